"""Device mapping: what can be run is described, what cannot is refused with the map."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza import ResourceManager
from cadenza.cluster import DeviceSharing, PlacementError, RoleConfig
from cadenza.cluster.placement import format_devices, parse_devices


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3", (0, 1, 2, 3)), ("0-1,8-9", (0, 1, 8, 9)), ("5", (5,)), (" 2 - 3 , 0 ", (2, 3, 0)), ([3, 1], (3, 1))],
)
def test_devices_are_read_from_lists_and_ranges(text: Any, numbers: tuple[int, ...]) -> None:
    assert parse_devices(text) == numbers


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("0-3;8", "neither a number nor a range"),
        ("7-0", "runs backwards; write '0-7'"),
        ("", "neither a number nor a range"),
        ("0,,1", "neither a number nor a range"),
        ("-1", "neither a number nor a range"),
        ("0-99999999999", "names 100000000000 devices"),
        ("__import__('os')", "neither a number nor a range"),
        ([], "no devices"),
        ([0, -1], "from 0 on, got -1"),
        ([True], "from 0 on, got True"),
        (["0"], "from 0 on, got '0'"),
        (3, "a list, a range such as '0-7', or 'auto', got 3"),
        (None, "got None"),
        ({"device": "0-3"}, "did you mean 'devices'"),
        ({"devices": "0", "tensor_parallel": 0}, "greater than 0"),
    ],
)
def test_what_names_no_devices_is_refused_with_the_role(devices: Any, message: str) -> None:
    with pytest.raises(PlacementError, match="actor: ") as caught:
        ResourceManager(8).place({"actor": devices})
    assert message in str(caught.value)


@given(st.lists(st.integers(0, 30), min_size=1, unique=True))
def test_formatted_devices_read_back(numbers: list[int]) -> None:
    assert parse_devices(format_devices(numbers)) == tuple(numbers)


def test_a_worker_knows_its_part_of_the_role() -> None:
    config = RoleConfig(devices="0-7", devices_per_worker=2, tensor_parallel=2)
    places = ResourceManager(4, 2).place({"actor": config})["actor"].places
    assert [place.devices for place in places] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [(place.data_rank, place.tensor_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [place.node for place in places] == ["node-0", "node-0", "node-1", "node-1"]
    assert {(place.world_size, place.data_ranks, place.tensor_ranks) for place in places} == {(4, 2, 2)}
    assert str(places[3]) == "actor rank 3 (data 1, tensor 1) on node-1, devices 6-7"


def test_ranks_follow_the_order_in_which_devices_are_named() -> None:
    places = ResourceManager(4).place({"actor": [2, 0, 3]})["actor"].places
    assert [place.devices for place in places] == [(2,), (0,), (3,)]


@pytest.mark.parametrize(
    ("one", "other", "sharing"),
    [
        ("0-3", [3, 2, 1, 0], DeviceSharing.COLOCATED),
        ("0-3", "0-1", DeviceSharing.PARTIAL),
        ("0-3", "2-5", DeviceSharing.PARTIAL),
        ("0-3", "4-7", DeviceSharing.DISAGGREGATED),
    ],
)
def test_what_two_roles_share_has_a_name(one: Any, other: Any, sharing: DeviceSharing) -> None:
    plan = ResourceManager(8).place({"actor": one, "sampler": other})
    assert plan.sharing("actor", "sampler") is plan.sharing("sampler", "actor") is sharing


def test_a_map_can_be_read() -> None:
    plan = ResourceManager([4, 2, 1]).place(
        {"actor": "0-3", "reference": "0-3", "sampler": {"devices": "2-5", "devices_per_worker": 2}}
    )
    assert plan.describe().splitlines() == [
        "node-0       0  1  2  3",
        "  actor      0  1  2  3",
        "  reference  0  1  2  3",
        "  sampler    .  .  0  0",
        "node-1       4  5",
        "  sampler    1  1",
        "node-2       6  idle",
        "actor and reference: colocated",
        "actor and sampler: partial, both on 2-3",
        "reference and sampler: partial, both on 2-3",
    ]


def test_an_impossible_mapping_is_refused_with_all_that_is_wrong_and_the_map() -> None:
    roles = {
        "actor": {"devices": "2-5", "devices_per_worker": 4},
        "critic": "6-9",
        "reference": [0, 0],
        "sampler": {"devices": "0-2", "tensor_parallel": 2},
    }
    with pytest.raises(PlacementError) as caught:
        ResourceManager([4, 4]).place(roles)
    assert str(caught.value).splitlines() == [
        "impossible device mapping",
        "actor: replica 0 on devices 2-5 lies on the nodes node-0, node-1: its devices must be those of one node",
        "critic: devices 8-9 do not exist: there are 8, numbered 0-7",
        "reference: devices 0 are named more than once",
        "sampler: 3 devices are not a whole number of replicas of 2 (devices_per_worker 1 x tensor_parallel 2): "
        "use 2 or 4",
        "",
        "node-0          0  1  2  3",
        "  actor         .  .  0  0",
        "  reference     1  .  .  .",
        "  sampler       0  1  2  .",
        "node-1          4  5  6  7",
        "  actor         0  0  .  .",
        "  critic        .  .  0  1",
        "no such device  8  9",
        "  critic        2  3",
    ]


def test_a_map_without_roles_is_refused() -> None:
    with pytest.raises(PlacementError, match="no role has devices"):
        ResourceManager(1).place({})


def test_an_unknown_role_is_named_with_those_there_are() -> None:
    with pytest.raises(KeyError, match="no role 'critic' in the device mapping, there are: actor"):
        ResourceManager(1).place({"actor": "0"})["critic"]


def test_auto_without_a_chooser_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"'auto' of sampler: .* of which there are 8"):
        ResourceManager(8).place({"actor": "0-3", "sampler": "auto"})


def test_nodes_may_differ_in_their_devices() -> None:
    resources = ResourceManager([8, 4, 2])
    assert list(resources.devices) == list(range(14))
    assert [node.devices for node in resources.nodes] == [range(8), range(8, 12), range(12, 14)]
    with pytest.raises(ValueError, match="num_gpus_per_node must be at least 1, got 0"):
        ResourceManager([8, 0])


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    per_worker=st.integers(1, 4),
    tensor=st.integers(1, 3),
    data=st.data(),
)
def test_every_map_that_is_accepted_can_be_run(counts: list[int], per_worker: int, tensor: int, data: Any) -> None:
    resources = ResourceManager(counts)
    devices = data.draw(st.lists(st.integers(0, sum(counts)), min_size=1, max_size=12))
    config = RoleConfig(devices=devices, devices_per_worker=per_worker, tensor_parallel=tensor)
    size = per_worker * tensor
    replicas = [devices[i : i + size] for i in range(0, len(devices), size)]
    node_of = {device: node.name for node in resources.nodes for device in node.devices}
    possible = (
        len(set(devices)) == len(devices)
        and max(devices) < sum(counts)
        and all(len(replica) == size and len({node_of[d] for d in replica}) == 1 for replica in replicas)
    )
    if not possible:
        with pytest.raises(PlacementError, match="impossible device mapping"):
            resources.place({"actor": config})
        return
    plan = resources.place({"actor": config})
    places = plan["actor"].places
    assert [device for place in places for device in place.devices] == devices
    assert [place.rank for place in places] == list(range(len(places)))
    for place in places:
        assert {node_of[device] for device in place.devices} == {place.node}
        assert place.data_rank * tensor + place.tensor_rank == place.rank
    assert plan.describe()
