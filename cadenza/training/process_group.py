"""The ranks that train one model together, connected by torch.distributed.

Invariant: what one rank says here, all say, in the same order; so no rank waits for a word that never comes. A rank
that fails tells the others instead (`RankGroup.all_gather`), and one that dies is heard of as `OtherRanksLost`.
```
rank 0   Rendezvous ---- address, through the controller ----> all ranks: join -> ProcessGroup
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

from cadenza.errors import DeadlinePassed, OtherRanksLost

dist: Any = import_module("torch.distributed")  # as Any: it does not say what it exports
T = TypeVar("T")

JOIN_SECONDS = 120.0
"""For all ranks to come to the rendezvous."""
COLLECTIVE_SECONDS = 1800.0
"""For the slowest rank to come to a collective: shares of a batch may take very different times."""
BUCKET_NUMBERS = 1 << 24
"""Numbers that are added up at once."""


class VersionsDiffer(RuntimeError):
    """Ranks that run on different versions of torch do not compute together."""


class RankGroup:
    """The ranks that train one model together. This base class is a rank alone: what `ProcessGroup` does between ranks
    is done here with one."""

    data_rank = 0
    """The number of its share of each batch."""
    data_size = 1
    """Shares of each batch."""
    global_rank = 0
    """Among all ranks. Those that hold one copy of the model together have the same share."""

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank. They are pickled."""
        return [value]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Each of the tensors becomes its sum over the ranks, the same bits on all of them."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Each of the tensors becomes that of rank 0."""

    def close(self) -> None:
        """Leave. The others are not told."""


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Where the `Rendezvous` of rank 0 listens."""

    host: str
    port: int


class Rendezvous:
    """Where the ranks find each other. It is open as long as the object lives, in the process of rank 0."""

    def __init__(self, host: str) -> None:
        """`host` is what the others call this machine."""
        self.store: Any = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_SECONDS)
        )
        self.address = RendezvousAddress(host, self.store.port)


class ProcessGroup(RankGroup):
    """Ranks in processes of their own, one group to a process."""

    def __init__(
        self,
        rendezvous: Rendezvous | RendezvousAddress,
        rank: int,
        members: Sequence[str],
        *,
        tensor_ranks: int = 1,
        seconds: float = JOIN_SECONDS,
    ) -> None:
        """Comes back when all have come. `members` are the names of the ranks, for messages; as many neighbours as
        `tensor_ranks` hold one copy of the model together."""
        self.global_rank, self._members, self.tensor_ranks = rank, list(members), tensor_ranks
        self.data_rank, self.data_size = rank // tensor_ranks, len(members) // tensor_ranks
        ends = time.monotonic() + seconds
        store = rendezvous.store if isinstance(rendezvous, Rendezvous) else self._connect(rendezvous, seconds)
        self._wait_for_ranks(store, ends)
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with self._as_ranks_lost():
            dist.init_process_group(
                kind,
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=len(members),
                timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            )
            self._data, self._tensor = self._new_groups()
        self._store = store

    def all_gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * len(self._members)
        with self._as_ranks_lost():
            dist.all_gather_object(found, value)
        return found[self.global_rank % self.tensor_ranks :: self.tensor_ranks]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        self._all_reduce(tensors, self._data)

    def all_reduce_tensor_ranks(self, tensors: Sequence[Tensor]) -> None:
        """The same over the ranks that hold one copy of the model together."""
        self._all_reduce(tensors, self._tensor)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._as_ranks_lost():
                dist.broadcast(flat, 0)
            _scatter(flat, bucket)

    def new_gloo_group(self) -> Any:
        """One more process group of all ranks, for what is sent at the same time."""
        with self._as_ranks_lost():
            return dist.new_group(backend="gloo")

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _all_reduce(self, tensors: Sequence[Tensor], group: Any) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._as_ranks_lost():
                dist.all_reduce(flat, group=group)
            _scatter(flat, bucket)

    def _new_groups(self) -> tuple[Any, Any]:
        """Of the ranks with the same shard of the model, and of those with the same share of the batch; None is all."""
        if self.tensor_ranks == 1:
            return None, None
        ranks = range(len(self._members))
        columns = [[r for r in ranks if r % self.tensor_ranks == i] for i in range(self.tensor_ranks)]
        rows = [[r for r in ranks if r // self.tensor_ranks == i] for i in range(self.data_size)]
        data, tensor = ([dist.new_group(members) for members in groups] for groups in (columns, rows))
        return data[self.global_rank % self.tensor_ranks], tensor[self.data_rank]

    def _connect(self, rendezvous: RendezvousAddress, seconds: float) -> Any:
        try:
            return dist.TCPStore(
                rendezvous.host,
                rendezvous.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            )
        except (RuntimeError, OSError) as error:  # RuntimeError is what torch.distributed raises
            raise DeadlinePassed(
                f"{self._members[self.global_rank]} cannot reach {self._members[0]} at "
                f"{rendezvous.host}:{rendezvous.port} within {seconds:g} s: {error}"
            ) from error

    def _wait_for_ranks(self, store: Any, ends: float) -> None:
        """Wait for all ranks, and compare what they run on."""
        store.set(f"here/{self.global_rank}", json.dumps({"torch": str(torch.__version__)}))
        for rank, member in enumerate(self._members):
            left = max(ends - time.monotonic(), 0.001)
            try:
                store.wait([f"here/{rank}"], timedelta(seconds=left))
            except RuntimeError as error:
                raise DeadlinePassed(
                    f"{self._members[self.global_rank]} waits for {member} to train together with it, which did not "
                    f"come in time; does it run, and can it reach {self._members[0]}? ({error})"
                ) from error
            theirs, mine = json.loads(store.get(f"here/{rank}"))["torch"], str(torch.__version__)
            if theirs.partition("+")[0] != mine.partition("+")[0]:  # builds for other devices are fine
                raise VersionsDiffer(
                    f"torch {theirs} in {member}, but torch {mine} in {self._members[self.global_rank]}: install the "
                    "same on all nodes"
                )

    @contextmanager
    def _as_ranks_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise OtherRanksLost(
                f"{self._members[self.global_rank]} lost the connection to another rank, or one did not come within "
                f"{COLLECTIVE_SECONDS:g} s: {error}"
            ) from error


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, at most BUCKET_NUMBERS numbers together unless one alone has more."""
    bucket: list[Tensor] = []
    count = 0
    for tensor in tensors:
        if bucket and (
            count + tensor.numel() > BUCKET_NUMBERS or _dtype_and_device(tensor) != _dtype_and_device(bucket[0])
        ):
            yield bucket
            bucket, count = [], 0
        bucket.append(tensor)
        count += tensor.numel()
    if bucket:
        yield bucket


def _dtype_and_device(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


@torch.no_grad()
def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for piece, tensor in zip(torch.split(flat, [tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(piece.view_as(tensor))
