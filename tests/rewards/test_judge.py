from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cadenza.errors import RewardError
from cadenza.rewards import RewardConfig, RewardUnavailable, Sample, Scored, make_reward
from cadenza.rewards.judge import REMINDER
from cadenza.rewards.verdict import by_json
from cadenza.simulation.virtual_cluster.clock import run

SAMPLE = Sample(response="The {answer} is four.", prompt="2 + 2?", row={"answer": "4"}, domain="sums")


class Says:
    """A judge with a script, which writes down what it is asked."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.asked: list[Sequence[Mapping[str, str]]] = []

    async def __call__(self, messages: Sequence[Mapping[str, str]]) -> str:
        self.asked.append(list(messages))
        return self.replies[min(len(self.asked), len(self.replies)) - 1]


def judged(ask: Any, sample: Sample = SAMPLE, **settings: Any) -> Scored:
    async def main() -> Scored:
        async with make_reward({"name": "judge", "ask": ask, "retry_seconds": 0.0, **settings}, "sums") as reward:
            return await reward(sample)

    return run(main)


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Score: 0", 0.0),
        ("Score: 10", 1.0),
        ("**Score: 7.5**", 0.75),
        ("score = 3", 0.3),
        ("First I thought Score: 9, but no. Score: 2", 0.2),
    ],
)
def test_the_last_score_counts_on_the_scale(reply: str, value: float) -> None:
    assert judged(Says(reply)).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("reply", "settings", "value"),
    [
        ("Verdict: YES.", {"pattern": r"Verdict: (\w+)", "labels": {"yes": 1, "no": 0}}, 1.0),
        ("Verdict: no", {"pattern": r"Verdict: (\w+)", "labels": {"yes": 1, "no": 0}}, 0.0),
        ('So: {"grade": 3, "why": "{x}"}', {"json_field": "grade", "scale": (1, 5)}, 0.5),
        ('```json\n{"grade": "bad"}\n```', {"json_field": "grade", "labels": {"good": 1, "bad": -1}}, -1.0),
    ],
)
def test_a_verdict_may_be_a_word_or_a_field_of_json(reply: str, settings: dict[str, Any], value: float) -> None:
    assert judged(Says(reply), **settings).value == value


def test_the_last_json_object_with_the_field_counts() -> None:
    assert by_json('{"a": 1} and {"a": {"b": 2}} and {"c": 3} and {broken', "a") == {"b": 2}
    assert by_json("{" * 1000, "a") is None


def test_a_judge_that_talks_nonsense_is_asked_again_with_what_it_said() -> None:
    judge = Says("What a lovely day!", "Score: 11", "Score: 5")
    assert judged(judge, asks=3).value == 0.5
    assert [message["role"] for message in judge.asked[2]] == ["user", "assistant", "user", "assistant", "user"]
    assert judge.asked[2][3]["content"] == "Score: 11", "a score outside the scale is no verdict"
    assert judge.asked[2][4]["content"] == REMINDER


def test_a_judge_that_goes_on_talking_nonsense_is_an_infrastructure_fault_and_never_a_value() -> None:
    judge = Says("blah")
    with pytest.raises(RewardUnavailable, match=r"no verdict in 2 replies; the last one ends with 'blah', asked 3"):
        judged(judge, asks=2, tries=3)
    assert len(judge.asked) == 6


def test_the_template_takes_fields_of_the_row_and_what_is_filled_in_stays_as_it_is() -> None:
    judge = Says("Score: 1")
    judged(judge, template='Task {prompt} Right {answer} Said {response} Form {"score": 0}', system="Be strict.")
    system, question = judge.asked[0]
    assert system == {"role": "system", "content": "Be strict."}
    assert question["content"] == 'Task 2 + 2? Right 4 Said The {answer} is four. Form {"score": 0}'


def test_a_template_with_a_field_that_the_row_has_not_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardError, match="a row of domain 'sums' has no 'rubric'; there are answer, prompt, response"):
        judged(Says("Score: 1"), template="{rubric}")


def test_success_is_said_where_a_threshold_is() -> None:
    assert judged(Says("Score: 8")).success is None
    assert judged(Says("Score: 8"), success_at=0.8).success is True
    assert judged(Says("Score: 8"), success_at=0.9).success is False


def test_a_judge_without_a_model_is_refused_when_its_config_is_read() -> None:
    with pytest.raises(ValueError, match=r"a judge needs a model: set url .* or ask"):
        RewardConfig.model_validate("judge")


def test_outside_of_a_run_the_policy_cannot_judge() -> None:
    async def main() -> None:
        with pytest.raises(RewardError, match="asks the policy of a run, and here is no run: set url or ask"):
            await make_reward({"name": "judge", "model": "policy"}, "sums").open()

    run(main)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://here", "model": "m", "ask": print}, "url and ask are two judges"),
        ({"url": "http://here"}, "model: name the model"),
        ({"model": "gpt"}, "a judge needs a model: set url .* or set 'model: policy'"),
        ({"model": "policy", "ask": print}, "model 'policy' does nothing beside ask"),
        ({"model": "policy", "api_key_env": "KEY", "options": {"n": 1}}, "api_key_env, options is for a server"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": None}, "one of them must find the verdict"),
        ({"json_field": "a", "pattern": "b"}, "pattern does nothing beside json_field"),
        ({"labels": {"a": 1}, "scale": (0, 1)}, "scale does nothing beside labels"),
        ({"scale": (1, 0)}, "scale must rise"),
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward({"name": "judge", **settings}, "sums")
