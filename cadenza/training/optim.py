"""Optimizer, schedule and clipping: from gradients to one update, a pure function of the number of updates done.

    factor(step) = (step + 1) / warmup_steps                     while step < warmup_steps
    then with t = (step - warmup_steps) / (total_steps - warmup_steps), at most 1:
    constant  1        linear  1 - (1 - m) t        cosine  m + (1 - m) (1 + cos(pi t)) / 2        m = min_lr_ratio

An update whose gradient norm is not finite is refused before it touches a weight. One whose gradient is 0 has nothing
to say and is not made: momentum and weight decay alone must not move a policy. It is no step of the schedule either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from cadenza.config import Config
from cadenza.training.settings import refuse_unused

Schedule = Literal["constant", "linear", "cosine"]


class OptimConfig(Config):
    """How gradients become weights."""

    optimizer: str = "AdamW"
    """The name of a class in torch.optim."""
    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of that class, as `betas` or `momentum`."""
    lr: float = Field(default=1e-3, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Of matrices; norms and biases do not decay."""
    schedule: Schedule = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises. Updates without signal do not count, here and in `total_steps`."""
    total_steps: int | None = Field(default=None, gt=0)
    """Updates after which 'linear' and 'cosine' have reached their end. A batch is epochs * mini_batches updates."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """What is left of the learning rate at the end."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Longer gradients are shortened to this; None only measures them."""

    @model_validator(mode="after")
    def _consistent(self) -> OptimConfig:
        for name in ("lr", "weight_decay"):
            if name in self.optimizer_args:
                raise ValueError(f"optimizer_args.{name}={self.optimizer_args[name]!r} does nothing: set {name} itself")
        if self.schedule == "constant":
            refuse_unused(self, ("total_steps", "min_lr_ratio"), "with schedule 'constant'")
        elif self.total_steps is None:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps, the updates until its end")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps must be above warmup_steps {self.warmup_steps}, got {self.total_steps}")
        if not hasattr(torch.optim, self.optimizer):
            raise ValueError(f"torch.optim has no {self.optimizer!r}; take 'AdamW', 'SGD' or another of its classes")
        return self

    def lr_at(self, step: int) -> float:
        """The learning rate of the update after `step` updates."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps is None:
            return self.lr
        t = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        left = 1 - t if self.schedule == "linear" else (1 + math.cos(math.pi * t)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What became of one update."""

    grad_norm: float
    """Before clipping."""
    lr: float
    is_skipped: bool
    """The gradient was 0, and nothing has changed."""


class NonFiniteGradient(ArithmeticError):
    """The gradient norm is NaN or infinite."""


class Optimizer:
    """Updates the parameters that require gradients."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> None:
        self.config = config
        self.step = 0
        """Updates done."""
        self.named = {name: p for name, p in parameters if p.requires_grad}
        if not self.named:
            raise ValueError("nothing to train: no parameter requires a gradient")
        self._same_mesh = _same_mesh(self.named.values())
        groups = [
            {"params": [p for p in alike if (p.ndim >= 2) == decays], "weight_decay": config.weight_decay * decays}
            for alike in self._same_mesh
            for decays in (True, False)
        ]
        kind: Any = getattr(torch.optim, config.optimizer)
        arguments = {"lr": config.lr, **config.optimizer_args}
        sharded = any(hasattr(p, "device_mesh") for p in self.named.values())
        if config.optimizer in ("Adam", "AdamW", *(() if sharded else ("SGD", "Adagrad"))):
            arguments.setdefault("fused", True)
        self._optimizer: torch.optim.Optimizer = kind([g for g in groups if g["params"]], **arguments)

    def apply(self, count: float = 1.0) -> UpdateResult:
        """Make the update that the gradients, divided by `count`, ask for, if any, and clear them."""
        if count != 1.0:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad.div_(count)
        norm = self._norm()
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            raise NonFiniteGradient(f"the gradient norm is {grad_norm}")
        lr = self.config.lr_at(self.step)
        if not grad_norm:
            self.clear()
            return UpdateResult(grad_norm, lr, is_skipped=True)
        limit = self.config.max_grad_norm
        if limit is not None and grad_norm > limit:
            for alike in self._same_mesh:
                nn.utils.clip_grads_with_norm_(alike, limit, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.clear()
        self.step += 1
        return UpdateResult(grad_norm, lr, is_skipped=False)

    def clear(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def _norm(self) -> Tensor:
        """Of the gradient, over all shards."""
        norms = []
        for alike in self._same_mesh:
            norm: Any = nn.utils.get_total_norm([p.grad for p in alike if p.grad is not None])
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        total: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        return total

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's memory, by 'parameter name/its name'."""
        state = self._optimizer.state
        return {
            f"{name}/{buffer}": value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for name, parameter in self.named.items()
            for buffer, value in state.get(parameter, {}).items()
            if value is not None
        }

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Go on where another optimizer of the same parameters stopped."""
        state: dict[Tensor, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            name, _, buffer = key.rpartition("/")
            if name not in self.named:
                raise ValueError(f"the optimizer state has the parameter {name!r}, which the model does not train")
            state.setdefault(self.named[name], {})[buffer] = tensor.clone()
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        self.step = step


def _same_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters that can be computed with together: whole ones, and shards on the same ranks."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())
