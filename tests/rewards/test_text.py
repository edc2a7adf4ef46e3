"""Rewards that look at text alone, against expectations worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cadenza.errors import RewardError
from cadenza.rewards import Sample, Scored, make_reward
from cadenza.simulation.virtual_cluster.clock import run


def scored(spec: Any, response: str, **row: Any) -> Scored:
    async def main() -> Scored:
        return await make_reward({"part": spec}, "texts")(Sample(response=response, row=row, domain="texts"))

    return run(main)


@pytest.mark.parametrize(
    ("settings", "response", "answer", "right"),
    [
        ({}, "  Paris ", "paris", True),
        ({}, "Paris.", "Paris", False),
        ({}, "New\n York", "new york", True),
        ({}, "ﬁne", "fine", True),
        ({}, "", "x", False),
        ({}, "Rome", ["Paris", "Rome"], True),
        ({}, "7", 7, True),
        ({"ignore_case": False}, "paris", "Paris", False),
        ({"ignore_punctuation": True}, "Paris!", "«Paris»", True),
        ({"ignore_articles": True}, "the Eiffel Tower", "Eiffel tower", True),
        ({"numbers": True}, "1,000.50", "1000.5", True),
        ({"numbers": True}, "-0", "0", True),
        ({"numbers": True}, "1000", "100", False),
        ({"extract": r"Answer: (\w+)"}, "Answer: Rome. No! Answer: Paris", "Paris", True),
        ({"extract": r"Answer: (\w+)"}, "Paris", "Paris", False),
        ({"extract": r"<a>(.*?)</a>"}, "<a>Pa\nris</a>", "pa ris", True),
    ],
)
def test_exact(settings: dict[str, Any], response: str, answer: Any, right: bool) -> None:
    result = scored({"name": "exact", **settings}, response, answer=answer)
    assert (result.value, result.success) == (float(right), right)


@pytest.mark.parametrize(
    ("settings", "response", "answer", "value"),
    [
        ({}, "abcd", "abcd", 1.0),
        ({}, "abcd", "bcde", 2 * 3 / 8),
        ({}, "", "abc", 0.0),
        ({}, "abcd", ["xyz", "abce"], 2 * 3 / 8),
        ({"metric": "token_f1"}, "the cat sat", "the cat sat down", 2 * (3 / 3) * (3 / 4) / (3 / 3 + 3 / 4)),
        ({"metric": "token_f1"}, "a a a b", "a b c", 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),
        ({"metric": "token_f1"}, "x", "y", 0.0),
        ({"metric": "token_f1"}, "", "", 1.0),
        ({"extract": r"\d+"}, "none", "7", 0.0),
    ],
)
def test_fuzzy(settings: dict[str, Any], response: str, answer: Any, value: float) -> None:
    assert scored({"name": "fuzzy", **settings}, response, answer=answer).value == pytest.approx(value)


def test_fuzzy_counts_as_solved_from_its_threshold_on() -> None:
    assert scored({"name": "fuzzy", "success_at": 0.75}, "abcd", answer="bcde").success is True
    assert scored("fuzzy", "abcd", answer="bcde").success is False


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(C)", "C"),
        ("D.", "D"),
        ("**A**", "A"),
        ("The answer is B.", "B"),
        ("Answer: (D)", "D"),
        ("The correct answer is option C because A is wrong", "C"),
        ("I think the answer is **b**", "B"),
        ("\\boxed{C}", "C"),
        ("\\boxed{\\text{(D)}} although (A) is near", "D"),
        ("At first A seems right. The answer is A. No, the answer is C.", "C"),
        ("A) is wrong, B) is wrong.\nC) all of these", "C"),
        ("Let us see: (A) no, (B) yes", "B"),
        ("A banana is a fruit", None),
        ("I do not know", None),
        ("Answers A and B are wrong; C is right, (D) is not", "C"),
        ("The answer is a mystery", None),
        ("", None),
    ],
)
def test_choice_finds_the_letter_that_a_response_settles_on(response: str, letter: str | None) -> None:
    for right in "ABCD":
        assert scored({"name": "choice", "letters": 4}, response, answer=right).value == float(letter == right)


@pytest.mark.parametrize("answer", ["B", "b", "(B)", 1, "Lyon", ["B", "C"]])
def test_the_answer_of_a_choice_may_be_a_letter_a_number_or_a_text(answer: Any) -> None:
    row = {"answer": answer, "choices": ["Paris", "Lyon", "Nice"]}
    assert scored("choice", "The answer is B", **row).success is True
    assert scored("choice", "It must be Lyon.", **row).success is True
    assert scored("choice", "It must be Paris.", **row).success is False
    assert scored("choice", "The answer is E", **row).success is False, "there are three choices"


def test_an_answer_that_is_no_choice_is_an_error_that_shows_it() -> None:
    with pytest.raises(RewardError, match="the answer 'Q', which is none of the letters A to D"):
        scored({"name": "choice", "letters": 4}, "A", answer="Q")


@pytest.mark.parametrize(
    ("settings", "response", "right"),
    [
        ({"pattern": "<think>.*</think>.+"}, "<think>a\nb</think> 4\n", True),
        ({"pattern": "<think>.*</think>.+"}, "so <think>a</think> 4", False),
        ({"pattern": "<answer>", "match": "search"}, "so <answer>4", True),
        ({"pattern": r"(?m)^\d+$", "match": "search"}, "a\n12\nb", True),
    ],
)
def test_format(settings: dict[str, Any], response: str, right: bool) -> None:
    assert scored({"name": "format", **settings}, response).success is right


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'\\(' is no regular expression"):
        make_reward({"name": "format", "pattern": "("}, "texts")


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("response", "value", "parsed"),
    [
        ('{"age": 3}', 1.0, 1.0),
        ('Here:\n```json\n{"age": 3}\n```\nDone.', 1.0, 1.0),
        ('{"age": "3"}', 0.0, 1.0),
        ("[]", 0.0, 1.0),
        ("age: 3", 0.0, 0.0),
        ('{"age": NaN}', 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_json_schema(response: str, value: float, parsed: float) -> None:
    pytest.importorskip("jsonschema")
    result = scored({"name": "json_schema", "definition": SCHEMA}, response)
    assert (result.value, result.parts["part/parsed"]) == (value, parsed)


def test_a_schema_may_be_in_the_row_and_a_broken_one_is_an_error() -> None:
    pytest.importorskip("jsonschema")
    assert scored("json_schema", "7", schema='{"type": "integer"}').value == 1.0
    with pytest.raises(RewardError, match="domain 'texts' has a 'schema' that is none"):
        scored("json_schema", "7", schema={"type": "numeral"})
    with pytest.raises(ValueError, match="no JSON schema"):
        make_reward({"name": "json_schema", "definition": {"type": "numeral"}}, "texts")


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (60, 0.0), (70, -0.25), (80, -0.5), (99, -39 / 40), (100, -1.0), (150, -1.0)]
)
def test_overlong_grows_linearly_in_the_last_tokens_before_the_limit(tokens: int, value: float) -> None:
    sample = Sample(response="", response_tokens=np.zeros(tokens, np.int32))

    async def main(penalty: float) -> float:
        spec = {"name": "overlong", "max_tokens": 100, "buffer": 40, "penalty": penalty}
        return (await make_reward(spec, "texts")(sample)).value

    assert run(lambda: main(1.0)) == pytest.approx(value)
    assert run(lambda: main(0.5)) == pytest.approx(value / 2)


def test_overlong_needs_tokens_and_a_buffer_within_the_limit() -> None:
    with pytest.raises(RewardError, match="counts response_tokens"):
        scored({"name": "overlong", "max_tokens": 10, "buffer": 5}, "text")
    with pytest.raises(ValueError, match="buffer must be at most max_tokens 10, got 11"):
        make_reward({"name": "overlong", "max_tokens": 10, "buffer": 11}, "texts")
