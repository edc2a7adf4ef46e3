"""The contract of the embedded engine, against the forward and the `generate` of transformers."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import pytest
from engine_cases import GREEDY, KINDS, SIZES, VOCAB, WARM, ask, fresh, greedy, prompt, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cadenza import DataProto, RolloutScheduler  # noqa: E402
from cadenza.inference import row_layout  # noqa: E402
from cadenza.inference.admission import MIN_SHARED_TOKENS  # noqa: E402
from cadenza.inference.decoders import ModuleDecoder, PackedDecoder, decoder_for  # noqa: E402
from cadenza.inference.engine import Engine  # noqa: E402
from cadenza.inference.kv_cache import common_prefix_length  # noqa: E402
from cadenza.inference.replica import (  # noqa: E402
    Finish,
    Generation,
    PauseMode,
    Replica,
    ReplicaError,
    ReplicaLost,
    Request,
    RequestRefused,
    Sampling,
    Span,
    StaleEpoch,
    Tokens,
)
from cadenza.inference.sampling import GOLDEN, batch_sampling, rng_counter, sample_tokens, uniforms  # noqa: E402
from cadenza.inference.sequence import EngineSequence  # noqa: E402
from cadenza.inference.torch_engine import TorchReplica  # noqa: E402
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig  # noqa: E402
from cadenza.testing import LocalCluster  # noqa: E402

T = TypeVar("T")


def scores(model: Any, tokens: Tokens, written: Tokens, temperature: float = 1.0) -> Any:
    """[R, V] log probabilities under which each written token was drawn, from one forward pass over everything."""
    with torch.inference_mode():
        ids = torch.from_numpy(np.concatenate((tokens, written))).long()[None]
        logits = model(ids).logits[0, len(tokens) - 1 : -1].float()
        return torch.log_softmax(logits / temperature, -1)


def assert_drawn_from(model: Any, tokens: Tokens, answer: Generation, temperature: float = 1.0) -> None:
    want = scores(model, tokens, answer.tokens, temperature)
    want = want[torch.arange(len(answer.tokens)), torch.from_numpy(answer.tokens).long()]
    np.testing.assert_allclose(answer.logprobs, want.numpy(), atol=1e-4)
    assert (answer.tokens.dtype, answer.logprobs.dtype) == (np.int32, np.float32)
    assert sum(span.length for span in answer.spans) == len(answer.tokens)


def assert_each_span_is_of_its_version(tokens: Tokens, answer: Generation) -> None:
    """Greedy text of models whose seeds are the versions: every token and logprob from its own model alone."""
    assert sum(span.length for span in answer.spans) == len(answer.tokens)
    start = 0
    for span in answer.spans:
        end = start + span.length
        part = Generation(answer.tokens[start:end], answer.logprobs[start:end], (span,), answer.finish)
        before, model = np.concatenate((tokens, answer.tokens[:start])), tiny(seed=span.version)
        assert_drawn_from(model, before, part)
        assert part.tokens.tolist() == scores(model, before, part.tokens).argmax(-1).tolist()
        start = end


@contextmanager
def replicas(count: int = 1, model: Any = None, **options: Any) -> Iterator[list[TorchReplica]]:
    made = [TorchReplica(model or tiny(), name=f"r{i}", devices=(i,), **options) for i in range(count)]
    try:
        yield made
        for replica in made:
            replica.check()
    finally:
        for replica in made:
            replica.close()


def served(
    main: Callable[[TorchReplica], Coroutine[Any, Any, T]], *, model: Any = None, seconds: float = 60.0, **options: Any
) -> T:
    """Run with one replica; whoever hangs fails the test."""
    with replicas(1, model, **options) as (replica,):
        return asyncio.run(asyncio.wait_for(main(replica), seconds))


class Brake:
    """Lets an engine write so many more tokens, and then nothing until it is released: commands it still obeys."""

    def __init__(self, replica: TorchReplica, tokens: int) -> None:
        self._engine = replica._engine
        self._end = replica.generated + tokens
        self._there = threading.Event()
        prepare = self._engine.admit_and_prefill

        def braked(until: int) -> bool:
            if replica.generated < self._end:
                return prepare(until)
            self._there.set()
            time.sleep(0.0005)
            return False

        self._engine.admit_and_prefill = braked  # type: ignore[method-assign]

    async def reached(self) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, self._there.wait, 30.0)

    def release(self) -> None:
        del self._engine.admit_and_prefill


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_it_is_a_replica() -> None:
    async def main(replica: TorchReplica) -> None:
        as_protocol: Replica = replica
        assert (as_protocol.name, as_protocol.devices, as_protocol.kv_capacity) == ("r0", (0,), 500)

    served(main, kv_tokens=500)


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_output_equals_generate_for_mixed_lengths(kind: str) -> None:
    shapes = [(1, 30), (2, 5), (17, 40), (60, 1), (33, 21), (9, 64), (100, 12), (31, 2), (64, 33), (5, 50)]

    async def main(replica: TorchReplica) -> list[Generation]:
        requests = [ask(i, prompt(length, i), count) for i, (length, count) in enumerate(shapes)]
        return await asyncio.gather(*[replica.generate(request) for request in requests])

    answers = served(main, model=tiny(kind))
    for i, ((length, count), answer) in enumerate(zip(shapes, answers, strict=True)):
        assert answer.tokens.tolist() == greedy(tiny(kind), prompt(length, i), count)
        assert (answer.finish, answer.spans) == (Finish.LENGTH, (Span(0, count),))
        assert_drawn_from(tiny(kind), prompt(length, i), answer)


def test_llama_like_models_are_packed_and_others_run_as_they_are() -> None:
    decoders = {kind: type(decoder_for(tiny(kind))) for kind in KINDS}
    assert {kind for kind, of in decoders.items() if of is PackedDecoder} == {"llama", "qwen2", "qwen3", "biased"}
    assert set(decoders.values()) == {PackedDecoder, ModuleDecoder}


def test_a_multiplier_that_the_packing_does_not_know_makes_it_step_back() -> None:
    config = transformers.GraniteConfig(**SIZES, logits_scaling=3.0, residual_multiplier=0.3)
    model = transformers.GraniteForCausalLM(config).eval()

    async def main(replica: TorchReplica) -> None:
        assert (await replica.generate(ask(1))).tokens.tolist() == greedy(model, prompt(10, 1), 20)

    served(main, model=model)
    assert isinstance(decoder_for(model), ModuleDecoder)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_shorter_formats_are_packed_too_and_as_exact_as_the_module(kind: str) -> None:
    model = fresh(kind).to(torch.bfloat16)
    assert isinstance(decoder_for(model), PackedDecoder)

    async def main(replica: TorchReplica) -> None:
        answer = await replica.generate(ask(1, count=40))
        want = scores(tiny(kind), prompt(10, 1), answer.tokens)
        want = want[torch.arange(40), torch.from_numpy(answer.tokens).long()].numpy()
        assert np.abs(answer.logprobs - want).mean() < 0.1

    served(main, model=model)


@pytest.mark.parametrize("sampling", [WARM, Sampling(temperature=0.6), Sampling(temperature=1.7)])
def test_logprobs_match_a_full_forward(sampling: Sampling) -> None:
    async def main(replica: TorchReplica) -> None:
        requests = [ask(i, prompt(3 * i + 1, i), 60, sampling) for i in range(12)]
        answers = await asyncio.gather(*[replica.generate(request) for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            assert_drawn_from(tiny(), request.chunks[0], answer, sampling.temperature)

    served(main)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (20, 0.5), (1, 1.0), (0, 1e-9), (500, 0.999)])
def test_limits_cut_the_distribution_and_its_logprobs_say_so(top_k: int, top_p: float) -> None:
    async def main(replica: TorchReplica) -> None:
        sampling = Sampling(temperature=1.3, top_k=top_k, top_p=top_p)
        answer = await replica.generate(ask(1, count=100, sampling=sampling))
        chances = scores(tiny(), prompt(10, 1), answer.tokens, 1.3).exp().numpy()
        for row, token, logprob in zip(chances, answer.tokens, answer.logprobs, strict=True):
            order = np.argsort(-row)[: top_k or VOCAB]
            mass = row[order] / row[order].sum()
            kept = order[: int(np.searchsorted(np.cumsum(mass), top_p * (1 - 1e-6))) + 1]
            assert token in kept
            assert logprob == pytest.approx(math.log(row[token] / row[kept].sum()), abs=1e-4)

    served(main)


def test_every_row_of_a_batch_is_drawn_by_its_own_law() -> None:
    samplings = [WARM, GREEDY, Sampling(top_k=1), Sampling(temperature=0.5), Sampling(top_p=0.3), Sampling(top_k=7)]

    async def main(replica: TorchReplica) -> None:
        async def each(together: bool) -> list[list[int]]:
            requests = [
                ask(i + 100 * together, prompt(12), 30, sampling, seed=i) for i, sampling in enumerate(samplings)
            ]
            if together:
                return [answer.tokens.tolist() for answer in await asyncio.gather(*map(replica.generate, requests))]
            return [(await replica.generate(request)).tokens.tolist() for request in requests]

        alone = await each(False)
        assert alone == await each(True)
        assert alone[1] == alone[2] == greedy(tiny(), prompt(12), 30)
        assert len({tuple(tokens) for tokens in alone}) == 5

    served(main)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sampled_tokens_do_not_depend_on_the_company(kind: str) -> None:
    wanted = [ask(i, prompt(5 + 9 * i, i), 40 + i, WARM, seed=1000 + i) for i in range(6)]

    async def alone(replica: TorchReplica) -> list[list[int]]:
        return [(await replica.generate(request)).tokens.tolist() for request in wanted]

    async def in_company(replica: TorchReplica) -> list[list[int]]:
        others = [replica.generate(ask(100 + i, prompt(3 + 2 * i, i), 10 + 3 * i, WARM)) for i in range(30)]
        answers = await asyncio.gather(*[replica.generate(request) for request in wanted])
        await asyncio.gather(*others)
        return [answer.tokens.tolist() for answer in answers]

    first = served(alone, model=tiny(kind))
    assert first == served(in_company, model=tiny(kind), max_running=64)
    assert first == served(in_company, model=tiny(kind), max_running=5, prefill_tokens=16)
    assert first != served(alone, model=tiny(kind, seed=1))


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0, 1.5])[None].expand(20_000, -1)
    for sampling, allowed in ((WARM, 6), (Sampling(top_k=3), 3), (Sampling(temperature=0.5), 6)):
        batched = batch_sampling([sampling], 6, torch.device("cpu"))
        counters = np.array([rng_counter(seed, 3) for seed in range(20_000)], np.uint64)[:, None]
        tokens, logprobs = sample_tokens(logits, batched, torch.from_numpy(uniforms(counters, 1)[0]))
        counts = np.bincount(tokens.numpy(), minlength=6) / 20_000
        chances = torch.softmax(logits[0] / sampling.temperature, -1).numpy()
        chances[np.argsort(-chances)[allowed:]] = 0
        chances /= chances.sum()
        assert np.abs(counts - chances).max() < 0.012
        np.testing.assert_allclose(logprobs.exp().numpy(), chances[tokens.numpy()], atol=1e-5)


def test_the_random_numbers_of_neighbouring_turns_have_nothing_in_common() -> None:
    turns = [(42 + GOLDEN * turn) & (1 << 64) - 1 for turn in range(1, 5)]  # as `Model` seeds them
    start = np.array([rng_counter(seed, 0) for seed in turns], np.uint64)[:, None]
    numbers = uniforms(start, 500)[:, :, 0]
    assert len(np.unique(numbers)) > 0.99 * numbers.size
    assert 0.0 <= numbers.min() < 0.01 < 0.99 < numbers.max() < 1.0
    ahead = np.array([rng_counter(seed, 100) for seed in turns], np.uint64)[:, None]
    np.testing.assert_array_equal(uniforms(ahead, 400)[:, :, 0], numbers[100:])


def test_a_response_ends_at_a_stop_token_with_that_token() -> None:
    text = greedy(tiny(), prompt(10, 1), 30)
    own, models = text[12], text[20]

    async def main(replica: TorchReplica) -> None:
        first = replica.generate(ask(1, count=30, sampling=Sampling(temperature=0.0, stop=(own,))))
        second = replica.generate(ask(2, prompt(10, 1), 30))
        for answer, stop in ((await first, own), (await second, models)):
            length = min(text.index(token) for token in {stop, models}) + 1
            assert (answer.tokens.tolist(), answer.finish) == (text[:length], Finish.STOP)

    served(main, eos_token_ids=(models,))


def test_the_end_tokens_are_those_of_the_model_unless_told() -> None:
    model = fresh()
    model.generation_config.eos_token_id = [3, 5]
    with replicas(1, model) as (own,), replicas(1, model, eos_token_ids=(7,)) as (told,):
        assert (own.eos_token_ids, told.eos_token_ids) == ({3, 5}, {7})


def test_a_response_is_cut_where_the_cache_or_the_positions_of_the_model_end() -> None:
    async def cache(replica: TorchReplica) -> None:
        answer = await replica.generate(ask(1, prompt(40), 500))
        assert (answer.finish, len(answer.tokens)) == (Finish.LENGTH, 60)
        with pytest.raises(RequestRefused, match="100 tokens of context"):
            await replica.generate(ask(2, prompt(100)))

    async def positions(replica: TorchReplica) -> None:
        answer = await replica.generate(ask(1, prompt(200), 500))
        assert (answer.finish, len(answer.tokens)) == (Finish.LENGTH, 56)
        assert_drawn_from(tiny(), prompt(200), answer)

    served(cache, kv_tokens=100)
    served(positions)


# -- who joins, who leaves -------------------------------------------------------------------------------------------


def test_requests_that_join_in_the_middle_change_nothing() -> None:
    async def main(replica: TorchReplica) -> None:
        running = {}
        for i in range(24):
            running[i] = replica.generate(ask(i, prompt(1 + 4 * i, i), 10 + i))
            if i % 3 == 2:
                await running[i - 2]
        for i, future in running.items():
            assert (await future).tokens.tolist() == greedy(tiny(), prompt(1 + 4 * i, i), 10 + i)

    served(main, max_running=4)


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_an_aborted_turn_goes_on_from_its_tokens_on_any_replica(sampling: Sampling) -> None:
    async def main(first: TorchReplica, second: TorchReplica) -> None:
        whole = await first.generate(ask(1, count=150, sampling=sampling, session=99))
        for replica in (first, second):
            brake = Brake(first, 20)
            future = first.generate(ask(2, prompt(10, 1), 150, sampling, seed=10))
            await brake.reached()
            first.abort(2, "moved")
            part = await future
            brake.release()
            done = len(part.tokens)
            assert (part.finish, done) == (Finish.ABORT, 20)
            chunks = (prompt(10, 1), part.tokens)
            more = ask(3, chunks=chunks, count=150 - done, sampling=sampling, seed=10, offset=done, session=2)
            rest = await replica.generate(more)
            assert [*part.tokens.tolist(), *rest.tokens.tolist()] == whole.tokens.tolist()
            logprobs = np.concatenate((part.logprobs, rest.logprobs))
            np.testing.assert_allclose(logprobs, whole.logprobs, atol=1e-4)

    with replicas(2) as (first, second):
        asyncio.run(main(first, second))


def test_it_tells_how_far_its_requests_have_come() -> None:
    async def main(replica: TorchReplica) -> None:
        brake = Brake(replica, 80)
        running = replica.generate(ask(1, count=100, offset=5))
        waiting = replica.generate(ask(2, count=10))
        await brake.reached()
        first, second = replica.requests_in_flight()
        assert (first.id, first.context - first.written) == (1, 10 - 5)
        assert first.written == pytest.approx(80 + 5, abs=row_layout.WIDTH_MULTIPLE)
        assert 0 < first.computed <= first.context
        assert first.fresh == first.written - 5
        assert second == (2, 10, 0, 0, 0)
        brake.release()
        await asyncio.gather(running, waiting)
        assert replica.requests_in_flight() == []

    served(main, max_running=1)


def test_an_abort_of_one_does_not_disturb_the_others() -> None:
    async def main(replica: TorchReplica) -> None:
        brake = Brake(replica, 90)
        futures = [replica.generate(ask(i, prompt(5 + i, i), 100)) for i in range(9)]
        await brake.reached()
        for i in (0, 4, 8):
            replica.abort(i, "test")
        brake.release()
        for i, future in enumerate(futures):
            answer = await future
            text = greedy(tiny(), prompt(5 + i, i), 100)
            assert answer.tokens.tolist() == text[: len(answer.tokens)]
            assert answer.finish is (Finish.ABORT if i in (0, 4, 8) else Finish.LENGTH)

    served(main)


def test_a_waiting_request_is_aborted_without_tokens() -> None:
    async def main(replica: TorchReplica) -> None:
        running, waiting = replica.generate(ask(1, count=100)), replica.generate(ask(2))
        replica.abort(2, "test")
        replica.abort(77, "unknown ids are ignored")
        answer = await waiting
        assert (answer.finish, len(answer.tokens), answer.spans) == (Finish.ABORT, 0, ())
        assert len((await running).tokens) == 100

    served(main, max_running=1)


def test_tokens_of_a_cancelled_client_are_discarded_under_the_cause_of_the_abort() -> None:
    async def main(replica: TorchReplica) -> None:
        brake = Brake(replica, 5)
        gone = replica.generate(ask(1, count=200))
        await brake.reached()
        gone.cancel()
        replica.abort(1, "client_gone")
        brake.release()
        await replica.generate(ask(2, count=3))
        assert replica.discarded == {"client_gone": 5} == (await replica.stats()).discarded
        replica.generate(ask(3, count=4)).cancel()
        await replica.generate(ask(4, count=5))
        assert replica.discarded["unclaimed"] == 4

    served(main)


# -- the cache -------------------------------------------------------------------------------------------------------


def test_a_later_turn_computes_only_its_new_tokens() -> None:
    async def main(replica: TorchReplica) -> None:
        chunks: tuple[Tokens, ...] = ()
        before = 0
        for turn in range(4):
            chunks = (*chunks, prompt(20 + turn, turn))
            answer = await replica.generate(ask(turn, chunks=chunks, count=15, session=7))
            assert answer.tokens.tolist() == greedy(tiny(), np.concatenate(chunks), 15)
            chunks = (*chunks, answer.tokens)
            after = (await replica.stats()).prefilled
            # All of the first prompt but its last token; later also the last token of the turn before.
            assert after - before == 20 + turn - (turn == 0)
            before = after

    served(main)


def test_a_session_that_starts_anew_reuses_what_is_the_same() -> None:
    async def main(replica: TorchReplica) -> None:
        await replica.generate(ask(1, prompt(30), session=7))
        other = np.concatenate((prompt(30)[:12], prompt(20, 5)))
        answer = await replica.generate(ask(2, other, session=7))
        assert answer.tokens.tolist() == greedy(tiny(), other, 20)
        assert (await replica.stats()).prefilled == 29 + 31 - common_prefix_length(prompt(30), other)

    served(main)


@pytest.mark.parametrize("together", [True, False])
def test_members_of_a_group_compute_their_prompt_once(together: bool) -> None:
    async def main(replica: TorchReplica) -> None:
        requests = [ask(i, prompt(40), 10, WARM, group=4) for i in range(6)]
        if together:
            answers = await asyncio.gather(*[replica.generate(request) for request in requests])
        else:
            answers = [await replica.generate(request) for request in requests]
        assert (await replica.stats()).prefilled == 39
        assert len({answer.tokens.tobytes() for answer in answers}) == 6
        for answer in answers:
            assert_drawn_from(tiny(), prompt(40), answer)
        longer = np.concatenate((prompt(40), prompt(7, 9)))
        answer = await replica.generate(ask(9, longer, group=4))
        assert answer.tokens.tolist() == greedy(tiny(), longer, 20)
        assert (await replica.stats()).prefilled == 39 + 6

    served(main)


def test_groups_that_come_mixed_and_longer_than_the_budget_are_filled_bit_by_bit() -> None:
    async def main(replica: TorchReplica) -> None:
        texts = [np.concatenate((prompt(60, i % 3), prompt(1 + i // 3, i))) for i in range(12)]
        futures = [replica.generate(ask(i, text, 10, group=i % 3)) for i, text in enumerate(texts)]
        for text, future in zip(texts, futures, strict=True):
            assert (await future).tokens.tolist() == greedy(tiny(), text, 10)
        # Of each group the first computes 60 tokens, and everybody its own end; for the last few nobody waits.
        least = 3 * 60 + sum(i // 3 for i in range(12))
        assert least <= (await replica.stats()).prefilled < least + 9 * MIN_SHARED_TOKENS

    served(main, prefill_tokens=7)


def test_who_does_not_fit_waits_and_nobody_overtakes() -> None:
    async def main(replica: TorchReplica) -> None:
        order: list[int] = []
        futures = [replica.generate(ask(i, prompt(length, i), 10)) for i, length in enumerate((60, 60, 5))]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: order.append(i))
        await asyncio.gather(*futures)
        assert order == [0, 1, 2]

    served(main, kv_tokens=100)


def test_a_full_cache_preempts_and_loses_no_token() -> None:
    async def main(replica: TorchReplica) -> None:
        futures = [replica.generate(ask(i, prompt(20, i), 60)) for i in range(5)]
        for i, future in enumerate(futures):
            answer = await future
            assert answer.tokens.tolist() == greedy(tiny(), prompt(20, i), 60)
            assert_drawn_from(tiny(), prompt(20, i), answer)
        assert (await replica.stats()).prefilled > 5 * 19

    served(main, kv_tokens=150)


def test_an_idle_context_gives_way_the_oldest_first() -> None:
    async def main(replica: TorchReplica) -> None:
        for i in range(3):  # three contexts of 49 computed tokens, of which two fit beside a row of 72 cells
            await replica.generate(ask(i, prompt(40, i), 10))
        before = (await replica.stats()).prefilled
        for i, cached in ((2, 49), (0, 0)):
            chunks = (prompt(40, i), np.array(greedy(tiny(), prompt(40, i), 10), np.int32))
            await replica.generate(ask(10 + i, chunks=chunks, count=1, session=i))
            after = (await replica.stats()).prefilled
            assert after - before == 49 - cached
            before = after

    served(main, kv_tokens=170)


def cells(engine: Engine) -> int:
    """Tokens for which memory is allocated, in rows or in the prefix cache."""
    return engine._cache.cells + engine._prefix_cache.tokens


def run(engine: Engine, shapes: list[tuple[int, int]]) -> tuple[dict[int, EngineSequence], int]:
    """Write responses to prompts of these lengths; the sequences, and the most that was running at once."""
    for i, (length, count) in enumerate(shapes):
        engine.add(EngineSequence(ask(i, prompt(length, i), count), prompt(length, i), frozenset(), count, i))
    done: dict[int, EngineSequence] = {}
    most = 0
    with torch.inference_mode():
        while engine.admit_and_prefill(1 << 30):
            most = max(most, len(engine.running))
            assert cells(engine) <= engine.kv_tokens
            done |= {sequence.request.id: sequence for sequence in engine.advance(engine.compute())}
            engine.check()
    return done, most


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("long", [0, 15, 31])
def test_what_is_allocated_stays_within_kv_tokens_however_long_one_context_is(kind: str, long: int) -> None:
    shapes = [(200, 30) if i == long else (4 + i % 9, 8 + i % 5) for i in range(32)]
    engine = Engine(
        decoder_for(tiny(kind)), max_running=32, kv_tokens=1024, prefill_tokens=9999, keep_kv=False, version=0
    )
    done, most = run(engine, shapes)
    assert most > 3
    for i, sequence in done.items():
        assert sequence.tokens == greedy(tiny(kind), prompt(shapes[i][0], i), shapes[i][1])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_context_as_long_as_kv_tokens_is_served_alone(kind: str) -> None:
    engine = Engine(
        decoder_for(tiny(kind)), max_running=4, kv_tokens=101, prefill_tokens=9999, keep_kv=False, version=0
    )
    done, most = run(engine, [(90, 11), (100, 1), (3, 5)])
    assert most == 1
    assert [len(done[i].tokens) for i in range(3)] == [11, 1, 5]


def test_rows_that_stand_empty_give_way_to_idle_contexts() -> None:
    engine = Engine(decoder_for(tiny()), max_running=8, kv_tokens=1024, prefill_tokens=9999, keep_kv=False, version=0)
    _, most = run(engine, [(60, 10 + 2 * i) for i in range(8)])
    assert most == 8
    assert engine._cache.cells <= 512
    assert engine._prefix_cache.tokens >= 4 * 70


@given(data=st.data())
@settings(max_examples=25)
def test_whatever_comes_and_goes_the_engine_writes_what_generate_writes(data: Any) -> None:
    """Random arrivals, groups, turns, aborts, other weights and budgets, one step at a time."""
    drawn_rows = st.tuples(st.integers(0, 12), st.sampled_from([1, 2, 20, 45]), st.integers(1, 40), st.integers(0, 2))
    rows = data.draw(st.lists(drawn_rows, min_size=1, max_size=14), label="arrival, prompt, response, group")
    aborts = data.draw(st.dictionaries(st.integers(0, 40), st.integers(0, 13), max_size=4), label="step: request")
    loads = data.draw(st.sets(st.integers(1, 40), max_size=2), label="new weights at steps")
    engine = Engine(
        decoder_for(tiny()),
        max_running=data.draw(st.sampled_from([1, 3, 16]), label="max_running"),
        kv_tokens=data.draw(st.sampled_from([110, 250, 5000]), label="kv_tokens"),
        prefill_tokens=data.draw(st.sampled_from([3, 50, 5000]), label="prefill_tokens"),
        keep_kv=False,
        version=0,
    )
    common = prompt(60, 77)

    def text(i: int) -> Tokens:
        _, length, _, group = rows[i]
        return common[:length] if group else prompt(length, i % 3)

    done: dict[int, EngineSequence] = {}
    version = step = 0
    with torch.inference_mode():
        while len(done) < len(rows):
            for i, (arrival, _, count, group) in enumerate(rows):
                if arrival == step:
                    request = ask(i, text(i), count, group=group or 100 + i, session=i // 2)
                    engine.add(EngineSequence(request, text(i), frozenset(), count, i))
            if step in loads:
                version += 1
                engine.load(version, engine.decoder.pack(tiny(seed=version)))
            if (gone := engine.abort(aborts.get(step, -1))) is not None:
                done[gone.request.id] = gone
            if engine.admit_and_prefill(1 << 30):
                done |= {sequence.request.id: sequence for sequence in engine.advance(engine.compute())}
            engine.check()
            assert cells(engine) <= engine.kv_tokens
            step += 1
            assert step < 1000
    assert not engine.running
    for i, sequence in done.items():
        answer, count = sequence.generation(), rows[i][2]
        assert (len(answer.tokens) == count) == (answer.finish is Finish.LENGTH)
        assert_each_span_is_of_its_version(text(i), answer)


def test_rows_of_very_different_length_are_cut_into_blocks_and_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_layout, "MIN_SPLIT_SAVING", 1)
    monkeypatch.setattr(row_layout, "ROWS_PER_BLOCK", 2)
    shapes = [(5, 70), (200, 50), (40, 40), (90, 90), (7, 20), (150, 60), (66, 33), (3, 100), (180, 12)]
    engine = Engine(decoder_for(tiny()), max_running=9, kv_tokens=9999, prefill_tokens=9999, keep_kv=False, version=0)
    for i, (length, count) in enumerate(shapes):
        engine.add(EngineSequence(ask(i, prompt(length, i), count), prompt(length, i), frozenset(), count, i))
    done: list[EngineSequence] = []
    most = 0
    with torch.inference_mode():
        while engine.admit_and_prefill(99):
            assert engine._batch is not None
            most = max(most, len(engine._batch.row_blocks))
            done += engine.advance(engine.compute())
            engine.check()
    assert most >= 4
    for sequence in done:
        length, count = shapes[sequence.request.id]
        assert sequence.tokens == greedy(tiny(), prompt(length, sequence.request.id), count)


# -- pause, fence, weights -------------------------------------------------------------------------------------------


def test_a_pause_that_aborts_returns_partial_tokens_of_running_and_waiting_requests() -> None:
    async def main(replica: TorchReplica) -> None:
        brake = Brake(replica, 5)
        running, waiting = replica.generate(ask(1, count=200)), replica.generate(ask(2))
        await brake.reached()
        await replica.pause(1, PauseMode.ABORT)
        brake.release()
        assert (running.result().finish, len(running.result().tokens)) == (Finish.ABORT, 5)
        assert (waiting.result().finish, len(waiting.result().tokens)) == (Finish.ABORT, 0)
        await asyncio.sleep(0.02)
        assert replica.generated == 5
        replica.check()

    served(main, max_running=1)


def test_a_pause_that_drains_waits_for_who_is_there_and_not_for_who_comes() -> None:
    async def main(replica: TorchReplica) -> None:
        futures = [replica.generate(ask(id, count=60)) for id in (1, 2, 3)]
        draining = asyncio.ensure_future(replica.pause(1, PauseMode.DRAIN))
        await asyncio.sleep(0)
        futures.append(replica.generate(ask(4, epoch=1)))
        await draining
        assert [future.done() for future in futures] == [True, True, True, False]
        assert replica.generated == 180
        await replica.resume()
        assert len((await futures[3]).tokens) == 20

    served(main, max_running=2)


def test_a_pause_that_keeps_goes_on_where_it_stopped() -> None:
    async def main(replica: TorchReplica) -> None:
        brake = Brake(replica, 10)
        future = replica.generate(ask(1, count=120))
        await brake.reached()
        await replica.pause(1, PauseMode.KEEP)
        brake.release()
        await asyncio.sleep(0.02)
        stats = await replica.stats()
        assert (stats.paused, stats.running, stats.generated) == (True, 1, 10)
        await replica.resume()
        answer = await future
        assert answer.tokens.tolist() == greedy(tiny(), prompt(10, 1), 120)
        assert (await replica.stats()).prefilled == 9

    served(main)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_the_fence_refuses_an_older_epoch(mode: PauseMode) -> None:
    async def main(replica: TorchReplica) -> None:
        await replica.pause(5, mode)
        await replica.pause(3, mode)
        await replica.resume()
        with pytest.raises(StaleEpoch, match="epoch 4 is behind fence 5"):
            await replica.generate(ask(epoch=4))
        assert len((await replica.generate(ask(epoch=5))).tokens) == 20

    served(main)


def test_a_request_of_the_new_epoch_waits_for_the_resume() -> None:
    async def main(replica: TorchReplica) -> None:
        await replica.pause(3, PauseMode.ABORT)
        future = replica.generate(ask(epoch=3))
        await asyncio.sleep(0.02)
        stats = await replica.stats()
        assert (stats.paused, stats.waiting, stats.generated) == (True, 1, 0)
        await replica.resume()
        assert len((await future).tokens) == 20

    served(main)


def test_a_pause_that_a_resume_overtakes_fails_and_a_drain_can_be_cut_short() -> None:
    async def main(replica: TorchReplica) -> None:
        brake = Brake(replica, 5)
        first = replica.generate(ask(1, count=240))
        await brake.reached()
        draining = asyncio.ensure_future(replica.pause(1, PauseMode.DRAIN))
        await asyncio.sleep(0)
        await replica.resume()
        with pytest.raises(ReplicaError, match="resumed before"):
            await draining
        draining = asyncio.ensure_future(replica.pause(2, PauseMode.DRAIN))
        await asyncio.sleep(0)
        await replica.pause(3, PauseMode.ABORT)
        await draining
        brake.release()
        assert first.result().finish is Finish.ABORT

    served(main)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_keeping_through_new_weights_makes_two_spans_and_the_later_tokens_are_of_the_new_ones(kind: str) -> None:
    async def main(replica: TorchReplica) -> None:
        brake, done = Brake(replica, 20), 20
        future = replica.generate(ask(1, count=150))
        await brake.reached()
        await replica.pause(1, PauseMode.KEEP)
        await replica.load_weights(5, tiny(kind, seed=1))
        brake.release()
        await replica.resume()
        answer = await future
        assert answer.spans == (Span(4, done), Span(5, 150 - done))
        first, rest = answer.tokens[:done], answer.tokens[done:]
        assert first.tolist() == greedy(tiny(kind), prompt(10, 1), done)
        context = np.concatenate((prompt(10, 1), first))
        assert rest.tolist() == greedy(tiny(kind, seed=1), context, 150 - done)
        after = Generation(rest, answer.logprobs[done:], (Span(5, 150 - done),), Finish.LENGTH)
        assert_drawn_from(tiny(kind, seed=1), context, after)
        assert (await replica.stats()).version == 5

    served(main, model=tiny(kind), version=4)


def test_new_weights_drop_the_cache_unless_it_is_kept() -> None:
    async def prefilled(replica: TorchReplica) -> int:
        first = await replica.generate(ask(1, prompt(40), session=1))
        await replica.load_weights(1, None)
        await replica.generate(ask(2, chunks=(prompt(40), first.tokens), count=1, session=1))
        return (await replica.stats()).prefilled

    assert served(prefilled) == 39 + 59
    assert served(prefilled, keep_kv=True) == 39


def test_loading_without_a_pause_takes_effect_between_two_steps() -> None:
    async def main(replica: TorchReplica) -> None:
        brake = Brake(replica, 20)
        future = replica.generate(ask(1, count=150))
        await brake.reached()
        await replica.load_weights(1, None)
        brake.release()
        answer = await future
        assert answer.spans == (Span(0, 20), Span(1, 130))
        assert answer.tokens.tolist() == greedy(tiny(), prompt(10, 1), 150)

    served(main)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_a_trainer_does_to_the_module_is_seen_at_the_load_and_not_before(kind: str) -> None:
    model = fresh(kind)
    model.train()

    async def main(replica: TorchReplica) -> None:
        with torch.no_grad():
            for mine, other in zip(model.parameters(), tiny(kind, seed=1).parameters(), strict=True):
                mine.copy_(other)
        assert (await replica.generate(ask(1))).tokens.tolist() == greedy(tiny(kind), prompt(10, 1), 20)
        await replica.load_weights(1, None)
        assert (await replica.generate(ask(2))).tokens.tolist() == greedy(tiny(kind, seed=1), prompt(10, 2), 20)

    served(main, model=model)
    assert model.training
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_state_dict_is_loaded_and_the_module_of_the_trainer_left_alone(kind: str) -> None:
    model = fresh(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    async def main(replica: TorchReplica) -> None:
        await replica.load_weights(1, tiny(kind, seed=1).state_dict())
        assert (await replica.generate(ask(1))).tokens.tolist() == greedy(tiny(kind, seed=1), prompt(10, 1), 20)
        for wrong in ({"nothing.weight": torch.zeros(3)}, {}, "weights"):
            with pytest.raises(ReplicaError, match="could not load version 2"):
                await replica.load_weights(2, wrong)
        assert (await replica.generate(ask(2))).spans == (Span(1, 20),)

    served(main, model=model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_none_means_the_module_the_replica_was_made_of_also_after_a_state_dict(kind: str) -> None:
    model = fresh(kind)

    async def main(replica: TorchReplica) -> None:
        await replica.load_weights(1, tiny(kind, seed=1).state_dict())
        model.load_state_dict(tiny(kind, seed=2).state_dict())
        await replica.load_weights(2, None)
        assert (await replica.generate(ask(1))).tokens.tolist() == greedy(tiny(kind, seed=2), prompt(10, 1), 20)

    served(main, model=model)


def test_a_part_of_a_state_dict_changes_what_was_loaded_last() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for last in (tiny(seed=1), tiny(seed=1).state_dict()):
        expected = fresh(seed=1)
        expected.load_state_dict({name: tiny(seed=2).state_dict()[name]}, strict=False)

        async def main(replica: TorchReplica, last: object = last, expected: Any = expected) -> None:
            await replica.load_weights(1, tiny(seed=3).state_dict())
            await replica.load_weights(2, last)
            await replica.load_weights(3, {name: tiny(seed=2).state_dict()[name]})
            assert_drawn_from(expected, prompt(10, 1), await replica.generate(ask(1)))

        served(main)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_load_that_is_refused_leaves_nothing_behind(kind: str) -> None:
    good = {name: tensor.clone() for name, tensor in tiny(kind, seed=1).state_dict().items()}
    first, last = next(iter(good)), list(good)[-1]
    bigger = transformers.GPT2LMHeadModel if kind == "gpt2" else transformers.LlamaForCausalLM
    layers = {"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"intermediate_size": 64, "n_inner": 64}
    modules = [bigger(type(tiny(kind).config)(**(SIZES | other))) for other in layers]

    async def main(replica: TorchReplica) -> None:
        refused = [good | {"nothing.weight": torch.zeros(3)}, good | {last: torch.zeros(3, 5)}, *modules]
        for i, wrong in enumerate(refused):
            with pytest.raises(ReplicaError, match="could not load version 1"):
                await replica.load_weights(1, wrong)
            assert_drawn_from(tiny(kind), prompt(10, i), await replica.generate(ask(i, prompt(10, i))))
        # A part that changes nothing shows what the copy holds that the state dicts are loaded into.
        await replica.load_weights(2, {first: tiny(kind).state_dict()[first]})
        assert_drawn_from(tiny(kind), prompt(10, 9), await replica.generate(ask(9)))

    served(main, model=fresh(kind))


def test_an_adapter_that_is_refused_leaves_nothing_behind() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(fresh(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    good = {name: torch.randn_like(tensor) for name, tensor in peft.get_peft_model_state_dict(model).items()}
    first, last = next(iter(good)), list(good)[-1]

    async def main(replica: TorchReplica) -> None:
        for wrong in (good | {"nothing.lora_A.weight": torch.zeros(3)}, good | {last: torch.zeros(3, 5)}):
            with pytest.raises(ReplicaError, match="could not load version 1"):
                await replica.load_weights(1, wrong)
        await replica.load_weights(2, {first: good[first]})  # the other factors are zeros as at the start
        assert_drawn_from(tiny(), prompt(10, 1), await replica.generate(ask(1)))

    served(main, model=model)


def test_lora_is_merged_and_the_adapter_alone_can_be_published() -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(fresh(), peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets)).eval()

    async def main(replica: TorchReplica) -> None:
        assert (await replica.generate(ask(1))).tokens.tolist() == greedy(tiny(), prompt(10, 1), 20)
        trained = copy.deepcopy(model)
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.data = 0.3 * torch.randn_like(parameter)
        want = greedy(trained, prompt(10, 2), 20)
        assert want != greedy(tiny(), prompt(10, 2), 20)
        await replica.load_weights(1, peft.get_peft_model_state_dict(trained))
        answer = await replica.generate(ask(2))
        assert answer.tokens.tolist() == want
        assert_drawn_from(trained, prompt(10, 2), answer)
        await replica.load_weights(2, None)
        assert (await replica.generate(ask(3))).tokens.tolist() == greedy(tiny(), prompt(10, 3), 20)
        await replica.load_weights(3, trained)
        assert (await replica.generate(ask(4, prompt(10, 2)))).tokens.tolist() == want

    served(main, model=model)
    assert isinstance(decoder_for(model), PackedDecoder)


def test_it_sleeps_only_when_paused_and_empty_and_forgets_its_cache() -> None:
    async def main(replica: TorchReplica) -> None:
        with pytest.raises(RuntimeError, match="paused and empty"):
            await replica.sleep()
        await replica.generate(ask(1, prompt(40), session=1))
        frozen = replica.generate(ask(2, count=200))
        await replica.pause(1, PauseMode.KEEP)
        with pytest.raises(RuntimeError, match="paused and empty"):
            await replica.sleep()
        await replica.pause(1, PauseMode.ABORT)
        await frozen
        await replica.sleep()
        await replica.sleep()
        assert replica._engine._cache.keys.numel() == 0
        with pytest.raises(ReplicaError, match="asleep"):
            await replica.generate(ask(3, epoch=1))
        for call in (replica.resume(), replica.load_weights(1, None)):
            with pytest.raises(RuntimeError, match="wake it"):
                await call
        await replica.wake()
        before = await replica.stats()
        assert not before.paused
        await replica.generate(ask(4, prompt(40), session=1, epoch=1))
        assert (await replica.stats()).prefilled - before.prefilled == 39

    served(main)


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["kill", "close"])
def test_death_fails_every_call_in_flight_and_every_later_one(end: str) -> None:
    async def main(replica: TorchReplica) -> None:
        brake = Brake(replica, 6)
        calls: list[Awaitable[object]] = [replica.generate(ask(id, count=240)) for id in (1, 2, 3)]
        await brake.reached()
        written = replica.generated
        calls.append(asyncio.ensure_future(replica.pause(1, PauseMode.DRAIN)))
        await asyncio.sleep(0)
        replica.kill("test") if end == "kill" else replica.close()
        brake.release()
        calls += [
            replica.generate(ask(4, epoch=1)),
            replica.pause(2, PauseMode.ABORT),
            replica.resume(),
            replica.stats(),
        ]
        calls += [replica.load_weights(1, None), replica.wake(), replica.sleep()]
        for call in calls:
            with pytest.raises(ReplicaLost):
                await call
        replica.abort(1, "ignored")
        assert replica.discarded == {"test" if end == "kill" else "closed": written}
        await asyncio.sleep(0.05)
        assert replica.generated == written
        replica.check()

    served(main)


def test_an_error_in_the_engine_fails_everybody_and_hangs_nobody() -> None:
    async def main(replica: TorchReplica) -> None:
        brake = Brake(replica, 6)
        futures = [replica.generate(ask(id, count=200)) for id in (1, 2)]
        await brake.reached()

        def broken(*_: object) -> None:
            raise RuntimeError("out of luck")

        replica._engine.decoder.decode = broken  # type: ignore[assignment, method-assign]
        brake.release()
        for future in futures:
            with pytest.raises(ReplicaLost, match="out of luck"):
                await future
        with pytest.raises(ReplicaLost, match="out of luck"):
            await replica.pause(1, PauseMode.ABORT)
        with pytest.raises(ReplicaLost, match="out of luck"):
            await replica.generate(ask(3))

    served(main)


def test_weights_that_are_not_numbers_fail_the_requests_and_better_ones_serve_again() -> None:
    async def main(replica: TorchReplica) -> None:
        bad = fresh()
        bad.model.norm.weight.data.fill_(float("nan"))
        await replica.load_weights(1, bad)
        for sampling in (WARM, GREEDY):
            with pytest.raises(ReplicaError, match="version 1 gives logits that are not finite"):
                await replica.generate(ask(1, sampling=sampling))
        await replica.load_weights(2, tiny())
        assert (await replica.generate(ask(1))).tokens.tolist() == greedy(tiny(), prompt(10, 1), 20)

    served(main)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (ask(1, np.zeros(0, np.int32)), "0 tokens of context"),
        (ask(1, count=0), "0 to write"),
        (ask(1, np.array([3, VOCAB], np.int32)), "not 2 tokens of 0 to 96"),
        (ask(1, np.array([-1], np.int32)), "not 1 tokens of 0 to 96"),
        (ask(1, context=7), "not 7 tokens"),
        (ask(1, chunks=(), context=7), "not 7 tokens"),
    ],
)
def test_a_request_that_cannot_be_served_fails_alone(request_: Request, text: str) -> None:
    async def main(replica: TorchReplica) -> None:
        with pytest.raises(RequestRefused, match=text):
            await replica.generate(request_)
        first = replica.generate(ask(1))
        with pytest.raises(ReplicaError, match="already in flight"):
            await replica.generate(ask(1))
        assert len((await first).tokens) == 20

    served(main)


def test_bad_sizes_are_refused_by_name() -> None:
    for options in ({"max_running": 0}, {"kv_tokens": 1}, {"prefill_tokens": 0}, {"threads": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            TorchReplica(tiny(), **options)


def test_the_loop_runs_on_while_the_engine_computes_and_the_thread_ends_with_the_replica() -> None:
    async def main(replica: TorchReplica) -> int:
        future = asyncio.gather(*[replica.generate(ask(i, count=200)) for i in range(8)])
        ticks = 0
        while not future.done():
            await asyncio.sleep(0)
            ticks += 1
        await future
        return ticks

    assert served(main) > 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cadenza-r")]


def test_a_replica_outlives_the_loop_that_used_it() -> None:
    async def leave_it_running(replica: TorchReplica) -> None:
        replica.generate(ask(1, count=100))
        replica.generate(ask(2, count=3))
        await asyncio.sleep(0)

    async def use(replica: TorchReplica) -> None:
        assert len((await replica.generate(ask(3))).tokens) == 20
        await replica.pause(1, PauseMode.ABORT)
        assert (await replica.stats()).waiting == 0
        assert replica.discarded == {"loop_closed": replica.generated - 20}

    with replicas(1) as (replica,):
        brake = Brake(replica, 10)
        asyncio.run(leave_it_running(replica))
        assert brake._there.wait(30)
        brake.release()
        asyncio.run(use(replica))


# -- under the scheduler ---------------------------------------------------------------------------------------------


class Talk:
    """Three turns about nothing; a reply is worth its length."""

    def __init__(self) -> None:
        self.turn = 0

    async def reset(self, seed: int) -> str:
        return f"task {seed}: say something"

    async def step(self, action: str) -> tuple[Any, ...]:
        self.turn += 1
        return f" and {self.turn}?", float(len(action)), self.turn == 3, False, {}


@lru_cache
def talker() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**(SIZES | {"vocab_size": 256, "initializer_range": 0.05}))
    return transformers.Qwen2ForCausalLM(config).eval()


async def rows_of_batches(
    pool: list[TorchReplica], steps: int
) -> list[tuple[list[int], list[bool], list[float], list[int]]]:
    """Train steps that change nothing but the version: tokens, response mask, logprobs and versions of every row."""
    cluster = LocalCluster(pool)
    domains = {"talk": DomainConfig(env=Talk)}
    manager = EnvManagerConfig(domains=domains, slots=6, sampling=Sampling(max_tokens=12, stop=(10,)))
    config = RolloutConfig(batch_size=8, group_size=4, seed=5)
    scheduler = RolloutScheduler(config, manager, cluster.resources, cluster, "train")
    rows = []
    try:
        for step in range(steps):
            await scheduler.suspend()
            await cluster.sampler.load_weights(step + 1, None)
            await scheduler.resume()
            batch = await scheduler.get_batch(DataProto(meta_info={"global_step": step}), 8)
            assert batch is not None
            names = ("input_ids", "response_mask", "infer_logprobs", "versions")
            columns = [batch.batch.ragged(name) for name in names]
            for i in range(8):
                tokens, mask, logprobs, versions = (np.asarray(column[i]) for column in columns)
                rows.append((tokens.tolist(), mask.astype(bool).tolist(), logprobs.tolist(), versions.tolist()))
    finally:
        await scheduler.shutdown()
    scheduler.ledger.check()
    return rows


def test_a_scheduler_trains_on_the_tokens_that_the_engine_sampled() -> None:
    with replicas(2, talker(), kv_tokens=4096) as pool:
        rows = asyncio.run(asyncio.wait_for(rows_of_batches(pool, 3), 100))
        assert len(rows) == 24
        for number, (tokens, mask, logprobs, versions) in enumerate(rows):
            with torch.inference_mode():
                logits = talker()(torch.tensor(tokens)[None]).logits[0]
                want = torch.log_softmax(logits[:-1], -1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
            places = np.flatnonzero(mask)
            np.testing.assert_allclose(np.array(logprobs)[places], want.numpy()[places - 1], atol=1e-4)
            assert {versions[place] for place in places} == {number // 8 + 1}
        assert sum(replica.returned for replica in pool) == sum(sum(mask) for _, mask, _, _ in rows)


def test_one_seed_gives_one_run_however_many_replicas_serve_it() -> None:
    runs = []
    for count, running in ((1, 64), (2, 3)):
        with replicas(count, talker(), max_running=running) as pool:
            runs.append(asyncio.run(asyncio.wait_for(rows_of_batches(pool, 2), 100)))
    assert [row[:2] for row in runs[0]] == [row[:2] for row in runs[1]]
