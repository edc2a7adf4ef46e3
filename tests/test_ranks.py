"""The processes that tests compute in: one that dies costs its own test."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from ranks import Ranks


def double(group: Any, number: int) -> int:
    return 2 * number


def die(group: Any, rank: int) -> None:
    if group.global_rank == rank:
        os.kill(os.getpid(), signal.SIGILL)


@pytest.mark.slow
def test_a_rank_that_dies_costs_its_call_and_the_next_one_has_new_processes() -> None:
    with Ranks(2) as ranks:
        with pytest.raises(ChildProcessError, match="rank 1 died, its exit code is -4"):
            ranks.run(die, 1)
        assert ranks.run(double, 4) == [8, 8]
