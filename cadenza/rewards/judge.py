"""`judge`: a language model reads the response and gives a verdict.

    template + sample -> ask -> verdict? | -> value
                          ^---- no: say so, `asks` times in all --> VerdictUnclear, an infrastructure fault

The model is behind any OpenAI-compatible server (`url`), is a function of messages (`ask`), or is the policy of the run
(`model: policy`), which is asked through the run's own sampler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field, PrivateAttr, field_validator, model_validator

from cadenza.config import load_object
from cadenza.errors import InfrastructureError, RewardError
from cadenza.off_loop import as_async
from cadenza.rewards.base import LastingFault, row_problem
from cadenza.rewards.endpoint import Endpoint, EndpointReward
from cadenza.rewards.host import AskPolicy, RewardHost
from cadenza.rewards.sample import Sample, Scored
from cadenza.rewards.text import checked_pattern, last_match
from cadenza.rewards.verdict import as_value, by_json

TEMPLATE = """You judge an answer to a task.

<task>
{prompt}
</task>

<answer>
{response}
</answer>

Is the answer correct, complete and clear? Think briefly. Then end with one line of this form, N from 0 (useless) to 10
(perfect):
Score: N"""

POLICY = "policy"
"""The `model` of a judge without a server that is the model that is trained."""

REMINDER = "Your reply has no verdict that can be read. Reply with the verdict only, in the form that was asked for."


class VerdictUnclear(InfrastructureError):
    """A judge gave no verdict that could be read, as often as it was asked. The response is not to blame."""


class VerdictStaysUnclear(VerdictUnclear, LastingFault):
    """The judge would give the same replies again: it is the policy, without randomness."""


class Judge(EndpointReward):
    """A value from 0 to 1: where the verdict lies on `scale`, or what `labels` has for it."""

    url: str | None = Field(default=None, pattern="^https?://")
    """Of an OpenAI-compatible server, with or without its `/v1`."""
    model: str | None = None
    """Its name there. Without url, 'policy' is the model that is trained, as it is when it is asked."""
    ask: str | Callable[..., Any] | None = None
    """`ask(messages) -> str`, plain or async, or its 'module:name'. A message has `role` and `content`."""
    template: str = TEMPLATE
    """What the judge is asked. `{prompt}`, `{response}` and `{FIELD}` of the row are filled in; other braces stay."""
    system: str | None = None
    """A system message before it."""
    pattern: str | None = r"(?i)score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
    """A regular expression whose first group is the verdict; its last match counts."""
    json_field: str | None = None
    """The field of a JSON object that is the verdict; it takes the place of `pattern`."""
    labels: dict[str, float] | None = None
    """What words are worth, as `{yes: 1, no: 0}`, where the verdict is a word."""
    scale: tuple[float, float] = (0.0, 10.0)
    """The verdicts that become 0 and 1. One outside cannot be read."""
    success_at: float | None = None
    """The value from which on the task counts as solved; None says nothing about it."""
    asks: int = Field(default=2, gt=0)
    """Times that the judge is asked until its verdict can be read."""
    max_tokens: int = Field(default=512, gt=0)
    temperature: float = Field(default=0.0, ge=0)
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the request to the server."""

    _endpoint: Endpoint | None = PrivateAttr(default=None)
    _host: RewardHost = PrivateAttr(default=RewardHost())

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        return None if pattern is None else checked_pattern(pattern)

    @model_validator(mode="after")
    def _possible(self) -> Judge:
        given = self.model_fields_set
        if self.url is not None and self.ask is not None:
            raise ValueError("url and ask are two judges: remove one")
        if self.url is not None and self.model is None:
            raise ValueError(f"model: name the model that {self.url} shall judge with")
        if self.json_field is None and self.pattern is None:
            raise ValueError("pattern and json_field are both null: one of them must find the verdict")
        if self.json_field is not None and "pattern" in given:
            raise ValueError("pattern does nothing beside json_field: remove one of the two")
        if self.labels is not None and "scale" in given:
            raise ValueError("scale does nothing beside labels: remove one of the two")
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale must rise, got {self.scale}")
        if self.ask is not None and self.model is not None:
            raise ValueError(f"model {self.model!r} does nothing beside ask: remove one of the two")
        if self.asks_policy and (idle := sorted(given & {*EndpointReward.model_fields, "options"})):
            raise ValueError(f"{', '.join(idle)} is for a server, and 'model: policy' has none: set url, or remove it")
        if self.url is None and self.ask is None and not self.asks_policy:
            raise ValueError(
                "a judge needs a model: set url (an OpenAI-compatible server) or ask (a function of messages), or set "
                "'model: policy' for the model that is trained"
            )
        return self

    @property
    def asks_policy(self) -> bool:  # type: ignore[override]  # its settings decide
        """Whether the policy of the run is the judge."""
        return self.url is None and self.ask is None and self.model == POLICY

    @property
    def concurrency(self) -> int | None:
        """The sampler itself limits what is asked of the policy at once."""
        return None if self.asks_policy else self.connections

    def use_host(self, host: RewardHost) -> None:
        self._host = host

    async def open(self) -> None:
        if self.url is not None:
            self._opened(self.url)
        elif self.asks_policy:
            self._policy()

    async def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()

    async def __call__(self, sample: Sample) -> Scored:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": self._question(sample)}]
        for _ in range(self.asks):
            reply = await self._ask(sample, messages)
            value = self._value(reply)
            if value is not None:
                success = None if self.success_at is None else value >= self.success_at
                return Scored(value, success, note=" ".join(reply.split())[-200:])
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": REMINDER}]
        said = " ".join(reply.split())[-100:]
        unclear = VerdictStaysUnclear if self.asks_policy and self.temperature == 0 else VerdictUnclear
        raise unclear(f"the judge gave no verdict in {self.asks} replies; the last one ends with {said!r}")

    def _value(self, reply: str) -> float | None:
        if self.json_field is not None:
            said = by_json(reply, self.json_field)
        else:
            said = last_match(self.pattern or "", reply)
        return as_value(said, self.scale, self.labels)

    def check_row(self, row: Mapping[str, Any]) -> str | None:
        return row_problem(self._question, row)

    def _question(self, sample: Sample) -> str:
        fields = {**sample.row, "prompt": sample.prompt, "response": sample.response}

        def fill(found: re.Match[str]) -> str:
            if found[1] not in fields:
                known = ", ".join(fields)
                raise RewardError(f"template of the judge: {sample.row_name} has no '{found[1]}'; there are {known}")
            return str(fields[found[1]])

        return re.sub(r"\{(\w+)\}", fill, self.template)

    async def _ask(self, sample: Sample, messages: Sequence[Mapping[str, str]]) -> str:
        if self.url is not None:
            return await self._ask_server(self._opened(self.url), messages)
        if self.asks_policy:
            return await self._policy()(
                sample, list(messages), max_tokens=self.max_tokens, temperature=self.temperature
            )
        assert self.ask is not None  # _possible
        ask = load_object(self.ask) if isinstance(self.ask, str) else self.ask
        return str(await as_async(ask)(messages))

    def _policy(self) -> AskPolicy:
        if self._host.policy is None:
            raise RewardError("'model: policy' asks the policy of a run, and here is no run: set url or ask")
        return self._host.policy

    def _opened(self, url: str) -> Endpoint:
        endpoint = self._endpoint = self._endpoint or self.endpoint(_chat_url(url))
        return endpoint

    async def _ask_server(self, endpoint: Endpoint, messages: Sequence[Mapping[str, str]]) -> str:
        body = {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        answer = await endpoint.post({**body, **self.options, "messages": list(messages)})
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise RewardError(f"{endpoint.place}: no chat completion but {str(answer)[:200]!r}") from error


def _chat_url(url: str) -> str:
    """The address of chat completions below the address of a server."""
    base = url.rstrip("/")
    if base.endswith("/chat/completions"):
        return base
    return f"{base}/chat/completions" if re.search(r"/v\d+$", base) else f"{base}/v1/chat/completions"
