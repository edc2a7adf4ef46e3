"""A replica behind an OpenAI-compatible HTTP server (server.py).

Invariant: what is trained is what the server's engine wrote, token by token: prompts go as token ids, and a server
whose answers have none is refused for rollouts. Its text would have to be tokenised again, and might become other ones.

    generate -> task: POST /v1/completions, streamed -> tokens as they come -> future
    abort, pause(abort) -> the connection is closed, which ends the request there -> the tokens so far

A server that cannot be reached is a replica that is lost. Requests that come while the replica is paused wait on this
side.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cadenza.inference.replica import (
    Finish,
    Generation,
    NotSupported,
    PauseMode,
    ReplicaError,
    ReplicaLost,
    ReplicaStats,
    Request,
    RequestRefused,
    Sampling,
    Span,
    Tokens,
)
from cadenza.inference.server import ConnectionBroke, Server
from cadenza.inference.task_replica import PendingRequest, TaskReplica
from cadenza.off_loop import as_async

MASK64 = (1 << 64) - 1


class HttpReplica(TaskReplica):
    """A `Replica` over a server that takes and gives token ids, as vLLM does.

    `logprobs` is what the server says of the tokens: `processed`, under the distribution they were drawn from
    (`--logprobs-mode processed_logprobs`), or `raw`, before temperature and limits, which is vLLM's own default; then
    only requests that are drawn without them are taken. Responses end with `eos_token_ids`, which are the server's own
    unless they are given. `kv_tokens` is what the router believes to fit there.
    """

    def __init__(
        self,
        server: Server,
        *,
        name: str = "http",
        devices: Sequence[int] = (0,),
        eos_token_ids: Collection[int] | None = None,
        kv_tokens: int = 1 << 16,
        logprobs: Literal["raw", "processed"] = "raw",
        version: int = 0,
    ) -> None:
        super().__init__(name, devices, version)
        self.kv_capacity = self.max_context = kv_tokens
        self._server = server
        self._eos = None if eos_token_ids is None else frozenset(eos_token_ids)
        self._logprobs = logprobs
        self._chunks = self._prefilled = self._generated = 0
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def check(self) -> None:
        """Raise unless the server can be used for rollouts."""
        body = self._body([0], 1, Sampling(max_tokens=1, temperature=0.0), 0) | {"model": await self._server.model()}
        async with aclosing(self._choices(body)) as choices:
            async for choice in choices:
                _tokens_and_logprobs(self._server.config.url, choice)

    # -- the replica protocol --------------------------------------------------------------------------------------

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        future = super().generate(request)
        if self._resumed.is_set() and (pending := self._in_flight.get(request.id)) is not None:
            pending.engine_id = pending.engine_id or str(request.id)
        return future

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        self._check_alive()
        if mode is PauseMode.KEEP:
            raise NotSupported(
                f"{self.name}: requests cannot be frozen over HTTP: no answer says which version wrote the tokens "
                "that are on their way; pause with 'abort' or 'drain'"
            )
        self.fence = max(self.fence, epoch)
        self._resumed.clear()
        if mode is PauseMode.ABORT:
            for id in list(self._in_flight):
                self.abort(id, "pause")
        tasks = [pending.task for pending in self._in_flight.values() if pending.engine_id]
        if tasks:
            await asyncio.wait(tasks)

    async def resume(self) -> None:
        self._check_alive()
        self._resumed.set()

    async def load_weights(self, version: int, weights: object) -> None:
        """Through the endpoints that vLLM has in its development mode: a state dict with all names of the checkpoint,
        which the server reads from the shared memory of this node; the path of a checkpoint; or None for the one it was
        started with. They reset what is cached."""
        self._check_alive()
        if self._resumed.is_set() or self._in_flight:
            raise RuntimeError(f"{self.name} must be paused and empty to load weights: pause it with PauseMode.ABORT")
        try:
            await self._server.request_json("POST", "/pause?mode=abort&clear_cache=true")
        except ReplicaLost:
            raise
        except ReplicaError as error:
            raise NotSupported(
                f"{self.name}: version {version} cannot be loaded, {self._server.config.url} has no endpoint for "
                "weights. It serves judges and rollouts of a policy that is not trained; to train, start vLLM with "
                """VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "cadenza"}', or use """
                f"engine.kind 'vllm' or 'torch' ({error})"
            ) from error
        await self._send_weights(weights)
        await self._server.request_json("POST", "/update_weight_version", {"new_version": str(version)})
        await self._server.request_json("POST", "/resume")
        self.version = version

    async def sleep(self) -> None:
        self._check_alive()
        raise NotSupported(f"{self.name} cannot sleep: the devices of {self._server.config.url} are not ours")

    async def wake(self) -> None:
        self._check_alive()

    async def stats(self) -> ReplicaStats:
        self._check_alive()
        running = sum(1 for pending in self._in_flight.values() if pending.tokens)
        return ReplicaStats(
            version=self.version,
            running=running,
            waiting=len(self._in_flight) - running,
            progress=self._chunks + self._answered,
            paused=not self._resumed.is_set(),
            kv_tokens=sum(pending.request.context + len(pending.tokens) for pending in self._in_flight.values()),
            kv_capacity=self.kv_capacity,
            generated=self._generated,
            prefilled=self._prefilled,
            discarded=dict(self.discarded),
        )

    async def close(self) -> None:
        """Close the connections. What is in flight is lost."""
        self._die("closed", f"{self.name} is closed")
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _send_weights(self, weights: object) -> None:
        if weights is None or isinstance(weights, (str, Path)):
            where = {} if weights is None else {"weights_path": str(weights)}
            await self._server.request_json("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": where})
            await self._server.request_json(
                "POST", "/start_weight_update"
            )  # and what that leaves out (vllm_weights.py)
            await self._server.request_json("POST", "/finish_weight_update")
            return
        if not isinstance(weights, Mapping):
            raise TypeError(f"weights must be a state dict, a path or None, got {type(weights).__name__}")
        from cadenza.inference.buckets import buckets

        files, next_bucket = buckets(weights), as_async(next)
        await self._server.request_json("POST", "/start_weight_update")
        while (path := await next_bucket(files, None)) is not None:
            await self._server.request_json("POST", "/update_weights", {"update_info": {"path": str(path)}})
        await self._server.request_json("POST", "/finish_weight_update")

    def _validated(self, request: Request) -> Tokens:
        context = super()._validated(request)
        sampling = request.sampling
        plain = sampling.temperature == 0 or (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
        if self._logprobs == "raw" and not plain:
            raise RequestRefused(
                f"{self.name}: with temperature {sampling.temperature:g}, top_p {sampling.top_p:g} and top_k "
                f"{sampling.top_k}, raw logprobs are not those of the distribution that tokens are drawn from: start "
                "the server with --logprobs-mode processed_logprobs, and say logprobs: processed"
            )
        return context

    def _body(self, tokens: list[int], count: int, sampling: Sampling, seed: int) -> dict[str, Any]:
        """The body of a request. It names every sampling parameter, so that no default of server or model decides."""
        greedy = sampling.temperature == 0
        body: dict[str, Any] = {
            "prompt": tokens,
            "max_tokens": count,
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": 0 if greedy else sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
        if self._eos is not None:
            return body | {"stop_token_ids": sorted(self._eos.union(sampling.stop)), "ignore_eos": True}
        return body | {"stop_token_ids": sorted(sampling.stop)}

    async def _generate(self, pending: PendingRequest) -> Generation:
        if pending.engine_id is None:
            await self._resumed.wait()
            pending.engine_id = str(pending.request.id)
        try:
            finish = await self._stream_tokens(pending)
        except ConnectionBroke as error:
            raise await self._error_of_broken_connection(error) from error
        spans = [Span(self.version, len(pending.tokens))] if pending.tokens else []
        return pending.generation(spans, finish)

    def _stop_request(self, pending: PendingRequest) -> None:
        pending.task.cancel()

    async def _stream_tokens(self, pending: PendingRequest) -> Finish:
        """The tokens as they come, to the end of the answer: so the connection can be used again."""
        request, finish = pending.request, None
        count = min(request.max_tokens, self.max_context - request.context)
        body = self._body(pending.context.tolist(), count, request.sampling, _server_seed(request))
        async with aclosing(self._choices(body | {"model": await self._server.model()})) as choices:
            async for choice in choices:
                ids, logprobs = _tokens_and_logprobs(self._server.config.url, choice)
                if ids and not pending.tokens:
                    self._prefilled += request.context
                pending.tokens += ids
                pending.logprobs += logprobs
                self._generated += len(ids)
                self._chunks += 1
                finish = choice.get("finish_reason") or finish
        if finish not in ("stop", "length", "abort"):
            raise ReplicaError(f"{self.name}: the answer to request {request.id} ended with {finish!r}")
        return Finish(finish)

    async def _choices(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """What comes of a streamed completion, piece by piece."""
        async with self._server.stream("POST", "/v1/completions", body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data:") or (text := line[5:].strip()) == "[DONE]":
                    continue
                data = json.loads(text)
                if "error" in data:
                    raise ReplicaError(f"{self.name}: the server says {data['error']}")
                for choice in data["choices"]:
                    yield choice

    async def _error_of_broken_connection(self, error: ConnectionBroke) -> ReplicaError:
        """A connection broke: is it the server?"""
        try:
            await self._server.request_json("GET", "/v1/models")
        except ReplicaLost as gone:
            return ReplicaLost(f"{self.name}: {gone}")
        except ReplicaError:
            pass  # it is there
        return error


def _tokens_and_logprobs(url: str, choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Token ids and logprobs of a piece."""
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if ids is None or (ids and logprobs is None):
        missing = "token ids" if ids is None else "logprobs"
        raise NotSupported(
            f"{url} gives no {missing} with its answers, and text that is tokenised again is never trained: use a "
            "server that does (vLLM: return_token_ids), or this one for judges, with Server.chat"
        )
    if len(logprobs or ()) != len(ids):
        raise ReplicaError(f"{url} gives {len(ids)} token ids with {len(logprobs or ())} logprobs")
    return list(ids), list(logprobs or ())


def _server_seed(request: Request) -> int:
    """One for each turn and each interruption of it, in what servers take for a seed."""
    key = np.array([request.seed & MASK64, request.offset], np.uint64).tobytes()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
