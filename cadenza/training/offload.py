"""Weights and optimizer memory out of the way, so that the device is free for something else.

The bytes move to the host and the storage on the device is given up; tensors, and what refers to them, stay what they
are. `reload` gives them their bytes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class Offloaded:
    """The storages of some tensors, kept on the host until `reload`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages: dict[int, Any] = {}
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            storages[storage._cdata] = storage
        # What cannot be resized is a file in memory, or an array of numpy's: none of it is on a device.
        self._storages = [storage for storage in storages.values() if storage.resizable()]
        self._hosts = [storage.clone() if storage.device.type == "cpu" else storage.cpu() for storage in self._storages]
        self.bytes: int = sum(storage.nbytes() for storage in self._storages)
        """That were freed."""
        for storage in self._storages:
            storage.resize_(0)

    def reload(self) -> None:
        for storage, host in zip(self._storages, self._hosts, strict=True):
            storage.resize_(host.nbytes())
            storage.copy_(host)


def _local(tensor: Tensor) -> Tensor:
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard
