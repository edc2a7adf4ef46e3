"""`math`: the response has the same value as the answer, judged by math-verify in processes that can be killed."""

from __future__ import annotations

import importlib.util
from typing import Any

from pydantic import Field, PrivateAttr

from cadenza.errors import RewardError
from cadenza.rewards.base import ConfiguredReward, answers_of
from cadenza.rewards.process_pool import ProcessPool
from cadenza.rewards.sample import Sample, Scored

MODULE = "cadenza.rewards.math_verifier"


class Math(ConfiguredReward):
    """1 where the final answer of the response equals the answer of the row, else 0.

    The answer is LaTeX or plain ('1/2', '\\frac{1}{2}', '0.5', '1,234', '\\{1, 2\\}'); several values in one answer
    must all be there, in any order. A list of answers accepts each of them. The final answer is what stands in the
    last \\boxed{}, between answer tags, after ####, after 'the answer is', or else the last expression. A check that is
    late, or breaks its process, is an infrastructure fault.
    """

    needs_answer = True
    processes: int = Field(default=2, gt=0)
    """Checks at once. A process is started when it is first needed."""
    check_seconds: float = Field(default=5.0, gt=0)
    """After which the process of a check is killed."""
    precision: int = Field(default=6, ge=0)
    """Decimals to which numbers are compared."""

    _pool: ProcessPool | None = PrivateAttr(default=None)

    @property
    def concurrency(self) -> int:
        return self.processes

    def open(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError("mathematics is checked with math-verify: pip install 'cadenza[math]'")
        self._opened()

    def _opened(self) -> ProcessPool:
        pool = self._pool = self._pool or ProcessPool(MODULE, [str(self.check_seconds)], self.processes)
        return pool

    def close(self) -> None:
        """Kill the processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes that there are now."""
        return [] if self._pool is None else self._pool.ids

    def __call__(self, sample: Sample) -> Scored:
        answers = [str(answer) for answer in answers_of(sample)]
        request = {"answers": answers, "response": sample.response, "precision": self.precision}
        reply: dict[str, Any] = self._opened().ask(request, self.check_seconds)
        if "unreadable" in reply:
            raise RewardError(f"the answer of a row of domain '{sample.domain}' is wrong: {reply['unreadable']}")
        note = f"found {reply['found']!r}"[:200] if reply["found"] is not None else ""
        return Scored(float(reply["right"]), reply["right"], note=note)
