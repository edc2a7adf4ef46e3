from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cadenza.errors import DeadlinePassed, InfrastructureError, RewardError
from cadenza.rewards import Sample, Scored, make_reward
from cadenza.rewards.math import Math
from cadenza.rewards.math_answer import as_words, final_answer
from cadenza.rewards.math_latex import as_latex
from cadenza.simulation.virtual_cluster.clock import run

pytest.importorskip("math_verify")

ROOT = Path(__file__).parents[2]
HALF = Sample(response="so it is \\boxed{0.5}", row={"answer": "1/2"}, domain="sums")
ENDLESS = Sample(response="\\boxed{9^{9^{9^{9}}}}", row={"answer": "3"}, domain="sums")


def has_ended(process: int) -> bool:
    """Whether a process is gone, or goes within half a minute."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 30)[0])
    finally:
        os.close(handle)


# -- the labelled pairs ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_labelled_pairs_are_judged_right_but_for_the_errors_that_the_document_lists() -> None:
    lines = (Path(__file__).parent / "math_pairs.jsonl").read_text(encoding="utf-8").splitlines()
    pairs: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert len(pairs) >= 300

    async def main() -> list[Scored]:
        async with make_reward({"name": "math", "check_seconds": 60}, "pairs") as reward:
            samples = [Sample(response=pair["response"], row={"answer": pair["answer"]}) for pair in pairs]
            return [await reward(sample) for sample in samples]

    errors = [pair for pair, scored in zip(pairs, run(main), strict=True) if scored.success is not pair["label"]]
    for error in errors:
        print(json.dumps(error, ensure_ascii=False))
    document = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (right|wrong) \|", document, re.MULTILINE)
    labels = {True: "right", False: "wrong"}
    assert {(pair["answer"], pair["response"], labels[pair["label"]]) for pair in errors} == set(listed)
    assert f"{len(pairs) - len(errors)} of {len(pairs)} labelled pairs" in document


# -- what counts as an answer ------------------------------------------------------------------------------------------


def scored(response: str, answer: Any, **settings: Any) -> Scored:
    async def main() -> Scored:
        sample = Sample(response=response, row={"answer": answer}, domain="sums")
        async with make_reward({"name": "math", **settings}, "sums") as reward:
            return await reward(sample)

    return run(main)


def test_each_of_a_list_of_answers_is_right_and_an_answer_may_be_a_worked_solution() -> None:
    assert scored("7", ["6", "7"]).success is True
    assert scored("8", ["6", "7"]).success is False
    assert scored("18", "9 * 2 = 18 dollars.\n#### 18").success is True
    assert scored("x", "We get \\boxed{x}, from 3 tries.").success is True
    assert scored("3", 3).success is True


def test_precision_says_how_near_numbers_must_be() -> None:
    assert scored("3.14", "3.14159").success is False
    assert scored("3.14", "3.14159", precision=2).success is True


def test_an_answer_of_a_row_that_is_no_mathematics_is_an_error_and_no_zero() -> None:
    with pytest.raises(RewardError, match=r"a row of domain 'sums' is wrong: '\\\\frac\{' cannot be read"):
        scored("3", "\\frac{")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("a \\boxed{1} b \\boxed{\\frac{1}{2}} c", "\\frac{1}{2}"),
        ("$\\boxed{1}$ and $\\boxed{2}$", "1, 2"),
        ("\\boxed{1} came before \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2", ""),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("1\n#### 2", "2"),
        ("<think>The answer is 1.</think>The answer is 2.", "2"),
        ("The answer is 2. I am sure.", "2"),
        ("The answer is a long story.", None),
        ("2", "2"),
        ("First one, then another: 2", None),
    ],
)
def test_the_surest_place_for_an_answer_counts(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("2 1/2", "(2+\\frac{1}{2})"),
        ("1e5", "1 \\cdot 10^{5}"),
        ("3×10⁴", "3\\times 10^{4}"),  # noqa: RUF001 - a sign of mathematics
        ("1 000 000", "1000000"),
        ("sqrt(2)", "\\sqrt{2}"),
        ("12 km/h", "12"),
        ("\\$20", "20"),
        ("0.1\\overline{6}", "\\frac{15}{90}"),
        ("$1$ and $2$", "1, 2"),
    ],
)
def test_mathematics_as_people_write_it_becomes_latex(text: str, latex: str) -> None:
    assert as_latex(text) == latex


def test_words_are_no_products_of_letters() -> None:
    assert as_words("\\text{No solution}") == "no solution"
    assert as_words("\\text{June 20}") == "june 20"
    for mathematics in ("xy", "\\pi", "pi", "12 cm", "x=3", ""):
        assert as_words(mathematics) is None


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_check_that_is_late_is_an_infrastructure_fault_and_its_process_is_replaced() -> None:
    math = Math(check_seconds=3)

    async def main() -> Scored:
        async with make_reward({"name": math, "tries": 5, "retry_seconds": 0.0}, "sums") as reward:
            return await reward(HALF)

    with pytest.raises(DeadlinePassed, match="a process was killed after 3 s without an answer"):
        math(ENDLESS)
    assert math.process_ids == []
    assert run(main).success is True


def test_a_process_that_is_killed_is_an_infrastructure_fault_and_the_check_is_tried_again() -> None:
    math = Math(check_seconds=60)
    try:
        math(HALF)
        (process,) = math.process_ids
        os.kill(process, signal.SIGKILL)
        assert has_ended(process)
        with pytest.raises(InfrastructureError, match="ended with exit code -9 before it answered"):
            math(HALF)
        math(HALF)
        os.kill(math.process_ids[0], signal.SIGKILL)

        async def main() -> Scored:
            return await make_reward({"name": math, "tries": 2, "retry_seconds": 0.0}, "sums")(HALF)

        assert run(main).success is True
    finally:
        math.close()


def test_checks_run_side_by_side_and_closing_leaves_no_process() -> None:
    async def main() -> list[int]:
        math = Math(processes=2, check_seconds=60)
        reward = make_reward({"name": math}, "sums")
        values = await asyncio.gather(*[reward(HALF) for _ in range(6)])
        assert [scored.value for scored in values] == [1.0] * 6
        processes = math.process_ids
        await reward.close()
        return processes

    processes = asyncio.run(main())
    assert len(processes) == 2
    assert all(map(has_ended, processes))


def test_no_process_outlives_the_one_that_started_it() -> None:
    program = (
        "import os, signal\n"
        "from cadenza.rewards import Sample\n"
        "from cadenza.rewards.math import Math\n"
        "math = Math(check_seconds=60)\n"
        "math(Sample(response='1', row={'answer': '1'}))\n"
        "print(*math.process_ids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert has_ended(int(done.stdout))
