"""Distillation: the program of examples.py.

    (validate) -> a batch of rows -> KL to the teacher's distributions at the tokens of the answers -> ...

A row has a `prompt` and a `response`, or `messages`, as for SFT. The teacher computes its distributions over the whole
vocabulary when they are needed.
"""

from __future__ import annotations

import numpy as np

from cadenza.data import DataProto
from cadenza.pipelines.examples import ExampleProgram
from cadenza.run.distill import DistillRoles, DistillRunConfig


class DistillPipeline(ExampleProgram):
    """Distillation."""

    config_class, roles_class = DistillRunConfig, DistillRoles

    def held_out_metrics(self, rows: DataProto) -> dict[str, float]:
        """The KL by token; success is the share of rows whose answers greedy decoding would write, and agreement the
        share of tokens at which student and teacher find the same one likeliest."""
        names = ("loss", "differs", "tokens", "exact")
        loss, differs, tokens, exact = (float(rows.batch.numpy(name).sum(dtype=np.float64)) for name in names)
        return {"loss": loss / tokens, "success": exact / len(rows), "agreement": 1 - differs / tokens}
