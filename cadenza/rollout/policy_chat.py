"""Lets a reward function ask the policy being trained (LLM as judge).

A question goes to the replicas of the run, through the same sampler as the rollouts.

Invariant: a question is no turn of any trajectory. It holds no slot, its tokens are in no row and on the account of no
attempt, and are counted here. The router, the gate and weight updates treat it like a turn: while the gate is closed it
waits, and goes on from the tokens it has.

No deadlock: a rollout has given up its slot and its cache before its reward is computed, `get_batch` opens the gate
before it waits for a group, and a question is ordered in the wait queue by the group of its sample.

The seed of a question follows from the attempt, the messages and how often they were asked before about this sample: a
question that is asked again is answered anew, and a run that is repeated gives the same answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b

from cadenza.inference.replica import SamplingChanges
from cadenza.rewards import LastingFault, Sample
from cadenza.rollout.branches import BRANCH_SESSIONS
from cadenza.rollout.ledger import Attempt, AttemptState, Group
from cadenza.rollout.model import GOLDEN, MASK64, ContextFull, Model, RolloutContext
from cadenza.rollout.records import Trajectory
from cadenza.rollout.router import RouteRequest


class PolicyChat:
    """Asks the policy about samples, each between the beginning and the end of its scoring: what a `RewardHost` has as
    `ask_policy`."""

    events = None
    """`TokenCounter` for the questions: counted here, on no attempt. No event is emitted for them."""

    def __init__(self, shared: RolloutContext) -> None:
        self.calls = 0
        self.tokens = 0
        """Generated tokens, in all calls."""
        self._context = replace(shared, token_counter=self, is_training=False)
        self._numbers = itertools.count()
        self._asked: dict[int, Counter[int]] = {}
        """By the attempt that is being scored: how often each question, by its digest, was asked about it."""

    @contextmanager
    def scoring(self, trajectory: Trajectory) -> Iterator[None]:
        """Within, questions about this trajectory are answered."""
        self._asked[trajectory.id] = Counter()
        try:
            yield
        finally:
            del self._asked[trajectory.id]

    def add_tokens(self, attempt: Attempt, count: int) -> None:
        """Count the tokens of an answer; `attempt` is the question's own stand-in and gets none."""
        self.tokens += count

    async def __call__(
        self, sample: Sample, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float
    ) -> str:
        """Returns the answer of the policy as it is now. Raises what a turn of a rollout raises. Of the run's sampling
        `stop` counts, which may be what ends an answer; top_p and top_k do not."""
        asked = self._asked.get(sample.trajectory.id)
        if asked is None:
            raise LastingFault("the policy was asked about a sample that is not being scored, or not any more")
        self.calls += 1
        own = SamplingChanges(max_tokens=max_tokens, temperature=temperature, top_p=1.0, top_k=0)
        context = replace(self._context, sampling=own.applied_to(self._context.sampling))
        digest = _digest(messages)
        seed = (sample.trajectory.seed ^ digest) + GOLDEN * asked[digest] & MASK64
        asked[digest] += 1
        model = _Question(sample.trajectory, seed, next(self._numbers), context)
        try:
            reply = await model.chat([dict(message) for message in messages])
        except ContextFull as error:
            raise ContextFull(f"a question of the reward about '{sample.trajectory.task.id}': {error}") from None
        finally:
            model.end_session()
        return reply.text


class _Question(Model):
    """One call, as the sampler sees it: of the same age as the sample's group, with a session and prefixes of its
    own."""

    __slots__ = ("_number",)

    def __init__(self, about: Trajectory, seed: int, number: int, context: RolloutContext) -> None:
        now = asyncio.get_running_loop().time()
        group = Group(about.group, about.task, 0, now)
        attempt = Attempt(about.id, group, about.member, about.attempt, about.slot, now)
        attempt.state = AttemptState.SCORING  # it has no lease
        told = Trajectory(about.id, about.task, about.group, about.member, about.attempt, about.slot, seed)
        super().__init__(attempt, told, context)
        self._number = number

    @property
    def _session(self) -> int:
        return ~(super()._session + self._number * BRANCH_SESSIONS)  # those of rollouts are not negative

    def _route_request(self, length: int, written: int) -> RouteRequest:
        found = super()._route_request(length, written)
        return found._replace(group=~found.group)


def _digest(messages: Sequence[Mapping[str, str]]) -> int:
    """64 bits that keep the seeds of questions apart from each other and from those of turns."""
    text = json.dumps([dict(message) for message in messages], sort_keys=True)
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
