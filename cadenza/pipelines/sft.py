"""Supervised fine-tuning: the controller program.

    (validate) -> a batch of rows -> cross-entropy of the answers -> ...

A row has a `prompt` and a `response`, or `messages`, of which every message of the assistant trains.
"""

from __future__ import annotations

import numpy as np

from cadenza.data import DataProto
from cadenza.run.example_pipeline import ExamplePipeline
from cadenza.run.sft import SftConfig, SftRoles


class SftPipeline(ExamplePipeline):
    """Supervised fine-tuning."""

    config_class, roles_class = SftConfig, SftRoles

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
        found: DataProto = await self.roles.actor.evaluate(batch)
        return found

    def held_out_metrics(self, rows: DataProto) -> dict[str, float]:
        """The loss by token; success is the share of rows whose answers greedy decoding would write."""
        names = ("loss", "tokens", "exact")
        loss, tokens, exact = (float(rows.batch.numpy(name).sum(dtype=np.float64)) for name in names)
        return {"loss": loss / tokens, "success": exact / len(rows)}
