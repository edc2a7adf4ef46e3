"""Silence for the log of the scheduler while faults are injected on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cadenza.rollout.failures import logger


@contextmanager
def quiet_log() -> Iterator[None]:
    """Drop what the scheduler logs: its events say the same, and the faults are intended."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
