"""Rewards behind HTTP: a server on the loopback that is well, busy, down, or talks nonsense."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from loopback import listening, nowhere

from cadenza.errors import RewardError
from cadenza.rewards import RewardUnavailable, Sample, Scored, make_reward

SAMPLE = Sample(response="4", prompt="2 + 2 = ", row={"answer": "4", "level": np.int64(3)}, domain="sums")
FAST = {"retry_seconds": 0.0}


async def ask(url: str, sample: Sample = SAMPLE, **settings: Any) -> Scored:
    async with make_reward({"name": "remote", "url": url, **FAST, **settings}, "sums") as reward:
        return await reward(sample)


def test_a_remote_reward_gets_the_sample_and_gives_its_value() -> None:
    async def main() -> None:
        async with listening(lambda body: (200, {"value": 0.5, "success": True, "parts": {"style": 1}})) as server:
            scored = await ask(f"{server.url}/score")
        assert scored == Scored(0.5, True, {"remote": 0.5, "remote/style": 1.0})
        assert server.paths == ["/score"]
        assert server.bodies == [
            {
                "prompt": "2 + 2 = ",
                "response": "4",
                "messages": list(SAMPLE.messages),
                "row": {"answer": "4", "level": 3},
                "domain": "sums",
                "finish": "stop",
            }
        ]

    asyncio.run(main())


def test_a_bare_number_is_a_value_and_a_batch_is_a_list() -> None:
    async def main() -> list[float]:
        def answer(body: Any) -> tuple[int, Any]:
            return 200, [float(sample["response"]) for sample in body["samples"]]

        async with (
            listening(answer) as server,
            make_reward({"name": "remote", "url": server.url, "batch_size": 8}, "sums") as reward,
        ):
            scores = await asyncio.gather(*[reward(Sample(response=str(number))) for number in range(5)])
            assert len(server.bodies) < 5
            return [scored.value for scored in scores]

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_is_busy_or_breaks_is_tried_again(status: int) -> None:
    answers = iter([(status, "later"), (status, "later"), (200, 1.0)])

    async def main() -> float:
        async with listening(lambda body: next(answers)) as server:
            return (await ask(server.url, tries=3)).value

    assert asyncio.run(main()) == 1.0


def test_a_server_that_is_down_is_an_infrastructure_fault_that_names_the_place() -> None:
    async def main() -> None:
        await ask(f"{await nowhere()}/score?token=geheim", tries=2)

    with pytest.raises(RewardUnavailable, match=r"reward 'remote' of domain 'sums': POST http://127") as error:
        asyncio.run(main())
    assert "2 times" in str(error.value)
    assert "geheim" not in str(error.value)


@pytest.mark.parametrize("answer", [(404, "no such place"), (422, "bad body"), (200, "<html>")])
def test_an_answer_that_will_not_change_is_an_error_that_names_the_place_and_is_not_tried_again(answer: Any) -> None:
    async def main() -> None:
        async with listening(lambda body: answer) as server:
            try:
                await ask(f"{server.url}/score")
            finally:
                assert len(server.bodies) == 1

    with pytest.raises(RewardError, match=r"POST http://127.0.0.1:\d+/score: "):
        asyncio.run(main())


@pytest.mark.parametrize("answer", ["good", None, {"score": 1}, {"value": "1"}, []])
def test_an_answer_without_a_value_is_an_error(answer: Any) -> None:
    async def main() -> None:
        async with listening(lambda body: (200, answer)) as server:
            await ask(server.url)

    with pytest.raises(RewardError):
        asyncio.run(main())


# -- the judge ---------------------------------------------------------------------------------------------------------


def completion(text: str | None) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_judge_behind_a_server_is_asked_once_and_its_verdict_lies_on_the_scale() -> None:
    async def main() -> None:
        async with (
            listening(lambda body: completion("Fine work.\nScore: 8")) as server,
            make_reward({"name": "judge", "url": server.url, "model": "critic", **FAST}, "sums") as reward,
        ):
            scored = await reward(SAMPLE)
        assert (scored.value, scored.note) == (0.8, "judge: Fine work. Score: 8")
        assert server.paths == ["/v1/chat/completions"]
        (body,) = server.bodies
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("critic", 0.0, 512)
        (message,) = body["messages"]
        assert "<task>\n2 + 2 = \n</task>" in message["content"]
        assert "<answer>\n4\n</answer>" in message["content"]

    asyncio.run(main())


@pytest.mark.parametrize("suffix", ["", "/v1", "/v1/", "/v1/chat/completions"])
def test_the_address_of_a_judge_may_be_written_in_every_usual_way(suffix: str) -> None:
    async def main() -> list[str]:
        async with listening(lambda body: completion("Score: 1")) as server:
            spec = {"name": "judge", "url": server.url + suffix, "model": "critic"}
            async with make_reward(spec, "sums") as reward:
                await reward(SAMPLE)
            return server.paths

    assert asyncio.run(main()) == ["/v1/chat/completions"]


def test_a_judge_that_is_down_costs_the_sample_no_value() -> None:
    async def main() -> None:
        spec = {"name": "judge", "url": await nowhere(), "model": "critic", "tries": 2, **FAST}
        async with make_reward(spec, "sums") as reward:
            await reward(SAMPLE)

    with pytest.raises(RewardUnavailable, match=r"reward 'judge' of domain 'sums': POST .*/v1/chat/completions"):
        asyncio.run(main())


def test_a_key_comes_from_the_environment_and_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "geheim-123")

    async def main() -> None:
        async with listening(lambda body: (401, "the key geheim-123 is not known")) as server:
            spec = {"name": "judge", "url": server.url, "model": "critic", "api_key_env": "JUDGE_KEY"}
            try:
                async with make_reward(spec, "sums") as reward:
                    await reward(SAMPLE)
            finally:
                assert server.authorizations == ["Bearer geheim-123"]

    with pytest.raises(RewardError, match=r"401 the key \*\*\* is not known"):
        asyncio.run(main())


def test_a_key_that_is_not_in_the_environment_is_named() -> None:
    async def main() -> None:
        spec = {"name": "judge", "url": "http://127.0.0.1:1", "model": "critic", "api_key_env": "NO_SUCH_KEY"}
        await make_reward(spec, "sums").open()

    with pytest.raises(RewardError, match="there is no environment variable NO_SUCH_KEY"):
        asyncio.run(main())


def test_an_answer_that_is_no_chat_completion_is_an_error() -> None:
    async def main() -> None:
        async with listening(lambda body: (200, {"choices": []})) as server:
            spec = {"name": "judge", "url": server.url, "model": "critic"}
            async with make_reward(spec, "sums") as reward:
                await reward(SAMPLE)

    with pytest.raises(RewardError, match="no chat completion"):
        asyncio.run(main())
