"""The contract of environments: how they are found, where they run, when they are closed, what they may say.

What is about threads runs on a real loop with events instead of sleeps; the rest runs under virtual time.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from builders import (
    FOREVER,
    OneStepEnv,
    causes,
    chain,
    column,
    fake,
    fates,
    get,
    got,
    now,
    playing,
    publish,
    responses,
    rows,
    simulate,
    stepping,
    timed,
)

import cadenza
from cadenza import envs
from cadenza.errors import InfrastructureError
from cadenza.off_loop import with_deadline
from cadenza.rewards import Sample
from cadenza.rollout.env_handle import EnvHandle
from cadenza.rollout.failures import NothingFinished, SchedulerClosed
from cadenza.rollout.model import Model
from cadenza.rollout.records import Fate, Task
from cadenza.testing import FakeReplica

T = TypeVar("T")
DONE = ("", 1.0, True, False, {})


def really(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run on a real loop, with a deadline."""
    return asyncio.run(asyncio.wait_for(main(), 30.0))


class Plain:
    """The sync form of `OneStepEnv`, with an account of what was called in which thread."""

    calls: ClassVar[list[tuple[str, int]]]

    def __init__(self) -> None:
        self.note("init")

    def reset(self, seed: int) -> str:
        self.note("reset")
        return f"task {seed}"

    def step(self, action: str) -> Any:
        self.note("step")
        return DONE

    def close(self) -> None:
        self.note("close")

    @classmethod
    def note(cls, name: str) -> None:
        cls.calls.append((name, threading.get_ident()))


def plain(**methods: Any) -> Any:
    """A fresh class of this kind, with its own account and some methods of its own."""
    return type("Plain", (Plain,), {"calls": []} | methods)


def called(env: Any) -> list[str]:
    return [name for name, _ in env.calls]


# -- the registry ------------------------------------------------------------------------------------------------------


def test_an_env_is_registered_by_name_and_found_by_it() -> None:
    @cadenza.env("test-registry-once")
    class Registered(OneStepEnv):
        pass

    assert envs.find_factory("test-registry-once") is Registered
    assert "test-registry-once" in envs.registered()


def test_registering_gives_the_class_back_unchanged() -> None:
    assert cadenza.env("test-registry-same")(OneStepEnv) is OneStepEnv


def test_a_name_that_is_taken_by_another_class_is_refused() -> None:
    cadenza.env("test-registry-taken")(OneStepEnv)
    with pytest.raises(ValueError, match=r"env 'test-registry-taken' is registered already, as builders\.OneStepEnv"):
        cadenza.env("test-registry-taken")(Plain)


def test_the_same_class_may_be_registered_again() -> None:
    """A module that is reloaded, as in a notebook, registers its envs twice."""
    cadenza.env("test-registry-again")(OneStepEnv)
    cadenza.env("test-registry-again")(OneStepEnv)


def test_an_env_is_found_by_its_path_and_as_the_class_itself() -> None:
    assert envs.find_factory("builders:OneStepEnv") is OneStepEnv
    assert envs.find_factory(OneStepEnv) is OneStepEnv


def test_a_registered_env_plays_by_its_name() -> None:
    cadenza.env("test-registry-plays")(OneStepEnv)

    async def main() -> None:
        async with playing(env="test-registry-plays") as scheduler:
            assert len(await got(scheduler, 4)) == 4

    simulate(main)


def test_env_args_reach_the_constructor() -> None:
    class Paying(OneStepEnv):
        def __init__(self, pay: float) -> None:
            self.pay = pay

        async def step(self, action: str) -> Any:
            return "", self.pay, True, False, {}

    async def main() -> None:
        async with playing(env=Paying, env_args={"pay": 0.25}) as scheduler:
            assert column(await got(scheduler, 4), "scores") == [0.25] * 4

    simulate(main)


# -- where they run ----------------------------------------------------------------------------------------------------


def test_a_sync_env_runs_off_the_loop_from_init_to_close() -> None:
    env = plain()

    async def main() -> None:
        async with playing([fake(0.0)], env=env, batch_size=1, tasks=1) as scheduler:
            await got(scheduler, 1)

    really(main)
    assert called(env) == ["init", "reset", "step", "close"]
    assert threading.get_ident() not in {thread for _, thread in env.calls}


