"""Rewards in processes of their own. Here the processes are workers on the same virtual loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from builders import FOREVER, OneStepEnv, column, fates, got, now, playing, simulate, timed

from cadenza import ResourceManager
from cadenza.cluster import Cluster
from cadenza.cluster.worker_handle import start_worker
from cadenza.data import DataProto
from cadenza.errors import InfrastructureError
from cadenza.rewards import RewardConfig, RewardUnavailable, Sample
from cadenza.rollout.collate import collate
from cadenza.rollout.failures import RolloutError
from cadenza.rollout.records import Trajectory
from cadenza.rollout.reward_pool import RewardPool
from cadenza.rollout.reward_process import RewardProcess
from cadenza.run.episodes import EpisodeStats


def test_the_pool_scores_side_by_side_and_a_slow_sample_holds_up_no_other() -> None:
    async def reward(sample: Sample) -> float:
        await asyncio.sleep(50.0 if sample.trajectory.id == 0 else 0.0)
        return float(sample.trajectory.id)

    async def main() -> None:
        async with playing(reward=reward, reward_workers=2, group_size=2, batch_size=2, extra_groups=1) as scheduler:
            batch, when = await timed(got(scheduler, 2))
            assert column(batch, "scores") == [2.0, 3.0]
            assert when < 5.0

    simulate(main)


def test_what_a_reward_raises_in_the_pool_costs_its_attempt_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    calls: Counter[int] = Counter()

    async def reward(sample: Sample) -> float:
        calls[sample.trajectory.id] += 1
        if sample.trajectory.id == 0:
            raise ValueError("no such unit")
        return 1.0

    async def main() -> None:
        async with playing(reward=reward, reward_workers=1) as scheduler:
            await got(scheduler, 4)
            assert fates(scheduler) == {"failed": 1, "trained": 4}
            assert scheduler.metrics()["errors/user_code"] == 1

    simulate(main)
    assert "no such unit" in caplog.text
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_the_metric_of_a_gate_counts_the_answers_that_it_keeps_back(reward_workers: int) -> None:
    async def even(sample: Sample) -> float:
        return float(sample.trajectory.id % 2 == 0)

    async def half(sample: Sample) -> float:
        return 0.5

    async def main() -> None:
        rewards = {"even": {"name": even, "gate": True}, "half": half}
        domains = {"toy": {"env": OneStepEnv, "rewards": rewards}}
        taken: list[Trajectory] = []

        def collator(trajectories: list[Trajectory]) -> DataProto:
            taken.extend(trajectories)
            return collate(trajectories)

        async with playing(domains=domains, reward_workers=reward_workers, collator=collator) as scheduler:
            await got(scheduler, 4)
            found = EpisodeStats.of(taken, 0).metrics("train")
            assert (found["train/reward/even"], found["train/reward/half"]) == (0.5, 0.5)
            assert found["train/success"] == 0.5, "nothing behind the gate says what a success is"

    simulate(main)


class Processes:
    """The processes that pools started, and what befalls further starts."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.before_start: Callable[[int], Awaitable[None]] | None = None

    @property
    def alive(self) -> list[Any]:
        return [handle for handle in self.started if not handle._ended.done()]

    def kill_all(self) -> None:
        for handle in self.alive:
            handle.kill()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    found = Processes()

    async def start_and_tell(backend: str, role: str, number: int, *args: Any, **options: Any) -> Any:
        if found.before_start is not None:
            await found.before_start(number)
        found.started.append(await start_worker(backend, role, number, *args, **options))
        return found.started[-1]

    monkeypatch.setattr("cadenza.rollout.reward_pool.start_worker", start_and_tell)
    return found


async def no_policy(*args: Any, **options: Any) -> str:
    raise AssertionError("no reward here asks the policy")


async def slow_reward(sample: Sample) -> float:
    await asyncio.sleep(10.0)
    return 1.0


