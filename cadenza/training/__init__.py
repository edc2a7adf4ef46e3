"""Training: actor, critic and reference on torch, from batches to weights and checkpoints."""

from __future__ import annotations

from cadenza.training.actor import Actor, ActorConfig
from cadenza.training.checkpoint import CheckpointError, Checkpoints, TrainingState
from cadenza.training.critic import Critic, CriticConfig
from cadenza.training.estimator import Estimator, EstimatorConfig
from cadenza.training.learner import NonFiniteLoss
from cadenza.training.models import LoraConfig, ModelConfig, ModelNotFound, load_model
from cadenza.training.reference import Reference, ReferenceConfig
from cadenza.training.supervised import Supervised, SupervisedConfig, examples

__all__ = [
    "Actor",
    "ActorConfig",
    "CheckpointError",
    "Checkpoints",
    "Critic",
    "CriticConfig",
    "Estimator",
    "EstimatorConfig",
    "LoraConfig",
    "ModelConfig",
    "ModelNotFound",
    "NonFiniteLoss",
    "Reference",
    "ReferenceConfig",
    "Supervised",
    "SupervisedConfig",
    "TrainingState",
    "examples",
    "load_model",
]