def test_a_slow_sync_env_does_not_block_the_loop() -> None:
    stepping, go_on = threading.Event(), threading.Event()

    def step(self: Any, action: str) -> Any:
        stepping.set()
        assert go_on.wait(20.0), "the loop never came to set the event"
        return DONE

    async def main() -> None:
        async with playing([fake(0.0)], env=plain(step=step), batch_size=1, tasks=1) as scheduler:
            getting = asyncio.ensure_future(got(scheduler, 1))
            await asyncio.to_thread(stepping.wait, 20.0)
            go_on.set()
            assert len(await getting) == 1

    really(main)


def test_a_sync_env_that_raises_when_nobody_waits_any_more_makes_no_noise() -> None:
    stepping, go_on = threading.Event(), threading.Event()
    noise: list[dict[str, Any]] = []

    def step(self: Any, action: str) -> Any:
        stepping.set()
        go_on.wait(20.0)
        raise ValueError("too late to matter")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
        async with playing([fake(0.0)], env=plain(step=step), batch_size=1, tasks=1) as scheduler:
            getting = asyncio.ensure_future(got(scheduler, 1))
            await asyncio.to_thread(stepping.wait, 20.0)
            closing = asyncio.ensure_future(scheduler.shutdown())
            await asyncio.sleep(0.05)
            go_on.set()
            await closing
            with pytest.raises(SchedulerClosed):
                await getting
        gc.collect()

    really(main)
    assert noise == []


def test_many_slow_sync_envs_run_side_by_side() -> None:
    together = threading.Barrier(64, timeout=20.0)

    def step(self: Any, action: str) -> Any:
        together.wait()
        return DONE

    async def main() -> None:
        async with playing([fake(0.0)], env=plain(step=step), batch_size=64, slots=64) as scheduler:
            assert len(await got(scheduler, 64)) == 64

    really(main)


def test_a_plain_factory_runs_off_the_loop_every_time_also_when_it_makes_async_envs() -> None:
    threads: list[int] = []

    def connect() -> OneStepEnv:
        threads.append(threading.get_ident())
        return OneStepEnv()

    async def main() -> None:
        async with playing([fake(0.0)], env=connect, tasks=4, slots=1) as scheduler:
            await got(scheduler, 4)

    really(main)
    assert len(threads) == 4
    assert threading.get_ident() not in threads


def test_an_async_env_runs_on_the_loop() -> None:
    threads: set[int] = set()

    class OnLoop(OneStepEnv):
        def __init__(self) -> None:
            threads.add(threading.get_ident())

        async def reset(self, seed: int) -> str:
            threads.add(threading.get_ident())
            return "task"

        async def step(self, action: str) -> Any:
            threads.add(threading.get_ident())
            return DONE

    async def main() -> None:
        async with playing([fake(0.0)], env=OnLoop, tasks=4) as scheduler:
            await got(scheduler, 4)

    really(main)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("field", ["reward", "group_filter"])
def test_a_sync_reward_or_filter_runs_off_the_loop(field: str) -> None:
    threads: set[int] = set()

    def judge(subject: Any) -> float:
        threads.add(threading.get_ident())
        return True

    async def main() -> None:
        async with playing([fake(0.0)], tasks=4, **{field: judge}) as scheduler:
            await got(scheduler, 4)

    really(main)
    assert threads
    assert threading.get_ident() not in threads


