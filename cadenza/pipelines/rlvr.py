"""Reinforcement learning with verifiable rewards: the program of agentic.py over datasets.

    rows of every domain, by weight -> one answer each -> its reward -> whole groups -> advantages -> train -> publish

There is no env: a rollout asks the model and nothing else. Every answer is generated, scored and released on its own.
"""

from __future__ import annotations

from cadenza.pipelines.agentic import AgenticPipeline
from cadenza.run.rlvr_config import RlvrConfig


class RlvrPipeline(AgenticPipeline):
    """Reinforcement learning with verifiable rewards."""

    config_class = RlvrConfig
