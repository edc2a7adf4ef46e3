from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from cadenza.errors import DeadlinePassed, InfrastructureError, RewardError
from cadenza.rewards import ConfiguredReward, RewardConfig, RewardUnavailable, Sample, Scored, make_reward
from cadenza.simulation.virtual_cluster.clock import run

RIGHT = Sample(response="42", prompt="6 * 7 = ", row={"answer": "42"}, domain="sums")


def right(sample: Sample) -> bool:
    return bool(sample.response == sample.answer)


async def length(sample: Sample) -> float:
    return len(sample.response) / 10


def scored(spec: object, sample: Sample = RIGHT) -> Scored:
    async def main() -> Scored:
        async with make_reward(spec, "sums") as reward:  # type: ignore[arg-type]
            return await reward(sample)

    return run(main)


class Flaky:
    """A reward that meets an infrastructure fault, so often."""

    def __init__(self, faults: int) -> None:
        self.faults = faults
        self.calls = 0

    async def __call__(self, sample: Sample) -> float:
        self.calls += 1
        if self.calls <= self.faults:
            raise InfrastructureError("the server is down")
        return 1.0


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_sample_has_its_conversation() -> None:
    assert RIGHT.messages == (
        {"role": "user", "content": "6 * 7 = "},
        {"role": "assistant", "content": "42"},
    )
    given = ({"role": "system", "content": "Be brief."},)
    assert Sample(response="42", messages=given).messages == given


def test_a_row_without_an_answer_is_an_error_that_names_the_domain_and_the_fields() -> None:
    with pytest.raises(RewardError, match=r"domain 'sums' has no 'answer'; it has 'question', 'level'"):
        _ = Sample(response="", row={"question": "?", "level": 3}, domain="sums").answer


# -- one reward --------------------------------------------------------------------------------------------------------


def test_a_function_plain_or_async_is_a_reward() -> None:
    assert scored(right) == Scored(1.0, True, {"right": 1.0})
    assert scored(length) == Scored(0.2, None, {"length": 0.2})


def test_keys_beside_the_name_are_settings_of_the_reward() -> None:
    def near(sample: Sample, allowed: int = 0) -> bool:
        return bool(abs(int(sample.response) - int(sample.answer)) <= allowed)

    sample = Sample(response="40", row={"answer": "42"})
    assert scored({"name": near}, sample).value == 0
    assert scored({"name": near, "allowed": 2}, sample).value == 1


