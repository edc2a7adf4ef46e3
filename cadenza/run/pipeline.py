"""What every controller program has: its steps, its clock, its metrics, its checkpoints, its end.

    train: roles start -> `start` or `restore` -> `opened` -> `program` -> a last checkpoint

A pipeline is a subclass with a config class and a `program`, which is the algorithm:

    class Student(Pipeline):
        config_class, roles_class = StudentConfig, StudentRoles

        async def program(self) -> None:
            async for step in self.steps():
                await self.checkpoint(step)
                batch = self.batch(step)
                with self.timed("train"):
                    self.add_metrics("train", await self.roles.student.train(batch))
                self.end_step(samples=len(batch), tokens=batch.batch["response_mask"].sum())

`pipeline: my_module:Student` in a config runs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from cadenza.config import load_object
from cadenza.datasets import DataError
from cadenza.observe.run import RunDirectory
from cadenza.off_loop import done_before
from cadenza.rollout.failures import RolloutError
from cadenza.run.config import ConfigError, RunConfig
from cadenza.run.roles import Roles
from cadenza.training import Checkpoints

T = TypeVar("T")
STOPPED = "stopped"
StepListener = Callable[[int, Mapping[str, float]], None]
PIPELINES = {
    "agentic": "cadenza.pipelines.agentic:AgenticPipeline",
    "rlvr": "cadenza.pipelines.rlvr:RlvrPipeline",
    "sft": "cadenza.pipelines.sft:SftPipeline",
    "dpo": "cadenza.pipelines.dpo:DpoPipeline",
    "reward_model": "cadenza.pipelines.reward_model:RewardModelPipeline",
    "distill": "cadenza.pipelines.distill:DistillPipeline",
}
"""The programs that ship, by the name that the config key `pipeline` gives them. Each is imported when it is used."""


class RunEnded(Exception):
    """The run ends before its last step; the text says why."""


@dataclass(slots=True)
class DomainProgress:
    """How far a domain is."""

    samples: int = 0
    """Trajectories trained."""
    success_first: float | None = None
    success_last: float | None = None

    def record_success(self, success: float | None) -> None:
        """Remember how good the policy is here; None says nothing."""
        if success is not None:
            self.success_last = success
            if self.success_first is None:
                self.success_first = success


@dataclass(slots=True)
class RunProgress:
    """How far a run is."""

    step: int = 0
    """Batches trained."""
    samples: int = 0
    """Trajectories, or examples, trained."""
    success_first: float | None = None
    success_last: float | None = None
    success_best: float | None = None
    loss_first: float | None = None
    """On rows that are held out, where a run has them."""
    loss_last: float | None = None
    loss_best: float | None = None
    validated: int = -1
    """The step after which the policy was last measured."""
    validating: int = -1
    """The step after which a measurement began whose figures are not there yet; -1 is none."""
    ended: str = ""
    """Why, if not by the last step."""
    domains: dict[str, DomainProgress] = field(default_factory=dict)
    """Of a run with rollouts, each domain."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunProgress:
        """What `asdict` made of it."""
        domains = {name: DomainProgress(**own) for name, own in state["domains"].items()}
        return cls(**{**state, "domains": domains})

    def domain(self, name: str) -> DomainProgress:
        return self.domains.setdefault(name, DomainProgress())


