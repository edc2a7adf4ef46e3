"""Reinforcement learning in environments: the controller program.

    publish the weights -> (validate) -> a batch of whole groups -> advantages -> train -> publish ...
                              lend the shared devices | take them back

A batch may be trained in chunks, each as soon as its groups are whole: then the gradients of all chunks are one update.
With `rollout.alpha` 0 this is on-policy, and one seed is one run. With alpha above 0 the same program is asynchronous:
the next batches are generated while one is trained. Devices that `devices` gives to the actor and to replicas generate
from the last use of the actor to the next one, if that pays (rollout/sharing.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from cadenza.data import DataProto
from cadenza.run.agentic_config import AgenticConfig
from cadenza.run.config import RunConfig
from cadenza.run.episodes import EpisodeStats
from cadenza.run.rollout_pipeline import RolloutPipeline
from cadenza.run.rollouts import check_tasks, discarded_tokens, step_request, step_trace


class AgenticPipeline(RolloutPipeline):
    """Reinforcement learning in environments."""

    config_class: ClassVar[type[RunConfig]] = AgenticConfig
    _trained_chunks: tuple[DataProto, ...] = ()
    """The chunks of the batch of this step so far."""

    async def program(self) -> None:
        async for step in self.steps():
            await self.publish()
            await self.validate(step)
            await self.checkpoint(step)
            await self.lend()
            async for chunk in self.batch_chunks(step):
                chunk = await self.advantages(chunk)
                await self.learn(chunk)
            if self.progress.ended:
                break
            await self.finish_step()
        if self.config.validation is not None:
            await self.publish()
            await self.validate(self.progress.step, last=True)

    async def batch_chunks(self, step: int) -> AsyncIterator[DataProto]:
        """The next batch of whole groups, in its chunks. A batch that was begun is taken to its end, which comes early
        where the tasks run out."""
        for size in self.config.chunk_sizes:
            get_chunk = partial(self.rollouts.get_batch, step_request(step), size)
            chunk = await (get_chunk() if self._trained_chunks else self.unless_stopped(get_chunk))
            if chunk is None:
                if not self._trained_chunks:
                    self.progress.ended = "the tasks ran out"
                return
            await self.take_back()
            yield chunk

    async def advantages(self, batch: DataProto) -> DataProto:
        """What the estimator makes of the scores."""
        with self.timed("advantages"):
            batch, metrics = await self.roles.advantages(batch)
        self.add_metrics("train", metrics)
        return batch

    async def learn(self, chunk: DataProto) -> None:
        """One train step, or one chunk of it."""
        with self.timed("train"):
            self.add_metrics("train", await self.roles.learn(chunk))
        self._trained_chunks += (chunk,)

    async def finish_step(self) -> None:
        """The end of a train step: its last update, its metrics, samples and trace."""
        chunks, self._trained_chunks = self._trained_chunks, ()
        with self.timed("train"):
            self.add_metrics("train", await self.roles.finish(chunks))
        stats = (await self.inference.sampler.stats()).values()
        episodes = EpisodeStats.merge([chunk.meta_info["episodes"] for chunk in chunks], self.config.samples)
        self.metrics |= chunks[-1].meta_info["metrics"] | discarded_tokens(stats)
        self.metrics |= episodes.staleness(self.progress.step) | episodes.metrics("train")
        self.metrics["time/wait"] = sum(chunk.meta_info["wait_seconds"] for chunk in chunks)
        if self.shared is not None:
            self.metrics |= self.shared.metrics()
        metrics = self.end_step(samples=episodes.count, tokens=episodes.tokens)
        self.write_samples(self.progress.step, "train", episodes)
        generating = len(self.inference.sampler.devices)
        self.run.trace(step_trace(self.config, self.progress.step, metrics, chunks, stats, generating))
        for name, own in episodes.domains.items():
            self.progress.domain(name).samples += own.count
        if self.config.validation is None:  # of the weights before: good enough to stop, not to choose a checkpoint
            self.record_episodes(episodes, choose=False)
            self.stop_at_target()

    # -- from where, to where --------------------------------------------------------------------------------------

    async def start(self) -> None:
        if (settings := self.config.cold_start) is not None:
            check_tasks(self.config, self.roles.codec)  # a cold start may be long
            self.log(0, await self.roles.cold_start(settings))
        if self.config.needs_reference:
            await self.roles.freeze_reference(self.run.path / "reference")

    async def restore(self, checkpoint: Path) -> None:
        if self.config.needs_reference:
            await self.roles.load_reference(self.run.path / "reference")
        await super().restore(checkpoint)

    def state(self) -> dict[str, Any]:
        return {"estimator": self.roles.estimator.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.roles.estimator.load_state(state["estimator"])