def test_a_process_that_dies_costs_no_sample(processes: Processes) -> None:
    async def main() -> None:
        async with playing(reward=slow_reward, reward_workers=2) as scheduler:
            asyncio.get_running_loop().call_later(5.0, lambda: processes.started[0].kill())
            await got(scheduler, 4)
            assert fates(scheduler) == {"trained": 4}
            await asyncio.sleep(100.0)
            assert len(processes.alive) == 2, "a new one has taken its place"

    simulate(main)


@pytest.mark.parametrize("size", [1, 3])
def test_where_all_processes_die_samples_wait_for_new_ones(processes: Processes, size: int) -> None:
    async def main() -> None:
        async with playing(reward=slow_reward, reward_workers=size) as scheduler:
            asyncio.get_running_loop().call_later(5.0, processes.kill_all)
            await got(scheduler, 4)
            assert fates(scheduler) == {"trained": 4}

    simulate(main)


def test_a_process_that_is_not_replaced_at_once_is_replaced_later(processes: Processes) -> None:
    async def fail_twice(number: int) -> None:
        if number in (1, 2):
            raise InfrastructureError("no room")

    async def main() -> None:
        processes.before_start = fail_twice
        async with playing(reward=slow_reward, reward_workers=1) as scheduler:
            asyncio.get_running_loop().call_later(5.0, processes.kill_all)
            await got(scheduler, 4)
            assert fates(scheduler) == {"trained": 4}

    simulate(main)


def test_samples_fail_once_no_process_can_be_started_any_more(processes: Processes) -> None:
    async def fail_later(number: int) -> None:
        if number:
            raise InfrastructureError("no room")

    async def main() -> None:
        processes.before_start = fail_later
        pool = RewardPool({"toy": {"slow": RewardConfig(name=slow_reward)}}, 1, "embedded", 1.0, no_policy)
        scoring = asyncio.ensure_future(pool.score("toy", Sample(response="42")))
        asyncio.get_running_loop().call_later(5.0, processes.kill_all)
        with pytest.raises(RewardUnavailable, match=r"no reward process is left for a sample of domain 'toy'.*no room"):
            await scoring
        await pool.close()

    simulate(main)


def test_a_dead_process_does_not_disturb_the_shutdown(processes: Processes) -> None:
    async def main() -> None:
        async with playing(reward=slow_reward, reward_workers=3) as scheduler:
            await got(scheduler, 4)
            processes.started[0].kill()
        assert processes.alive == []

    simulate(main)


def test_a_reward_that_hangs_in_close_outlives_the_shutdown_nowhere(processes: Processes) -> None:
    class Hung:
        async def __call__(self, sample: Sample) -> float:
            return 1.0

        async def close(self) -> None:
            await asyncio.sleep(FOREVER)

    async def main() -> None:
        async with playing(reward=Hung, reward_workers=3, close_seconds=2.0) as scheduler:
            await got(scheduler, 4)
        assert processes.alive == []

    simulate(main)


def test_where_one_process_cannot_start_the_others_end(processes: Processes) -> None:
    async def fail_last(number: int) -> None:
        if number == 2:
            await asyncio.sleep(1.0)
            raise InfrastructureError("no room for a third process")

    async def main() -> None:
        processes.before_start = fail_last
        async with playing(reward=slow_reward, reward_workers=3) as scheduler:
            with pytest.raises(InfrastructureError, match="no room for a third process"):
                await got(scheduler, 4)
            assert (len(processes.started), processes.alive) == (2, [])

    simulate(main)


def test_a_process_that_is_being_replaced_during_the_shutdown_does_not_outlive_it(processes: Processes) -> None:
    class SlowToClose:
        async def __call__(self, sample: Sample) -> float:
            await asyncio.sleep(10.0)
            return 1.0

        async def close(self) -> None:
            await asyncio.sleep(5.0)

    async def start_slowly(number: int) -> None:
        await asyncio.sleep(2.0 if number >= 2 else 0.0)

    async def main() -> None:
        processes.before_start = start_slowly
        async with playing(reward=SlowToClose, reward_workers=2) as scheduler:
            batch = asyncio.ensure_future(got(scheduler, 4))
            await asyncio.sleep(5.0)
            processes.started[0].kill()
            await asyncio.sleep(1.0)
            batch.cancel()
        await asyncio.sleep(100.0)
        assert processes.alive == []

    simulate(main)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reward_workers", [0, 2])
