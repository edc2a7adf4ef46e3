"""`cadenza bench update`: the cost of a weight update from a trainer to replicas in other processes.

A state dict of 135M parameters goes from one process to two others on this machine, in three ways: through the
controller, which is the simplest; through shared memory; and by a broadcast with gloo. Seconds run from the live
tensors of the trainer to tensors in all receivers. Copies are the private memory of a receiver afterwards, and of the
controller, as shares of the weights.
"""

from __future__ import annotations

import asyncio
import json
import os
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from cadenza.benchmarks.paced import own_ray
from cadenza.cluster import ray_tensors
from cadenza.cluster.weight_transfer import BroadcastGroups, StoredWeights, WeightBroadcast, WeightLayout

RECEIVERS = 2
ROUNDS = 3
HIDDEN, INNER, LAYERS, VOCAB, KV = 576, 1536, 30, 49152, 192
"""The sizes of SmolLM2-135M."""


class WeightEndpoint:
    """One end of a weight transfer: the process with the weights, or one that receives them."""

    def __init__(self, has_weights: bool) -> None:
        self._torch: Any = import_module("torch")
        self._torch.set_num_threads(1)
        ray_tensors.register()
        self._broadcast_groups = BroadcastGroups()
        self._weights = _state(self._torch) if has_weights else {}
        self._received: Any = None

    def weights(self) -> Any:
        return self._weights

    def store(self) -> StoredWeights:
        return StoredWeights.put(self._weights)

    def open(self, receivers: int) -> WeightBroadcast:
        return self._broadcast_groups.open(WeightLayout.of(self._weights), receivers)

    def send(self, broadcast: WeightBroadcast) -> None:
        broadcast.send(self._weights, self._broadcast_groups)

    def receive(self, what: Any) -> float:
        """Receive weights; returns the share of them that is private memory of this process."""
        self._received = None
        before = _own_bytes()
        if isinstance(what, StoredWeights):
            self._received = asyncio.run(what.fetch())
        elif isinstance(what, WeightBroadcast):
            self._received = what.receive(self._broadcast_groups)
        else:
            self._received = import_module("ray").get(what[0])
        read = sum(float(tensor.reshape(-1)[:: 1 << 10].sum()) for tensor in self._received.values())
        assert read == read  # every page was there to be read
        return (_own_bytes() - before) / WeightLayout.of(self._received).bytes


def update(as_json: bool) -> int:
    """Measure and print; returns the exit code."""
    with own_ray(1 + RECEIVERS) as ray:
        figures = _measured(ray)
    if as_json:
        print(json.dumps(figures, indent=2))
        return 0
    table = Table(title=f"{figures['megabytes']} MB to {RECEIVERS} processes of one machine, median of {ROUNDS}")
    for column in ("way", "seconds", "copies in a receiver", "copies in the controller"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, found in figures["ways"].items():
        table.add_row(way, f"{found['seconds']:.2f}", f"{found['copies']:.2f}", f"{found['controller_copies']:.2f}")
    Console().print(table)
    return 0


def _measured(ray: Any) -> dict[str, Any]:
    ray_tensors.register()
    endpoint = ray.remote(num_cpus=0)(WeightEndpoint)
    sender, receivers = endpoint.remote(True), [endpoint.remote(False) for _ in range(RECEIVERS)]
    broadcast = ray.get(sender.open.remote(RECEIVERS))
    sent: list[Any] = []

    def controller() -> list[Any]:
        weights = ray.get(sender.weights.remote())
        held.append((_own_bytes() - began) / broadcast.layout.bytes)
        shared = [ray.put(weights)]
        return [receiver.receive.remote(shared) for receiver in receivers]

    def store() -> list[Any]:
        stored = ray.get(sender.store.remote())
        return [receiver.receive.remote(stored) for receiver in receivers]

    def collective() -> list[Any]:
        sent.append(sender.send.remote(broadcast))
        return [receiver.receive.remote(broadcast.for_rank(rank)) for rank, receiver in enumerate(receivers, 1)]

    ways: dict[str, Any] = {}
    for name, way in (("through the controller", controller), ("shared memory", store), ("broadcast", collective)):
        seconds, copies = [], []
        held: list[float] = [0.0]
        for _ in range(ROUNDS):
            began, at = _own_bytes(), perf_counter()
            copies += ray.get(way())
            ray.get(sent)
            seconds.append(perf_counter() - at)
        ways[name] = {
            "seconds": round(median(seconds), 3),
            "copies": round(median(copies), 2),
            "controller_copies": round(max(held), 2),
        }
    return {"megabytes": broadcast.layout.bytes // 1_000_000, "receivers": RECEIVERS, "ways": ways}


def _state(torch: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    embedding = matrix(VOCAB, HIDDEN)
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        state |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    return {**state, "model.norm.weight": matrix(HIDDEN)}


def _own_bytes() -> int:
    """Return the private memory of this process."""
    found = 0
    for line in Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            found += int(line.split()[1]) * 1024
    return found
