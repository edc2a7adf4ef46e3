"""`remote`: a reward that a server computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, PrivateAttr

from cadenza.errors import RewardError
from cadenza.rewards.endpoint import Endpoint, EndpointReward
from cadenza.rewards.sample import Sample, Scored

ANSWER = ("value", "success", "parts", "note")


class Remote(EndpointReward):
    """Posts the sample as JSON (prompt, response, messages, row, domain, finish) and takes the answer as its value: a
    number, or an object with `value` and, if it likes, `success`, `parts` and `note`."""

    url: str = Field(pattern="^https?://")
    batch_size: int = Field(default=1, gt=0)
    """Above 1, the body is `{"samples": [...]}`, and the answer a list."""

    _endpoint: Endpoint | None = PrivateAttr(default=None)

    async def open(self) -> None:
        self._opened()

    async def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()

    async def __call__(self, sample: Sample) -> Any:
        return self._scored(await self._post(_body(sample)))

    async def score_batch(self, samples: Sequence[Sample]) -> list[Any]:
        answers = await self._post({"samples": [_body(sample) for sample in samples]})
        if not isinstance(answers, list):
            raise RewardError(f"{self.url} answered {str(answers)[:200]!r} to a batch; it must answer with a list")
        return [self._scored(answer) for answer in answers]

    async def _post(self, body: Any) -> Any:
        return await self._opened().post(body)

    def _opened(self) -> Endpoint:
        endpoint = self._endpoint = self._endpoint or self.endpoint(self.url)
        return endpoint

    def _scored(self, answer: Any) -> Any:
        if not isinstance(answer, dict):
            return answer  # its value is checked where all are
        if "value" not in answer or set(answer) - set(ANSWER):
            known = ", ".join(ANSWER)
            raise RewardError(f"{self.url} answered with the keys {', '.join(answer) or 'none'}; it may have {known}")
        return Scored(answer["value"], answer.get("success"), answer.get("parts") or {}, str(answer.get("note") or ""))


def _body(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "messages": list(sample.messages),
        "row": dict(sample.row),
        "domain": sample.domain,
        "finish": sample.finish,
    }
