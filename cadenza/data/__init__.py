"""Data: what travels between the controller and the workers."""

from __future__ import annotations

from cadenza.data.proto import IS_PADDING, DataProto
from cadenza.data.ragged import Positions, Ragged
from cadenza.data.schema import TRAIN_BATCH, Column, Schema, SchemaError

__all__ = ["IS_PADDING", "TRAIN_BATCH", "Column", "DataProto", "Positions", "Ragged", "Schema", "SchemaError"]
