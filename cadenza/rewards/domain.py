"""The reward of a domain: one reward, or several combined by weights and gates.

    gates, together -> one is closed? the sum is 0 | the others, together -> sum of weight times value

Gates are asked first, so that a judge is not paid for answers that do not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from cadenza.rewards.config import RewardConfig
from cadenza.rewards.host import RewardHost
from cadenza.rewards.sample import Sample, Scored
from cadenza.rewards.together import all_of
from cadenza.rewards.worker import RewardWorker

OneSpec: TypeAlias = str | Callable[..., Any] | RewardConfig | Mapping[str, Any]
"""A name, a function, or a mapping with `name`."""
RewardSpec: TypeAlias = OneSpec | Mapping[str, OneSpec]
"""One reward, or several by the keys that their metrics have."""


class DomainReward:
    """`await reward(sample)` is a `Scored`: the weighted sum, and the value of every reward as a part.

        reward = make_reward({"right": "math", "form": {"name": "format", "pattern": "<answer>", "weight": 0.1}}, "gsm")
        async with reward:
            await reward(Sample(response="<answer>42", row={"answer": "42"}))   # value 1.1, parts right 1, form 1

    `success` is False where a gate is closed, and else what the first reward in the list says that says anything and
    is no gate. Where none of them does, an open gate is a success, so that the rate is that of the gates. A domain
    reward belongs to one event loop at a time. `open` may be left out; `close` may not where a reward keeps processes
    or connections.
    """

    def __init__(self, configs: Mapping[str, RewardConfig], domain: str, host: RewardHost | None = None) -> None:
        """`host` is what this process has for rewards; None is outside of a run."""
        if not any(not config.gate for config in configs.values()):
            raise ValueError(f"the rewards of domain '{domain}' are all gates, there is nothing to add up: add one")
        self.domain = domain
        self._workers = [RewardWorker(config, key, domain, host or RewardHost()) for key, config in configs.items()]
        self._is_open = False
        self._lock = asyncio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the rewards, each of which is a part of every value. A closed gate leaves out those behind it."""
        return tuple(worker.key for worker in self._workers)

    async def open(self) -> None:
        """Let every reward make what it needs. Opening twice is opening once; if one fails, all are closed."""
        if self._is_open:
            return
        async with self._lock:
            if not self._is_open:
                try:
                    await all_of([worker.open() for worker in self._workers])
                except BaseException:
                    await self.close()
                    raise
                self._is_open = True

    async def close(self) -> None:
        """Let every reward give up what it has. It may be opened again, also in another event loop."""
        self._is_open = False
        self._lock = asyncio.Lock()
        outcomes = await asyncio.gather(*[worker.close() for worker in self._workers], return_exceptions=True)
        for outcome in outcomes:  # one that fails keeps no other from closing
            if isinstance(outcome, BaseException):
                raise outcome

    async def __aenter__(self) -> DomainReward:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __call__(self, sample: Sample) -> Scored:
        await self.open()
        scores = await self._scores([worker for worker in self._workers if worker.config.gate], sample)
        is_open = all(scored.value >= worker.config.gate_at for worker, scored in scores.items())
        if is_open:
            scores |= await self._scores([worker for worker in self._workers if not worker.config.gate], sample)
        counted = [(worker.config.weight, scores[worker].value) for worker in scores if not worker.config.gate]
        return Scored(
            value=sum((weight * value for weight, value in counted), start=0.0),
            success=self._success(scores) if is_open else False,
            parts=_parts(scores),
            note="; ".join(f"{worker.key}: {scored.note}" for worker, scored in scores.items() if scored.note),
        )

    def _success(self, scores: Mapping[RewardWorker, Scored]) -> bool | None:
        """What an answer that passed the gates is called."""
        said = [scores[worker].success for worker in self._workers if not worker.config.gate]
        passed = True if any(worker.config.gate for worker in self._workers) else None
        return next((success for success in said if success is not None), passed)

    async def _scores(self, workers: Sequence[RewardWorker], sample: Sample) -> dict[RewardWorker, Scored]:
        return dict(zip(workers, await all_of([worker.score(sample) for worker in workers]), strict=True))


def make_reward(spec: RewardSpec, key: str) -> DomainReward:
    """The reward that a domain's config means; `key` is the name of the domain.

    A mapping with `name` is one reward, any other mapping is several. Raises ValueError for what it does not know.
    """
    if isinstance(spec, Mapping) and "name" not in spec:
        configs = {part: RewardConfig.model_validate(one) for part, one in spec.items()}
    else:
        config = RewardConfig.model_validate(spec)
        configs = {config.short_name: config}
    return DomainReward(configs, key)


def _parts(scores: Mapping[RewardWorker, Scored]) -> dict[str, float]:
    """The value of every reward under its key, and its own parts under `key/part`."""
    parts = {worker.key: scored.value for worker, scored in scores.items()}
    for worker, scored in scores.items():
        parts |= {f"{worker.key}/{name}": value for name, value in scored.parts.items()}
    return parts
