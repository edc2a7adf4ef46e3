"""Logprobs, entropies and hidden states of the trained tokens, from a module and rows laid out for one pass.

Invariant: what comes out is what the module's own forward gives for each row alone. `PackedForward` is used where
a probe shows that it agrees with the module, and the module itself elsewhere. The head is computed where a trained
token is predicted and nowhere else, its softmax in float32, in chunks that bound the memory of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cadenza.algorithms import entropy as entropy_of
from cadenza.training.batching import micro_batches
from cadenza.training.models import base_model
from cadenza.training.packed_forward import PackedForward
from cadenza.training.packing import PackedRows, Packing, pack
from cadenza.training.strategy import ParallelStrategy, Precision
from cadenza.training.token_rows import Array, TokenRows

LOGITS_LIMIT = 1 << 24
"""64 MB in float32."""

EntropyNeed = Literal["none", "value", "gradient"]
Use = Literal["scores", "hidden"]
"""What passes are made for."""
LogitsFunction = Callable[[Tensor, slice, Tensor, Tensor | None], tuple[Tensor, ...]]
"""From the logits [p, V] of some slots that predict, which slots these are, and of k trained tokens the slot [k] among
them that predicts each and their numbers [k] in the pass, None for all in order: some values [k] each."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the policy says of the trained tokens."""

    logprobs: Tensor
    """[K] under the distribution that was sampled from: logits over the temperature"""
    entropy: Tensor | None
    """[K] of that distribution, in nats, if asked for"""


