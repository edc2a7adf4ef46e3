"""Rollouts that branch, ask side by side, and change the sampling of a call. Every row is exact, token by token."""

from __future__ import annotations

import asyncio
import random
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import build, chain, column, fates, got, playing, rows, simulate, timed

from cadenza.inference.replica import Finish, Request, Span
from cadenza.rollout.domain_rollout import reward_sample
from cadenza.rollout.model import Model
from cadenza.rollout.records import Fate, Task, Trajectory, Turn
from cadenza.testing import ByteCodec, FakeReplica


def words(request: Request) -> list[int]:
    draw = random.Random(request.seed)
    return [draw.randrange(65, 91) for _ in range(6)]


def replica(seconds: float = 1.0) -> FakeReplica:
    return FakeReplica(words, seconds=seconds)


def said(batch: Any) -> list[tuple[str, str]]:
    """Of each row, all tokens as text, and under those that train a '^'."""
    masks = rows(batch, "response_mask")
    return [
        (bytes(ids.tolist()).decode(), "".join(".^"[int(bit)] for bit in mask))
        for ids, mask in zip(rows(batch, "input_ids"), masks, strict=True)
    ]


def test_branches_are_rows_that_begin_with_the_tokens_before_and_train_their_own() -> None:
    async def play(task: Task, env: Any, model: Model) -> None:
        await model.chat("think. ")
        other = model.branch()
        await asyncio.gather(model.chat("short "), other.chat("long "))
        await other.chat("more ")

    async def main() -> None:
        async with playing([replica()], rollout=play, batch_size=1, group_size=1) as scheduler:
            batch, when = await timed(got(scheduler, 1))
            assert when == 3.0, "the branches are asked side by side"
            assert column(batch, "traj_id") == [0, 0]
            (root, root_mask), (branch, branch_mask) = said(batch)
            thought = root[7:13]
            assert root == f"think. {thought}short {root[-6:]}"
            assert root_mask == "......." + "^" * 6 + "......" + "^" * 6
            assert branch.startswith(f"think. {thought}long ")
            assert branch_mask == "." * (7 + 6 + 5) + "^" * 6 + "." * 5 + "^" * 6
            assert column(batch, "turns") == [4, 4]

    simulate(main)


def test_the_tokens_of_branches_do_not_depend_on_which_one_is_faster() -> None:
    def outcome(slow: str) -> list[tuple[str, str]]:
        async def play(task: Task, env: Any, model: Model) -> None:
            await model.chat("begin ")
            branches = {"a": model.branch(), "b": model.branch()}

            async def ask(name: str) -> None:
                await asyncio.sleep(5.0 if name == slow else 0.0)
                await branches[name].chat(f"{name} ")

            await asyncio.gather(ask("a"), ask("b"))

        found: list[tuple[str, str]] = []

        async def main() -> None:
            async with playing([replica()], rollout=play, batch_size=1, group_size=1) as scheduler:
                found.extend(said(await got(scheduler, 1)))

        simulate(main)
        return found

    assert outcome("a") == outcome("b")


def test_a_suspension_in_the_middle_changes_no_token_of_a_branch() -> None:
    async def play(task: Task, env: Any, model: Model) -> None:
        await model.chat("begin ")
        await asyncio.gather(*[model.branch().chat(f"{name} ") for name in "abc"])

    def outcome(suspended: bool) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []

        async def main() -> None:
            async with playing([replica(6.0)], rollout=play, batch_size=2, group_size=2) as scheduler:
                taking = asyncio.ensure_future(got(scheduler, 2))
                if suspended:
                    for pause in (2.5, 7.0):
                        await asyncio.sleep(pause)
                        await scheduler.suspend()
                        await asyncio.sleep(1.0)
                        await scheduler.resume()
                found.extend(said(await taking))
                assert fates(scheduler) == {"trained": 2}

        simulate(main)
        return found

    assert outcome(suspended=True) == outcome(suspended=False)


