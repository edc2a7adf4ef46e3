"""The ranks that train one model together, connected by torch.distributed.

Invariant: what one rank says here, all say, in the same order; so no rank waits for a word that never comes. A rank
that fails tells the others instead (`Peers.exchange`), and one that dies is heard of as `PeerLost`.
```
rank 0   Meeting ---- address, through the controller ----> all ranks: join -> Group
```
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from cadenza.errors import DeadlinePassed, PeerLost

dist: Any = import_module("torch.distributed")  # as Any: it does not say what it exports
T = TypeVar("T")

JOIN_SECONDS = 120.0
"""For all ranks to come to the meeting."""
TALK_SECONDS = 1800.0
"""For the slowest rank to come to a collective: shares of a batch may take very different times."""
BUCKET = 1 << 24
"""Numbers that are added up at once."""


class VersionsDiffer(RuntimeError):
    """Ranks that run on different versions of torch do not compute together."""


class Peers:
    """A rank alone. All that `Group` does between ranks is done here with one."""

    rank = 0
    """The number of its share of each batch."""
    size = 1
    """Shares of each batch."""
    number = 0
    """Among all ranks. Those that hold one copy of the model together have the same share."""

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks, by rank. They are pickled."""
        return [value]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each of the tensors becomes its sum over the ranks, the same bits on all of them."""

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Each of the tensors becomes that of rank 0."""

    def close(self) -> None:
        """Leave. The others are not told."""


@dataclass(frozen=True, slots=True)
class Address:
    """Of a meeting."""

    host: str
    port: int


class Meeting:
    """Where the ranks find each other. It is open as long as the object lives, in the process of rank 0."""

    def __init__(self, host: str) -> None:
        """`host` is what the others call this machine."""
        self.store: Any = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_SECONDS)
        )
        self.address = Address(host, self.store.port)


class Group(Peers):
    """Ranks in processes of their own, one group to a process."""

    def __init__(
        self,
        where: Meeting | Address,
        rank: int,
        members: Sequence[str],
        *,
        tensor_ranks: int = 1,
        seconds: float = JOIN_SECONDS,
    ) -> None:
        """Comes back when all have come. `members` are the names of the ranks, for messages; as many neighbours as
        `tensor_ranks` hold one copy of the model together."""
        self.number, self._members, self.tensor_ranks = rank, list(members), tensor_ranks
        self.rank, self.size = rank // tensor_ranks, len(members) // tensor_ranks
        ends = time.monotonic() + seconds
        store = where.store if isinstance(where, Meeting) else self._reach(where, seconds)
        self._greet(store, ends)
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with self._talking():
            dist.init_process_group(
                kind,
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=len(members),
                timeout=timedelta(seconds=TALK_SECONDS),
            )
            self._data, self._tensor = self._groups()
        self._store = store

    def exchange(self, value: T) -> list[T]:
        found: list[Any] = [None] * len(self._members)
        with self._talking():
            dist.all_gather_object(found, value)
        return found[self.number % self.tensor_ranks :: self.tensor_ranks]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        self._add_up(tensors, self._data)

    def add_up_copy(self, tensors: Sequence[Tensor]) -> None:
        """The same over the ranks that hold one copy of the model together."""
        self._add_up(tensors, self._tensor)

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._talking():
                dist.broadcast(flat, 0)
            _scatter(flat, bucket)

    def another(self) -> Any:
        """One more process group of all ranks, for whoever talks at the same time."""
        with self._talking():
            return dist.new_group(backend="gloo")

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _add_up(self, tensors: Sequence[Tensor], group: Any) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._talking():
                dist.all_reduce(flat, group=group)
            _scatter(flat, bucket)

    def _groups(self) -> tuple[Any, Any]:
        """Of the ranks with the same part of the model, and of those with the same share of the batch; None is all."""
        if self.tensor_ranks == 1:
            return None, None
        ranks = range(len(self._members))
        columns = [[r for r in ranks if r % self.tensor_ranks == i] for i in range(self.tensor_ranks)]
        rows = [[r for r in ranks if r // self.tensor_ranks == i] for i in range(self.size)]
        data, tensor = ([dist.new_group(members) for members in groups] for groups in (columns, rows))
        return data[self.number % self.tensor_ranks], tensor[self.rank]

    def _reach(self, where: Address, seconds: float) -> Any:
        try:
            return dist.TCPStore(
                where.host, where.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
            )
        except (RuntimeError, OSError) as error:  # RuntimeError is what torch.distributed raises
            raise DeadlinePassed(
                f"{self._members[self.number]} cannot reach {self._members[0]} at {where.host}:{where.port} within "
                f"{seconds:g} s: {error}"
            ) from error

    def _greet(self, store: Any, ends: float) -> None:
        """Wait for all ranks, and compare what they run on."""
        store.set(f"here/{self.number}", json.dumps({"torch": str(torch.__version__)}))
        for rank, member in enumerate(self._members):
            left = max(ends - time.monotonic(), 0.001)
            try:
                store.wait([f"here/{rank}"], timedelta(seconds=left))
            except RuntimeError as error:
                raise DeadlinePassed(
                    f"{self._members[self.number]} waits for {member} to train together with it, which did not come in "
                    f"time; does it run, and can it reach {self._members[0]}? ({error})"
                ) from error
            theirs, mine = json.loads(store.get(f"here/{rank}"))["torch"], str(torch.__version__)
            if theirs.partition("+")[0] != mine.partition("+")[0]:  # builds for other devices are fine
                raise VersionsDiffer(
                    f"torch {theirs} in {member}, but torch {mine} in {self._members[self.number]}: install the same "
                    "on all nodes"
                )

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(
                f"{self._members[self.number]} lost the connection to another rank, or one did not come within "
                f"{TALK_SECONDS:g} s: {error}"
            ) from error


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, at most BUCKET numbers together unless one alone has more."""
    bucket: list[Tensor] = []
    count = 0
    for tensor in tensors:
        if bucket and (count + tensor.numel() > BUCKET or _kind(tensor) != _kind(bucket[0])):
            yield bucket
            bucket, count = [], 0
        bucket.append(tensor)
        count += tensor.numel()
    if bucket:
        yield bucket


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


@torch.no_grad()
def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, tensor in zip(torch.split(flat, [tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view_as(tensor))
