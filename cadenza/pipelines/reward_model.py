"""Training of a reward model: the program of examples.py.

    (validate) -> a batch of pairs -> minus log P(chosen wins), by Bradley and Terry -> ...

A row has a `prompt`, the answer that was `chosen` and the one that was `rejected`. A checkpoint is a classifier of
transformers with one label: `AutoModelForSequenceClassification` loads it.
"""

from __future__ import annotations

from cadenza.algorithms import bradley_terry
from cadenza.data import DataProto
from cadenza.pipelines.examples import ExampleProgram
from cadenza.run.example_rows import PREFERENCE
from cadenza.run.reward_model import RewardModelConfig, RewardModelRoles


class RewardModelPipeline(ExampleProgram):
    """Training of a reward model."""

    config_class, roles_class, row_form = RewardModelConfig, RewardModelRoles, PREFERENCE

    def held_out_metrics(self, rows: DataProto) -> dict[str, float]:
        """The loss by pair; success is the share of pairs whose chosen answer scores higher."""
        loss = bradley_terry(*rows.batch["value"].view(-1, 2).unbind(1))
        metrics = dict(loss.metrics)
        return {"loss": float(loss.values.mean()), "success": metrics.pop("accuracy"), **metrics}
