"""Runs whose batches are trained in parts: the same steps, begun earlier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_cases import cadenza, column, config_file, distance, lines, rollouts, steps, texts, trained

from cadenza.observe.run import RunDirectory
from cadenza.pipelines.agentic import AgenticPipeline
from cadenza.rollout.failures import Stalled
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.run.config_file import dump_config, read_config


def last(run: Path) -> Path:
    return run / "checkpoints" / "last"


def test_at_alpha_0_parts_train_the_same_rows_to_the_same_weights(tmp_path: Path) -> None:
    # Without skip_idle, metrics are about all rows, and not only about those that were computed.
    options = ("steps=3", "samples=16", "rollout.batch_size=16", "actor.skip_idle=false")
    one, parts = (trained(tmp_path, *options, f"batch_parts={count}").run for count in (1, 3))
    assert sorted(texts(one)) == sorted(texts(parts))
    told = {
        name for line in lines(one) for name in line if name.startswith(("train/", "staleness/")) or name == "samples"
    }
    assert {"train/loss", "train/score_std", "train/advantage_std", "train/success", "train/entropy"} <= told
    for name in told:
        assert column(parts, name) == pytest.approx(column(one, name), abs=1e-5), name
    assert distance(last(one), last(parts)) < 1e-5


def test_an_asynchronous_run_in_parts_keeps_its_bound_and_its_account_and_goes_on(tmp_path: Path) -> None:
    done = trained(tmp_path, "steps=3", "rollout.batch_size=16", "rollout.alpha=1", "batch_parts=4", "samples=5")
    again = cadenza("resume", done.run, "steps=5", "--json")
    assert again.code == 0, again.err
    assert column(done.run, "samples") == {step: 16 * step for step in range(1, 6)}
    assert max(column(done.run, "staleness/max").values()) <= 1
    assert {len(line["groups"]) for line in lines(done.run, "trace")} == {4}
    assert [step for step, *_ in texts(done.run)] == [step for step in range(1, 6) for _ in range(5)]
    for line in steps(done.run).values():
        assert line["train/updates"] == 1
        assert line["time/wait"] + line["time/train"] <= line["time/step"]


def test_a_batch_whose_tasks_run_out_between_its_parts_is_trained(tmp_path: Path) -> None:
    done = trained(tmp_path, "steps=9", "envs.domains.lake.tasks=5", "batch_parts=2")
    assert (done.figures["steps"], done.figures["samples"]) == (3, 20), "two batches of two groups, and one of one"
    assert done.figures["ended"] == "the tasks ran out"


def in_parts(
    directory: Path, monkeypatch: pytest.MonkeyPatch, between: Callable[[AgenticPipeline], None]
) -> AgenticPipeline:
    """A run of two parts a step in which something happens before the second part of the second step is asked for."""
    config = read_config(config_file(directory), ["steps=4", "batch_parts=2"])
    inner, asked = RolloutScheduler.get_batch, 0

    async def get_batch(self: RolloutScheduler, *arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 4:
            between(pipelines[0])
        return await inner(self, *arguments)

    monkeypatch.setattr(RolloutScheduler, "get_batch", get_batch)
    pipelines: list[AgenticPipeline] = []

    async def main() -> None:
        pipelines.append(AgenticPipeline(config, run))
        await pipelines[0].train()

    with RunDirectory(directory / "run", config=dump_config(config), trackers=()) as run:
        try:
            asyncio.run(main())
        except Stalled:
            pipelines[0].progress.ended = "stalled"
    return pipelines[0]


def test_a_stop_between_two_parts_comes_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = in_parts(tmp_path, monkeypatch, lambda pipeline: pipeline.stop()).progress
    assert (progress.ended, progress.step, progress.samples) == ("stopped", 2, 16)
    assert rollouts(last(tmp_path / "run"))["sums"]["fates"]["trained"] == progress.samples


def test_a_failure_between_two_parts_leaves_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stall(pipeline: AgenticPipeline) -> None:
        error = Stalled("nothing moves")
        pipeline.rollouts.queue.end_run(error)

    progress = in_parts(tmp_path, monkeypatch, stall).progress
    assert (progress.ended, progress.step) == ("stalled", 1)
    assert rollouts(last(tmp_path / "run"))["sums"]["fates"]["trained"] == progress.samples == 8
    monkeypatch.undo()
    whole = trained(tmp_path, "steps=4", "batch_parts=2").run
    again = cadenza("resume", tmp_path / "run", "--json")
    assert again.code == 0, again.err
    assert distance(last(tmp_path / "run"), last(whole)) < 1e-5