def test_a_branch_that_is_full_waits_for_the_others_before_the_episode_ends() -> None:
    async def play(task: Task, env: Any, model: Model) -> None:
        await model.chat("begin ")
        other = model.branch()
        await asyncio.gather(model.chat("x" * 200), other.chat("long "))

    async def main() -> None:
        options: dict[str, Any] = {"rollout": play, "batch_size": 1, "max_context": 100}
        async with playing([replica(5.0)], **options) as scheduler:
            batch, when = await timed(got(scheduler, 1))
            assert (when, column(batch, "turns")) == (10.0, [2, 2])
            assert column(batch, "truncated") == [True, True]
            assert scheduler.ledger.tokens[Fate.TRAINED] == 2 * 6

    simulate(main)


def test_a_step_pays_the_turn_that_led_to_it_and_not_the_last_branch() -> None:
    async def play(task: Task, env: Any, model: Model) -> None:
        observation = await env.reset(task.seed)
        await model.branch().chat("aside ")
        while not env.done:
            reply = await model.chat(observation)
            observation = await env.step(reply.text)

    async def main() -> None:
        async with playing([replica()], env=chain(2), rollout=play, batch_size=1) as scheduler:
            batch = await got(scheduler, 1)
            assert [row.tolist() for row in rows(batch, "step_scores")] == [[1.0, 1.0, 0.0]] * 2

    simulate(main)


def test_a_second_call_on_one_branch_is_refused_and_names_the_way() -> None:
    async def play(task: Task, env: Any, model: Model) -> None:
        await asyncio.gather(model.chat("one "), model.chat("two "))

    async def main() -> None:
        scheduler = build([replica()], rollout=play, batch_size=1, error_budget=0)
        with pytest.raises(Exception, match=r"`model\.branch\(\)` is a conversation beside it"):
            await got(scheduler, 1)
        await scheduler.shutdown()

    simulate(main)


def example(name: str) -> Any:
    return runpy.run_path(str(Path(__file__).parents[2] / "examples/thinking.py"))[name]


def asking(rollout: str, answers: str) -> Any:
    """A scheduler that plays a rollout of the example on one question; each call of the model takes the next answers,
    `|` between them, and is cut off at its `max_tokens`."""
    texts = iter(answers.split("|"))
    rows = [{"messages": [{"role": "user", "content": "Q "}]}]
    domains = {"toy": {"tasks": rows, "rollout": example(rollout), "reward": lambda sample: 1.0}}
    return playing([FakeReplica(lambda request: list(next(texts).encode()))], domains=domains, batch_size=1)


@pytest.mark.parametrize(
    ("rollout", "answers", "rows"),
    [
        ("budget", "7", [("Q 7", "..^")]),
        ("budget", "t" * 60 + "|42", [(f"Q {'t' * 48}\nAnswer: 42", f"..{'^' * 48}.........^^")]),
        (
            "two_answers",
            "t" * 60 + "|41|42",
            [
                (f"Q {'t' * 48}", f"..{'^' * 48}"),
                (f"Q {'t' * 48}\nAnswer: 41", f"..{'.' * 48}.........^^"),
                (f"Q {'t' * 48}\nAnswer: 42", f"..{'.' * 48}.........^^"),
            ],
        ),
        (
            "draft_and_choose",
            "41|42|43",
            [("Q 41", "..^^"), ("Q 42", "..^^"), ("Q Draft 1: 41\nDraft 2: 42\nAnswer: 43", f"{'.' * 34}^^")],
        ),
    ],
)
def test_the_rollouts_of_the_example_train_every_token_that_the_model_wrote_once(
    rollout: str, answers: str, rows: list[tuple[str, str]]
) -> None:
    async def main() -> None:
        async with asking(rollout, answers) as scheduler:
            assert said(await got(scheduler, 1)) == rows

    simulate(main)


class EndedByNull(ByteCodec):
    """Ends an answer with the byte 0, as the codec of a run does with its end token."""

    end_token_id = 0

    def encode(self, observation: Any, *, first: bool, last: int | None = None) -> list[int]:
        tokens = list(super().encode(observation, first=first))
        return tokens if first or last in (None, 0) else [0, *tokens]


def turn(prompt: str, response: str, *, fresh: bool = False, cut: bool = False) -> Turn:
    tokens = np.frombuffer(response.encode(), np.uint8).astype(np.int32)
    asked = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    finish = Finish.LENGTH if cut else Finish.STOP
    return Turn(asked, tokens, np.zeros(len(tokens), np.float32), (Span(0, len(tokens)),), finish, fresh, 0.0, 1.0)