def test_a_hung_sync_env_costs_its_lease_and_not_the_exit_of_the_interpreter() -> None:
    program = """
        import asyncio, sys, threading
        sys.path.insert(0, "tests")
        from builders import fake, fates, got, playing

        class Hung:
            made = 0
            def reset(self, seed):
                Hung.made += 1
                self.hangs = Hung.made == 1
                return "task"
            def step(self, action):
                if self.hangs:
                    threading.Event().wait()
                return "", 1.0, True, False, {}

        async def main():
            async with playing([fake(0.0)], env=Hung, tasks=4, lease_seconds=0.05) as scheduler:
                assert len(await got(scheduler, 4)) == 4
                assert fates(scheduler) == {"failed": 1, "trained": 4}, fates(scheduler)

        asyncio.run(main())
        print("played")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "played\n"), done.stderr


@pytest.mark.parametrize("clock", [simulate, really])
@pytest.mark.parametrize("error", [StopIteration, SystemExit])
def test_whatever_a_sync_env_raises_costs_one_attempt(clock: Any, error: type[BaseException]) -> None:
    first = iter([True])

    def step(self: Any, action: str) -> Any:
        if next(first, False):
            raise error
        return DONE

    async def main() -> None:
        async with playing([fake(0.0)], env=plain(step=step), tasks=4, lease_seconds=1000) as scheduler:
            assert len(await asyncio.wait_for(got(scheduler, 4), 5.0)) == 4
            assert fates(scheduler) == {"failed": 1, "trained": 4}

    clock(main)


# -- close is always called --------------------------------------------------------------------------------------------


def test_close_is_called_after_a_normal_end() -> None:
    env = plain()

    async def main() -> None:
        async with playing(env=env, tasks=4) as scheduler:
            await got(scheduler, 4)
            assert called(env).count("close") == 4

    simulate(main)


@pytest.mark.parametrize("place", ["reset", "step"])
def test_close_is_called_after_an_exception(place: str) -> None:
    def fail(self: Any, argument: Any) -> Any:
        raise ValueError("a bug")

    env = plain(**{place: fail})

    async def main() -> None:
        async with playing(env=env, tasks=2, max_attempts=2) as scheduler:
            with pytest.raises(NothingFinished):
                await get(scheduler, -1)

    simulate(main)
    assert called(env).count("init") == called(env).count("close") == 4


def test_close_is_called_after_an_exception_in_the_rollout() -> None:
    async def play(task: Task, env: EnvHandle, model: Model) -> None:
        await model.chat(await env.reset(task.seed))
        raise ValueError("a bug in the rollout")

    env = plain()

    async def main() -> None:
        async with playing(env=env, rollout=play, tasks=2, max_attempts=1) as scheduler:
            with pytest.raises(NothingFinished):
                await get(scheduler, -1)

    simulate(main)
    assert called(env).count("init") == called(env).count("close") == 2


def hanging() -> Any:
    return stepping(lambda seed, number: asyncio.sleep(FOREVER))


def test_close_is_called_when_the_attempt_loses_a_race() -> None:
    async def step(seed: int, number: int) -> None:
        if number == 0:
            await asyncio.sleep(FOREVER)

    env: Any = stepping(step)

    async def main() -> None:
        async with playing(env=env, group_size=2, extra_members=1, batch_size=2, tasks=1) as scheduler:
            _, when = await timed(got(scheduler, 2))
            await asyncio.sleep(1e-6)  # the rest of this instant
            assert (when, len(env.closed)) == (1.0, 3)

    simulate(main)


def test_close_is_called_when_the_lease_expires() -> None:
    env: Any = hanging()

    async def main() -> None:
        async with playing(env=env, tasks=2, max_attempts=2, lease_seconds=10) as scheduler:
            with pytest.raises(NothingFinished):
                await get(scheduler, -1)
            await asyncio.sleep(1.0)
            assert len(env.opened) == len(env.closed) == 4

    simulate(main)


def test_close_is_called_at_shutdown() -> None:
    env: Any = hanging()

    async def main() -> None:
        async with playing(env=env) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(2.0)
        assert len(env.opened) == len(env.closed) == 4

    simulate(main)


def test_close_is_called_when_a_stale_group_is_dropped() -> None:
    env: Any = hanging()

    async def main() -> None:
        async with playing(env=env, staleness="drop", alpha=0) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(2.0)
            await publish(scheduler, 1)
            await asyncio.sleep(2.0)
            assert fates(scheduler) == {"stale": 4}
            assert len(env.closed) == 4

    simulate(main)


@pytest.mark.parametrize("kind", ["sync", "async", "factory"])
def test_an_env_whose_constructor_outlives_its_attempt_is_closed_when_it_is_there(kind: str) -> None:
    began, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def construct() -> None:
        began.set()
        assert go_on.wait(20.0)

    class SyncClose(OneStepEnv):
        def __init__(self) -> None:
            construct()

        def reset(self, seed: int) -> str:  # type: ignore[override]
            return "task"

        def step(self, action: str) -> Any:  # type: ignore[override]
            return DONE

        def close(self) -> None:
            closed.set()

    class AsyncClose(SyncClose):
        async def close(self) -> None:  # type: ignore[override]
            closed.set()

    class AllAsync(OneStepEnv):
        async def close(self) -> None:
            closed.set()

    def factory() -> AllAsync:
        construct()
        return AllAsync()

    env: Any = {"sync": SyncClose, "async": AsyncClose, "factory": factory}[kind]

    async def main() -> bool:
        async with playing([fake(0.0)], env=env, tasks=1, batch_size=1) as scheduler:
            await scheduler.resume()
            await asyncio.to_thread(began.wait, 20.0)
        go_on.set()
        return await asyncio.to_thread(closed.wait, 2.0)

    assert really(main)


def test_an_env_that_lacks_a_method_is_closed_all_the_same() -> None:
    closed: list[Any] = []

    class Stepless:
        def reset(self, seed: int) -> str:
            return "task"

        def close(self) -> None:
            closed.append(self)

    async def main() -> None:
        async with playing(env=Stepless, tasks=1, max_attempts=2) as scheduler:
            with pytest.raises(NothingFinished):
                await get(scheduler, -1)

    simulate(main)
    assert len(closed) == 2


def test_a_close_that_raises_costs_nothing_but_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(OneStepEnv):
        async def close(self) -> None:
            raise OSError("the container does not stop")

    async def main() -> None:
        async with playing(env=Stubborn, tasks=4) as scheduler:
            assert len(await got(scheduler, 4)) == 4
            assert scheduler.metrics()["envs/leaked"] == 4

    simulate(main)
    assert caplog.text.count("close of domain 'toy' raised") == 1


def test_a_close_that_hangs_costs_its_slot_close_seconds() -> None:
    class Hanging(OneStepEnv):
        made = 0

        def __init__(self) -> None:
            Hanging.made += 1
            self.hangs = Hanging.made == 1

        async def close(self) -> None:
            if self.hangs:
                await asyncio.sleep(FOREVER)

    async def main() -> None:
        async with playing(env=Hanging, batch_size=2, tasks=2, slots=1, close_seconds=5) as scheduler:
            _, when = await timed(got(scheduler, 2))
            assert when == 1.0 + 5.0 + 1.0
            assert scheduler.metrics()["envs/leaked"] == 1

    simulate(main)


def test_an_async_env_may_have_plain_methods() -> None:
    closed: list[Any] = []

    class Mixed(OneStepEnv):
        def reset(self, seed: int) -> str:  # type: ignore[override]
            return "task"

        def close(self) -> None:
            closed.append(self)

    async def main() -> None:
        async with playing(env=Mixed, tasks=4) as scheduler:
            assert len(await got(scheduler, 4)) == 4
            assert scheduler.metrics()["envs/leaked"] == 0

    simulate(main)
    assert len(closed) == 4


def test_a_sync_env_may_have_async_methods() -> None:
    closed: list[Any] = []

    async def close(self: Any) -> None:
        closed.append(self)

    async def main() -> None:
        async with playing(env=plain(close=close), tasks=4) as scheduler:
            assert len(await got(scheduler, 4)) == 4
            assert scheduler.metrics()["envs/leaked"] == 0

    simulate(main)
    assert len(closed) == 4


def test_an_env_may_be_made_by_an_async_function() -> None:
    async def connect() -> OneStepEnv:
        await asyncio.sleep(1.0)
        return OneStepEnv()

    async def main() -> None:
        async with playing(env=connect, tasks=4) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert (len(batch), when) == (4, 2.0)

    simulate(main)


# -- what they say -----------------------------------------------------------------------------------------------------


def prompts(batch: Any) -> list[list[int]]:
    pairs = zip(rows(batch, "input_ids"), rows(batch, "prompt_mask"), strict=True)
    return [tokens[mask].tolist() for tokens, mask in pairs]


@pytest.mark.parametrize(
    ("observation", "tokens"),
    [
        ("hello", list(b"hello")),
        ([{"role": "system", "content": "be brief. "}, {"role": "user", "content": "hi"}], list(b"be brief. hi")),
        (np.array([7, 1, 4], np.int32), [7, 1, 4]),
        (np.array([7, 1, 4], np.int64), [7, 1, 4]),
    ],
    ids=["text", "messages", "tokens", "wide tokens"],
)
def test_an_observation_is_text_messages_or_tokens(observation: Any, tokens: list[int]) -> None:
    class Says(OneStepEnv):
        async def reset(self, seed: int) -> Any:
            return observation

    async def main() -> None:
        async with playing(env=Says, tasks=4) as scheduler:
            assert prompts(await got(scheduler, 4)) == [tokens] * 4

    simulate(main)


def test_an_action_is_the_text_of_the_response() -> None:
    heard: list[str] = []

    class Listens(OneStepEnv):
        async def step(self, action: str) -> Any:
            heard.append(action)
            return DONE

    async def main() -> None:
        async with playing([FakeReplica(lambda request: "left")], env=Listens, tasks=2, batch_size=2) as scheduler:
            await got(scheduler, 2)

    simulate(main)
    assert heard == ["left", "left"]


def test_all_members_of_a_group_get_the_seed_of_its_task() -> None:
    env: Any = stepping(lambda seed, number: asyncio.sleep(0))

    async def main() -> None:
        async with playing(
            domains={"toy": {"env": env}}, group_size=3, batch_size=6, rollout="trajectory"
        ) as scheduler:
            await got(scheduler, 6)

    simulate(main)
    assert env.made == {0: 3, 1: 3}


def test_a_row_of_a_dataset_reaches_the_rollout_and_the_reward() -> None:
    async def play(task: Task, env: EnvHandle, model: Model) -> None:
        assert isinstance(task.data, dict)
        await model.chat(task.data["question"])

    async def reward(sample: Sample) -> float:
        assert sample.prompt == sample.row["question"]
        return float(sample.answer)

    async def main() -> None:
        questions = [{"question": "1+1", "answer": 2}, {"question": "2+2", "answer": 4}]
        async with playing(tasks=questions, rollout=play, reward=reward, batch_size=2) as scheduler:
            batch = await got(scheduler, 2)
            assert column(batch, "scores") == [2.0, 4.0]
            assert [bytes(prompt) for prompt in prompts(batch)] == [b"1+1", b"2+2"]

    simulate(main)


def test_a_reward_is_booked_on_the_turn_that_led_to_it() -> None:
    class Counting(OneStepEnv):
        def __init__(self) -> None:
            self.turn = 0

        async def step(self, action: str) -> Any:
            self.turn += 1
            return "go on", self.turn / 4, self.turn == 3, False, {}

    async def main() -> None:
        async with playing(env=Counting, tasks=1, batch_size=1) as scheduler:
            batch = await got(scheduler, 1)
            assert rows(batch, "step_scores")[0].tolist() == [0.25, 0.5, 0.75]
            assert column(batch, "scores") == column(batch, "episode_scores") == [1.5]

    simulate(main)


# -- truncation --------------------------------------------------------------------------------------------------------


def test_an_episode_of_too_many_turns_is_truncated() -> None:
    async def main() -> None:
        async with playing(env=chain(100), max_turns=5) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert when == 5.0
            assert column(batch, "truncated") == [True] * 4
            assert [len(row) for row in rows(batch, "step_scores")] == [5] * 4

    simulate(main)


def test_an_episode_that_ends_by_itself_at_the_last_turn_is_not_truncated() -> None:
    async def main() -> None:
        async with playing(env=chain(5), max_turns=5) as scheduler:
            assert column(await got(scheduler, 4), "truncated") == [False] * 4

    simulate(main)


def test_an_env_may_truncate_by_itself() -> None:
    class Short(OneStepEnv):
        async def step(self, action: str) -> Any:
            return "", 0.0, False, True, {}

    async def main() -> None:
        async with playing(env=Short) as scheduler:
            assert column(await got(scheduler, 4), "truncated") == [True] * 4

    simulate(main)


def test_an_episode_that_fills_its_context_is_truncated_and_kept() -> None:
    async def main() -> None:
        async with playing(env=chain(100), max_context=40) as scheduler:
            batch = await got(scheduler, 4)
            assert column(batch, "truncated") == [True] * 4
            assert max(column(batch, "lengths")) <= 40
            assert column(batch, "scores") == [3.0] * 4  # 6 + 10, 6 + 10, 6 + 2, and no room for a fourth prompt

    simulate(main)


def test_a_response_ends_where_its_context_is_full() -> None:
    async def main() -> None:
        async with playing(max_context=10, tasks=4) as scheduler:
            batch = await got(scheduler, 4)
            assert [len(response) for response in responses(batch)] == [4] * 4  # after a prompt of 6

    simulate(main)


def test_a_step_wise_episode_whose_observation_does_not_fit_is_truncated_and_kept() -> None:
    class Growing(OneStepEnv):
        def __init__(self) -> None:
            self.turn = 0

        async def step(self, action: str) -> Any:
            self.turn += 1
            return "x" * 20 * self.turn, 1.0, False, False, {}

    async def main() -> None:
        async with playing(env=Growing, rollout="step", max_context=50, batch_size=1, tasks=1) as scheduler:
            batch = await got(scheduler, 1)
            assert column(batch, "truncated") == [True] * 3
            assert column(batch, "scores") == [3.0] * 3
            assert fates(scheduler) == {"trained": 1}

    simulate(main)


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_by_progress() -> None:
    async def main() -> None:
        async with playing(env=chain(5, seconds=8.0), lease_seconds=10) as scheduler:
            _, when = await timed(got(scheduler, 4))
            assert when == 5 * (1.0 + 8.0)
            assert scheduler.metrics()["slots/leases_expired"] == 0

    simulate(main)


def test_waiting_for_the_model_does_not_use_up_the_lease() -> None:
    async def main() -> None:
        async with playing([fake(100.0)], lease_seconds=10, alpha=1, tasks=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(50.0)
            await scheduler.suspend()
            await asyncio.sleep(1000.0)
            assert len(await got(scheduler, 4)) == 4
            assert scheduler.metrics()["slots/leases_expired"] == 0

    simulate(main)


@pytest.mark.parametrize("place", ["reset", "step", "rollout"])
def test_a_lease_that_expires_says_where(place: str) -> None:
    class Hangs(OneStepEnv):
        async def reset(self, seed: int) -> str:
            if place == "reset":
                await asyncio.sleep(FOREVER)
            return "task"

        async def step(self, action: str) -> Any:
            if place == "step":
                await asyncio.sleep(FOREVER)
            return DONE

    async def play(task: Task, env: EnvHandle, model: Model) -> None:
        reply = await model.chat(await env.reset(task.seed))
        await env.step(reply.text)
        await asyncio.sleep(FOREVER)

    async def main() -> None:
        async with playing(env=Hangs, rollout=play, tasks=1, batch_size=1, max_attempts=1, lease_seconds=10) as s:
            with pytest.raises(NothingFinished):
                await get(s, 1)
            [cause] = causes(s, Fate.FAILED)
            assert cause == f"{place}: lease expired"
            assert "no progress within lease_seconds 10" in s.why("toy/0")
            assert now() == 10.0 + (place != "reset")

    simulate(main)


def test_infrastructure_that_an_env_reports_does_not_speak_against_the_task() -> None:
    async def step(seed: int, number: int) -> None:
        if number < 5:
            raise InfrastructureError("no sandbox is free")

    async def main() -> None:
        async with playing(env=stepping(step), tasks=1, batch_size=1, max_attempts=2, error_budget=0) as scheduler:
            batch = await got(scheduler, 1)
            assert column(batch, "attempt") == [5]
            assert fates(scheduler) == {"failed": 5, "trained": 1}

    simulate(main)


# -- close and a step that still runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", [True, False], ids=["a step that returns", "a step that does not"])
def test_a_sync_env_is_closed_after_the_step_that_still_runs_or_after_close_seconds(returns: bool) -> None:
    order: list[str] = []
    go_on, ended, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        made = 0

        def __init__(self) -> None:
            Slow.made += 1
            self.first = Slow.made == 1

        def reset(self, seed: int) -> str:
            return "task"

        def step(self, action: str) -> Any:
            if self.first:
                assert go_on.wait(20.0)
                order.append("step ended")
                ended.set()
            return DONE

        def close(self) -> None:
            if self.first:
                order.append("closed")
                closed.set()

    async def main() -> None:
        patience = {"lease_seconds": 0.2, "close_seconds": 5.0 if returns else 0.3}
        async with playing([fake(0.0)], env=Slow, tasks=4, **patience) as scheduler:
            assert len(await got(scheduler, 4)) == 4  # another slot did what the slow one should have
            if returns:
                await asyncio.sleep(0.1)
                assert order == []
            else:
                assert await asyncio.to_thread(closed.wait, 5.0)
            go_on.set()
            assert await asyncio.to_thread(ended.wait, 5.0)
            assert await asyncio.to_thread(closed.wait, 5.0)

    really(main)
    assert order == (["step ended", "closed"] if returns else ["closed", "step ended"])


def test_a_call_that_raises_as_its_waiter_is_cancelled_makes_no_noise() -> None:
    noise: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: noise.append(context))
        call: asyncio.Future[None] = loop.create_future()
        waiter = asyncio.ensure_future(with_deadline(10.0, call, "seconds"))
        await asyncio.sleep(0)
        call.set_exception(ValueError("too late to matter"))
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        del call
        gc.collect()

    really(main)
    assert noise == []
