"""Weights on their way from a trainer to replicas in other processes.

Invariant: the controller passes references and no weights, and a replica has all tensors of a shipment or none. Tensors
stand one after the other in a stream of bytes, which is cut into buckets of at most `bucket_bytes`; both ends compute
the same cuts from the layout. Tensors that share their memory (tied embeddings) travel once.
```
one node:      trainer --put, a bucket at a time--> object store --read in place--> every replica of the node
more nodes:    trainer --broadcast, a bucket at a time--> all replicas               (gloo)
```
The object store works across nodes too, one copy for each, and is what is used when a broadcast fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from cadenza.inference.replica import ReplicaError
from cadenza.off_loop import as_async

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]
BUCKET_BYTES = 64 << 20
BROADCAST_SECONDS = 60.0
"""For everybody to join, and for each bucket."""


class ShipmentLost(ReplicaError):
    """Weights did not arrive, or not all of them; those from before are still whole."""


class Entry(NamedTuple):
    """A tensor of a layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    same_as: str | None
    """The tensor before it whose memory it shares."""


class Piece(NamedTuple):
    """A part of a tensor, in a bucket."""

    entry: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What travels, in which order."""

    entries: tuple[Entry, ...]
    bucket_bytes: int

    @classmethod
    def of(cls, state: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> Layout:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        entries = []
        seen: dict[Any, str] = {}
        for name, tensor in state.items():
            size = tensor.numel() * tensor.element_size()
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            first = seen.setdefault(key, name) if size else name
            same_as = None if first == name else first
            entries.append(Entry(name, str(tensor.dtype), tuple(tensor.shape), 0 if same_as else size, same_as))
        return cls(tuple(entries), bucket_bytes)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def buckets(self) -> Iterator[list[Piece]]:
        """The cuts."""
        bucket: list[Piece] = []
        room = self.bucket_bytes
        for number, entry in enumerate(self.entries):
            start = 0
            while start < entry.bytes:
                stop = min(start + room, entry.bytes)
                bucket.append(Piece(number, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    yield bucket
                    bucket, room = [], self.bucket_bytes
        if bucket:
            yield bucket

    def packed(self, state: Mapping[str, Tensor]) -> Iterator[list[Bytes]]:
        """The bytes of each bucket. On the CPU they are those of the tensors themselves."""
        kept: tuple[int, Bytes] | None = None
        for bucket in self.buckets():
            pieces = []
            for piece in bucket:
                if kept is None or kept[0] != piece.entry:
                    kept = piece.entry, _bytes_of(state[self.entries[piece.entry].name])
                pieces.append(kept[1][piece.start : piece.stop])
            yield pieces

    def unpacked(self, received: Iterable[Sequence[Bytes]]) -> dict[str, Tensor]:
        """The tensors in buckets that come in order. What lies in one piece is not copied, and must not be changed."""
        parts: list[list[Bytes]] = [[] for _ in self.entries]
        arriving = iter(received)
        for number, bucket in enumerate(self.buckets()):
            pieces = next(arriving, None)
            sizes = [piece.stop - piece.start for piece in bucket]
            if pieces is None or [len(piece) for piece in pieces] != sizes:
                got = None if pieces is None else [len(piece) for piece in pieces]
                raise ShipmentLost(f"bucket {number} of the weights should have pieces of {sizes} bytes, got {got}")
            for piece, data in zip(bucket, pieces, strict=True):
                parts[piece.entry].append(data)
        tensors: dict[str, Tensor] = {}
        for entry, pieces in zip(self.entries, parts, strict=True):
            if entry.same_as is not None:
                tensors[entry.name] = tensors[entry.same_as]
            else:
                tensors[entry.name] = _tensor_of(pieces, entry)
        return tensors


@dataclass(frozen=True, slots=True)
class Stored:
    """Weights in the object store of Ray."""

    id: str
    layout: Layout
    refs: tuple[Any, ...]
    """One for each bucket."""

    @classmethod
    def put(cls, state: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> Stored:
        layout = Layout.of(state, bucket_bytes)
        ray: Any = import_module("ray")
        return cls(uuid4().hex, layout, tuple(ray.put(pieces) for pieces in layout.packed(state)))

    def receive(self) -> dict[str, Tensor]:
        """The tensors, which lie in memory that all processes of the node share."""
        ray: Any = import_module("ray")
        try:
            return self.layout.unpacked(ray.get(ref) for ref in self.refs)
        except ray.exceptions.RayError as error:
            raise _gone(error) from error

    async def fetch(self) -> dict[str, Tensor]:
        """`receive` for whoever has a loop, in which Ray must be awaited."""
        ray: Any = import_module("ray")
        try:
            buckets = [await ref for ref in self.refs]
        except ray.exceptions.RayError as error:
            raise _gone(error) from error
        tensors: dict[str, Tensor] = await as_async(self.layout.unpacked)(buckets)
        return tensors


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Weights that one process sends to others, all at once. It has rank 0 among them."""

    id: str
    layout: Layout
    line: str
    """Where they meet: host and port of the sender, and a number. Those who met there before meet no more."""
    rank: int
    size: int

    def next(self) -> Broadcast:
        """Of other weights of the same layout, to the same others."""
        return replace(self, id=uuid4().hex)

    def to(self, rank: int) -> Broadcast:
        """As a receiver takes it."""
        return replace(self, rank=rank)

    def send(self, state: Mapping[str, Tensor], lines: Lines) -> None:
        torch: Any = import_module("torch")
        group = lines.join(self)
        for pieces in self.layout.packed(state):
            _passed(group, torch.from_numpy(np.concatenate(pieces)))

    def receive(self, lines: Lines) -> dict[str, Tensor]:
        group = lines.join(self)
        return self.layout.unpacked(self._arriving(group))

    def _arriving(self, group: Any) -> Iterator[list[Bytes]]:
        torch: Any = import_module("torch")
        for bucket in self.layout.buckets():
            ends = np.cumsum([piece.stop - piece.start for piece in bucket])
            data = torch.empty(int(ends[-1]), dtype=torch.uint8)
            _passed(group, data)
            yield np.split(data.numpy(), ends[:-1])


