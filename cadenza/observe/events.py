"""The events of a schedule: what happened to which attempt, group or replica, and when.

| kind | subject | detail |
|---|---|---|
| open | group | task and version |
| issue, finish | attempt | slot; reward |
| trained, validated, filtered, surplus, stale, failed, cancelled | attempt | cause |
| ask, answer | attempt | replica; finish reason and tokens |
| suspend, suspended, resume, publish, shrink, expand, lost | sampler or replica | mode, version, devices, cause |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Event(NamedTuple):
    """One line of a schedule."""

    time: float
    kind: str
    subject: str
    detail: str


EventSink = Callable[[Event], None]
