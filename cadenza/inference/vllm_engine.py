"""A replica over vLLM's AsyncLLM: its processes compute, this one speaks the protocol.

Invariant: tokens have the version that vLLM booked with the step that wrote them, and weights change only while nothing
is generated.

    generate -> task: add_request -> tokens as they come -> future          abort -> vLLM ends it -> the same task
    pause:  abort  every request ends with what it has        keep  vLLM freezes them        drain  they end first
    load_weights: (frozen meanwhile) buckets -> version -> cached keys and values dropped, unless `keep_kv`

vLLM has an environment of its own, so this module is imported where it is installed and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeVar

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from cadenza.inference.buckets import BACKEND, buckets, shared_memory_directory
from cadenza.inference.meter import StepMeter
from cadenza.inference.replica import (
    Finish,
    Generation,
    NotSupported,
    PauseMode,
    ReplicaError,
    ReplicaLost,
    ReplicaStats,
    Request,
    Span,
    Tokens,
)
from cadenza.inference.sampling import rng_counter
from cadenza.inference.task_replica import PendingRequest, TaskReplica
from cadenza.off_loop import THREAD_POOL, as_async, done_before

T = TypeVar("T")
STREAM_TOKENS = 16
"""Tokens of a request after which its progress is known here. Each time costs an event-loop iteration."""
ADAPTER = 1
"""vLLM's number of the only adapter."""


