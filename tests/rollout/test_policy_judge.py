"""A judge that is the policy of the run: its questions go through the sampler of the rollouts, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from builders import (
    causes,
    chain,
    column,
    fates,
    got,
    now,
    open_attempts,
    playing,
    publish,
    responses,
    simulate,
    site,
    timed,
)

from cadenza.errors import RewardError
from cadenza.inference.replica import Request
from cadenza.rewards import ConfiguredReward, RewardHost, Sample
from cadenza.rewards.judge import REMINDER
from cadenza.rollout.failures import NothingFinished
from cadenza.rollout.records import Fate
from cadenza.testing import FakeReplica

JUDGE: dict[str, Any] = {"name": "judge", "model": "policy", "template": "Judge {response}"}
VERDICT = "Score: 7"


def asked(request: Request) -> str:
    return bytes(np.concatenate(request.chunks).astype(np.uint8)).decode()


def is_question(request: Request) -> bool:
    return asked(request).startswith("Judge ")


def policy(
    verdict: Callable[[Request], str] | str = VERDICT, *, answers: float = 1.0, judges: float = 10.0, **options: Any
) -> FakeReplica:
    """A replica that answers tasks with 'ok', and questions of the judge with a verdict, and takes so long for each."""
    judge = verdict if callable(verdict) else lambda request: verdict
    return FakeReplica(
        lambda request: judge(request) if is_question(request) else "ok",
        seconds=lambda request: judges if is_question(request) else answers,
        **options,
    )


def questions(*replicas: FakeReplica) -> list[Request]:
    return [request for replica in replicas for request in replica.requests if is_question(request)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reward_workers", [0, 2])
def test_the_tokens_of_the_judge_are_counted_apart_and_are_in_no_row(workers: int, reward_workers: int) -> None:
    async def main() -> None:
        replica = policy()
        options = {"workers": workers, "reward_workers": reward_workers}
        async with playing([replica], reward=JUDGE, tasks=4, **options) as scheduler:
            batch = await got(scheduler, 4)
            assert column(batch, "scores") == pytest.approx([0.7] * 4)
            assert responses(batch) == [list(b"ok")] * 4
            metrics = scheduler.metrics()
            assert (metrics["judge/calls"], metrics["judge/tokens"]) == (4, 4 * len(VERDICT))
            assert metrics["tokens/trained"] == 4 * len("ok")
            assert replica.generated == metrics["tokens/trained"] + metrics["judge/tokens"]

    simulate(main)


def test_a_run_without_such_a_judge_has_no_such_metric() -> None:
    async def main() -> None:
        async with playing([policy()]) as scheduler:
            await got(scheduler, 4)
            assert "judge/calls" not in scheduler.metrics()

    simulate(main)


def test_the_judge_is_greedy_unless_it_says_otherwise_and_has_sessions_and_prefixes_of_its_own() -> None:
    async def main() -> None:
        replica = policy()
        warm = {**JUDGE, "temperature": 0.5, "max_tokens": 8}
        domains = {name: {"env": None, "tasks": [{"prompt": "hm"}] * 2} for name in ("cold", "warm")}
        domains["cold"]["reward"], domains["warm"]["reward"] = JUDGE, warm
        async with playing([replica], domains=domains) as scheduler:
            await got(scheduler, 4)
        found = {(request.sampling.temperature, request.sampling.max_tokens) for request in questions(replica)}
        assert found == {(0.0, 512), (0.5, 8)}
        rollouts = [request for request in replica.requests if not is_question(request)]
        for key in ("session", "group"):
            ids = {getattr(request, key) for request in questions(replica)}
            assert len(ids) == 4
            assert not ids & {getattr(request, key) for request in rollouts}

    simulate(main)


def test_the_judge_holds_no_slot() -> None:
    async def main() -> None:
        async with playing([policy(judges=100.0)], reward=JUDGE, slots=1, tasks=4) as scheduler:
            _, when = await timed(got(scheduler, 4))
            assert when < 110.0, "four answers of one second, one after the other, and verdicts side by side"

    simulate(main)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("reward_workers", [0, 1])
def test_a_suspension_in_the_middle_of_judging_costs_only_its_time(workers: int, reward_workers: int) -> None:
    """It lasts longer than `reward_seconds` and `stall_seconds`, and each verdict goes on from the tokens it had."""

    async def main() -> None:
        replica = policy()
        options = {"reward_seconds": 20.0, "stall_seconds": 50.0, "workers": workers, "reward_workers": reward_workers}
        async with playing([replica], reward=JUDGE, tasks=4, **options) as scheduler:
            batch = asyncio.ensure_future(got(scheduler, 4))
            await asyncio.sleep(5.0)
            assert len(questions(replica)) == 4
            await scheduler.suspend()
            assert not replica.requests_in_flight()
            await asyncio.sleep(1000.0)
            assert not batch.done()
            await scheduler.resume()
            assert column(await batch, "scores") == pytest.approx([0.7] * 4)
            assert 1000.0 < now() < 1020.0
            assert fates(scheduler) == {"trained": 4}
            assert scheduler.metrics()["judge/tokens"] == 4 * len(VERDICT)
            assert replica.discarded.total() == 0
            assert {request.offset > 0 for request in questions(replica)[4:]} == {True}

    simulate(main)


def test_get_batch_opens_the_gate_for_a_judge_that_it_waits_for() -> None:
    """At alpha 0 the trainer waits for the batch, the batch for the judge, and the judge for the gate."""

    async def main() -> None:
        async with playing([policy()], reward=JUDGE, alpha=0.0, stall_seconds=50.0) as scheduler:
            given_up = asyncio.ensure_future(got(scheduler, 4))
            await asyncio.sleep(5.0)
            given_up.cancel()
            await scheduler.suspend()
            await asyncio.sleep(1000.0)
            for version in (1, 2, 3):
                await got(scheduler, 4)
                await publish(scheduler, version)
            assert fates(scheduler).keys() <= {"trained"}

    simulate(main)


def test_weights_that_are_published_in_the_middle_of_judging_end_no_verdict() -> None:
    async def main() -> None:
        replica = policy(judges=10.0)
        async with playing([replica], reward=JUDGE, alpha=1.0) as scheduler:
            await got(scheduler, 4)
            for version in (1, 2, 3):
                await asyncio.sleep(3.0)
                await publish(scheduler, version)
                await got(scheduler, 4)
            assert fates(scheduler) == {"trained": 16}

    simulate(main)


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_verdicts_and_turns_that_fill_the_cache_wait_for_each_other_and_not_for_ever(reward_workers: int) -> None:
    async def main() -> None:
        replica = policy(judges=2.0, kv_capacity=40)  # a context has some 20 tokens
        options = {"env": chain(3, seconds=1.0), "slots": 8, "alpha": 1.0, "reward_workers": reward_workers}
        async with playing([replica], reward=JUDGE, batch_size=8, **options) as scheduler:
            for version in (1, 2, 3):
                await got(scheduler, 8)
                await publish(scheduler, version)
            assert fates(scheduler)["trained"] == 24
            assert "failed" not in fates(scheduler)

    simulate(main)


def test_a_replica_that_dies_while_it_judges_is_replaced_by_another() -> None:
    async def main() -> None:
        replicas = [policy(name=f"r{n}", devices=(n,)) for n in range(2)]
        async with playing(replicas, reward=JUDGE, tasks=4) as scheduler:
            asyncio.get_running_loop().call_later(5.0, replicas[0].kill, "a test")
            await got(scheduler, 4)
            assert fates(scheduler) == {"trained": 4}

    simulate(main)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("reward_workers", [0, 1])
def test_the_shutdown_waits_for_no_verdict(workers: int, reward_workers: int) -> None:
    async def main() -> None:
        replica = policy(judges=1e5)
        async with playing([replica], reward=JUDGE, workers=workers, reward_workers=reward_workers) as scheduler:
            batch = asyncio.ensure_future(got(scheduler, 4))
            await asyncio.sleep(5.0)
            assert questions(replica)
            batch.cancel()
            await scheduler.suspend()
        assert now() < 100.0
        assert not replica.requests_in_flight()

    simulate(main)


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_a_reply_without_a_verdict_is_asked_about_once_more(reward_workers: int) -> None:
    async def main() -> None:
        replica = policy(lambda request: VERDICT if REMINDER in asked(request) else "Hm.")
        async with playing([replica], reward=JUDGE, tasks=4, reward_workers=reward_workers) as scheduler:
            assert column(await got(scheduler, 4), "scores") == pytest.approx([0.7] * 4)
            assert scheduler.metrics()["judge/calls"] == 8

    simulate(main)


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_a_policy_that_gives_no_verdict_fails_as_infrastructure_and_never_as_a_value(reward_workers: int) -> None:
    async def main() -> None:
        replica = policy(lambda request: "Hm." if "task 0" in asked(request) else VERDICT)
        judge = {**JUDGE, "template": "Judge {prompt}"}
        options = {"tasks": 2, "batch_size": 1, "max_attempts": 1, "reward_workers": reward_workers}
        async with playing([replica], reward=judge, **options) as scheduler:
            assert column(await got(scheduler, 1), "scores") == pytest.approx([0.7])
            assert set(causes(scheduler, Fate.FAILED)) <= {"reward: RewardUnavailable"}
            assert scheduler.metrics()["errors/user_code"] == 0

    simulate(main)


def test_a_question_that_does_not_fit_the_context_costs_its_task_and_says_so() -> None:
    async def main() -> None:
        judge = {**JUDGE, "template": "Judge " + 100 * "x"}
        async with playing([policy()], reward=judge, tasks=1, batch_size=1, max_context=100) as scheduler:
            with pytest.raises(NothingFinished, match="reward: ContextFull"):
                await got(scheduler, 1)
            assert "a question of the reward about 'toy/0': 106 tokens leave no room" in scheduler.why("toy/0")

    simulate(main)


def test_one_answer_that_is_too_long_for_the_judge_costs_its_own_try_and_not_its_group() -> None:
    async def main() -> None:
        answers = iter(["y" * 80])
        replica = FakeReplica(lambda request: VERDICT if is_question(request) else next(answers, "ok"), seconds=1.0)
        judge = {**JUDGE, "template": "Judge {response} " + "z" * 20}
        options = {"tasks": 1, "batch_size": 4, "group_size": 4, "max_context": 100}
        async with playing([replica], reward=judge, **options) as scheduler:
            await got(scheduler, 4)
            assert fates(scheduler) == {"failed": 1, "trained": 4}
            assert causes(scheduler, Fate.FAILED) == {"reward: ContextFull": 1}
            assert scheduler.metrics()["errors/user_code"] == 0

    simulate(main)


class Ensemble(ConfiguredReward):
    """Asks the policy the same question several times, and one other."""

    asks_policy: ClassVar[bool] = True

    def use_host(self, host: RewardHost) -> None:
        self._ask = host.ask_policy

    async def __call__(self, sample: Sample) -> float:
        texts = ["Judge this"] * 3 + ["Judge that"]
        calls = [self._ask(sample, [{"role": "user", "content": t}], max_tokens=8, temperature=1.0) for t in texts]
        return float(len(await asyncio.gather(*calls)))

    _ask: Any = None


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_a_question_that_is_asked_again_is_answered_anew_and_the_same_in_every_run(reward_workers: int) -> None:
    async def main() -> list[tuple[int, str]]:
        replica = policy()
        async with playing([replica], reward=Ensemble, tasks=2, batch_size=2, reward_workers=reward_workers) as running:
            await got(running, 2)
        return sorted((request.seed, asked(request)) for request in replica.requests)

    first = simulate(main)
    assert len({seed for seed, _ in first}) == len(first) == 2 * (1 + 4)
    assert simulate(main) == first


@pytest.mark.parametrize(("temperature", "questions_asked"), [(0.0, 2), (1.0, 6)])
def test_a_judge_without_randomness_is_not_tried_again(temperature: float, questions_asked: int) -> None:
    async def main() -> None:
        tried, is_tried_again = iter([True]), asyncio.Event()

        def say(request: Request) -> str:
            if not is_question(request) and not next(tried, False):
                is_tried_again.set()
            return "Hm."

        replica = FakeReplica(say, seconds=1.0)
        judge = {**JUDGE, "temperature": temperature, "tries": 3}
        async with playing([replica], reward=judge, tasks=1, batch_size=1, slots=1) as scheduler:
            batch = asyncio.ensure_future(got(scheduler, 1))
            await is_tried_again.wait()
            batch.cancel()
        found = [(request.seed, asked(request)) for request in questions(replica)]
        assert len(found) == len(set(found)) == questions_asked

    simulate(main)


def test_the_policy_ends_a_verdict_where_it_ends_an_answer() -> None:
    async def main() -> None:
        replica = policy()
        sampling = {"stop": [7], "top_k": 3, "top_p": 0.5, "max_tokens": 64}
        async with playing([replica], reward=JUDGE, sampling=sampling, batch_size=1) as scheduler:
            await got(scheduler, 1)
        found = {(r.sampling.stop, r.sampling.top_k, r.sampling.top_p) for r in questions(replica)}
        assert found == {((7,), 0, 1.0)}

    simulate(main)


class Forgetful(Ensemble):
    asks_policy: ClassVar[bool] = False


@pytest.mark.parametrize("reward_workers", [0, 1])
def test_a_reward_that_does_not_declare_that_it_asks_the_policy_is_refused_at_the_start(reward_workers: int) -> None:
    async def main() -> None:
        with pytest.raises(RewardError, match=r"declares `asks_policy: ClassVar\[bool\] = True`"):
            async with playing([policy()], reward=Forgetful, reward_workers=reward_workers) as scheduler:
                await got(scheduler, 4)

    simulate(main)


def test_a_reward_of_the_user_that_asks_the_policy_waits_at_the_gate_as_the_judge_does() -> None:
    async def main() -> None:
        replica = policy()
        options = {"reward": Ensemble, "reward_seconds": 20.0, "stall_seconds": 50.0, "tasks": 4}
        async with playing([replica], **options) as scheduler:
            batch = asyncio.ensure_future(got(scheduler, 4))
            await asyncio.sleep(5.0)
            await scheduler.suspend()
            await asyncio.sleep(1000.0)
            await scheduler.resume()
            await batch
            assert fates(scheduler) == {"trained": 4}

    simulate(main)


class BatchedJudge(Ensemble):
    """Asks about one sample after the other."""

    batch_size: int = 8

    async def score_batch(self, samples: list[Sample]) -> list[float]:
        question = [{"role": "user", "content": "Judge this"}]
        said = [await self._ask(sample, question, max_tokens=8, temperature=0.0) for sample in samples]
        return [float(len(text)) for text in said]


@pytest.mark.parametrize("reward_workers", [0, 1])
@pytest.mark.parametrize("seconds", [2.0, 5.0, 15.0, 25.0])
def test_samples_that_are_cancelled_cost_the_others_in_their_batch_nothing(reward_workers: int, seconds: float) -> None:
    async def main() -> None:
        replica = policy()
        options = {"reward": BatchedJudge, "reward_workers": reward_workers, "tasks": 8, "slots": 8}
        async with playing([replica], group_size=1, batch_size=4, **options) as scheduler:
            batch = asyncio.ensure_future(got(scheduler, 4))
            await asyncio.sleep(seconds)
            for attempt in open_attempts(scheduler)[:2]:
                scheduler.queue.fail(attempt, "a test", tries_used=0.1)
                scheduler.queue.on_stop(attempt)
            await batch
            assert set(causes(scheduler, Fate.FAILED)) <= {"a test"}
            assert now() < 300.0

    simulate(main)


def test_a_scheduler_with_its_sampler_in_another_process_judges_too() -> None:
    async def main() -> None:
        async with site([policy()]) as there:
            scheduler = there.scheduler(reward=JUDGE, tasks=4, workers=2)
            await got(scheduler, 4)
            assert scheduler.metrics()["judge/calls"] == 4

    simulate(main)
