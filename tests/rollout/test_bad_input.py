"""Bad input gets an error that names the field and the way out; the scheduler goes on, or stops with balanced books.

`playing` checks the books at the end of every test.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from builders import (
    FOREVER,
    OneStepEnv,
    build,
    chain,
    cluster_of,
    column,
    fake,
    fates,
    first_time,
    get,
    got,
    now,
    playing,
    pool,
    publish,
    sim_replicas,
    simulate,
    stepping,
    timed,
)
from pydantic import ValidationError

from cadenza import DataProto, GroupQueueManager, ResourceManager, RolloutScheduler, env
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.env_handle import EnvHandle
from cadenza.rollout.failures import (
    ErrorBudget,
    FilterLimit,
    NothingFinished,
    SchedulerClosed,
    StalenessError,
    UserErrors,
)
from cadenza.rollout.local_sampler import LocalSampler
from cadenza.rollout.model import Model
from cadenza.rollout.records import Fate, Task
from cadenza.rollout.sampler import SamplerConfig
from cadenza.simulation.virtual_cluster.cost import CostModel

NAN = float("nan")
INF = float("inf")


def manager(**fields: Any) -> EnvManagerConfig:
    return EnvManagerConfig(**({"domains": {"toy": {"env": OneStepEnv}}, "slots": 1} | fields))


# -- configuration -----------------------------------------------------------------------------------------------------


def test_a_batch_size_that_is_no_multiple_of_the_group_size_is_refused_in_the_config() -> None:
    with pytest.raises(ValidationError, match="batch_size must be a multiple of group_size 4, got 10; take 8 or 12"):
        RolloutConfig(batch_size=10, group_size=4)


def test_a_batch_size_below_the_group_size_is_told_the_smallest_that_fits() -> None:
    with pytest.raises(ValidationError, match="batch_size must be a multiple of group_size 4, got 3; take 4"):
        RolloutConfig(batch_size=3, group_size=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0), ("batch_size", -8), ("group_size", 0), ("group_size", -1), ("alpha", -0.5), ("alpha", NAN),
        ("alpha", INF), ("extra_members", -1), ("extra_groups", -1), ("max_filtered", 0), ("max_attempts", 0),
        ("error_budget", -1), ("stall_seconds", 0), ("stall_seconds", NAN), ("history", -1),
    ],
)  # fmt: skip
def test_a_size_that_makes_no_sense_is_refused_by_the_name_of_its_field(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        RolloutConfig(**({"batch_size": 8} | {name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", 0), ("slots", -2), ("domains", {}), ("max_context", 0), ("max_turns", 0), ("lease_seconds", 0),
        ("lease_seconds", NAN), ("reward_seconds", -1), ("close_seconds", 0),
    ],
)  # fmt: skip
def test_an_env_manager_size_that_makes_no_sense_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        manager(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("weight", 0), ("weight", -1), ("weight", NAN), ("max_envs", 0)])
def test_a_domain_size_that_makes_no_sense_is_refused_by_the_name_of_its_field(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        DomainConfig(env=OneStepEnv, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 0), ("max_tokens", -5), ("temperature", -1.0), ("top_p", 1.5), ("top_k", -1)]
)
def test_sampling_that_makes_no_sense_is_refused_by_the_name_of_its_field(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        manager(sampling={name: value})


@pytest.mark.parametrize("tasks", [0, -3, []])
def test_a_domain_without_tasks_is_refused_by_its_name(tasks: Any) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r"domains\.toy\.tasks"):
            build(tasks=tasks)

    simulate(main)


@pytest.mark.parametrize("field", ["num_gpus_per_node", "num_nodes"])
def test_a_resource_manager_without_devices_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        ResourceManager(**({"num_gpus_per_node": 8} | {field: 0}))


def test_a_sampler_without_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        LocalSampler([])


@pytest.mark.parametrize(
    ("make", "wrong", "nearest"),
    [
        (lambda **key: RolloutConfig(batch_size=8, **key), "group_sise", "group_size"),
        (lambda **key: RolloutConfig(**key), "batchsize", "batch_size"),
        (lambda **key: manager(**key), "lease_second", "lease_seconds"),
        (lambda **key: manager(domains={"toy": {"env": OneStepEnv} | key}), "max_env", "max_envs"),
        (lambda **key: manager(sampling=key), "max_token", "max_tokens"),
        (lambda **key: SamplerConfig(**key), "heartbeat", "heartbeat_seconds"),
    ],
)
def test_an_unknown_config_key_is_refused_and_the_nearest_known_one_named(
    make: Callable[..., Any], wrong: str, nearest: str
) -> None:
    with pytest.raises(ValidationError, match=f"'{wrong}'; did you mean '{nearest}'"):
        make(**{wrong: 1})


def test_an_unknown_config_key_that_is_near_to_none_gets_the_list_of_known_ones() -> None:
    with pytest.raises(ValidationError, match="no key 'zzz'; known keys: batch_size, group_size"):
        RolloutConfig(batch_size=8, zzz=1)


def test_a_config_cannot_be_changed_afterwards() -> None:
    config = RolloutConfig(batch_size=8)
    with pytest.raises(ValidationError, match="frozen"):
        config.batch_size = 16


# -- names -------------------------------------------------------------------------------------------------------------


def test_an_unregistered_env_is_refused_and_the_nearest_known_one_named() -> None:
    env("number-guess")(OneStepEnv)

    async def main() -> None:
        with pytest.raises(ValueError, match="env 'number-gues' is not registered; did you mean 'number-guess'"):
            build(env="number-gues")

    simulate(main)


def test_a_path_that_leads_to_no_env_says_why() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r"'no\.such\.module:Env' cannot be loaded: No module named 'no'"):
            build(env="no.such.module:Env")

    simulate(main)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rollout", "trajectry", "rollout 'trajectry' is not known; take one of trajectory, step"),
        ("reward", "jugde", "reward 'jugde' is not known; did you mean 'judge'?"),
        ("group_filter", "keep", "'keep' does not name an object; write it as 'package.module:name'"),
        ("mode", "test", "mode must be 'train' or 'val', got 'test'"),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_what_to_write_instead(field: str, value: str, message: str) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            build(**{field: value})

    simulate(main)


# -- get_batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (6, "batch_size must be a multiple of group_size 4, got 6; take 4 or 8"),
        (0, "batch_size must be positive, or -1 for everything, got 0"),
        (-4, "batch_size must be positive, or -1 for everything, got -4"),
        (-1, r"batch_size -1 means until the tasks run out, .*\['toy'\] never do; set domains.<name>.tasks"),
    ],
)
def test_a_batch_size_that_cannot_be_served_is_refused_and_the_scheduler_goes_on(size: int, message: str) -> None:
    async def main() -> None:
        async with playing(group_size=4, batch_size=8) as scheduler:
            with pytest.raises(ValueError, match=message):
                await get(scheduler, size)
            assert len(await got(scheduler, 8)) == 8

    simulate(main)


@pytest.mark.parametrize("meta", [{}, {"global_step": None}, {"global_step": "3"}])
def test_get_batch_without_a_global_step_says_where_to_put_it(meta: dict[str, Any]) -> None:
    async def main() -> None:
        async with playing() as scheduler:
            with pytest.raises(ValueError, match=r"data\.meta_info\['global_step'\] must be an int, got"):
                await scheduler.get_batch(DataProto(meta_info=meta), 4)
            assert len(await got(scheduler, 4)) == 4

    simulate(main)


def test_get_batch_after_shutdown_is_refused() -> None:
    async def main() -> None:
        async with playing() as scheduler:
            await got(scheduler, 4)
        with pytest.raises(SchedulerClosed, match="shut down"):
            await get(scheduler, 4)

    simulate(main)


@pytest.mark.parametrize("alpha", [0, 1])
def test_publishing_more_often_than_taking_is_told_as_such_and_leaves_the_books_in_order(alpha: int) -> None:
    async def main() -> None:
        async with playing(batch_size=4, alpha=alpha, tasks=4) as scheduler:
            await scheduler.resume()
            for version in (1, 2):
                await asyncio.sleep(2.0)
                await publish(scheduler, version)
            with pytest.raises(StalenessError, match=r"publish once per batch, .*or set staleness to 'drop'"):
                await get(scheduler, 4)
            scheduler.ledger.check()

    simulate(main)


def test_on_policy_a_batch_that_is_awaited_over_a_publication_is_told_as_such() -> None:
    async def main() -> None:
        async with playing(batch_size=4, alpha=0) as scheduler:
            await got(scheduler, 4)
            ahead = asyncio.ensure_future(get(scheduler, 4))
            await asyncio.sleep(0.5)
            await publish(scheduler, 1)
            with pytest.raises(StalenessError, match="no more than 0 batches ahead of a publication"):
                await ahead
            scheduler.ledger.check()

    simulate(main)


def test_a_call_that_a_rollout_leaves_behind_is_waited_for_and_the_next_one_is_refused() -> None:
    """The episode is scored when its calls are over: its tokens are all booked, and no lease runs on."""
    left: list[asyncio.Task[Any]] = []

    async def play(task: Task, env: EnvHandle, model: Model) -> None:
        async def more() -> None:
            await model.chat("more")
            await model.chat("again")

        reply = await model.chat(await env.reset(task.seed))
        await env.step(reply.text)
        left.append(asyncio.create_task(more()))
        await asyncio.sleep(0)

    async def slow(seed: int, number: int) -> Any:
        await asyncio.sleep(15.0 if number == 1 else 0.0)

    async def main() -> None:
        options = {"group_size": 2, "batch_size": 2, "slots": 2, "lease_seconds": 20.0, "tasks": 1}
        async with playing([fake(1.0)], env=stepping(slow), rollout=play, **options) as scheduler:
            batch = await got(scheduler, 2)
            assert column(batch, "turns") == [2, 2]
            assert scheduler.ledger.tokens[Fate.TRAINED] == 4 * 10
            assert fates(scheduler)["trained"] == 2
            late = await asyncio.gather(*left, return_exceptions=True)
            assert all(isinstance(error, RuntimeError) and "the rollout has returned" in str(error) for error in late)

    simulate(main)


def test_two_calls_of_the_model_at_once_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def play(task: Task, env: EnvHandle, model: Model) -> None:
        await model.chat(await env.reset(task.seed))
        await asyncio.gather(model.chat("one"), model.chat("another"))

    async def main() -> None:
        async with playing([fake(1.0)], rollout=play, batch_size=1, tasks=1, error_budget=0) as scheduler:
            with pytest.raises(ErrorBudget, match="rollout of domain 'toy': RuntimeError"):
                await get(scheduler, 1)

    simulate(main)
    assert "a call of the model is under way" in caplog.text


def test_a_step_after_the_end_of_the_episode_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def play(task: Task, env: EnvHandle, model: Model) -> None:
        reply = await model.chat(await env.reset(task.seed))
        await env.step(reply.text)
        await env.step(reply.text)

    async def main() -> None:
        async with playing([fake(1.0)], rollout=play, batch_size=1, tasks=1, error_budget=0) as scheduler:
            with pytest.raises(ErrorBudget, match="rollout of domain 'toy': EnvError"):
                await get(scheduler, 1)

    simulate(main)
    assert "stepped after the episode was done" in caplog.text


@pytest.mark.parametrize("size", ["4", None, 2.0])
def test_a_batch_size_that_is_no_integer_is_named(size: Any) -> None:
    async def main() -> None:
        async with playing() as scheduler:
            with pytest.raises(ValueError, match="batch_size must be positive"):
                await get(scheduler, size)

    simulate(main)


# -- versions and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 1, 0])
def test_a_version_that_does_not_grow_is_refused_and_the_scheduler_goes_on(version: int) -> None:
    async def main() -> None:
        async with playing() as scheduler:
            await publish(scheduler, 2)
            with pytest.raises(ValueError, match=f"version must grow: it is 2, got {version}"):
                await scheduler.sampler.load_weights(version)
            batch = await got(scheduler, 4)
            assert batch.meta_info["version"] == 2

    simulate(main)


def test_a_queue_whose_version_goes_back_is_told_both_versions() -> None:
    queue = GroupQueueManager(RolloutConfig(batch_size=4), manager())
    queue.advance(5)
    with pytest.raises(ValueError, match="version must not go back: it is 5, got 4"):
        queue.advance(4)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([7], r"target_gpus \[7\] do not exist; the resource manager has \[0, 1, 2\]"),
        ([], "shrink needs at least one device, got none"),
    ],
)
def test_a_shrink_that_makes_no_sense_is_refused_and_the_scheduler_goes_on(devices: list[int], message: str) -> None:
    async def main() -> None:
        async with playing(pool(3)) as scheduler:
            with pytest.raises(ValueError, match=message):
                await scheduler.shrink_sampler(devices)
            assert set(scheduler.sampler.devices.values()) == {"active"}
            assert (len(await got(scheduler, 4)), now()) == (4, 1.0)

    simulate(main)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([7], r"target_gpus \[7\] do not exist; the resource manager has \[0, 1, 2\]"),
        ([], "expand needs at least one device, got none"),
    ],
)
def test_an_expand_that_makes_no_sense_is_refused_and_the_scheduler_goes_on(devices: list[int], message: str) -> None:
    async def main() -> None:
        async with playing(pool(3)) as scheduler:
            await scheduler.shrink_sampler([2])
            with pytest.raises(ValueError, match=message):
                await scheduler.expand_sampler(devices)
            assert scheduler.sampler.devices == {0: "active", 1: "active", 2: "asleep"}
            assert (len(await got(scheduler, 4)), now()) == (4, 1.0)

    simulate(main)


def test_a_device_without_a_replica_is_told_apart_from_one_that_does_not_exist() -> None:
    async def main() -> None:
        replicas = pool(2)
        replicas[1].devices = (3,)
        async with playing(cluster=cluster_of(*replicas)) as scheduler:
            with pytest.raises(ValueError, match=r"no replica on devices \[2\]; the sampler has \[0, 3\]"):
                await scheduler.shrink_sampler([2])

    simulate(main)


def test_a_replica_leaves_as_a_whole() -> None:
    async def main() -> None:
        replicas = pool(2)
        replicas[0].devices, replicas[1].devices = (0, 1), (2, 3)
        async with playing(cluster=cluster_of(*replicas)) as scheduler:
            with pytest.raises(ValueError, match=r"replica r0 sits on devices \[0, 1\]; name \[1\] too"):
                await scheduler.shrink_sampler([0])

    simulate(main)


def test_skip_load_of_a_replica_with_old_weights_is_refused_and_expand_without_it_works() -> None:
    async def main() -> None:
        async with playing(pool(2), alpha=1) as scheduler:
            await scheduler.shrink_sampler([1])
            await publish(scheduler, 1)
            with pytest.raises(ValueError, match=r"\{'r1': 0\} do not have version 1; expand without skip_load"):
                await scheduler.expand_sampler([1], skip_load=True)
            assert scheduler.sampler.devices == {0: "active", 1: "asleep"}
            await scheduler.expand_sampler([1])
            assert scheduler.sampler.devices == {0: "active", 1: "active"}
            batch = await got(scheduler, 4)
            assert {version for row in batch.batch.ragged("versions") for version in row.tolist()} == {-1, 1}

    simulate(main)


# -- environments ------------------------------------------------------------------------------------------------------

BAD_STEPS = {
    "None": (lambda: Nothing, r"env 'toy' step returned None; return \(observation, reward, terminated"),
    "four values": (
        lambda: ("", 1.0, True, {}),
        r"step returned \('', 1.0, True, \{\}\); return \(observation, reward",
    ),
    "a list": (lambda: ["", 1.0, True, False, {}], r"step returned \[.*\]; return \(observation, reward"),
    "reward None": (lambda: ("", None, True, False, {}), "step returned reward None; return a number"),
    "reward NaN": (lambda: ("", NAN, True, False, {}), "step returned reward nan; return a finite number"),
    "reward inf": (lambda: ("", INF, True, False, {}), "step returned reward inf; return a finite number"),
    "reward text": (lambda: ("", "lots", True, False, {}), "step returned reward 'lots'; return a number"),
    "reward '1'": (lambda: ("", "1", True, False, {}), "step returned reward '1'; return a number or a bool"),
    "terminated text": (lambda: ("", 1.0, "no", False, {}), "step returned terminated 'no'; return True or False"),
    "success text": (
        lambda: ("", 1.0, True, False, {"success": "yes"}),
        r"step returned info\['success'\] 'yes'; say True or False, or leave it out",
    ),
    "no observation": (lambda: (None, 0.0, False, False, {}), "step returned no observation; return text, messages"),
    "a number as observation": (lambda: (7, 0.0, False, False, {}), "step returned .*7.*; return text, messages"),
    "text as info": (lambda: ("", 1.0, True, False, "won"), "step returned info 'won'; return a dict"),
}
Nothing = object()


def bad_first_step(case: str) -> type:
    value = BAD_STEPS[case][0]()

    class Bad:
        bad = True

        async def reset(self, seed: int) -> str:
            return f"task {seed}"

        async def step(self, action: str) -> Any:
            bad, Bad.bad = Bad.bad, False
            if bad:
                return None if value is Nothing else value
            return "", 1.0, True, False, {}

    return Bad


@pytest.mark.parametrize("case", BAD_STEPS)
def test_an_env_whose_step_breaks_the_contract_loses_one_attempt_and_is_told_what_to_return(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with playing(env=bad_first_step(case), group_size=2) as scheduler:
            assert column(await got(scheduler, 4), "scores") == [1.0] * 4
            assert fates(scheduler) == {"failed": 1, "trained": 4}
            assert scheduler.metrics()["errors/user_code"] == 1

    simulate(main)
    assert re.search(BAD_STEPS[case][1], caplog.text)


def test_an_env_whose_reset_returns_nothing_is_told_what_to_return(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(OneStepEnv):
        async def reset(self, seed: int) -> Any:
            return None if seed == 0 else "task"

    async def main() -> None:
        async with playing(env=Silent, max_attempts=2) as scheduler:
            assert set(column(await got(scheduler, 4), "task_id")) == {f"toy/{seed}" for seed in (1, 2, 3, 4)}
            assert "task retired, member 0 failed 2 x" in scheduler.why("toy/0")

    simulate(main)
    assert "env 'toy' reset returned no observation; return text, messages or tokens" in caplog.text


@pytest.mark.parametrize("observation", ["task", ["task"], np.array([1, 2]), {"board": 1}])
def test_an_env_whose_reset_returns_what_gymnasium_s_do_is_told_so(
    observation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Gym(OneStepEnv):
        async def reset(self, seed: int) -> Any:
            return observation, {"lives": 3}

    async def main() -> None:
        async with playing(env=Gym, tasks=2, max_attempts=1) as scheduler:
            with pytest.raises(NothingFinished, match=r"rollout of domain 'toy': .*EnvError: env 'toy' reset"):
                await get(scheduler, 4)

    simulate(main)
    assert "reset returned (observation, info) as gymnasium's envs do; return the observation alone" in caplog.text


def test_two_chat_messages_in_a_tuple_are_an_observation() -> None:
    class Polite(OneStepEnv):
        async def reset(self, seed: int) -> Any:
            return {"role": "system", "content": "be kind"}, {"role": "user", "content": f"task {seed}"}

    async def main() -> None:
        async with playing(env=Polite) as scheduler:
            assert len(await got(scheduler, 4)) == 4

    simulate(main)


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0), np.bool_(True), np.array(1.0), Fraction(1)])
def test_numbers_and_bools_of_python_and_numpy_are_rewards(value: Any) -> None:
    async def step(seed: int, number: int) -> Any:
        return "", value, value, np.bool_(False), {"success": value}

    async def main() -> None:
        async with playing(env=stepping(step)) as scheduler:
            assert column(await got(scheduler, 4), "scores") == [1.0] * 4
        async with playing(reward=lambda trajectory: value) as scheduler:
            assert column(await got(scheduler, 4), "scores") == [1.0] * 4

    simulate(main)


# -- runs of which nothing comes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize("size", [4, -1])
def test_tasks_that_all_failed_end_in_an_error_that_names_the_first_one(mode: str, size: int, workers: int) -> None:
    async def step(seed: int, number: int) -> Any:
        raise ValueError("no board")

    async def main() -> None:
        async with playing(env=stepping(step), tasks=3, mode=mode, batch_size=4, workers=workers) as scheduler:
            for _ in range(2):
                with pytest.raises(
                    NothingFinished,
                    match=r"9 attempts failed\. The first error was step of domain 'toy': ValueError: no board; ",
                ):
                    await get(scheduler, size)
            assert fates(scheduler) == {"failed": 9}

    simulate(main)


def test_groups_that_are_all_filtered_after_a_failed_try_are_no_error() -> None:
    async def step(seed: int, number: int) -> Any:
        if number == 0:
            raise ValueError("no board")

    async def nothing(trajectories: list[Any]) -> bool:
        return False

    async def main() -> None:
        async with playing(env=stepping(step), tasks=3, group_filter=nothing) as scheduler:
            assert await get(scheduler, 4) is None

    simulate(main)


def test_a_task_that_fails_while_others_are_trained_is_no_error() -> None:
    async def step(seed: int, number: int) -> Any:
        if seed != 1:
            raise ValueError("no board")

    async def main() -> None:
        async with playing(env=stepping(step), tasks=3, batch_size=1) as scheduler:
            assert column(await got(scheduler, 1), "task_id") == ["toy/1"]
            await publish(scheduler, 1)
            assert await get(scheduler, 1) is None

    simulate(main)


def test_tasks_that_are_all_filtered_are_no_error() -> None:
    async def main() -> None:
        async with playing(tasks=3, group_filter=lambda trajectories: False) as scheduler:
            assert await get(scheduler, 4) is None

    simulate(main)


def test_a_filter_that_always_raises_is_the_error_of_a_run_without_a_batch() -> None:
    def broken(trajectories: Any) -> bool:
        raise KeyError("verdict")

    async def main() -> None:
        async with playing(tasks=3, group_filter=broken) as scheduler:
            with pytest.raises(NothingFinished, match="group_filter: KeyError: 'verdict'"):
                await get(scheduler, 4)

    simulate(main)


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_a_program_that_never_publishes_is_told_once(alpha: float, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with playing(alpha=alpha) as scheduler:
            for _ in range(2 + int(alpha)):
                await got(scheduler, 4)
            assert "published" not in caplog.text
            for _ in range(5):
                await got(scheduler, 4)

    simulate(main)
    assert caplog.text.count("batches were taken of version 0, and no weights were published since") == 1


def test_a_program_that_takes_its_batches_in_pieces_and_publishes_is_told_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with playing(batch_size=4) as scheduler:
            for version in range(1, 6):
                for _ in range(4):
                    await got(scheduler, 1)
                await publish(scheduler, version)

    simulate(main)
    assert "published" not in caplog.text


def test_an_env_without_step_ends_the_run_with_the_name_of_the_method() -> None:
    class Stepless:
        def reset(self, seed: int) -> str:
            return "task"

    async def main() -> None:
        async with playing(env=Stepless, error_budget=10) as scheduler:
            with pytest.raises(ErrorBudget, match="init of domain 'toy': EnvError"):
                await get(scheduler, 4)
            assert "env 'toy' is a Stepless without a method 'step'" in scheduler.why("toy/0")

    simulate(main)


def test_an_async_env_without_reset_ends_the_run_with_the_name_of_the_method() -> None:
    class Resetless:
        async def step(self, action: str) -> Any:
            return "", 1.0, True, False, {}

    async def main() -> None:
        async with playing(env=Resetless, error_budget=10) as scheduler:
            with pytest.raises(ErrorBudget):
                await get(scheduler, 4)
            assert "env 'toy' is a Resetless without a method 'reset'" in scheduler.why("toy/0")

    simulate(main)


def test_what_user_code_raises_is_shown_once_in_the_schedulers_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    train, validation = UserErrors(budget=10), UserErrors(budget=10)
    validation.share_log(train)
    for errors in (train, validation, train):
        errors.add("step of domain 'toy'", ValueError("no board"))
    validation.add("reset of domain 'toy'", ValueError("no seed"))
    assert [record.message.partition(" raised")[0] for record in caplog.records] == [
        "step of domain 'toy'",
        "reset of domain 'toy'",
    ]
    assert (train.total, validation.total) == (2, 2)
    assert train.first == validation.first == "step of domain 'toy': ValueError: no board"


def test_a_sync_env_that_raises_in_init_is_shown_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        made = 0

        def __init__(self, path: str) -> None:
            Broken.made += 1
            if Broken.made == 1:
                raise FileNotFoundError(f"no level at {path}")

        def reset(self, seed: int) -> str:
            return "task"

        def step(self, action: str) -> Any:
            return "", 1.0, True, False, {}

    async def main() -> None:
        async with playing(env=Broken, env_args={"path": "levels/7"}) as scheduler:
            assert len(await got(scheduler, 4)) == 4
            assert fates(scheduler) == {"failed": 1, "trained": 4}

    simulate(main)
    assert "init of domain 'toy' raised" in caplog.text
    assert "no level at levels/7" in caplog.text
    assert "Traceback" in caplog.text


def test_env_args_that_the_env_does_not_take_end_the_run_with_the_name_of_the_argument() -> None:
    async def main() -> None:
        async with playing(env=chain(1), env_args={"hardness": 3}, error_budget=10) as scheduler:
            with pytest.raises(ErrorBudget, match="init of domain 'toy': TypeError"):
                await get(scheduler, 4)
            assert "hardness" in scheduler.why("toy/0")

    simulate(main)


def test_a_task_that_always_fails_is_retired_and_another_takes_its_place() -> None:
    async def fail(seed: int, number: int) -> None:
        if seed == 1:
            raise ValueError("this row is broken")

    async def main() -> None:
        async with playing(env=stepping(fail), group_size=2, max_attempts=3) as scheduler:
            batch = await got(scheduler, 4)
            assert set(column(batch, "task_id")) == {"toy/0", "toy/2"}
            assert "cancelled" in scheduler.why("toy/1")
            assert "task retired, member" in scheduler.why("toy/1")
            assert "this row is broken" in scheduler.why("toy/1")

    simulate(main)


def test_when_every_task_fails_why_tells() -> None:
    async def fail(seed: int, number: int) -> None:
        raise ValueError("broken")

    async def main() -> None:
        async with playing(env=stepping(fail), tasks=3, group_size=2, max_attempts=2) as scheduler:
            with pytest.raises(NothingFinished):
                await get(scheduler, -1)
            assert fates(scheduler).keys() == {"failed", "cancelled"}
            assert "task retired" in scheduler.why("toy/2")

    simulate(main)


def test_user_code_that_raises_too_often_ends_the_run_with_the_worst_place_and_the_field_to_raise() -> None:
    async def fail(seed: int, number: int) -> None:
        raise ValueError("broken")

    async def main() -> None:
        async with playing(env=stepping(fail), error_budget=7) as scheduler:
            message = r"raised 8 times since the last batch, error_budget allows 7; most often step of domain 'toy'"
            with pytest.raises(ErrorBudget, match=message):
                await get(scheduler, 4)
            with pytest.raises(ErrorBudget, match=r"ValueError: broken \(8 times\).*or raise error_budget"):
                await get(scheduler, 4)

    simulate(main)


def test_the_error_budget_tells_the_text_of_the_first_error_and_of_the_most_frequent_one() -> None:
    errors = UserErrors(budget=2)
    errors.add("reset of domain 'toy'", ValueError("no board"))
    for text in ("no move", "no other move"):
        errors.add("step of domain 'toy'", KeyError(text))
    said = str(errors.exceeded())
    assert "most often step of domain 'toy': KeyError: 'no move' (2 times)" in said
    assert "the first error was reset of domain 'toy': ValueError: no board" in said


def test_a_lease_that_expires_does_not_draw_on_the_budget_for_exceptions() -> None:
    """A time-out is infrastructure; nobody's code raised."""

    async def hang() -> None:
        await asyncio.sleep(FOREVER)

    async def main() -> None:
        async with playing(env=first_time(hang), error_budget=0, lease_seconds=10) as scheduler:
            assert len(await got(scheduler, 4)) == 4
            assert scheduler.metrics()["errors/user_code"] == 0

    simulate(main)


