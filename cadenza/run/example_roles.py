"""What learns from the rows of a dataset: the workers, and the role that holds them."""

from __future__ import annotations

from typing import Any

from cadenza.cluster import Cluster, dispatch
from cadenza.data import DataProto
from cadenza.run.example_config import ExampleConfig
from cadenza.run.roles import Roles
from cadenza.run.workers import LearnerWorker
from cadenza.training import Supervised
from cadenza.training.pairs import PairLearner


class ExampleWorker(LearnerWorker):
    """A model that learns from rows, and is measured on others."""

    learner: Supervised | PairLearner

    @dispatch("split")
    def evaluate(self, batch: DataProto) -> DataProto:
        """By row, what the pipeline needs to say how good the model is."""
        return self.learner.evaluate(batch)


class ExampleRoles(Roles):
    """The model that learns. A subclass starts its workers."""

    config: ExampleConfig
    actor: Cluster[Any]