class Short(ConfiguredReward):
    words: int

    def __call__(self, sample: Sample) -> bool:
        return len(sample.response.split()) <= self.words


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mth", "reward 'mth' is not known; did you mean 'math'"),
        ("no_such_module:reward", "cannot be loaded"),
        ({"name": right, "wieght": 2}, "reward 'right' has no setting 'wieght'; did you mean 'weight'"),
        ({"name": Short, "word": 2}, "reward 'Short' has no setting 'word'; did you mean 'words'"),
        ({"name": Short}, "reward 'Short': words: Field required"),
        ({"name": right, "tries": 0}, "tries"),
        ({"name": right, "gate_at": 0.5}, "gate_at does nothing without 'gate: true'"),
        ({"name": right, "gate": True, "weight": 2}, "weight does nothing for a gate"),
        ({"name": right, "gate": True}, "all gates, there is nothing to add up"),
        ({"form": {"name": right, "pattern": "x"}}, "has no setting 'pattern'"),
    ],
)
def test_a_config_that_means_nothing_is_refused_with_a_way_out(spec: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward(spec, "sums")  # type: ignore[arg-type]


def test_a_config_is_written_as_it_was_read_and_travels_to_other_processes() -> None:
    written = {"name": "fuzzy", "weight": 0.5, "metric": "token_f1"}
    config = RewardConfig.model_validate(written)
    assert config.model_dump() == written
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("value", ["1", None, float("nan"), float("inf"), Scored(1.0, parts={"a": float("nan")})])
def test_a_reward_that_returns_no_finite_number_is_an_error_that_names_it(value: object) -> None:
    def wrong(sample: Sample) -> object:
        return value

    with pytest.raises(RewardError, match="reward 'wrong' of domain 'sums' returned"):
        scored(wrong)


def test_a_reward_that_exits_is_an_error_and_ends_nothing() -> None:
    async def leaves(sample: Sample) -> float:
        raise SystemExit(3)

    with pytest.raises(RewardError, match=r"reward 'leaves' of domain 'sums' called sys.exit\(3\)"):
        scored({"leaves": leaves, "right": right})


# -- patience ----------------------------------------------------------------------------------------------------------


def test_an_infrastructure_fault_is_tried_again_and_never_a_value() -> None:
    flaky = Flaky(2)
    assert scored({"name": flaky, "tries": 3}).value == 1.0
    with pytest.raises(RewardUnavailable, match="reward 'Flaky' of domain 'sums': the server is down, asked 3 times"):
        scored({"name": Flaky(3), "tries": 3})


def test_tries_wait_twice_as_long_each_time_on_the_clock_of_the_loop() -> None:
    async def main() -> float:
        await make_reward({"name": Flaky(3), "tries": 4, "retry_seconds": 1.0}, "sums")(RIGHT)
        return asyncio.get_running_loop().time()

    assert run(main) == 1 + 2 + 4


def test_an_error_of_the_reward_itself_is_not_tried_again() -> None:
    calls = []

    def broken(sample: Sample) -> float:
        calls.append(sample)
        raise KeyError("score")

    with pytest.raises(KeyError, match="score"):
        scored(broken)
    assert len(calls) == 1


def test_a_late_reward_is_an_infrastructure_fault_that_names_reward_domain_and_seconds() -> None:
    async def slow(sample: Sample) -> float:
        await asyncio.sleep(60)
        return 1.0

    with pytest.raises(DeadlinePassed, match="the reward 'slow' of domain 'sums' did not return within reward_seconds"):
        scored({"name": slow, "seconds": 5, "tries": 1})


def test_a_reward_says_how_many_calls_it_bears_at_once() -> None:
    running: list[int] = []

    class Narrow:
        concurrency = 2
        now = 0

        async def __call__(self, sample: Sample) -> float:
            self.now += 1
            running.append(self.now)
            await asyncio.sleep(1)
            self.now -= 1
            return 1.0

    async def main() -> None:
        reward = make_reward(Narrow(), "sums")
        await asyncio.gather(*[reward(RIGHT) for _ in range(6)])

    run(main)
    assert max(running) == 2


def test_a_reward_is_opened_before_its_first_call_and_closed_once() -> None:
    log: list[str] = []

    class Server:
        async def open(self) -> None:
            log.append("open")

        def __call__(self, sample: Sample) -> float:
            log.append("call")
            return 1.0

        async def close(self) -> None:
            log.append("close")

    async def main() -> None:
        reward = make_reward(Server, "sums")
        await asyncio.gather(reward(RIGHT), reward(RIGHT))
        await reward.close()

    run(main)
    assert log == ["open", "call", "call", "close"]


def test_a_reward_that_cannot_be_opened_closes_those_that_were() -> None:
    log: list[str] = []

    class Server:
        def open(self) -> None:
            log.append("open")

        def __call__(self, sample: Sample) -> float:
            return 1.0

        def close(self) -> None:
            log.append("close")

    class Broken(Server):
        async def open(self) -> None:  # type: ignore[override]
            await asyncio.sleep(1)
            raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        scored({"server": Server, "broken": Broken})
    assert log == ["open", "close"]


# -- cache -------------------------------------------------------------------------------------------------------------


def test_a_value_is_computed_once_for_the_same_prompt_response_and_row() -> None:
    asked: list[tuple[str, object]] = []

    async def counted(sample: Sample) -> bool:
        asked.append((sample.response, sample.answer))
        return right(sample)

    samples = [Sample(response=text, row={"answer": answer}) for text in "ab" for answer in "abc"]

    async def main(cache: int) -> list[float]:
        async with make_reward({"name": counted, "cache": cache}, "sums") as reward:
            return [(await reward(sample)).value for sample in [*samples, *samples]]

    expected = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0] * 2
    assert run(lambda: main(6)) == expected
    assert len(asked) == 6
    asked.clear()
    assert run(lambda: main(5)) == expected
    assert len(asked) == 12, "the oldest value goes before it is asked for again"


def test_a_fault_is_not_cached() -> None:
    flaky = Flaky(1)

    async def main() -> float:
        async with make_reward({"name": flaky, "tries": 1, "cache": 8}, "sums") as reward:
            with pytest.raises(RewardUnavailable):
                await reward(RIGHT)
            return (await reward(RIGHT)).value

    assert run(main) == 1.0


# -- batches -----------------------------------------------------------------------------------------------------------


class Batched:
    """A reward of batches that writes down their sizes."""

    batch_size = 4

    def __init__(self, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self.error = error

    async def __call__(self, sample: Sample) -> float:
        raise AssertionError("batches are preferred")

    async def score_batch(self, samples: Sequence[Sample]) -> list[float]:
        self.sizes.append(len(samples))
        await asyncio.sleep(1)
        if self.error is not None:
            raise self.error
        return [float(sample.response) for sample in samples]


def numbered(count: int) -> list[Sample]:
    return [Sample(response=str(number)) for number in range(count)]


def test_samples_that_wait_together_are_scored_together_and_each_gets_its_own_value() -> None:
    batched = Batched()

    async def main() -> list[Scored]:
        reward = make_reward(batched, "sums")
        return await asyncio.gather(*map(reward, numbered(10)))

    assert [scored.value for scored in run(main)] == list(range(10))
    assert sum(batched.sizes) == 10
    assert max(batched.sizes) == 4
    assert len(batched.sizes) == 3


@pytest.mark.parametrize("shuffle", range(8))
def test_a_cancelled_waiter_costs_the_others_of_its_batch_nothing(shuffle: int) -> None:
    async def main() -> list[object]:
        reward = make_reward(Batched(), "sums")
        tasks = [asyncio.ensure_future(reward(sample)) for sample in numbered(6)]
        await asyncio.sleep(0.5)
        tasks[0].cancel()
        tasks[5].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(main, shuffle=shuffle)
    assert [getattr(result, "value", "cancelled") for result in results] == ["cancelled", 1, 2, 3, 4, "cancelled"]


def test_as_many_batches_run_at_once_as_the_reward_bears_calls() -> None:
    class Wide(Batched):
        concurrency = 3

    async def main() -> float:
        reward = make_reward(Wide(), "sums")
        await asyncio.gather(*map(reward, numbered(12)))
        return asyncio.get_running_loop().time()

    assert run(main) == 1.0


def test_closing_ends_a_batch_and_its_waiters_get_an_infrastructure_fault() -> None:
    async def main() -> list[object]:
        reward = make_reward({"name": Batched(), "tries": 1}, "sums")
        tasks = [asyncio.ensure_future(reward(sample)) for sample in numbered(6)]
        await asyncio.sleep(0.5)
        await reward.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(result, InfrastructureError) for result in run(main))


