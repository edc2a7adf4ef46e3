"""The transport between two processes: each message once and in order, in few calls; lost means lost for both ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from builders import simulate
from hypothesis import given
from hypothesis import strategies as st

from cadenza.cluster.channel import POLL_SECONDS, Channel, Mailbox
from cadenza.errors import DeadlinePassed, InfrastructureError


class Ends:
    """Both ends of a channel. The way there and back takes the `delays`, in turn, for the calls."""

    def __init__(self, delays: Sequence[float] = (0.0,), **options: Any) -> None:
        self.delays = delays
        self.calls: list[list[Any]] = []
        self.received: list[Any] = []
        self.answers: list[Any] = []
        self.lost: list[Exception] = []
        self.caller_lost: list[float] = []
        self.mailbox = Mailbox(
            self.received.append,
            lambda: self.caller_lost.append(asyncio.get_running_loop().time()),
            max_silence_seconds=60.0,
        )
        self.channel = Channel(self.call, self.answers.append, self.lost.append, **options)

    async def call(self, number: int, messages: list[Any]) -> tuple[int, list[Any]]:
        self.calls.append(messages)
        delay = self.delays[number % len(self.delays)]
        await asyncio.sleep(delay)
        answer = await self.mailbox.exchange(number, messages)
        await asyncio.sleep(delay)
        return answer


@given(
    delays=st.lists(st.floats(0.0, 0.1), min_size=1, max_size=7),
    pauses=st.lists(st.sampled_from([0.0, 0.001, 0.01]), max_size=30),
)
def test_messages_arrive_once_and_in_order_however_calls_overtake_each_other(
    delays: list[float], pauses: list[float]
) -> None:
    async def main() -> None:
        ends = Ends(delays)
        ends.channel.open()
        for number, pause in enumerate(pauses):
            ends.channel.send(number)
            ends.mailbox.send(number)
            await asyncio.sleep(pause)
        await asyncio.sleep(1.0)
        assert ends.received == ends.answers == list(range(len(pauses)))
        ends.channel.close()

    simulate(main)


def test_what_is_sent_within_the_linger_shares_a_call() -> None:
    async def main() -> None:
        ends = Ends(linger=0.002)
        for number in range(4):
            ends.channel.send(number)
            await asyncio.sleep(0.001)
        assert [messages for messages in ends.calls if messages] == [[0, 1], [2, 3]]
        ends.channel.close()

    simulate(main)


def test_without_a_linger_there_is_one_call_for_each_iteration_of_the_event_loop() -> None:
    async def main() -> None:
        ends = Ends(linger=0.0)
        for number in range(3):
            ends.channel.send(2 * number)
            ends.channel.send(2 * number + 1)
            await asyncio.sleep(1e-9)
        assert [messages for messages in ends.calls if messages] == [[0, 1], [2, 3], [4, 5]]
        ends.channel.close()

    simulate(main)


def test_a_channel_that_expects_nothing_only_says_that_it_lives() -> None:
    async def main() -> None:
        ends = Ends(is_expecting=lambda: False)
        ends.channel.send("first")
        await asyncio.sleep(100 * POLL_SECONDS)
        assert 40 < len(ends.calls) < 60  # a call waits for POLL_SECONDS, and then the channel does
        ends.channel.send("second")
        await asyncio.sleep(1.0)
        assert ends.received == ["first", "second"]
        assert not ends.caller_lost
        ends.channel.close()

    simulate(main)


def test_a_caller_that_falls_silent_is_lost_and_refused_when_it_calls_again() -> None:
    async def main() -> None:
        ends = Ends()
        ends.channel.open()
        await asyncio.sleep(300.0)
        assert not ends.caller_lost
        ends.channel.close()
        await asyncio.sleep(300.0)
        assert len(ends.caller_lost) == 1
        ends.mailbox.send("to nobody")
        with pytest.raises(InfrastructureError, match="gave its caller up: it was silent for 60 s"):
            await ends.mailbox.exchange(1000, [])

    simulate(main)


def test_a_caller_that_was_given_up_is_told_so_by_a_new_mailbox() -> None:
    async def main() -> None:
        ends = Ends()
        with pytest.raises(InfrastructureError, match="its first call is missing"):
            await ends.mailbox.exchange(1000, ["from an earlier life"])
        assert ends.received == []
        assert ends.caller_lost == [POLL_SECONDS]

    simulate(main)


def test_an_end_that_does_not_answer_is_lost() -> None:
    async def main() -> None:
        ends = Ends(delays=(1e9,), grace_seconds=5.0)
        ends.channel.open()
        await asyncio.sleep(60.0)
        (error,) = ends.lost
        assert isinstance(error, DeadlinePassed)
        ends.channel.send("too late")
        await asyncio.sleep(60.0)
        assert ends.calls == [[]]

    simulate(main)


def test_a_message_that_cannot_be_taken_ends_the_channel() -> None:
    async def main() -> None:
        ends = Ends()

        def refuse(message: object) -> None:
            raise ValueError(f"what is {message}?")

        ends.mailbox._on_message = refuse
        ends.channel.send("this")
        ends.channel.send("that")
        await asyncio.sleep(1.0)
        (error,) = ends.lost
        assert str(error) == "what is this?"

    simulate(main)