class Forward:
    """The forward pass of one module. The module may be changed by others (trained, adapted) but not rebuilt."""

    def __init__(
        self,
        module: nn.Module,
        *,
        precision: Precision = "fp32",
        logits_limit: int = LOGITS_LIMIT,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        """At most `logits_limit` logits exist at once; more come in chunks, and again in the backward pass. Where the
        `strategy` needs whole passes, the token budget is the only bound."""
        base: Any = base_model(module)
        strategy = strategy or ParallelStrategy()
        if not hasattr(base, "get_decoder") or not hasattr(base, "get_output_embeddings"):
            raise TypeError(f"{type(module).__name__} is not a language model or classifier of transformers")
        self.module = module
        self.precision: Precision = "fp32" if strategy.own_precision else precision
        self.offloaded = False
        """Whether the weights are elsewhere."""
        self.logits_limit = logits_limit
        self._base = base
        self._decoder: nn.Module = base.get_decoder()
        self._is_classifier = base.get_output_embeddings() is None
        """It has no logits of tokens: only its hidden states are asked for."""
        self._head: nn.Module = nn.Identity() if self._is_classifier else base.get_output_embeddings()
        self._vocab_size = int(base.config.get_text_config().vocab_size)
        self._packed_forward: PackedForward | None = None
        self._pass_count = strategy.pass_count
        self._lockstep = strategy.lockstep
        self._has_plain_head = not self._lockstep
        if not self._lockstep:
            self._probe()

    @property
    def packing(self) -> Packing:
        """The fastest layout that this module can do."""
        return "shared" if self._packed_forward is not None else "padded"

    def resolve(self, packing: Packing | Literal["auto"]) -> Packing:
        """The layout to use when `packing` is asked for."""
        if packing == "auto":
            return self.packing
        if packing != "padded" and self._packed_forward is None:
            config = self._base.config
            text = f"packing must not be {packing!r} for {config.model_type} models"
            if not _full_attention(config.get_text_config()):
                raise ValueError(f"{text}, whose layers do not all attend to the whole past: use 'padded' or 'auto'")
            try:
                right = self._is_exact_in(packing)
            except Exception as error:
                raise ValueError(f"{text}, which fail on it ({error}): use 'padded' or 'auto'") from error
            if not right:
                raise ValueError(f"{text}, which give other logits in it: use 'padded' or 'auto'")
        return packing

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def check_loaded(self) -> None:
        """Raise if the weights are elsewhere."""
        if self.offloaded:
            raise RuntimeError("the weights are offloaded: reload() them before anything is computed")

    def batches(self, rows: TokenRows, chosen: Array, budget: int, packing: Packing, use: Use) -> Iterator[PackedRows]:
        """The chosen rows as micro-batches; see `passes`."""
        return self.passes(rows, micro_batches(rows, chosen, budget, packing), packing, use)

    def passes(self, rows: TokenRows, batches: Sequence[Array], packing: Packing, use: Use) -> Iterator[PackedRows]:
        """The rows of each micro-batch, laid out. In the end, empty passes (and their backward passes, if there are
        any) for other ranks that have more of them."""
        self.check_loaded()
        passes = self._pass_count(len(batches))
        for batch in batches:
            yield pack(rows, batch, packing).to(self.device)
        for _ in range(passes - len(batches)):
            example = self._example("padded")
            result = self.hidden(example) if use == "hidden" else self.scores(example).logprobs
            if torch.is_grad_enabled():
                (result.sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    def hidden(self, packed: PackedRows) -> Tensor:
        """[K, D]: the hidden state before each trained token."""
        packed = packed.to(self.device)
        with self._autocast():
            return self._hidden(packed).index_select(0, packed.predicts)

    def scores(self, packed: PackedRows, *, temperature: float = 1.0, entropy: EntropyNeed = "none") -> TokenScores:
        """Logprobs, and on demand entropies, of the trained tokens."""
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0 to train, got {temperature}: greedy tokens have no gradient")
        packed = packed.to(self.device)

        def score(logits: Tensor, slots: slice, predicts: Tensor, tokens: Tensor | None) -> tuple[Tensor, ...]:
            targets = packed.targets if tokens is None else packed.targets[tokens]
            return _scores(logits, predicts, targets, temperature, entropy)

        logprobs, *entropies = self.over_logits(packed, score)
        return TokenScores(logprobs, entropies[0] if entropies else None)

    def over_logits(self, packed: PackedRows, function: LogitsFunction) -> tuple[Tensor, ...]:
        """What the function makes of the logits, [K] each. Long passes are given to it in chunks, whose logits are
        computed again in the backward pass."""
        packed = packed.to(self.device)
        chunk = max(self.logits_limit // self._vocab_size, 1)
        logits_of = self.logits_by_slot(packed)
        with self._autocast():
            if not self._has_plain_head or len(packed.reads) <= chunk:
                return function(logits_of(slice(None)), slice(None), packed.predicts, None)
            return _over_chunks(logits_of, function, packed, chunk)

    def logits_by_slot(self, packed: PackedRows) -> Callable[[slice], Tensor]:
        """Gives the logits [p, V] of some of the slots at `packed.reads`, so that not all of them need to exist."""
        packed = packed.to(self.device)
        with self._autocast():
            if not self._has_plain_head:
                return self._logits(packed).__getitem__
            hidden = self._hidden(packed)

        def logits_of(slots: slice) -> Tensor:
            with self._autocast():
                logits: Tensor = self._head(hidden[slots])
            return logits

        return logits_of

    @torch.no_grad()
    def logprobs(
        self, rows: TokenRows, chosen: Array, *, budget: int, packing: Packing, temperature: float = 1.0
    ) -> Array:
        """[K] float32: the logprobs of all trained tokens of the chosen rows, 0 for the others; without gradients."""
        values = np.zeros(len(rows.trained), np.float32)
        with evaluating(self.module):
            for packed in self.batches(rows, chosen, budget, packing, "scores"):
                scores = self.scores(packed, temperature=temperature)
                values[rows.numbers(packed.rows)] = scores.logprobs.float().cpu().numpy()
        return values

    def _hidden(self, packed: PackedRows) -> Tensor:
        """[P, D]: the hidden states at `packed.reads`."""
        if self._packed_forward is not None:
            return self._packed_forward.hidden(packed)
        states: Tensor
        if self._lockstep:
            states = self._base(**self._inputs(packed), output_hidden_states=True, logits_to_keep=1).hidden_states[-1]
        else:
            states = self._decoder(**self._inputs(packed)).last_hidden_state
        return states.flatten(0, 1)[torch.from_numpy(packed.reads).to(states.device)]

    def _logits(self, packed: PackedRows) -> Tensor:
        """[P, V] from the module as a whole, for models that do more with logits than their head."""
        if self._lockstep:
            return self._kept_logits(packed)
        logits: Tensor = self._base(**self._inputs(packed)).logits
        return logits.flatten(0, 1)[torch.from_numpy(packed.reads).to(logits.device)]

    def _kept_logits(self, packed: PackedRows) -> Tensor:
        """[P, V] with the head computed only in columns of the input in which something is read."""
        width = packed.grid.shape[1] if packed.packing == "padded" else len(packed.tokens)
        row, column = np.divmod(packed.reads, width)
        columns, kept = np.unique(column, return_inverse=True)
        keep = torch.from_numpy(columns).to(self.device)
        logits: Tensor = self._base(**self._inputs(packed), logits_to_keep=keep).logits
        return logits.flatten(0, 1)[torch.from_numpy(row * len(columns) + kept).to(logits.device)]

    def _inputs(self, packed: PackedRows) -> dict[str, Any]:
        if packed.packing == "padded":
            # Rows are padded on the right, where causal attention does not look: no mask is needed.
            return {"input_ids": packed.tokens.view(packed.grid.shape), "use_cache": False}
        return {
            "input_ids": packed.tokens[None],
            "position_ids": packed.positions[None],
            "attention_mask": packed.mask(next(self.module.parameters()).dtype),
            "use_cache": False,
        }

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self.precision == "fp32":
            yield
        else:
            with torch.autocast(self.device.type, torch.bfloat16):
                yield

    @torch.no_grad()
    def _probe(self) -> None:
        """Find out which short cuts give the module's own logits."""
        padded, shared = self._example("padded"), self._example("shared")
        with evaluating(self.module):
            expected = self._outputs(padded)[padded.predicts]
            self._has_plain_head = _is_close(self._head(self._hidden(padded))[padded.predicts], expected)
            if self._has_plain_head:
                self._packed_forward = PackedForward.of(self._decoder)
            if self._packed_forward is not None and not _is_close(
                self._head(self._hidden(shared))[shared.predicts], expected
            ):
                self._packed_forward = None

    @torch.no_grad()
    def _is_exact_in(self, packing: Packing) -> bool:
        """Whether the module itself gives the same logits in this layout: its mask and positions are all it needs."""
        layouts = self._example("padded"), self._example(packing)
        with evaluating(self.module):
            return _is_close(*(self._outputs(packed)[packed.predicts] for packed in layouts))

    def _outputs(self, packed: PackedRows) -> Tensor:
        """[P, V], or [P, D] of a classifier: what the module itself gives."""
        return self._hidden(packed) if self._is_classifier else self._logits(packed)

    def _example(self, packing: Packing) -> PackedRows:
        """Two rows that share a prefix."""
        ids = np.arange(11) % self._vocab_size
        ids[6:9] = ids[:3]
        offsets, firsts = np.array([0, 6, 11]), np.array([0, 5, 9])
        trained = np.array([1, 2, 3, 4, 5, 7, 8, 9, 10])
        rows = TokenRows(ids, offsets, trained, np.array([5, 4]), firsts, np.array([5, 4]))
        return pack(rows, np.arange(2), packing).to(self.device)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Dropout is off inside."""
    was_training = module.training
    if was_training:
        module.eval()
    try:
        yield
    finally:
        if was_training:
            module.train()


def _over_chunks(
    logits_of: Callable[[slice], Tensor], function: LogitsFunction, packed: PackedRows, chunk: int
) -> tuple[Tensor, ...]:
    """`Forward.over_logits` with the logits of `chunk` slots at a time."""
    order = packed.predicts.argsort(stable=True)
    predicts = packed.predicts[order]
    starts = torch.arange(0, len(packed.reads), chunk, device=predicts.device)
    bounds = [*torch.searchsorted(predicts, starts).tolist(), len(predicts)]
    found: list[tuple[Tensor, ...]] = []
    for start, first, last in zip(starts.tolist(), bounds, bounds[1:], strict=False):
        slots, its = slice(start, start + chunk), slice(first, last)

        def compute(slots: slice = slots, start: int = start, its: slice = its) -> tuple[Tensor, ...]:
            return function(logits_of(slots), slots, predicts[its] - start, order[its])

        found.append(checkpoint(compute, use_reentrant=False) if torch.is_grad_enabled() else compute())
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return tuple(torch.cat(values)[back] for values in zip(*found, strict=True))


def _scores(
    logits: Tensor, predicts: Tensor, targets: Tensor, temperature: float, entropy: EntropyNeed
) -> tuple[Tensor, ...]:
    """Of logits [P, V]: logprobs, and entropies if needed."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = logits.log_softmax(-1)
    # Flat, because torch gathers and adds up pairs of indices ten times slower.
    chosen = logprobs.view(-1).index_select(0, predicts * logits.shape[1] + targets)
    if entropy == "none":
        return (chosen,)
    known = logprobs if entropy == "gradient" else logprobs.detach()
    return chosen, entropy_of(known).index_select(0, predicts)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1.0))


def _full_attention(config: Any) -> bool:
    """Whether a mask of our own making is all that limits what a token sees."""
    if set(getattr(config, "attention_layers", ())) - {"global"}:  # GPT-Neo
        return False
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return set(layer_types) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None and getattr(config, "num_attention_heads", None) is not None