def test_a_context_longer_than_any_kv_cache_costs_its_task_and_not_the_replicas() -> None:
    class Huge(OneStepEnv):
        async def reset(self, seed: int) -> str:
            return "x" * (2000 if seed == 0 else 10)

    async def main() -> None:
        cost = CostModel(a=0.01, b=0.0, c=0.0, p=0.0, kv_capacity=1000)
        async with playing(sim_replicas(2, 10, cost=cost), env=Huge) as scheduler:
            batch = await got(scheduler, 4)
            assert set(column(batch, "task_id")) == {f"toy/{seed}" for seed in (1, 2, 3, 4)}
            assert set(scheduler.sampler.devices.values()) == {"active"}

    simulate(main)


# -- rollouts ----------------------------------------------------------------------------------------------------------


async def mute(task: Task, env: EnvHandle, model: Model) -> None:
    await env.reset(task.seed)


def test_a_rollout_that_never_calls_the_model_ends_the_run_and_says_so() -> None:
    async def main() -> None:
        async with playing(rollout=mute, error_budget=5) as scheduler:
            with pytest.raises(ErrorBudget, match="rollout of domain 'toy': ValueError"):
                await get(scheduler, 4)
            assert "the rollout returned without one turn of the model" in scheduler.why("toy/0")

    simulate(main)