class Lines:
    """The meetings of this process with others. A process group of its own for each, beside those of a trainer."""

    def __init__(self) -> None:
        self._line = ""
        self._group: Any = None
        self._store: Any = None
        self._numbers = count()

    def open(self, layout: Layout, receivers: int, host: str | None = None) -> Broadcast:
        """A broadcast from here. `host` is what others call this node; None asks Ray."""
        distributed: Any = import_module("torch.distributed")
        host = host or str(import_module("ray").util.get_node_ip_address())
        if self._store is None:
            self._store = distributed.TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=BROADCAST_SECONDS)
            )
        line = f"{host}:{self._store.port}/{next(self._numbers)}"
        return Broadcast(uuid4().hex, layout, line, 0, receivers + 1)

    def join(self, broadcast: Broadcast) -> Any:
        """The process group of a line; waits for everybody the first time."""
        if self._line == broadcast.line:
            return self._group
        distributed: Any = import_module("torch.distributed")
        patience = timedelta(seconds=BROADCAST_SECONDS)
        address, _, number = broadcast.line.partition("/")
        host, _, port = address.rpartition(":")
        self._line, self._group = "", None
        store = self._store or distributed.TCPStore(host, int(port), is_master=False, timeout=patience)
        prefixed = distributed.PrefixStore(number, store)
        try:
            self._group = distributed.ProcessGroupGloo(prefixed, broadcast.rank, broadcast.size, patience)
        except RuntimeError as error:
            raise ShipmentLost(f"{broadcast.size} processes did not meet at {address}: {error}") from error
        self._line = broadcast.line
        return self._group


def _gone(error: Exception) -> ShipmentLost:
    return ShipmentLost(f"weights are gone from the object store: {' '.join(str(error).split())}")


def _passed(group: Any, data: Tensor) -> None:
    """A bucket from rank 0 to all others."""
    options: Any = import_module("torch.distributed").BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([data], options).wait(timedelta(seconds=BROADCAST_SECONDS))
    except RuntimeError as error:
        raise ShipmentLost(f"a bucket of weights was not passed on: {error}") from error


def _bytes_of(tensor: Tensor) -> Bytes:
    torch: Any = import_module("torch")
    flat: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _tensor_of(pieces: Sequence[Bytes], entry: Entry) -> Tensor:
    torch: Any = import_module("torch")
    kind = getattr(torch, entry.dtype.removeprefix("torch."))
    if not pieces:
        return torch.empty(entry.shape, dtype=kind)  # type: ignore[no-any-return]
    data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if data.__array_interface__["data"][0] % 16:
        data = data.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it must not be written to: it is read
        flat = torch.from_numpy(data)
    return flat.view(kind).reshape(entry.shape)  # type: ignore[no-any-return]
