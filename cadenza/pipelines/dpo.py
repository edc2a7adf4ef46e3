"""Direct preference optimisation: the program of examples.py.

    (validate) -> a batch of pairs -> logprobs of the reference -> train -> ...

A row has a `prompt`, the answer that was `chosen` and the one that was `rejected`. The reference is the model that the
run begins with; under an adapter it is the model without it.
"""

from __future__ import annotations

from pathlib import Path

from cadenza.data import DataProto
from cadenza.pipelines.examples import ExampleProgram
from cadenza.run.dpo import DpoRoles, DpoRunConfig
from cadenza.run.example_rows import PREFERENCE
from cadenza.training.dpo import pair_loss


class DpoPipeline(ExampleProgram):
    """Direct preference optimisation."""

    config_class, roles_class, row_form = DpoRunConfig, DpoRoles, PREFERENCE
    config: DpoRunConfig
    roles: DpoRoles

    async def with_columns(self, batch: DataProto) -> DataProto:
        with self.timed("reference"):
            return await self.roles.with_reference(batch)

    async def evaluate(self, batch: DataProto) -> DataProto:
        return await super().evaluate(await self.roles.with_reference(batch))

    def held_out_metrics(self, rows: DataProto) -> dict[str, float]:
        """The loss by pair; success is the share of pairs that the policy prefers as they were labelled."""
        values, references = (rows.batch[name].view(-1, 2) for name in ("value", "reference"))
        loss = pair_loss(values, references, self.config.actor)
        metrics = dict(loss.metrics)
        return {"loss": float(loss.values.mean()), "success": metrics.pop("accuracy"), **metrics}

    # -- from where ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.roles.freeze_reference(self.run.path / "reference")

    async def restore(self, checkpoint: Path) -> None:
        await self.roles.load_reference(self.run.path / "reference")
        await super().restore(checkpoint)
