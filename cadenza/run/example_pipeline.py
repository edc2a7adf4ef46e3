"""What pipelines that learn from the rows of a dataset share: batches, and validation on rows that are held out.

A position in the order of the rows is the number of rows that were trained, so a resumed run goes on with the next one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from cadenza.data import DataProto
from cadenza.datasets import DataConfig
from cadenza.run.example_config import ExampleConfig
from cadenza.run.example_roles import ExampleRoles
from cadenza.run.example_rows import SUPERVISED, ExampleRows, RowForm, open_rows
from cadenza.run.pipeline import Pipeline


class ExamplePipeline(Pipeline):
    """A pipeline whose batches come from the rows of a dataset. A subclass names what its rows are, and has a program;
    pipelines/examples.py has the usual one."""

    row_form: ClassVar[RowForm] = SUPERVISED
    config: ExampleConfig
    roles: ExampleRoles
    _rows: ExampleRows
    _held_out: ExampleRows | None = None

    @asynccontextmanager
    async def opened(self, checkpoint: Path | None) -> AsyncIterator[None]:
        settings = self.config.validation
        self._rows = self._open("data", self.config.data)
        try:
            if settings is not None:
                self._held_out = self._open("validation.data", settings.data)
            yield
        finally:
            self._rows.close()
            if self._held_out is not None:
                self._held_out.close()

    def next_batch(self) -> DataProto | None:
        """The next rows to train; None where they have run out, which ends the run."""
        with self.timed("read"):
            batch = self._rows.at(self.progress.samples, self.config.actor.batch_size)
        if batch is None:
            self.progress.ended = "the rows ran out"
        else:
            self.metrics["train/epoch"] = batch.meta_info["epoch"]
        return batch

    def finish_step(self, batch: DataProto, metrics: Mapping[str, float]) -> None:
        """The end of a train step: its metrics, and its rows."""
        self.add_metrics("train", metrics)
        self.end_step(samples=batch.meta_info["rows"], tokens=int(metrics["tokens"]))

    async def validate(self, step: int, *, last: bool = False) -> None:
        """Measure the model on the rows that are held out, if it is time."""
        settings, rows = self.config.validation, self._held_out
        if settings is None or rows is None or (step % settings.every and not last):
            return
        if self.progress.validated == step:  # before the run was resumed
            self.stop_at_target()
            return
        size = self.config.actor.batch_size
        with self.timed("validate"):
            found = [await self.evaluate(batch) for batch in rows.batches(size)]
        metrics = self.held_out_metrics(DataProto.concat(found))
        self.log(step, {f"val/{name}": value for name, value in metrics.items()})
        self.progress.validated = step
        self.record_loss(metrics["loss"])
        self.record_success(metrics["success"], choose=False)
        self.stop_at_target()

    async def evaluate(self, batch: DataProto) -> DataProto:
        """By row, what `held_out_metrics` needs."""
        found: DataProto = await self.roles.actor.evaluate(batch)
        return found

    def held_out_metrics(self, rows: DataProto) -> dict[str, float]:
        """What the columns of `evaluate` say of all rows together: `loss`, `success` and others."""
        raise NotImplementedError

    def _open(self, key: str, data: DataConfig) -> ExampleRows:
        return open_rows(key, data, self.row_form, self.roles.codec, seed=self.config.seed)