class Pipeline:
    """One run, from its config to its last checkpoint."""

    config_class: ClassVar[type[RunConfig]] = RunConfig
    roles_class: ClassVar[type[Roles]] = Roles

    def __init__(self, config: RunConfig, run: RunDirectory, *, on_step: StepListener | None = None) -> None:
        self.config = config
        self.run = run
        self.roles = self.roles_class(config, failures=run.path / "failures")
        self.progress = RunProgress()
        self.metrics: dict[str, float] = {}
        """Of the step under way."""
        self._on_step = on_step or (lambda step, metrics: None)
        self._step_began = 0.0
        self._stop = asyncio.Event()
        self._checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        self._saved: int | None = None
        """The step of the last checkpoint."""
        self._unsaved_best_score: float | None = None
        """How good the policy is, if none was better so far and it is not saved yet."""
        self._is_best_due = False
        """Whether it is better than all before, and so gets a checkpoint. An equal one gets none of its own."""

    # -- what a pipeline adds --------------------------------------------------------------------------------------

    async def program(self) -> None:
        """The algorithm."""
        raise NotImplementedError

    async def start(self) -> None:
        """What a new run does before its program: weights to begin with."""

    @asynccontextmanager
    async def opened(self, checkpoint: Path | None) -> AsyncIterator[None]:
        """What the program needs beside its roles is open within; a run that is resumed goes on from `checkpoint`."""
        yield

    def state(self) -> dict[str, Any]:
        """Plain values of the controller that a checkpoint keeps."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""

    def save_files(self, directory: Path) -> None:
        """Write further files into a checkpoint."""

    @classmethod
    async def check_checkpoint(cls, config: RunConfig, checkpoint: Path) -> None:
        """Raise unless a checkpoint fits the config; changes nothing. Roles are checked when they load it."""

    # -- a run -----------------------------------------------------------------------------------------------------

    async def train(self, *, resume: Path | None = None) -> RunProgress:
        """Train until the last step, the target or a stop. A checkpoint is written at the end of each of these."""
        async with self.roles:
            await (self.start() if resume is None else self.restore(resume))
            async with self.opened(resume):
                if resume is not None:
                    self.run.keep_config()
                await self._run_to_end()
        return self.progress

    async def _run_to_end(self) -> None:
        """The program, and the checkpoint after it."""
        try:
            await self.program()
        except RunEnded as reason:
            self.progress.ended = str(reason)
        except (RolloutError, DataError):  # what was learned until then is kept
            if self.progress.step and self.progress.step != self._saved:
                await self.save()
            raise
        if self.progress.step != self._saved or self._is_best_due or self.progress.ended == STOPPED:
            await self.save()

    async def steps(self) -> AsyncIterator[int]:
        """The steps that are left. A stop ends the run between two of them."""
        while self.progress.step < self.config.steps:
            if self._stop.is_set():
                raise RunEnded(STOPPED)
            self._step_began = time.monotonic()
            yield self.progress.step

    def stop(self) -> None:
        """End as soon as the step under way allows it."""
        self._stop.set()

    async def unless_stopped(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await it, unless a stop comes before. What is there is not thrown away: a batch counts as trained."""
        if self._stop.is_set():
            raise RunEnded(STOPPED)
        task = asyncio.ensure_future(work())
        try:
            if not await done_before(self._stop, task):
                raise RunEnded(STOPPED)
            return task.result()
        finally:
            await asyncio.wait([task])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    async def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, as if nothing had happened."""
        await self.roles.load(checkpoint)
        state = self._checkpoints.load(checkpoint, {})  # after the models: making them takes random numbers
        self.progress = RunProgress.from_state(state["progress"])
        self.progress.ended = ""
        self._saved = self.progress.step
        self.load_state(state)

    async def checkpoint(self, step: int) -> None:
        """Save, if it is time or the policy is better than all before."""
        due = step > 0 and step % self.config.checkpoint.every == 0 and step != self._saved
        if due or self._is_best_due:
            with self.timed("checkpoint"):
                await self.save()
        self._unsaved_best_score = None  # of this policy: the next one has another

    async def save(self) -> None:
        """A checkpoint between two steps."""
        state = {"progress": asdict(self.progress), **self.state()}
        with self._checkpoints.writing(self.progress.step, score=self._unsaved_best_score, user=state) as directory:
            await self.roles.save(directory)
            self.roles.codec.save(directory)
            self.save_files(directory)
        self._unsaved_best_score, self._is_best_due, self._saved = None, False, self.progress.step

    # -- metrics ---------------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds up the time of one stage of the step, which may come several times."""
        began, name = time.monotonic(), f"time/{name}"
        yield
        self.metrics[name] = self.metrics.get(name, 0.0) + time.monotonic() - began

    def add_metrics(self, area: str, metrics: Mapping[str, float]) -> None:
        """Metrics of the step under way, as 'area/name'."""
        self.metrics |= {f"{area}/{name}": value for name, value in metrics.items()}

    def end_step(self, samples: int, tokens: int) -> Mapping[str, float]:
        """Count a step, which learned from so many samples and tokens; log it and return its metrics."""
        self.progress.step += 1
        self.progress.samples += samples
        seconds = time.monotonic() - self._step_began
        totals = {"samples": self.progress.samples, "time/step": seconds}
        pace = {"perf/samples_per_second": samples / seconds, "perf/tokens_per_second": tokens / seconds}
        metrics, self.metrics = self.metrics | totals | pace, {}
        self.log(self.progress.step, metrics)
        return metrics

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics to the run directory and to the display."""
        self.run.log(step, metrics)
        self._on_step(step, metrics)

    def record_success(self, success: float | None, *, choose: bool = True) -> None:
        """Remember how good the policy is, and whether it is the best so far. A better one gets a checkpoint; of equal
        ones the newest that has a checkpoint anyway is the best. With `choose` false it gets none and is none."""
        progress = self.progress
        if success is None:
            if self.config.target is not None:
                raise ConfigError(
                    "target is a success rate, but nothing says what a success is: let a reward return a bool or "
                    "Scored(success=...), or an env say 'success' in its info; or leave target out"
                )
            return
        progress.success_last = success
        if progress.success_first is None:
            progress.success_first = success
        is_better = progress.success_best is None or success > progress.success_best
        if is_better or success == progress.success_best:
            progress.success_best = success
            if choose:
                self._unsaved_best_score = success
                self._is_best_due |= is_better

    def record_loss(self, loss: float) -> None:
        """Remember the loss on rows that are held out. The model with the lowest gets a checkpoint for it."""
        progress = self.progress
        progress.loss_last = loss
        if progress.loss_first is None:
            progress.loss_first = loss
        if progress.loss_best is None or loss < progress.loss_best:
            progress.loss_best = loss
            self._unsaved_best_score = -loss
            self._is_best_due = True

    @property
    def has_reached_target(self) -> bool:
        """Whether the last success is enough."""
        success, target = self.progress.success_last, self.config.target
        return target is not None and success is not None and success >= target

    def stop_at_target(self) -> None:
        """End the run if the last success is enough."""
        if self.has_reached_target:
            raise RunEnded(f"success {self.progress.success_last:.3f} reached the target {self.config.target}")


def find_pipeline(name: Any, source: str = "config") -> type[Pipeline]:
    """The pipeline of this name in `PIPELINES`, or the one that 'module:name' means."""
    if not isinstance(name, str) or (name not in PIPELINES and ":" not in name):
        raise ConfigError(
            f"{source}: pipeline '{name}' is not known; there are {', '.join(PIPELINES)}, or name one of your own as "
            "'module:name'"
        )
    try:
        found = load_object(PIPELINES.get(name, name))
    except ValueError as error:
        raise ConfigError(f"{source}: pipeline: {error}") from error
    if not isinstance(found, type) or not issubclass(found, Pipeline):
        raise ConfigError(f"{source}: pipeline '{name}' is {found!r}: name a subclass of cadenza.run.pipeline.Pipeline")
    return found
