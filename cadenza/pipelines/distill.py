"""Distillation: the controller program.

    (validate) -> a batch of rows -> KL to the teacher's distributions at the tokens of the answers -> ...

A row has a `prompt` and a `response`, or `messages`, as for SFT. The teacher computes its distributions over the whole
vocabulary when they are needed.
"""

from __future__ import annotations

import numpy as np

from cadenza.data import DataProto
from cadenza.run.distill import DistillRoles, DistillRunConfig
from cadenza.run.example_pipeline import ExamplePipeline


class DistillPipeline(ExamplePipeline):
    """Distillation."""

    config_class, roles_class = DistillRunConfig, DistillRoles

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
        """The KL by token; success is the share of rows whose answers greedy decoding would write, and agreement the
        share of tokens at which student and teacher find the same one likeliest."""
        names = ("loss", "differs", "tokens", "exact")
        loss, differs, tokens, exact = (float(rows.batch.numpy(name).sum(dtype=np.float64)) for name in names)
        return {"loss": loss / tokens, "success": exact / len(rows), "agreement": 1 - differs / tokens}