USER, ASSISTANT = "user", "assistant"


@pytest.mark.parametrize(
    ("turns", "seen"),
    [
        ([turn("Q", "a", fresh=True)], [(USER, "Q."), (ASSISTANT, "a")]),
        (
            [turn("Q", "a", fresh=True), turn("more", "b")],
            [(USER, "Q."), (ASSISTANT, "a"), (USER, "more"), (ASSISTANT, "b")],
        ),
        (
            [turn("Q", "a", fresh=True, cut=True), turn("\0more", "b")],
            [(USER, "Q."), (ASSISTANT, "a"), (USER, "more"), (ASSISTANT, "b")],
        ),
        (
            [turn("Q", "hm", fresh=True, cut=True), turn(" So: ", "7")],
            [(USER, "Q."), (ASSISTANT, "hm So: 7")],
        ),
        (
            [turn("Q", "a", fresh=True), turn("x", "b"), turn("Qay", "c", fresh=True), turn("z", "d")],
            [(USER, "Q."), (ASSISTANT, "a"), (USER, "y"), (ASSISTANT, "c"), (USER, "z"), (ASSISTANT, "d")],
        ),
        (
            [turn("Q", "a", fresh=True), turn("Qax", "b", fresh=True), turn("Qaxby", "c", fresh=True)],
            [(USER, "Q."), (ASSISTANT, "a"), (USER, "x"), (ASSISTANT, "b"), (USER, "y"), (ASSISTANT, "c")],
        ),
        ([turn("Q", "a", fresh=True), turn("Q", "b", fresh=True)], [(USER, "Q."), (ASSISTANT, "b")]),
        ([turn("Q", "a", fresh=True), turn("New", "b", fresh=True)], [(USER, "New"), (ASSISTANT, "b")]),
    ],
)  # fmt: skip
def test_a_reward_sees_the_conversation_of_the_last_branch(turns: list[Turn], seen: list[tuple[str, str]]) -> None:
    trajectory = Trajectory(0, Task("toy/0", 0, "toy", {"messages": [{"role": USER, "content": "Q."}]}), 0, 0, 0, 0, 0)
    trajectory.turns.extend(turns)
    sample = reward_sample(trajectory, EndedByNull())
    assert [(message["role"], message["content"].strip("\0")) for message in sample.messages] == seen
    assert sample.response == bytes(turns[-1].response.tolist()).decode()
    assert sample.prompt.strip("\0") == [text for role, text in seen if role == USER][-1]


def test_a_call_may_change_its_sampling_and_an_unknown_key_is_refused() -> None:
    budgets: list[int] = []

    async def play(task: Task, env: Any, model: Model) -> None:
        reply = await model.chat("think ", sampling={"max_tokens": 3, "temperature": 1.0})
        budgets.append(len(reply.tokens))
        await model.generate(model.encode("so "))
        with pytest.raises(ValueError, match="max_token"):
            await model.chat("x", sampling={"max_token": 3})
        for key, value, way_out in (
            ("temperature", 0.5, "set it for all calls in the config"),
            ("top_p", 0.9, "limit only what is measured with validation.sampling.top_p"),
            ("top_k", 5, "limit only what is measured with validation.sampling.top_k"),
        ):
            with pytest.raises(ValueError, match=f"leave {key} out, or {way_out}"):
                await model.chat("x", sampling={key: value})

    async def main() -> None:
        fake = replica()
        async with playing([fake], rollout=play, batch_size=1) as scheduler:
            await got(scheduler, 1)
            first, second = list(fake.requests)[:2]
            assert (first.max_tokens, second.max_tokens) == (3, 1024)

    simulate(main)
    assert budgets[0] == 3


def test_a_call_of_a_validation_may_have_another_temperature() -> None:
    async def play(task: Task, env: Any, model: Model) -> None:
        await model.chat("think ", sampling={"temperature": 0.5})

    async def main() -> None:
        fake = replica()
        async with playing([fake], rollout=play, batch_size=1, mode="val") as scheduler:
            await got(scheduler, 1)
            assert [request.sampling.temperature for request in fake.requests] == [0.5]

    simulate(main)