def test_a_reward_that_cannot_open_refuses_the_run_and_leaves_none_open(workers: int, reward_workers: int) -> None:
    opened: Counter[str] = Counter()

    class Good:
        async def open(self) -> None:
            opened["good"] += 1

        async def close(self) -> None:
            opened["good"] -= 1

        async def __call__(self, sample: Sample) -> float:
            return 1.0

    class Bad(Good):
        async def open(self) -> None:
            raise RuntimeError("no server there")

    async def main() -> None:
        domains = {"a": {"env": OneStepEnv, "reward": Good}, "b": {"env": OneStepEnv, "reward": Bad}}
        async with playing(domains=domains, workers=workers, reward_workers=reward_workers) as scheduler:
            with pytest.raises(RuntimeError, match="no server there") as refused:
                await got(scheduler, 4)
            assert "reward 'Bad' of domain 'b'" in "".join(refused.value.__notes__)
            assert opened == {"good": 0}
            assert fates(scheduler) == {}

    simulate(main)


@pytest.mark.parametrize("reward_workers", [0, 2])
def test_env_workers_close_their_rewards_at_the_end(processes: Processes, reward_workers: int) -> None:
    opened: list[int] = []

    class Counting:
        async def open(self) -> None:
            opened.append(1)

        async def close(self) -> None:
            opened.append(-1)

        async def __call__(self, sample: Sample) -> float:
            return 1.0

    async def main() -> None:
        async with playing(reward=Counting, workers=2, reward_workers=reward_workers) as scheduler:
            await got(scheduler, 4)
            assert sum(opened) == 2 * (reward_workers or 1)
        assert sum(opened) == 0
        assert processes.alive == []

    simulate(main)


def test_rewards_that_hang_or_raise_in_close_keep_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    def closing(name: str, close: Callable[[], Awaitable[None]]) -> Any:
        class Closing:
            async def __call__(self, sample: Sample) -> float:
                return 1.0

            async def close(self) -> None:
                await close()
                closed.append(name)

        return Closing

    async def fail() -> None:
        raise ValueError("no such file")

    async def main() -> None:
        closes = {"a": lambda: asyncio.sleep(FOREVER), "b": fail, "c": lambda: asyncio.sleep(0.0)}
        domains = {name: {"env": OneStepEnv, "reward": closing(name, close)} for name, close in closes.items()}
        async with playing(domains=domains, close_seconds=2.0) as scheduler:
            await got(scheduler, 4)
        assert closed == ["c"]

    simulate(main)
    assert "domain 'a' did not return in time" in caplog.text
    assert "no such file" in caplog.text


def test_an_infrastructure_failure_in_the_pool_stays_one() -> None:
    async def reward(sample: Sample) -> float:
        if sample.trajectory.id == 0:
            raise InfrastructureError("the judge is down")
        return 1.0

    async def main() -> None:
        async with playing(reward=reward, reward_workers=1, max_attempts=2) as scheduler:
            await got(scheduler, 4)
            assert scheduler.metrics()["errors/user_code"] == 0
            assert "the judge is down" in scheduler.why("g0.0#0")

    simulate(main)


# -- processes of the run, on devices ----------------------------------------------------------------------------------


@asynccontextmanager
async def processes_of_the_run(count: int = 2) -> AsyncIterator[Sequence[Any]]:
    placed = ResourceManager(4).place({"reward": f"0-{count - 1}"})
    async with Cluster("reward", RewardProcess, placed["reward"]) as cluster:
        yield cluster.worker_handles


