"""Weights between processes: every type and shape arrives as it was, in buckets of any size, or nothing does."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cadenza.cluster import weight_transfer
from cadenza.cluster.weight_transfer import BroadcastGroups, WeightLayout, WeightTransferError


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(7, 33, generator=generator)
    return {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "half": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "wide": wide,
        "tied": wide,
        "turned": wide.t(),
        "small": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
        "number": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "nothing": torch.empty(0, 4),
        "double": torch.randn(2, 2, generator=generator, dtype=torch.float64),
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        bytes_of = [given.reshape(-1).view(torch.uint8) for given in (tensor, other[name])]
        assert torch.equal(*bytes_of), name


@pytest.mark.parametrize("size", [1, 3, 16, 100, 1 << 20])
def test_tensors_arrive_as_they_were_in_buckets_of_any_size(size: int) -> None:
    layout = WeightLayout.of(state(), size)
    buckets = list(layout.pack(state()))
    assert all(0 < sum(len(piece) for piece in bucket) <= size for bucket in buckets)
    same(state(), layout.unpack(buckets))


def test_what_shares_its_memory_travels_once_and_what_is_on_the_cpu_is_not_copied_to_be_packed() -> None:
    given = state()
    layout = WeightLayout.of(given)
    assert layout.bytes == sum(t.numel() * t.element_size() for name, t in given.items() if name != "tied")
    (bucket,) = layout.pack(given)
    addresses = {piece.__array_interface__["data"][0] for piece in bucket}
    assert given["wide"].data_ptr() in addresses
    received = layout.unpack([bucket])
    assert received["wide"].data_ptr() == received["tied"].data_ptr() == given["wide"].data_ptr()


def test_a_bucket_that_is_missing_or_cut_off_is_named() -> None:
    layout = WeightLayout.of(state(), 100)
    buckets = list(layout.pack(state()))
    with pytest.raises(WeightTransferError, match=r"bucket 2 of the weights should have pieces of .* bytes, got None"):
        layout.unpack(buckets[:2])
    with pytest.raises(WeightTransferError, match="bucket 1 of the weights"):
        layout.unpack([buckets[0], [np.zeros(3, np.uint8)], *buckets[2:]])


def test_buckets_hold_at_least_a_byte() -> None:
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1, got 0"):
        WeightLayout.of(state(), 0)


def test_a_broadcast_reaches_all_again_and_again() -> None:
    given, sender = state(), BroadcastGroups()
    broadcast = sender.open(WeightLayout.of(given, 100), 2, "127.0.0.1")
    receivers = [BroadcastGroups(), BroadcastGroups()]
    for factor in (1, 2):
        given["wide"] *= factor
        broadcast, found = broadcast.with_new_id(), [{}, {}]

        def receive(number: int) -> None:
            found[number] = broadcast.for_rank(number + 1).receive(receivers[number])  # noqa: B023 - joined below

        threads = [threading.Thread(target=receive, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        broadcast.send(given, sender)
        for thread in threads:
            thread.join(60)
        for received in found:
            same(given, received)


def test_a_receiver_that_stays_away_is_an_error_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfer, "BROADCAST_SECONDS", 1.0)
    sender = BroadcastGroups()
    broadcast = sender.open(WeightLayout.of(state()), 1, "127.0.0.1")
    with pytest.raises(WeightTransferError, match=r"2 processes did not meet at 127\.0\.0\.1:"):
        broadcast.send(state(), sender)


def test_another_rendezvous_is_another_process_group() -> None:
    groups = BroadcastGroups()
    one, other = (groups.open(WeightLayout.of(state()), 1, "127.0.0.1") for _ in range(2))
    assert one.rendezvous != other.rendezvous
    assert replace(one, id="").rendezvous == one.with_new_id().rendezvous