def test_the_error_of_a_batch_goes_to_all_its_waiters() -> None:
    async def main() -> list[object]:
        reward = make_reward({"name": Batched(InfrastructureError("no device")), "tries": 2}, "sums")
        return await asyncio.gather(*map(reward, numbered(3)), return_exceptions=True)

    assert all(isinstance(result, RewardUnavailable) for result in run(main))


def test_a_batch_with_too_few_values_is_an_error() -> None:
    class Forgets(Batched):
        async def score_batch(self, samples: Sequence[Sample]) -> list[float]:
            return [1.0] * (len(samples) - 1)

    with pytest.raises(RewardError, match="returned 0 values for a batch of 1 samples"):
        scored(Forgets())


# -- several -----------------------------------------------------------------------------------------------------------


def test_rewards_add_up_by_their_weights_and_each_is_a_part() -> None:
    spec = {"right": right, "length": {"name": length, "weight": -0.5}, "seen": {"name": length, "weight": 0.0}}
    result = scored(spec)
    assert result.value == pytest.approx(1.0 - 0.5 * 0.2)
    assert result.parts == {"right": 1.0, "length": 0.2, "seen": 0.2}
    assert make_reward(spec, "sums").names == ("right", "length", "seen")


def test_a_part_of_a_reward_is_a_part_of_the_domain_under_its_key() -> None:
    def tests(sample: Sample) -> Scored:
        return Scored(0.5, False, {"passed": 3.0}, "test 2 failed")

    result = scored({"code": tests, "length": length})
    assert result.parts == {"code": 0.5, "length": 0.2, "code/passed": 3.0}
    assert (result.success, result.note) == (False, "code: test 2 failed")


def test_the_first_reward_that_speaks_of_success_decides_it() -> None:
    def wrong(sample: Sample) -> bool:
        return False

    assert scored({"length": length, "right": right, "wrong": wrong}).success is True
    assert scored({"length": length}).success is None


def test_a_closed_gate_makes_the_sum_zero_and_the_others_are_not_asked() -> None:
    asked = []

    async def judge(sample: Sample) -> float:
        asked.append(sample)
        return 1.0

    spec = {"judge": judge, "right": {"name": right, "gate": True}}
    wrong = Sample(response="41", row={"answer": "42"})
    assert scored(spec, wrong) == Scored(0.0, False, {"right": 0.0})
    assert not asked
    assert scored(spec) == Scored(1.0, True, {"right": 1.0, "judge": 1.0}), "an open gate adds nothing"


def test_an_open_gate_is_a_success_only_where_no_reward_behind_it_says_anything() -> None:
    def passing(sample: Sample) -> float:
        return 1.0

    gate = {"gate": {"name": passing, "gate": True}}
    assert scored({**gate, "length": length}).success is True
    assert scored({**gate, "wrong": lambda sample: False}).success is False
    assert scored({"length": length, "passing": passing}).success is None, "there is no gate"


@pytest.mark.parametrize(("gate_at", "value"), [(0.2, 1.0), (0.21, 0.0)])
def test_a_gate_opens_at_its_threshold(gate_at: float, value: float) -> None:
    assert scored({"right": right, "length": {"name": length, "gate": True, "gate_at": gate_at}}).value == value


def test_an_error_of_one_reward_ends_the_others_and_is_raised_as_it_is() -> None:
    ended = []

    async def hangs(sample: Sample) -> float:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(True)
        return 0.0

    def broken(sample: Sample) -> float:
        raise ZeroDivisionError("in the reward")

    with pytest.raises(ZeroDivisionError, match="in the reward"):
        scored({"hangs": hangs, "broken": broken})
    assert ended


def test_a_sample_and_its_score_travel_to_other_processes() -> None:
    for record in (RIGHT, Scored(1.0, True, {"part": 0.5}, "note")):
        assert pickle.loads(pickle.dumps(record)) == record


def test_a_config_error_names_the_key() -> None:
    with pytest.raises(ValidationError) as error:
        RewardConfig.model_validate({"name": right, "cache": -1})
    assert error.value.errors()[0]["loc"] == ("cache",)