class VllmReplica(TaskReplica):
    """A `Replica` over a checkpoint that vLLM can load.

    `options` are vLLM's own engine arguments, as `tensor_parallel_size`, `max_model_len` or `kv_cache_memory_bytes`.
    `load_weights(version, weights)` takes a state dict with all names of the checkpoint; the path of another
    checkpoint; None for the one that the replica was made of; or, with `lora`, the weights of an adapter under peft's
    names. `lora` is the rank and the alpha of such adapters. Responses end with `eos_token_ids`, which are the model's
    own unless they are given. Token i of a turn depends on the seed and on where the turn was interrupted before it.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        name: str = "vllm",
        devices: Sequence[int] = (0,),
        eos_token_ids: Collection[int] | None = None,
        max_running: int = 64,
        keep_kv: bool = False,
        version: int = 0,
        lora: tuple[int, float] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name, devices, version)
        self._keep_kv = keep_kv
        self._lora = lora
        self._adapter: LoRARequest | None = None
        self._adapter_files: TemporaryDirectory[str] | None = None
        self._step_stats = _StepStats()
        settings: dict[str, Any] = {
            "model": str(model),
            "max_num_seqs": max_running,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": BACKEND},
            "enable_sleep_mode": current_platform.is_sleep_mode_available(),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if is_cpu := current_platform.is_cpu():
            settings["enable_chunked_prefill"] = False
        if lora is not None:
            settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora[0]}
        settings |= options or {}
        if is_cpu and settings["enable_chunked_prefill"]:
            raise ValueError(
                f"{name}: enable_chunked_prefill must be left out on a CPU: vLLM dies there of a request with a seed "
                "whose prompt is computed in more than one step"
            )
        args = AsyncEngineArgs(**settings)
        self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: self._step_stats])
        config = self._llm.vllm_config
        self.kv_capacity = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        self.max_context = min(self.kv_capacity, config.model_config.max_model_len)
        self.vocab = config.model_config.get_vocab_size()
        self._step_stats.capacity = self.kv_capacity
        self._path = str(model)
        self._weight_names = _weight_names(Path(model))
        if eos_token_ids is None:
            own = getattr(config.model_config.hf_config, "eos_token_id", None)
            eos_token_ids = [] if own is None else [own] if isinstance(own, int) else own
        self.eos_token_ids = frozenset(eos_token_ids)
        self._initial_version = version
        self._resumes = 0
        self._paused = self._asleep = False

    # -- the replica protocol, as far as it is not about requests --------------------------------------------------

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        self.fence = max(self.fence, epoch)
        tasks = [pending.task for pending in self._in_flight.values()]
        if mode is PauseMode.DRAIN:
            await self._drain(tasks)
        if mode is PauseMode.ABORT:  # those that vLLM does not have yet look at the cause when it has them
            for pending in self._in_flight.values():
                pending.cause = pending.cause or "pause"
        how = "abort" if mode is PauseMode.ABORT else "keep"
        await self._call_vllm(self._llm.pause_generation(mode=how, clear_cache=False))
        self._paused = True
        if mode is PauseMode.ABORT and tasks:
            await self._call_vllm(asyncio.wait(tasks))

    async def resume(self) -> None:
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it instead of resuming it")
        await self._call_vllm(self._llm.resume_generation())
        self._resumes += 1
        self._paused = False

    async def load_weights(self, version: int, weights: object) -> None:
        """Frozen meanwhile. After a failure it stays frozen: its weights may be half of each version."""
        self._check_alive()
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it before loading weights")
        was_paused = self._paused
        if not was_paused:
            await self.pause(self.fence, PauseMode.KEEP)
        try:
            await self._call_vllm(self._load(weights))
            await self._call_vllm(self._llm.update_weight_version(str(version)))
            if not self._keep_kv:
                await self._call_vllm(self._llm.reset_prefix_cache(reset_running_requests=True))
        except ReplicaError:
            raise
        except Exception as error:
            raise ReplicaError(f"{self.name} could not load version {version}: {error}") from error
        self.version = version
        if not was_paused:
            await self.resume()

    async def sleep(self) -> None:
        self._check_alive()
        if not current_platform.is_sleep_mode_available():
            raise NotSupported(
                f"{self.name} cannot sleep: vLLM has no sleep mode on '{current_platform.device_type}', where it would "
                "say that it sleeps and keep its memory. Close the replica, or leave it on its device"
            )
        if not self._paused or self._in_flight:
            raise RuntimeError(
                f"{self.name} must be paused and empty to sleep, but paused is {self._paused}, {len(self._in_flight)} "
                "in flight: pause it with PauseMode.ABORT"
            )
        await self._call_vllm(self._llm.sleep(level=1))
        self._asleep = True

    async def wake(self) -> None:
        self._check_alive()
        if self._asleep:
            await self._call_vllm(self._llm.wake_up())
            self._asleep = False
            await self.resume()

    async def stats(self) -> ReplicaStats:
        self._check_alive()
        steps = self._step_stats
        running = min(steps.running, len(self._in_flight))
        return ReplicaStats(
            version=self.version,
            running=running,
            waiting=len(self._in_flight) - running,
            progress=steps.count + self._answered,
            paused=self._paused,
            kv_tokens=int(steps.usage * self.kv_capacity),
            kv_capacity=self.kv_capacity,
            generated=steps.generated,
            prefilled=steps.prefilled,
            discarded=dict(self.discarded),
            costs=steps.meter.costs(),
        )

    def kill(self, cause: str) -> None:
        if not self._lost_reason:
            super().kill(cause)
            THREAD_POOL.submit(self._llm.shutdown, 0.0)

    async def close(self, seconds: float = 5.0) -> None:
        """End the processes of vLLM, which have so long to do it themselves. What is in flight is lost."""
        self._die("closed", f"{self.name} is closed")
        await as_async(self._llm.shutdown)(seconds)
        if self._adapter_files is not None:
            self._adapter_files.cleanup()

    # -- requests --------------------------------------------------------------------------------------------------

    def _validated(self, request: Request) -> Tokens:
        context = super()._validated(request)
        if self._asleep:
            raise ReplicaError(f"{self.name} is asleep")
        return context

    async def _generate(self, pending: PendingRequest) -> Generation:
        prompt, params = tokens_input(pending.context.tolist()), self._params(pending.request)
        try:
            queue = await self._llm.add_request(str(pending.request.id), prompt, params, lora_request=self._adapter)
            pending.engine_id = queue.request_id
            if pending.cause is not None:
                await self._llm.abort(pending.engine_id, internal=True)
            while True:
                output = queue.get_nowait() or await queue.get()
                (completion,) = output.outputs
                pending.tokens += completion.token_ids
                pending.logprobs += [
                    entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
                ]
                if output.finished:
                    break
        except EngineDeadError as error:
            raise self._lost_error(error) from error
        if completion.finish_reason not in ("stop", "length", "abort"):
            raise ReplicaError(f"{self.name}: vLLM ended the request with '{completion.finish_reason}'")
        spans = [
            Span(self._version_number(span.version), span.end - span.start) for span in completion.weight_versions or ()
        ]
        return pending.generation(spans, Finish(completion.finish_reason))

    def _stop_request(self, pending: PendingRequest) -> None:
        if pending.engine_id is not None:
            self._start_task(self._abort(pending.engine_id))

    async def _abort(self, engine_id: str) -> None:
        try:
            await self._llm.abort(engine_id, internal=True)
        except EngineDeadError as error:
            self._die("replica_lost", str(self._lost_error(error)))

    def _params(self, request: Request) -> SamplingParams:
        sampling = request.sampling
        greedy = sampling.temperature == 0
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            seed=None if greedy else rng_counter(request.seed, request.offset) >> 1,
            max_tokens=min(request.max_tokens, self.max_context - request.context),
            stop_token_ids=sorted(self.eos_token_ids.union(sampling.stop)),
            ignore_eos=True,  # those that count are in the line above
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=STREAM_TOKENS,
        )

    def _version_number(self, label: str) -> int:
        """A version as it was loaded; before that, vLLM has a word for it."""
        return int(label) if label.isdigit() else self._initial_version

    # -- control ---------------------------------------------------------------------------------------------------

    async def _drain(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for all that are there. vLLM's own way would leave those waiting that it has not begun."""
        if self._paused:
            await self.resume()
        resumes = self._resumes
        if tasks:
            await self._call_vllm(asyncio.wait(tasks))
        if self._resumes != resumes:
            raise ReplicaError(f"{self.name}: resumed before the pause took effect")

    async def _load(self, weights: object) -> None:
        if weights is None or isinstance(weights, (str, Path)):
            path = str(weights or self._path)
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            await self._llm.start_weight_update()  # and what that leaves out (vllm_weights.py)
            await self._llm.finish_weight_update()
        elif not isinstance(weights, Mapping):
            raise TypeError(f"weights must be a state dict, a path or None, got {type(weights).__name__}")
        elif any(".lora_A." in name for name in weights):
            await self._load_adapter(weights)
        else:
            await self._load_model(weights)

    async def _load_model(self, weights: Mapping[str, Tensor]) -> None:
        if missing := sorted(self._weight_names - weights.keys()):
            raise ValueError(f"all weights must come together, {len(missing)} are missing: {', '.join(missing[:3])}")
        files, next_bucket = buckets(weights), as_async(next)
        await self._llm.start_weight_update()
        while (path := await next_bucket(files, None)) is not None:
            await self._llm.update_weights(WeightTransferUpdateRequest({"path": str(path)}))
        await self._llm.finish_weight_update()

    async def _load_adapter(self, weights: Mapping[str, Tensor]) -> None:
        """In place of the last one: requests under way go on with it."""
        if self._lora is None:
            raise ValueError("these are weights of an adapter: make the replica with 'lora'")
        files = await as_async(_adapter_files)(weights, *self._lora)
        await self._llm.add_lora(LoRARequest("policy", ADAPTER, files.name, load_inplace=True))
        self._adapter = LoRARequest("policy", ADAPTER, files.name)
        if self._adapter_files is not None:
            self._adapter_files.cleanup()
        self._adapter_files = files

    async def _call_vllm(self, call: Awaitable[T]) -> T:
        """A call to vLLM, but not beyond the end of the replica."""
        answer = asyncio.ensure_future(call)
        try:
            if not await done_before(self._lost_event, answer):
                self._check_alive()
            return answer.result()
        except EngineDeadError as error:
            self._die("replica_lost", str(self._lost_error(error)))
            raise ReplicaLost(self._lost_reason) from error

    def _lost_error(self, error: EngineDeadError) -> ReplicaLost:
        return ReplicaLost(f"{self.name}: the processes of vLLM are gone: {error}")


