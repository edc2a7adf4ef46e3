"""Optimizer and schedule: against closed forms and torch itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from cadenza.training.optim import NonFiniteGradient, OptimConfig, Optimizer


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def loss_of(module: nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.linspace(-1, 1, 6).view(2, 3) + step
    return (module(x) ** 2).sum()


def test_a_constant_schedule_rises_and_stays() -> None:
    config = OptimConfig(lr=0.4, warmup_steps=4)
    assert [config.lr_at(step) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_a_linear_schedule_falls_to_its_end() -> None:
    config = OptimConfig(lr=1.0, schedule="linear", warmup_steps=2, total_steps=6, min_lr_ratio=0.2)
    assert [config.lr_at(step) for step in range(9)] == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_a_cosine_schedule_is_half_a_wave() -> None:
    config = OptimConfig(lr=2.0, schedule="cosine", total_steps=10, min_lr_ratio=0.1)
    for step in range(15):
        wave = (1 + math.cos(math.pi * min(step, 10) / 10)) / 2
        assert config.lr_at(step) == pytest.approx(2.0 * (0.1 + 0.9 * wave))


def test_adamw_is_torch_s_adamw_with_the_scheduled_learning_rate() -> None:
    ours, theirs = model(), model()
    config = OptimConfig(lr=0.1, schedule="linear", total_steps=5, max_grad_norm=None, weight_decay=0.3)
    optimizer = Optimizer(ours.named_parameters(), config)
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    others = [p for p in theirs.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], weight_decay=0.3)
    for step in range(5):
        loss_of(ours, step).backward()
        update = optimizer.apply()
        for group in reference.param_groups:
            group["lr"] = 0.1 * (1 - step / 5)
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()
        assert update.lr == pytest.approx(0.1 * (1 - step / 5))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("limit", [0.5, 1e6, None])
def test_long_gradients_are_shortened_and_measured_before(limit: float | None) -> None:
    module = model()
    loss_of(module).backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    optimizer = Optimizer(module.named_parameters(), OptimConfig(optimizer="SGD", lr=1.0, max_grad_norm=limit))
    update = optimizer.apply()
    step = before - torch.cat([p.detach().flatten() for p in module.parameters()])
    assert update.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    expected = min(float(gradient.norm()), limit or math.inf)
    assert float(step.norm()) == pytest.approx(expected, rel=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    module = model()
    optimizer = Optimizer(module.named_parameters(), OptimConfig())
    (loss_of(module) * math.inf).backward()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(NonFiniteGradient):
        optimizer.apply()
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert optimizer.step == 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("AdamW", {"betas": (0.8, 0.9)}), ("SGD", {"momentum": 0.9}), ("SGD", {}), ("RMSprop", {}), ("Adagrad", {})],
)
def test_any_optimizer_of_torch_goes_on_from_its_saved_state(name: str, arguments: dict[str, Any]) -> None:
    config = OptimConfig(optimizer=name, optimizer_args=arguments, lr=0.01, warmup_steps=5)
    module = model()
    optimizer = Optimizer(module.named_parameters(), config)

    def steps(module: nn.Module, optimizer: Optimizer) -> None:
        for step in range(3):
            loss_of(module, step).backward()
            optimizer.apply()

    steps(module, optimizer)
    again = model(1)
    again.load_state_dict(module.state_dict())
    resumed = Optimizer(again.named_parameters(), config)
    resumed.load({key: tensor.clone() for key, tensor in optimizer.tensors().items()}, optimizer.step)
    steps(module, optimizer)
    steps(again, resumed)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_the_state_of_another_model_is_refused() -> None:
    optimizer = Optimizer(model().named_parameters(), OptimConfig())
    with pytest.raises(ValueError, match=r"'9\.weight', which the model does not train"):
        optimizer.load({"9.weight/exp_avg": torch.zeros(1)}, 1)


def test_frozen_parameters_are_left_alone_and_all_frozen_is_an_error() -> None:
    module = model()
    module.get_submodule("0").requires_grad_(False)
    before = module.get_parameter("0.weight").detach().clone()
    optimizer = Optimizer(module.named_parameters(), OptimConfig(weight_decay=0.5))
    loss_of(module).backward()
    optimizer.apply()
    assert torch.equal(before, module.get_parameter("0.weight"))
    with pytest.raises(ValueError, match="nothing to train"):
        Optimizer(module.requires_grad_(False).named_parameters(), OptimConfig())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"schedule": "cosine"}, "needs total_steps"),
        ({"schedule": "linear", "total_steps": 3, "warmup_steps": 3}, "must be above warmup_steps"),
        ({"optimizer": "Adamw"}, "torch.optim has no 'Adamw'"),
        ({"lr": -1.0}, "lr"),
        ({"optimizer_args": {"lr": 0.1}}, "optimizer_args.lr=0.1 does nothing: set lr itself"),
        ({"optimizer_args": {"weight_decay": 0.1}}, "optimizer_args.weight_decay=0.1 does nothing: set weight_decay"),
        ({"total_steps": 9}, "total_steps=9 does nothing with schedule 'constant'"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio=0.1 does nothing with schedule 'constant'"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**config)
