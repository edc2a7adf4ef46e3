"""The embedded engine against the ways to generate that transformers has, in tokens per CPU second.

    cadenza bench engine            the table
    cadenza bench engine --json     one line of JSON

All write the same 32 responses of a 1M-parameter Llama: prompts and responses of 8 to 128 tokens each, drawn once, at
temperature 1 and on one thread. Only requested tokens count: a padded batch continues until its longest response is
complete. Times are CPU times of the whole process, the best of a few rounds; the ways alternate, so that the load of
the machine is the same for all of them.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import logging
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from cadenza.inference.replica import Request, Sampling, Tokens
from cadenza.inference.torch_engine import TorchReplica

REQUESTS, SHORTEST, LONGEST, VOCAB = 32, 8, 128, 512
SAMPLING = Sampling()
ROUNDS = 5
SLOW_ROUNDS = 2
"""Rounds of the ways that take seconds."""
PAGES = {"page_size": 32, "num_blocks": 512, "max_batch_tokens": 512}
"""Cache of `generate_batch`; by default it takes most of the memory, which costs most of its time."""
TARGETS = {"sequential_ratio": 3.0, "padded_ratio": 1.3}


def make_model() -> Any:
    """A Llama of 1.05M parameters, random."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class EngineWorkload:
    """The requests, the same for every way to generate."""

    def __init__(self, model: Any, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.model = model
        self.lengths: list[int] = rng.integers(SHORTEST, LONGEST + 1, REQUESTS).tolist()
        sizes = rng.integers(SHORTEST, LONGEST + 1, REQUESTS)
        self.prompts: list[Tokens] = [rng.integers(1, VOCAB, size).astype(np.int32) for size in sizes]
        self.tokens = sum(self.lengths)
        self.options = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
        self._replica: TorchReplica | None = None
        self._ids = 0

    def sequential(self) -> None:
        """`generate`, one request after the other."""
        for prompt, length in zip(self.prompts, self.lengths, strict=True):
            ids = torch.from_numpy(prompt).long()[None]
            self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **self.options)

    def padded(self) -> None:
        """`generate` on one batch, padded on the left."""
        width = max(len(prompt) for prompt in self.prompts)
        ids = torch.zeros(REQUESTS, width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(self.prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        self.model.generate(ids, attention_mask=mask, max_new_tokens=max(self.lengths), **self.options)

    def continuous(self) -> None:
        """`generate_batch`, which has one length for all requests: each runs until the longest is complete."""
        transformers: Any = import_module("transformers")
        length = max(self.lengths)
        self.model.generate_batch(
            inputs=[prompt.tolist() for prompt in self.prompts],
            generation_config=transformers.GenerationConfig(max_new_tokens=length, eos_token_id=-1, **self.options),
            continuous_batching_config=transformers.ContinuousBatchingConfig(**PAGES),
            progress_bar=False,
        )

    def engine(self) -> None:
        """The embedded engine, through the replica protocol, with a logprob for every token."""
        if self._replica is None:
            self._replica = TorchReplica(self.model, eos_token_ids=(), max_running=REQUESTS)
        replica = self._replica

        async def main() -> int:
            answers = await asyncio.gather(*[replica.generate(request) for request in self._requests()])
            return sum(len(answer.tokens) for answer in answers)

        assert asyncio.run(main()) == self.tokens

    def close(self) -> None:
        if self._replica is not None:
            self._replica.close()

    def _requests(self) -> list[Request]:
        """Make requests of new sessions, so that nothing is cached from the last round."""
        requests = []
        for prompt, length in zip(self.prompts, self.lengths, strict=True):
            id = self._ids = self._ids + 1
            request = Request(
                id=id, chunks=(prompt,), context=len(prompt), max_tokens=length, sampling=SAMPLING, seed=7919 * id,
                offset=0, session=id, group=id, epoch=0,
            )  # fmt: skip
            requests.append(request)
        return requests


def measure() -> dict[str, float]:
    """Measure the tokens per CPU second of every way."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    workload = EngineWorkload(make_model())
    ways: dict[str, tuple[Callable[[], None], int]] = {
        "generate, one by one": (workload.sequential, SLOW_ROUNDS),
        "generate, padded batch": (workload.padded, ROUNDS),
        "generate_batch": (workload.continuous, SLOW_ROUNDS),
        "cadenza": (workload.engine, ROUNDS),
    }
    best = dict.fromkeys(ways, float("inf"))
    try:
        with torch.no_grad():
            for round in range(ROUNDS):
                for name, (run, rounds) in ways.items():
                    if round == 0 and run is not workload.sequential:
                        run()  # the first call initialises things
                    if round < rounds:
                        start = time.process_time()
                        run()
                        best[name] = min(best[name], time.process_time() - start)
    finally:
        workload.close()
        torch.set_num_threads(threads)
    return {name: workload.tokens / seconds for name, seconds in best.items()}


def engine(json: bool = False) -> int:
    """Print the figures; returns 1 when a ratio misses its target."""
    speeds = measure()
    ours = speeds["cadenza"]
    figures = {
        "tokens_per_cpu_second": ours,
        "sequential_ratio": ours / speeds["generate, one by one"],
        "padded_ratio": ours / speeds["generate, padded batch"],
    }
    if json:
        print(jsonlib.dumps({name: round(value, 2) for name, value in figures.items()}))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table("way", "tokens per CPU second", "cadenza is", title="32 responses of a 1M-parameter model")
        for name, speed in speeds.items():
            table.add_row(name, f"{speed:,.0f}", "" if name == "cadenza" else f"{ours / speed:.1f} times as fast")
        Console().print(table)
    return int(any(figures[name] < target for name, target in TARGETS.items()))


if __name__ == "__main__":
    raise SystemExit(engine())