class _StepStats(StatLoggerBase):  # type: ignore[misc]
    """What vLLM says of each step."""

    def __init__(self) -> None:
        self.running = self.generated = self.prefilled = self.count = self.capacity = 0
        self.usage = 0.0
        self.meter = StepMeter()
        self._last: float | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        now, before = perf_counter(), self._last
        self.count += 1
        if scheduler_stats is not None:
            self.running, self.usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            prefilled, written = iteration_stats.prompt_token_stats.computed, iteration_stats.num_generation_tokens
            self.generated += written
            self.prefilled += prefilled
            if before is not None:
                self.meter.add(written, int(self.usage * self.capacity), prefilled, now - before)
        self._last = now if self.running else None  # what comes after idling says nothing about a step

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def _adapter_files(weights: Mapping[str, Tensor], rank: int, alpha: float) -> TemporaryDirectory[str]:
    """An adapter as peft writes it."""
    files = shared_memory_directory()
    targets = sorted({name.split(".lora_A.")[0].rpartition(".")[2] for name in weights if ".lora_A." in name})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": targets}
    Path(files.name, "adapter_config.json").write_text(json.dumps(config))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, Path(files.name, "adapter_model.safetensors"))
    return files


def _weight_names(model: Path) -> frozenset[str]:
    """Of the weights of a checkpoint on this machine; nothing is known of others."""
    found: set[str] = set()
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update(file.keys())
    return frozenset(found)