class Counting:
    """Counts what is open. Values are the numbers of the attempts."""

    opened: ClassVar[list[int]] = []

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    async def open(self) -> None:
        self.opened.append(1)

    async def close(self) -> None:
        self.opened.append(-1)

    async def __call__(self, sample: Sample) -> float:
        await asyncio.sleep(self.seconds)
        return float(sample.trajectory.id)


@pytest.mark.parametrize("workers", [0, 2])
def test_schedulers_share_the_processes_of_the_run_and_rewards_that_are_the_same(workers: int) -> None:
    Counting.opened.clear()

    async def main() -> None:
        async with processes_of_the_run() as shared:
            options = {"reward": Counting, "workers": workers, "reward_processes": shared}
            async with playing(**options) as training, playing(mode="val", tasks=4, **options) as validation:
                batches = await asyncio.gather(got(training, 4), got(validation, 4))
                assert [column(batch, "scores") for batch in batches] == 2 * [[0.0, 1.0, 2.0, 3.0]]
                assert Counting.opened == [1, 1], "once in each process"
            assert Counting.opened == [1, 1], "they are the run's"
        assert sum(Counting.opened) == 0

    simulate(main)


def test_a_process_of_the_run_that_dies_costs_no_sample_and_is_not_replaced(processes: Processes) -> None:
    async def main() -> None:
        async with processes_of_the_run() as shared, playing(reward=slow_reward, reward_processes=shared) as scheduler:
            asyncio.get_running_loop().call_later(5.0, shared[0].kill)
            await got(scheduler, 4)
            assert fates(scheduler) == {"trained": 4}
            await asyncio.sleep(100.0)
            assert not processes.started

    simulate(main)


def test_a_scheduler_that_begins_after_a_process_of_the_run_died_has_the_others() -> None:
    async def main() -> None:
        async with processes_of_the_run() as shared:
            shared[0].kill()
            async with playing(reward=slow_reward, reward_processes=shared) as scheduler:
                await got(scheduler, 4)
                assert fates(scheduler) == {"trained": 4}
            shared[1].kill()
            async with playing(reward=slow_reward, reward_processes=shared) as scheduler:
                with pytest.raises(RolloutError, match="no reward process is left"):
                    await got(scheduler, 4)

    simulate(main)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_run_ends_when_the_last_process_dies_and_says_why(workers: int) -> None:
    async def main() -> None:
        options = {"reward": slow_reward, "workers": workers}
        async with processes_of_the_run() as shared, playing(reward_processes=shared, **options) as scheduler:
            for seconds, process in enumerate(shared, 5):
                asyncio.get_running_loop().call_later(seconds, process.kill)
            with pytest.raises(RolloutError, match=r"no reward process is left .* domain 'toy': .* was ended"):
                await got(scheduler, 4)
            assert now() < 20.0

    simulate(main)


def test_a_scheduler_that_ends_leaves_nothing_to_compute_in_the_processes_of_the_run() -> None:
    scored: list[int] = []

    async def reward(sample: Sample) -> float:
        await asyncio.sleep(10.0)
        scored.append(sample.trajectory.id)
        return 1.0

    async def main() -> None:
        async with processes_of_the_run() as shared:
            async with playing(reward=reward, reward_processes=shared) as scheduler:
                batch = asyncio.ensure_future(got(scheduler, 4))
                await asyncio.sleep(5.0)
                batch.cancel()
            await asyncio.sleep(100.0)
            assert not scored

    simulate(main)


def test_a_reward_that_cannot_open_on_its_device_refuses_the_run() -> None:
    class Bad:
        async def open(self) -> None:
            raise RuntimeError("out of memory")

        async def __call__(self, sample: Sample) -> float:
            return 1.0

    async def main() -> None:
        async with processes_of_the_run() as shared, playing(reward=Bad, reward_processes=shared) as scheduler:
            with pytest.raises(RuntimeError, match="out of memory"):
                await got(scheduler, 4)

    simulate(main)