def test_a_rollout_that_is_not_async_is_told_to_be() -> None:
    def plain(task: Task, env: EnvHandle, model: Model) -> None:
        return

    async def main() -> None:
        with pytest.raises(ValueError, match=r"rollout .*plain.* must be an async function"):
            build(rollout=plain)

    simulate(main)


def test_a_first_prompt_beyond_max_context_retires_its_task_at_once_and_names_the_field() -> None:
    class Long(OneStepEnv):
        async def reset(self, seed: int) -> str:
            return "x" * 100

    async def main() -> None:
        async with playing(env=Long, max_context=50, error_budget=0, tasks=4) as scheduler:
            with pytest.raises(NothingFinished, match=r"4 attempts failed\. Most often: rollout: ContextFull"):
                await get(scheduler, 4)
            assert fates(scheduler) == {"failed": 4}
            assert "max_context 50" in scheduler.why("toy/0")

    simulate(main)


def test_an_empty_first_prompt_is_refused_in_words() -> None:
    class Empty(OneStepEnv):
        async def reset(self, seed: int) -> str:
            return ""

    async def main() -> None:
        async with playing(env=Empty, error_budget=5) as scheduler:
            with pytest.raises(ErrorBudget):
                await get(scheduler, 4)
            assert "must hold at least one token, got none" in scheduler.why("toy/0")

    simulate(main)


