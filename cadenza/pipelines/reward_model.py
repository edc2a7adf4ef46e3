"""Training of a reward model: the controller program.

    (validate) -> a batch of pairs -> minus log P(chosen wins), by Bradley and Terry -> ...

A row has a `prompt`, the answer that was `chosen` and the one that was `rejected`. A checkpoint is a classifier of
transformers with one label: `AutoModelForSequenceClassification` loads it.
"""

from __future__ import annotations

from cadenza.algorithms import bradley_terry
from cadenza.data import DataProto
from cadenza.run.example_pipeline import ExamplePipeline
from cadenza.run.example_rows import PREFERENCE
from cadenza.run.reward_model import RewardModelConfig, RewardModelRoles


class RewardModelPipeline(ExamplePipeline):
    """Training of a reward model."""

    config_class, roles_class, row_form = RewardModelConfig, RewardModelRoles, PREFERENCE

    async def program(self) -> None:
        async for step in self.steps():
            await self.validate(step)
            await self.checkpoint(step)
            if (batch := self.next_batch()) is None:
                break
            with self.timed("train"):
                metrics = await self.roles.actor.train(batch)
            self.finish_step(batch, metrics)
        await self.validate(self.progress.step, last=True)

    async def evaluate(self, batch: DataProto) -> DataProto:
        found: DataProto = await self.roles.actor.values(batch)
        return found

    def held_out_metrics(self, rows: DataProto) -> dict[str, float]:
        """The loss by pair; success is the share of pairs whose chosen answer scores higher."""
        loss = bradley_terry(*rows.batch["value"].view(-1, 2).unbind(1))
        metrics = dict(loss.metrics)
        return {"loss": float(loss.values.mean()), "success": metrics.pop("accuracy"), **metrics}
