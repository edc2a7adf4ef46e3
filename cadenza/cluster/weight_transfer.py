"""Transfer of weights from a trainer to replicas in other processes.

Invariant: the controller passes references and no weights, and a replica has all tensors of a transfer or none. Tensors
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
from cadenza.off_loop import COMPUTE_POOL, as_async

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]
BUCKET_BYTES = 64 << 20
BROADCAST_SECONDS = 60.0
"""For all processes to join a broadcast, and for each bucket."""


class WeightTransferError(ReplicaError):
    """Weights did not arrive, or not all of them; those from before are still whole."""


class TensorEntry(NamedTuple):
    """One tensor of a `WeightLayout`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    same_as: str | None
    """The tensor before it whose memory it shares."""


class TensorSlice(NamedTuple):
    """A range of a tensor's bytes, in a bucket."""

    entry: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The tensors of a weight transfer in their order, and how their bytes are cut into buckets."""

    entries: tuple[TensorEntry, ...]
    bucket_bytes: int

    @classmethod
    def of(cls, state: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> WeightLayout:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        entries = []
        seen: dict[Any, str] = {}
        for name, tensor in state.items():
            size = tensor.numel() * tensor.element_size()
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            first = seen.setdefault(key, name) if size else name
            same_as = None if first == name else first
            entries.append(TensorEntry(name, str(tensor.dtype), tuple(tensor.shape), 0 if same_as else size, same_as))
        return cls(tuple(entries), bucket_bytes)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def buckets(self) -> Iterator[list[TensorSlice]]:
        """The slices of each bucket."""
        bucket: list[TensorSlice] = []
        free_bytes = self.bucket_bytes
        for number, entry in enumerate(self.entries):
            start = 0
            while start < entry.bytes:
                stop = min(start + free_bytes, entry.bytes)
                bucket.append(TensorSlice(number, start, stop))
                free_bytes -= stop - start
                start = stop
                if not free_bytes:
                    yield bucket
                    bucket, free_bytes = [], self.bucket_bytes
        if bucket:
            yield bucket

    def pack(self, state: Mapping[str, Tensor]) -> Iterator[list[Bytes]]:
        """The bytes of each bucket. On the CPU they are those of the tensors themselves."""
        cached: tuple[int, Bytes] | None = None
        for bucket in self.buckets():
            pieces = []
            for piece in bucket:
                if cached is None or cached[0] != piece.entry:
                    cached = piece.entry, _bytes_of(state[self.entries[piece.entry].name])
                pieces.append(cached[1][piece.start : piece.stop])
            yield pieces

    def unpack(self, received: Iterable[Sequence[Bytes]]) -> dict[str, Tensor]:
        """The tensors in buckets that come in order. What lies in one piece is not copied, and must not be changed."""
        pieces_by_entry: list[list[Bytes]] = [[] for _ in self.entries]
        buckets_received = iter(received)
        for number, bucket in enumerate(self.buckets()):
            pieces = next(buckets_received, None)
            sizes = [piece.stop - piece.start for piece in bucket]
            if pieces is None or [len(piece) for piece in pieces] != sizes:
                got = None if pieces is None else [len(piece) for piece in pieces]
                raise WeightTransferError(
                    f"bucket {number} of the weights should have pieces of {sizes} bytes, got {got}"
                )
            for piece, data in zip(bucket, pieces, strict=True):
                pieces_by_entry[piece.entry].append(data)
        tensors: dict[str, Tensor] = {}
        for entry, pieces in zip(self.entries, pieces_by_entry, strict=True):
            if entry.same_as is not None:
                tensors[entry.name] = tensors[entry.same_as]
            else:
                tensors[entry.name] = _tensor_of(pieces, entry)
        return tensors


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights in the object store of Ray."""

    id: str
    layout: WeightLayout
    refs: tuple[Any, ...]
    """One for each bucket."""

    @classmethod
    def put(cls, state: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> StoredWeights:
        layout = WeightLayout.of(state, bucket_bytes)
        ray: Any = import_module("ray")
        return cls(uuid4().hex, layout, tuple(ray.put(pieces) for pieces in layout.pack(state)))

    async def fetch(self) -> dict[str, Tensor]:
        """The tensors, which lie in memory that all processes of the node share."""
        ray: Any = import_module("ray")
        try:
            buckets = [await ref for ref in self.refs]
        except ray.exceptions.RayError as error:
            text = f"weights are gone from the object store: {' '.join(str(error).split())}"
            raise WeightTransferError(text) from error
        tensors: dict[str, Tensor] = await as_async(self.layout.unpack, COMPUTE_POOL)(buckets)
        return tensors


@dataclass(frozen=True, slots=True)
class WeightBroadcast:
    """Weights that one process, which has rank 0, sends to all other ranks at once."""

    id: str
    layout: WeightLayout
    rendezvous: str
    """Where the processes meet: host and port of the sender, and a number. A new number makes a new process group."""
    rank: int
    size: int

    def with_new_id(self) -> WeightBroadcast:
        """A broadcast of other weights with the same layout, to the same receivers."""
        return replace(self, id=uuid4().hex)

    def for_rank(self, rank: int) -> WeightBroadcast:
        """The broadcast as the receiver with this rank takes it."""
        return replace(self, rank=rank)

    def send(self, state: Mapping[str, Tensor], groups: BroadcastGroups) -> None:
        torch: Any = import_module("torch")
        group = groups.join(self)
        for pieces in self.layout.pack(state):
            _broadcast_bucket(group, torch.from_numpy(np.concatenate(pieces)))

    def receive(self, groups: BroadcastGroups) -> dict[str, Tensor]:
        group = groups.join(self)
        return self.layout.unpack(self._received_buckets(group))

    def _received_buckets(self, group: Any) -> Iterator[list[Bytes]]:
        torch: Any = import_module("torch")
        for bucket in self.layout.buckets():
            ends = np.cumsum([piece.stop - piece.start for piece in bucket])
            data = torch.empty(int(ends[-1]), dtype=torch.uint8)
            _broadcast_bucket(group, data)
            yield np.split(data.numpy(), ends[:-1])


class BroadcastGroups:
    """The gloo process group in which this process broadcasts weights, apart from those of a trainer: a new one for
    each rendezvous."""

    def __init__(self) -> None:
        self._rendezvous = ""
        self._group: Any = None
        self._store: Any = None
        self._numbers = count()

    def open(self, layout: WeightLayout, receivers: int, host: str | None = None) -> WeightBroadcast:
        """A broadcast from this process. `host` is the address of this node for the receivers; None asks Ray."""
        distributed: Any = import_module("torch.distributed")
        host = host or str(import_module("ray").util.get_node_ip_address())
        if self._store is None:
            self._store = distributed.TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=BROADCAST_SECONDS)
            )
        rendezvous = f"{host}:{self._store.port}/{next(self._numbers)}"
        return WeightBroadcast(uuid4().hex, layout, rendezvous, 0, receivers + 1)

    def join(self, broadcast: WeightBroadcast) -> Any:
        """The process group of a broadcast's rendezvous. The first call waits until all ranks have joined."""
        if self._rendezvous == broadcast.rendezvous:
            return self._group
        distributed: Any = import_module("torch.distributed")
        timeout = timedelta(seconds=BROADCAST_SECONDS)
        address, _, number = broadcast.rendezvous.partition("/")
        host, _, port = address.rpartition(":")
        self._rendezvous, self._group = "", None
        store = self._store or distributed.TCPStore(host, int(port), is_master=False, timeout=timeout)
        prefixed = distributed.PrefixStore(number, store)
        try:
            self._group = distributed.ProcessGroupGloo(prefixed, broadcast.rank, broadcast.size, timeout)
        except RuntimeError as error:
            raise WeightTransferError(f"{broadcast.size} processes did not meet at {address}: {error}") from error
        self._rendezvous = broadcast.rendezvous
        return self._group


def _broadcast_bucket(group: Any, data: Tensor) -> None:
    """Pass a bucket from rank 0 to all other ranks."""
    options: Any = import_module("torch.distributed").BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([data], options).wait(timedelta(seconds=BROADCAST_SECONDS))
    except RuntimeError as error:
        raise WeightTransferError(f"a bucket of weights was not passed on: {error}") from error


def _bytes_of(tensor: Tensor) -> Bytes:
    torch: Any = import_module("torch")
    flat: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _tensor_of(pieces: Sequence[Bytes], entry: TensorEntry) -> Tensor:
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
