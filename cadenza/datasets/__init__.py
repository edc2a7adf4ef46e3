"""Rows to train on: files, Hugging Face `datasets` and procedural tasks, read by number in a fixed order.

config -> source (rows by number) -> reader (fields, template, messages) -> order (epochs) -> (number, epoch, row)
"""

from cadenza.datasets.config import CurriculumConfig, DataConfig
from cadenza.datasets.dataset import Dataset
from cadenza.datasets.describe import DatasetReport, describe_dataset
from cadenza.datasets.errors import DataError, RowError
from cadenza.datasets.opening import open_dataset

__all__ = [
    "CurriculumConfig",
    "DataConfig",
    "DataError",
    "Dataset",
    "DatasetReport",
    "RowError",
    "describe_dataset",
    "open_dataset",
]
