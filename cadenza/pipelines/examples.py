"""The program of every pipeline that learns from the rows of a dataset: sft.py, dpo.py, reward_model.py, distill.py.

    (validate) -> (checkpoint) -> a batch of rows -> columns that the loss needs besides -> train -> ...

What a row is and what the loss is differ: a pipeline names its config, its roles, whose workers learn, and its metrics.
"""

from __future__ import annotations

from cadenza.data import DataProto
from cadenza.run.example_pipeline import ExamplePipeline


class ExampleProgram(ExamplePipeline):
    """Learning from rows. A subclass has `held_out_metrics`, and names `config_class` and `roles_class`."""

    async def program(self) -> None:
        async for step in self.steps():
            await self.validate(step)
            await self.checkpoint(step)
            if (batch := self.next_batch()) is None:
                break
            batch = await self.with_columns(batch)
            with self.timed("train"):
                metrics = await self.roles.actor.train(batch)
            self.finish_step(batch, metrics)
        await self.validate(self.progress.step, last=True)

    async def with_columns(self, batch: DataProto) -> DataProto:
        """The batch with the columns that its loss needs besides those of its rows; as it is, unless overridden."""
        return batch
