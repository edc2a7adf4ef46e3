"""A process that computes rewards, for one client or for several: each process that runs slots is one.

Invariant: every sample that a client sends gets one answer, unless the client cancels it or leaves. For a client that
leaves or falls silent nothing more is computed; the rewards stay open for the others until the process closes them. Two
clients whose domain has the same rewards share them: a training and its validation load a reward model once.
```
client: ScoreRequest, CancelScore --> Mailbox --> DomainReward --> (id, Scored or error) --> client
        PolicyAnswer <-- the client asks its sampler <-- PolicyQuestion <-- a judge that is the policy of the run
```
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from cadenza.cluster.channel import Mailbox
from cadenza.cluster.dispatch import dispatch
from cadenza.cluster.worker import Worker
from cadenza.errors import USER_CODE_ERRORS, InfrastructureError, RewardError, raise_if_cancelled
from cadenza.off_loop import resolve_future
from cadenza.rewards import DomainReward, LastingFault, RewardConfig, RewardHost, Sample, Scored

SILENT_SECONDS = 600.0
"""After this time without a call a client is gone: what it asked for is cancelled."""

RewardConfigs = Mapping[str, Mapping[str, RewardConfig]]
"""By domain, then by the name of the reward."""


class ScoreRequest(NamedTuple):
    """Asks for the reward of a sample."""

    id: int
    domain: str
    sample: Sample


class CancelScore(NamedTuple):
    """The client does not wait for it any more."""

    id: int


class PolicyQuestion(NamedTuple):
    """Asks the client for an answer of the policy."""

    id: int
    request: int
    """Id of the score request whose sample it is about."""
    messages: Sequence[Mapping[str, str]]
    max_tokens: int
    temperature: float


class CancelQuestion(NamedTuple):
    """The reward does not wait for the answer any more."""

    id: int


class PolicyAnswer(NamedTuple):
    """What the policy said, or what the client's sampler raised."""

    id: int
    answer: str | Exception


class _Client:
    """What is computed for one client."""

    def __init__(self, rewards: Mapping[str, DomainReward]) -> None:
        self.rewards = rewards
        self.mailbox: Mailbox | None = None
        """None before the first sample."""
        self.scoring: dict[int, asyncio.Task[None]] = {}
        self.questions: dict[int, asyncio.Future[str]] = {}

    def send(self, message: Any) -> None:
        assert self.mailbox is not None  # it is answered
        self.mailbox.send(message)

    def cancel_all(self) -> None:
        for scoring in self.scoring.values():
            scoring.cancel()
        questions, self.questions = self.questions, {}
        for future in questions.values():  # a batch that waits for it may hold samples of other clients
            resolve_future(future, LastingFault("the policy was asked for a client that has left"))


class RewardProcess(Worker):
    """Scores samples of all domains, side by side."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._rewards: list[tuple[str, Mapping[str, RewardConfig], DomainReward]] = []
        """All that are open, by domain and config."""
        self._host = RewardHost(has_device=bool(self.place.devices), policy=self._ask_policy)
        self._score_ids = itertools.count()
        self._requests: dict[int | None, tuple[_Client, int]] = {}
        """By the `score_id` of a sample that is being scored: its client, and the id of the score request there."""
        self._question_ids = itertools.count()

    @dispatch("rank_zero")
    async def exchange(self, client: str, number: int, messages: Sequence[Any]) -> tuple[int, list[Any]]:
        """See channel.py."""
        known = self._clients.get(client)
        if known is None:
            raise InfrastructureError(f"'{client}' has left, or was silent for {SILENT_SECONDS:g} s")
        if known.mailbox is None:
            leave = partial(self._leave, client)
            known.mailbox = Mailbox(partial(self._on_message, known), leave, max_silence_seconds=SILENT_SECONDS)
        return await known.mailbox.exchange(number, messages)

    @dispatch("rank_zero")
    async def open_rewards(self, client: str, rewards: RewardConfigs) -> None:
        """Open the rewards of a client, so that one that cannot work refuses the run at its start. Some may be open if
        it raises."""
        try:
            found = {domain: self._find(domain, configs) for domain, configs in rewards.items()}
            for reward in found.values():
                await reward.open()
        except USER_CODE_ERRORS as error:  # it is raised in another process
            raise_if_cancelled(error)
            raise portable(error) from None
        self._clients[client] = _Client(found)

    @dispatch("rank_zero")
    async def leave(self, client: str) -> None:
        """The client asks for nothing more."""
        self._leave(client)

    @dispatch("broadcast")
    async def close_rewards(self) -> None:
        rewards, self._rewards = self._rewards, []
        for _, _, reward in rewards:
            await reward.close()

    async def close(self) -> None:
        await self.close_rewards()

    def _find(self, domain: str, configs: Mapping[str, RewardConfig]) -> DomainReward:
        """The rewards of a domain, those of another client if they are the same."""
        for other, known, reward in self._rewards:
            if (other, known) == (domain, configs):
                return reward
        self._rewards.append((domain, configs, DomainReward(configs, domain, self._host)))
        return self._rewards[-1][2]

    def _leave(self, client: str) -> None:
        if (known := self._clients.pop(client, None)) is not None:
            self._requests = {id: found for id, found in self._requests.items() if found[0] is not known}
            known.cancel_all()

    def _on_message(self, known: _Client, message: ScoreRequest | CancelScore | PolicyAnswer) -> None:
        if isinstance(message, ScoreRequest):
            scoring = asyncio.get_running_loop().create_task(self._score(known, message), name=message.domain)
            known.scoring[message.id] = scoring
            scoring.add_done_callback(lambda _: known.scoring.pop(message.id, None))
        elif isinstance(message, PolicyAnswer):
            if (future := known.questions.pop(message.id, None)) is not None:
                resolve_future(future, message.answer)
        elif (running := known.scoring.get(message.id)) is not None:
            running.cancel()

    async def _score(self, client: _Client, request: ScoreRequest) -> None:
        answer: Scored | Exception
        sample = replace(request.sample, score_id=next(self._score_ids))
        self._requests[sample.score_id] = client, request.id
        try:
            answer = await client.rewards[request.domain](sample)
        except USER_CODE_ERRORS as error:  # it is raised where the sample came from
            raise_if_cancelled(error)
            answer = portable(error)
        finally:
            self._requests.pop(sample.score_id, None)
        client.send((request.id, answer))

    async def _ask_policy(
        self, sample: Sample, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float
    ) -> str:
        """Let the client whose sample it is ask its sampler."""
        if sample.score_id not in self._requests:
            raise LastingFault("the policy was asked about a sample that is not being scored, or not any more")
        client, request = self._requests[sample.score_id]
        question = next(self._question_ids)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        client.questions[question] = future
        client.send(PolicyQuestion(question, request, messages, max_tokens, temperature))
        try:
            return await future
        finally:
            if client.questions.pop(question, None) is not None:
                client.send(CancelQuestion(question))


def portable(error: BaseException) -> Exception:
    """The error itself if it can travel, else its text."""
    if isinstance(error, Exception):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - user code decides what a pickle raises
            pass
        else:
            return error
    return RewardError(f"{type(error).__name__}: {error}")