# -- rewards and filters -----------------------------------------------------------------------------------------------

BAD_VERDICTS = {
    "raises": (ZeroDivisionError("no answer"), "ZeroDivisionError: no answer"),
    "None": (None, "returned None; return"),
    "NaN": (NAN, "returned nan; return"),
    "text": ("good", "returned 'good'; return"),
    "a number as text": ("1", "of domain 'toy' returned '1'; return a number or a bool"),
    "infinity": (INF, "returned inf; return"),
}


def verdicts(case: str, then: Any, *, forever: bool = False) -> Callable[[Any], Any]:
    """A reward or filter that is bad the first time, or always, and says `then` otherwise."""
    calls: list[Any] = []

    async def judge(subject: Any) -> Any:
        calls.append(subject)
        if len(calls) > 1 and not forever:
            return then
        value = BAD_VERDICTS[case][0]
        if isinstance(value, Exception):
            raise value
        return value

    return judge


@pytest.mark.parametrize("case", BAD_VERDICTS)
def test_a_reward_that_breaks_the_contract_loses_one_attempt_and_is_told_what_to_return(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with playing(reward=verdicts(case, 2.0), group_size=2) as scheduler:
            assert column(await got(scheduler, 4), "scores") == [2.0] * 4
            assert fates(scheduler) == {"failed": 1, "trained": 4}

    simulate(main)
    assert "reward of domain 'toy'" in caplog.text
    assert BAD_VERDICTS[case][1] in caplog.text


@pytest.mark.parametrize("case", BAD_VERDICTS)
def test_a_reward_that_is_always_bad_ends_the_run_with_its_name(case: str) -> None:
    async def main() -> None:
        async with playing(reward=verdicts(case, 2.0, forever=True), error_budget=5) as scheduler:
            with pytest.raises(ErrorBudget, match="most often reward of domain 'toy'"):
                await get(scheduler, 4)

    simulate(main)


@pytest.mark.parametrize("case", ["raises", "None", "NaN"])
def test_a_filter_that_breaks_the_contract_loses_one_group_and_is_told_what_to_return(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with playing(group_filter=verdicts(case, True), group_size=2) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert (len(batch), when) == (4, 2.0)
            assert fates(scheduler) == {"failed": 2, "trained": 4}

    simulate(main)
    assert "group_filter" in caplog.text
    assert BAD_VERDICTS[case][1] in caplog.text


@pytest.mark.parametrize("case", ["raises", "None", "NaN"])
def test_a_filter_that_is_always_bad_ends_the_run_with_its_name(case: str) -> None:
    async def main() -> None:
        async with playing(group_filter=verdicts(case, True, forever=True), error_budget=5) as scheduler:
            with pytest.raises(ErrorBudget, match="most often group_filter"):
                await get(scheduler, 4)

    simulate(main)


@pytest.mark.parametrize("field", ["reward", "group_filter"])
def test_a_reward_or_filter_whose_own_task_was_cancelled_counts_as_one_that_raised(field: str) -> None:
    calls: list[Any] = []

    async def judge(subject: Any) -> float:
        calls.append(subject)
        if len(calls) == 1:
            raise asyncio.CancelledError
        return 1.0

    async def main() -> None:
        async with playing(**{field: judge}) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert (len(batch), when) == (4, 2.0)
            assert fates(scheduler) == {"failed": 1, "trained": 4}

    simulate(main)


def test_a_filter_that_keeps_nothing_ends_in_an_error_with_the_limit_and_the_task() -> None:
    async def main() -> None:
        async with playing(group_filter=lambda group: False, max_filtered=20) as scheduler:
            with pytest.raises(FilterLimit, match=r"20 groups in a row were filtered \(max_filtered\).*'toy/"):
                await get(scheduler, 4)
            assert fates(scheduler)["filtered"] == 20

    simulate(main)


def test_a_scheduler_that_never_started_can_be_shut_down_twice() -> None:
    async def main() -> None:
        scheduler: RolloutScheduler = build(env=chain(1))
        await scheduler.shutdown()
        await scheduler.shutdown()
        scheduler.ledger.check()

    simulate(main)


# -- what would be trained as something else ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["reset", "step"])
@pytest.mark.parametrize(
    "observation",
    [np.array([0.7, 1.9, -3.2]), np.array([[1, 2], [3, 4]])],
    ids=["float", "2-D"],
)
def test_an_array_that_is_no_row_of_tokens_is_refused_as_an_observation(observation: Any, place: str) -> None:
    class Numbers(OneStepEnv):
        async def reset(self, seed: int) -> Any:
            return observation if place == "reset" else "task"

        async def step(self, action: str) -> tuple[Any, ...]:
            return observation, 0.0, False, False, {}

    async def main() -> None:
        async with playing(env=Numbers, error_budget=5) as scheduler:
            with pytest.raises(ErrorBudget, match=f"{place} of domain 'toy': EnvError|rollout of domain .*EnvError"):
                await get(scheduler, 4)
            assert f"EnvError: env 'toy' {place} returned" in scheduler.why("toy/0")

    simulate(main)


def test_tasks_that_are_a_text_are_refused_by_the_name_of_the_field() -> None:
    with pytest.raises(ValidationError, match="tasks"):
        DomainConfig(env=OneStepEnv, tasks="data.jsonl")


def test_two_tasks_with_one_id_are_refused_before_anything_runs() -> None:
    tasks = [Task("a", 1, "toy"), Task("b", 1, "toy"), Task("a", 2, "toy")]

    async def main() -> None:
        with pytest.raises(ValueError, match=r"domains\.toy\.tasks.*'a'"):
            build(tasks=tasks)

    simulate(main)


def test_a_step_before_the_first_turn_of_the_model_is_refused_in_words() -> None:
    async def hasty(task: Task, env: EnvHandle, model: Model) -> None:
        await env.reset(task.seed)
        await env.step("an opening")
        await model.chat("well?")

    async def main() -> None:
        async with playing(rollout=hasty, error_budget=5) as scheduler:
            with pytest.raises(ErrorBudget, match="EnvError"):
                await get(scheduler, 4)
            assert re.search(r"EnvError: .*step.*before.*model", scheduler.why("toy/0"))

    simulate(main)


def test_a_first_prompt_beyond_max_context_retires_its_task_at_once() -> None:
    class Long(OneStepEnv):
        async def reset(self, seed: int) -> str:
            return "x" * (200 if seed % 3 == 0 else 5)

    async def main() -> None:
        async with playing(env=Long, max_context=100, group_size=2, batch_size=8, error_budget=0) as scheduler:
            batch = await got(scheduler, 8)
            assert set(column(batch, "task_id")) == {f"toy/{seed}" for seed in (1, 2, 4, 5)}
            assert "max_context" in scheduler.why("toy/0")
            assert "#1" not in scheduler.why("toy/0")
            assert "task retired" in scheduler.why("toy/0")
            assert scheduler.metrics()["errors/user_code"] == 0

    simulate(main)


# -- attempts that stand still -----------------------------------------------------------------------------------------


def hanging(place: str) -> type:
    """An env that hangs there in its first task."""

    class Hanging(OneStepEnv):
        async def reset(self, seed: int) -> str:
            self.seed = seed
            if place == "reset" and seed == 0:
                await asyncio.sleep(FOREVER)
            return f"task {seed}"

        async def step(self, action: str) -> Any:
            if place == "step" and self.seed == 0:
                await asyncio.sleep(FOREVER)
            return "", 1.0, True, False, {}

    return Hanging


def still(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of attempts without progress."""
    return [record.getMessage() for record in caplog.records if "makes no progress" in record.getMessage()]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("place", ["reset", "step"])
def test_an_attempt_that_hangs_is_named_once_long_before_its_lease_ends(
    place: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with playing(env=hanging(place), batch_size=4, slots=4, workers=workers, max_attempts=1) as scheduler:
            await got(scheduler, 4)
            await asyncio.sleep(29.0)
            assert len(still(caplog)) <= 1
            await asyncio.sleep(200.0)

    simulate(main)
    [line] = still(caplog)
    assert re.match(rf"g0\.0#0 of task 'toy/0' makes no progress: in {place} for 3\d s; it fails after lease_", line)


def test_a_rollout_and_a_reward_that_hang_are_named_too(caplog: pytest.LogCaptureFixture) -> None:
    async def play(task: Task, env: EnvHandle, model: Model) -> None:
        await model.chat(await env.reset(task.seed))
        await asyncio.sleep(100.0 if task.seed == 0 else 0.0)

    async def judge(trajectory: Any) -> float:
        await asyncio.sleep(100.0)
        return 1.0

    async def main() -> None:
        async with playing(rollout=play, reward=judge, tasks=1, mode="val", batch_size=1) as scheduler:
            await got(scheduler, 1)

    simulate(main)
    rollout, reward = still(caplog)
    assert "g0.0#0 of task 'toy/0' makes no progress: in rollout for 30 s; it fails after" in rollout
    assert "g0.0#0 of task 'toy/0' makes no progress: in reward for 30 s; reward_seconds bounds" in reward


def test_a_thousand_attempts_that_hang_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def step(seed: int, number: int) -> None:
        await asyncio.sleep(FOREVER)

    async def main() -> None:
        async with playing([fake(lambda r: 1.0 + r.session % 7)], env=stepping(step), batch_size=1000, slots=1000) as s:
            await s.resume()
            await asyncio.sleep(500.0)

    simulate(main)
    lines = still(caplog)
    assert len(lines) <= 2
    assert sum(int(re.search(r"\((\d+) others", line)[1]) + 1 for line in lines) == 1000  # type: ignore[index]


def test_a_model_that_answers_nobody_is_told_once_and_one_that_is_slow_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        slow_for_one = fake(lambda request: 90.0 if request.session == 0 else 3.0)
        async with playing([slow_for_one], batch_size=100, slots=4) as scheduler:
            await got(scheduler, 100)
        assert still(caplog) == []
        async with playing([fake(200.0)], batch_size=8, slots=4) as scheduler:
            await got(scheduler, 8)

    simulate(main)
    [line] = still(caplog)
    assert "in model for 30 s (3 others make none either); this is said once" in line


def test_envs_whose_steps_always_take_long_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with playing(env=chain(50, 40.0), batch_size=64, slots=64) as scheduler:
            await got(scheduler, 64)
            for version in range(1, 20):
                await publish(scheduler, version)
                await got(scheduler, 64)
            assert now() > 40_000

    simulate(main)
    assert 1 <= len(still(caplog)) <= 12


def test_attempts_that_make_progress_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with playing(env=chain(10, 25.0), batch_size=4) as scheduler:
            await got(scheduler, 4)

    simulate(main)
    assert still(caplog) == []


def test_an_env_that_never_ends_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with playing([fake(0.0, tokens=1)], env=chain(5000), batch_size=2, max_turns=1200) as scheduler:
            assert column(await got(scheduler, 2), "turns") == [1200, 1200]

    simulate(main)
    assert caplog.text.count("has had 1000 turns, and the step of env 'toy' has not returned terminated") == 1
