"""Good settings of the strategies on the workloads that ship; `cadenza simulate` searches the others.

They were found by `cadenza simulate --search` and by hand on few seeds: good enough for a comparison.
"""

from __future__ import annotations

from cadenza.simulation.comparison.strategy import StrategySettings

TUNED_SETTINGS: dict[tuple[str, str, float], StrategySettings] = {
    **{(f"W{n}", "barrier", 0.0): StrategySettings() for n in range(1, 7)},
    ("W1", "queue", 0.0): StrategySettings(),
    ("W1", "cadenza", 0.0): StrategySettings(),
    ("W1", "cadenza", 1.0): StrategySettings(train_gpus=16, parts=8),
    ("W1", "cadenza", 2.0): StrategySettings(train_gpus=14, parts=8),
    ("W1", "cadenza", 4.0): StrategySettings(train_gpus=12, parts=8),
    ("W6", "cadenza", 1.0): StrategySettings(train_gpus=16, parts=8),
    ("W6", "cadenza", 2.0): StrategySettings(train_gpus=16, parts=8),
    ("W6", "cadenza", 4.0): StrategySettings(train_gpus=18, parts=8),
    ("W6", "group-queue", 1.0): StrategySettings(train_gpus=21, extra_members=2, extra_groups=16),
    ("W6", "group-queue", 2.0): StrategySettings(train_gpus=15, extra_members=1, extra_groups=16),
    ("W6", "group-queue", 4.0): StrategySettings(train_gpus=19, extra_members=2, extra_groups=16),
    ("W2", "queue", 0.0): StrategySettings(),
    ("W2", "oracle", 0.0): StrategySettings(),
    ("W2", "cadenza", 0.0): StrategySettings(),
    **{("W2", "admission", eta): StrategySettings(train_gpus=5, concurrency=40) for eta in (1.0, 2.0, 4.0, 8.0)},
    ("W2", "cadenza", 1.0): StrategySettings(train_gpus=5, parts=8),
    ("W2", "cadenza", 2.0): StrategySettings(train_gpus=5, parts=8),
    ("W2", "cadenza", 4.0): StrategySettings(train_gpus=5, concurrency=80, parts=8),
    ("W2x1024", "cadenza", 0.0): StrategySettings(),
    ("W2x1024", "cadenza", 1.0): StrategySettings(train_gpus=160, parts=8),
    ("W3", "queue", 0.0): StrategySettings(concurrency=48),
    ("W3", "oracle", 0.0): StrategySettings(concurrency=80),
    ("W3", "cadenza", 0.0): StrategySettings(),
    **{(name, "group-queue", 1.0): StrategySettings(train_gpus=8, extra_members=1) for name in ("W4", "W4:10")},
    **{(name, "cadenza", 1.0): StrategySettings(train_gpus=10, parts=8) for name in ("W4", "W4:10")},
    ("W5", "group-queue", 1.0): StrategySettings(train_gpus=8, extra_members=1, concurrency=12),
    ("W5", "cadenza", 1.0): StrategySettings(train_gpus=8, extra_members=1, parts=8),
}
"""Settings by workload, strategy and alpha."""
