"""Supervised fine-tuning: the program of examples.py.

    (validate) -> a batch of rows -> cross-entropy of the answers -> ...

A row has a `prompt` and a `response`, or `messages`, of which every message of the assistant trains.
"""

from __future__ import annotations

import numpy as np

from cadenza.data import DataProto
from cadenza.pipelines.examples import ExampleProgram
from cadenza.run.sft import SftConfig, SftRoles


class SftPipeline(ExampleProgram):
    """Supervised fine-tuning."""

    config_class, roles_class = SftConfig, SftRoles

    def held_out_metrics(self, rows: DataProto) -> dict[str, float]:
        """The loss by token; success is the share of rows whose answers greedy decoding would write."""
        names = ("loss", "tokens", "exact")
        loss, tokens, exact = (float(rows.batch.numpy(name).sum(dtype=np.float64)) for name in names)
        return {"loss": loss / tokens, "success": exact / len(rows)}
