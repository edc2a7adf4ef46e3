from __future__ import annotations

import importlib
import io
import json
import math
import re
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from cadenza.observe.curve import DownsampledCurve, curve, duration, short
from cadenza.observe.display import SHARE, Display
from cadenza.observe.report import render, write_report
from cadenza.observe.report_charts import smooth
from cadenza.observe.report_episodes import EPISODES, choose, find_episodes
from cadenza.observe.run import RunDirectory, SampleRecord, make_fresh_directory, read_lines
from cadenza.observe.trackers.tensorboard import TensorBoard

NASTY = "</pre></script><img src=x onerror=alert(1)> & \u2028 'quoted\" \ud800"


def sample(step: int, *, score: float = 1.0, prompt: str = "P.\n.G", mode: str = "train", **more: Any) -> SampleRecord:
    turns = [{"prompt": prompt, "response": "R", "reward": 0.0}, {"prompt": ".P\n.G", "response": "D", "reward": score}]
    record = {"step": step, "mode": mode, "task": f"lake/{step}", "domain": "lake", "score": score}
    return record | {"success": score > 0, "versions": [step - 1, step], "turns": turns} | more  # type: ignore[return-value]


def a_run(path: Path, steps: int, **options: Any) -> RunDirectory:
    run = RunDirectory(path, **{"trackers": []} | options)
    for step in range(1, steps + 1):
        run.log(step, {"train/success": step / steps})
        run.sample(sample(step))
    run.close()
    return run


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_lines(path)]


class Recorder:
    """A tracker that remembers."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.error = error
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.error:
            raise self.error
        self.seen.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


# -- the directory -----------------------------------------------------------------------------------------------------


def test_what_is_written_can_be_read_back(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", config={"seed": 3, "where": Path("x")}, trackers=[]) as run:
        run.log(1, {"train/score": np.float32(0.5), "samples": 64})
        run.sample(sample(1, prompt=NASTY))
        run.summary({"success": 0.9})
        run.summary({"success": np.float64(0.95)})
    (line,) = read_lines(run.path / "metrics.jsonl")
    assert (line["step"], line["train/score"], line["samples"]) == (1, 0.5, 64)
    assert 0 <= line["time"] < 60
    assert line["cpu"] >= 0
    (episode,) = read_lines(run.path / "samples.jsonl")
    assert episode == sample(1, prompt=NASTY)
    assert json.loads((run.path / "summary.json").read_text()) == {"success": 0.95}
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == {"seed": 3, "where": "x"}


def test_a_number_that_is_not_finite_is_null_in_the_file(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", trackers=[]) as run:
        run.log(1, {"train/loss": math.nan, "train/grad_norm": np.float32(math.inf), "train/kl": 0.1})
        run.sample(sample(1, score=math.nan))
    text = (run.path / "metrics.jsonl").read_text() + (run.path / "samples.jsonl").read_text()
    assert not re.search("NaN|Infinity", text)
    (line,) = read_lines(run.path / "metrics.jsonl")
    assert (line["train/loss"], line["train/grad_norm"], line["train/kl"]) == (None, None, 0.1)


def test_a_metric_cannot_take_the_name_of_the_step_or_the_time(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", trackers=[]) as run, pytest.raises(ValueError, match="'cpu'"):
        run.log(1, {"cpu": 1.0})


def test_a_line_is_on_disk_when_log_returns_even_if_the_process_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from cadenza.observe.run import RunDirectory\n"
        f"run = RunDirectory({str(tmp_path / 'run')!r})\n"
        "for step in range(1, 6): run.log(step, {'train/loss': 0.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -9
    assert steps_of(tmp_path / "run" / "metrics.jsonl") == [1, 2, 3, 4, 5]
    assert [event.step for event in events(tmp_path / "run" / "tensorboard") if event.scalars] == [1, 2, 3, 4, 5]
    RunDirectory(tmp_path / "run", resume=3, trackers=[]).close()
    assert steps_of(tmp_path / "run" / "metrics.jsonl") == [1, 2, 3]


def test_a_resumed_run_forgets_the_steps_after_its_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", 5, config={"seed": 1}).path
    (path / "summary.json").write_text("{}")
    before = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with RunDirectory(path, resume=3, trackers=[]) as run:
        assert run.path == path
        assert (path / "metrics.jsonl").read_bytes() == b"".join(before[:3])
        assert steps_of(path / "samples.jsonl") == [1, 2, 3]
        run.log(4, {"train/success": 0.0})
    assert steps_of(path / "metrics.jsonl") == [1, 2, 3, 4]
    assert {"config.yaml", "summary.json"} <= {file.name for file in path.iterdir()}
    assert not list(path.glob("*.cut"))


@pytest.mark.parametrize(("tail", "kept"), [(b'{"step": 3, "ti', [1, 2]), (b'{"step": 3}', [1, 2, 3])])
def test_a_half_written_last_line_is_dropped_and_a_whole_one_without_its_newline_is_not(
    tmp_path: Path, tail: bytes, kept: list[int]
) -> None:
    path = a_run(tmp_path / "run", 2).path
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    with RunDirectory(path, resume=3, trackers=[]) as run:
        run.log(4, {"train/success": 0.0})
    assert steps_of(path / "metrics.jsonl") == [*kept, 4]


def test_lines_out_of_order_are_judged_one_by_one(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", trackers=[]) as run:
        for step in (1, 4, 2, 5, 3):
            run.sample(sample(step))
    RunDirectory(run.path, resume=3, trackers=[]).close()
    assert steps_of(run.path / "samples.jsonl") == [1, 2, 3]


def test_the_clock_of_a_resumed_run_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    lines = [{"step": step, "time": step * 100.0, "cpu": step * 300.0} for step in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with RunDirectory(path, resume=2, trackers=[]) as run:
        assert 200 <= run.seconds < 260
        assert 600 <= run.cpu_seconds < 660


def test_a_resumed_run_that_is_told_something_else_keeps_what_it_was_told_before(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", 2, config={"lr": 1}).path

    def told(config: dict[str, int]) -> RunDirectory:
        with RunDirectory(path, resume=2, config=config, trackers=[]) as run:
            return run

    told({"lr": 1}).keep_config()
    told({"lr": 5})  # it turns out not to fit the checkpoint
    assert [file.name for file in path.glob("config*")] == ["config.yaml"]
    told({"lr": 2}).keep_config()
    told({"lr": 3}).keep_config()
    found = {file.stem: yaml.safe_load(file.read_text())["lr"] for file in path.glob("config*")}
    assert found == {"config-until-2": 1, "config-until-2-2": 2, "config": 3}


def test_a_new_run_never_writes_into_a_directory_that_holds_something(tmp_path: Path) -> None:
    paths = [a_run(tmp_path / "run", 1).path for _ in range(3)]
    assert [path.name for path in paths] == ["run", "run-2", "run-3"]
    (tmp_path / "empty").mkdir()
    assert make_fresh_directory(tmp_path / "empty") == tmp_path / "empty"
    (tmp_path / "file").touch()
    assert make_fresh_directory(tmp_path / "file") == tmp_path / "file-2"


def test_there_is_nothing_to_resume_where_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        RunDirectory(tmp_path / "nowhere", resume=3)
    with pytest.raises(TypeError, match="step of the checkpoint"):
        RunDirectory(tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()


def test_a_run_that_is_alive_cannot_be_resumed(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", trackers=[]) as run:
        run.log(1, {"train/loss": 1.0})
        program = f"from cadenza.observe.run import RunDirectory\nRunDirectory({str(run.path)!r}, resume=0)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "another process" in done.stderr
        assert steps_of(run.path / "metrics.jsonl") == [1]


# -- trackers ----------------------------------------------------------------------------------------------------------


def test_a_tracker_sees_every_step_and_one_that_fails_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Recorder(), Recorder(ConnectionError("no route"))
    with RunDirectory(tmp_path / "run", trackers=[bad, good]) as run:
        run.log(1, {"train/loss": 1.0})
        run.log(2, {"train/loss": 2.0})
    assert good.seen == [(1, {"train/loss": 1.0}), (2, {"train/loss": 2.0})]
    assert good.closed
    assert steps_of(run.path / "metrics.jsonl") == [1, 2]
    assert caplog.text.count("goes on without it") == 1


class Read(SimpleNamespace):
    """An event as it stands in a file of TensorBoard."""

    step: int
    scalars: dict[str, float]
    start: bool


def fields(message: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message."""
    found: dict[int, list[Any]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        field, kind = divmod(number(), 8)
        size = {1: 8, 5: 4}.get(kind)
        if kind == 0:
            value: Any = number()
        else:
            size = number() if size is None else size
            value = message[at : at + size]
            at += size
        found.setdefault(field, []).append(value)
    return found


def events(directory: Path) -> list[Read]:
    read = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event, content = fields(content[12 : 12 + size]), content[16 + size :]
            values = [fields(value) for value in fields(event[5][0])[1]] if 5 in event else []
            scalars = {value[1][0].decode(): struct.unpack("<f", value[2][0])[0] for value in values}
            read.append(Read(step=event.get(2, [0])[0], scalars=scalars, start=7 in event))
    return read


def test_tensorboard_gets_the_metrics_of_every_step(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, {}, None)
    board.log(1, {"train/loss": 0.5, "samples": 1e300})
    board.log(300, {"train/loss": -0.25})
    board.close()
    head, first, second = events(tmp_path / "tensorboard")
    assert head.scalars == {}
    assert (first.step, first.scalars) == (1, {"train/loss": 0.5, "samples": math.inf})
    assert (second.step, second.scalars) == (300, {"train/loss": -0.25})


def test_tensorboard_is_told_which_steps_a_resumed_run_repeats(tmp_path: Path) -> None:
    a_run(tmp_path / "run", 3, trackers=["tensorboard"])
    RunDirectory(tmp_path / "run", resume=2).close()
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2
    assert [event.step for event in events(tmp_path / "run" / "tensorboard") if event.start] == [3]


def test_the_checksums_are_those_of_tfrecord(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, {}, None)
    board.close()
    content = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    assert content[:12].hex() == "1800000000000000" + "a37f4b22"  # as TensorFlow writes a record of 24 bytes


def test_tensorboard_itself_reads_the_files(tmp_path: Path) -> None:
    module = "tensorboard.backend.event_processing.event_accumulator"
    pytest.importorskip(module)
    a_run(tmp_path / "run", 5, trackers=["tensorboard"])
    with RunDirectory(tmp_path / "run", resume=3) as run:
        run.log(4, {"train/success": -1.0})
    reader = importlib.import_module(module).EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    reader.Reload()
    read = [(event.step, round(event.value, 6)) for event in reader.Scalars("train/success")]
    assert read == [(1, 0.2), (2, 0.4), (3, 0.6), (4, -1.0)]


def test_logging_a_step_is_cheap(tmp_path: Path) -> None:
    metrics = {f"train/metric_{number}": number * 0.1 for number in range(40)}
    with RunDirectory(tmp_path / "run") as run:
        began = time.process_time()
        for step in range(100):
            run.log(step, metrics)
        assert time.process_time() - began < 0.2  # 0.02 s on the machine that it was written on


def test_observing_imports_nothing_heavy() -> None:
    program = "import sys, cadenza.observe.run, cadenza.observe.display, cadenza.observe.report; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "wandb", "tensorboard", "tensorboardX", "matplotlib"}.isdisjoint(done.stdout.split())


# -- the terminal ------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def show(steps: int, each: float, *, terminal: bool = False, **options: Any) -> str:
    """What is printed of a run whose success rises from 0 to 1."""
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system="truecolor" if terminal else None)
    with Display("lake", steps, console=console, clock=clock, **options) as display:
        for step in range(1, steps + 1):
            clock.now += each
            display.update(step, {"train/success": step / steps, "train/score": 0.5, "staleness/max": 2})
    return file.getvalue()


def test_without_a_terminal_there_are_lines_and_no_control_characters() -> None:
    text = show(10, 5.0)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    lines = text.splitlines()
    assert len(lines) == 11
    assert lines[5].startswith("step 5/10")
    assert "success 50%" in lines[5]
    assert "0:25 elapsed  0:25 left" in lines[5]


def test_fast_steps_are_not_all_printed_but_the_first_and_the_last_are() -> None:
    lines = show(100, 0.1).splitlines()[1:]
    assert 5 <= len(lines) <= 8
    assert lines[0].startswith("step 1/100")
    assert lines[-1].startswith("step 100/100")


def test_a_run_that_is_cut_short_still_tells_its_last_step() -> None:
    file = io.StringIO()
    with Display("lake", 100, console=Console(file=file), clock=Clock()) as display:
        for step in (1, 2, 3):
            display.update(step, {"train/score": 0.5})
    assert file.getvalue().splitlines()[-1].startswith("step 3/100")


def test_quiet_is_silent() -> None:
    file = io.StringIO()
    with Display("lake", 2, quiet=True, console=Console(file=file, force_terminal=True)) as display:
        display.update(1, {"train/success": 0.5})
        display.say("hello")
    assert file.getvalue() == ""


def test_what_is_said_is_text_and_neither_markup_nor_control_characters() -> None:
    file = io.StringIO()
    with Display("lake", 2, console=Console(file=file)) as display:
        display.say("[red]saved[/red] \x1b[31mstep\x1b[0m 5\x07")
    assert file.getvalue().splitlines()[-1] == "[red]saved[/red] step 5"


def test_in_a_terminal_a_curve_grows_and_the_numbers_stand_beside_it() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", show(50, 0.5, terminal=True, target=0.99))
    last = text.split("step 50 of 50")[-1]
    rows = last.splitlines()
    assert "100%" in last
    assert "0.500" in last
    assert re.search(r"to 99%\s+\S", last)
    marks = [[at for at, sign in enumerate(row) if "\u2800" < sign <= "\u28ff"] for row in rows[1:9]]
    assert max(marks[7]) < min(marks[0])  # low on the left, high on the right


def test_a_terminal_without_unicode_gets_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Display("lake", 5, console=Console(file=file, force_terminal=True, width=90), clock=Clock()) as display:
        for step in range(1, 6):
            display.update(step, {"train/success": step / 5})
    file.seek(0)
    assert "*" in file.read()


class SlowFile(io.StringIO):
    """A terminal that takes its time."""

    def write(self, text: str) -> int:
        until = time.process_time() + 0.005
        while time.process_time() < until:
            pass
        return super().write(text)


def test_there_are_at_most_four_pictures_a_second() -> None:
    pictures = show(300, 0.01, terminal=True).count(" of 300")
    assert 3 <= pictures <= 14


def test_drawing_takes_at_most_its_share_of_the_time() -> None:
    clock = Clock()
    console = Console(file=SlowFile(), force_terminal=True, width=112)
    with Display("lake", 10_000, console=console, clock=clock) as display:
        began = time.process_time()
        for step in range(1, 151):
            clock.now += 0.2
            display.update(step, {"train/success": step / 300})
        assert time.process_time() - began < 1.5 * SHARE * 30


def test_the_time_left_comes_from_the_measured_steps() -> None:
    clock = Clock()
    file = io.StringIO()
    with Display("lake", 100, console=Console(file=file), clock=clock) as display:
        clock.now += 1000.0  # loading the model is no step
        for step in range(41, 61):  # a run that was resumed
            clock.now += 3.0
            display.update(step, {"train/success": 0.5})
    assert "2:00 left" in file.getvalue().splitlines()[-1]


def test_the_way_to_the_target_is_estimated_from_the_success() -> None:
    def last(values: list[float]) -> str:
        clock, file = Clock(), io.StringIO()
        with Display("lake", 100, target=0.8, console=Console(file=file), clock=clock) as display:
            for step, value in enumerate(values, 1):
                clock.now += 1.0
                display.update(step, {"val/success": value})
        return file.getvalue().splitlines()[-1]

    rising = [step / 100 for step in range(1, 61)]
    assert "to 80%: 0:20" in last(rising)
    assert "to 80%: after the last step" in last([value / 10 for value in rising])
    assert "to 80%: not in sight" in last(rising[::-1])
    assert "to 80%: reached" in last([*rising, 0.8])


def test_a_curve_has_the_size_that_was_asked_for_and_the_shape_of_its_values() -> None:
    rows = curve(range(100), [x / 99 for x in range(100)], 40, 6, percent=True).split("\n")
    assert len(rows) == 6
    assert max(map(len, rows)) <= 40
    assert (rows[0].split("┤")[0].strip(), rows[4].split("┤")[0].strip()) == ("100%", "0%")
    columns = [[at for at, sign in enumerate(row) if sign > "\u2800"] for row in rows[:5]]
    assert all(min(above) >= max(below) - 1 for above, below in pairwise(columns))
    assert rows[5].split() == ["0", "99"]


@example(-0.00123)
@example(999.6)
@example(-9999.7)
@example(9.996e11)
@given(st.floats(-1e90, 1e90) | st.floats(-1e4, 1e4) | st.floats(-0.1, 0.1))
def test_a_short_number_has_at_most_six_characters_and_is_about_right(value: float) -> None:
    text = short(value)
    assert len(text) <= 6 or abs(value) < 1e-90
    unit = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1])
    assert (float(text[:-1]) * unit if unit else float(text)) == pytest.approx(value, rel=0.5)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=50), st.integers(20, 90))
def test_every_curve_can_be_drawn(values: list[float], width: int) -> None:
    text = curve(range(len(values)), values, width, 5)
    assert len(text.split("\n")) in (1, 5)
    assert all(len(row) <= width for row in text.split("\n"))


def test_a_series_is_thinned_without_losing_its_mean_or_its_extremes() -> None:
    series = DownsampledCurve(limit=100)
    values = [math.sin(number / 50) for number in range(10_000)]
    values[777] = 50.0
    for number, value in enumerate(values):
        series.add(number, value)
    series.add(10_000, math.nan)
    assert 50 <= len(series.points) <= 100
    assert (series.count, series.bad) == (10_000, 1)
    assert max(point.high for point in series.points) == 50.0
    mean = sum(point.y * point.weight for point in series.points) / series.count
    assert mean == pytest.approx(sum(values) / 10_000)
    assert [point.x for point in series.points] == sorted(point.x for point in series.points)


def test_numbers_and_durations_are_short() -> None:
    assert [short(value) for value in (0, 0.5, 7323.4, 12_345, -3e6)] == ["0", "0.5", "7323", "12.3k", "-3M"]
    assert [duration(seconds) for seconds in (42, 3725, 273_600)] == ["0:42", "1:02:05", "3 d 4 h"]


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_report_tells_the_first_and_the_last_success_and_how_to_play_the_checkpoint(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", config={"seed": 7}, trackers=[]) as run:
        for step, success in ((1, 0.1), (2, 0.5), (3, 0.9)):
            run.log(step, {"val/success": success, "samples": step * 64, "my/own": 4.5})
        run.sample(sample(3))
        (run.checkpoints / "step-000003").mkdir(parents=True)
    page = write_report(run.path).read_text(encoding="utf-8")
    assert "10% → 90%" in page
    assert ">192<" in page
    assert f"<code>cadenza play {run.path}</code>" in page
    assert "seed: 7" in page
    assert "my/own" in page
    assert "Success" in page
    assert 'aria-label="KL"' not in page


def test_the_summary_names_the_checkpoint_and_the_command(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", 2)
    run.summary({"checkpoint": "checkpoints/best", "play": "cadenza play --slowly"})
    page = render(run.path)
    assert "<code>checkpoints/best</code>" in page
    assert "<code>cadenza play --slowly</code>" in page


def test_the_report_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = render(a_run(tmp_path / "run", 3).path)
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page)


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", config={"note": NASTY}, trackers=[]) as run:
        run.log(1, {NASTY: 1.0, "train/success": 0.5})
        episode = sample(1, prompt=NASTY, task=NASTY, domain=NASTY, fate=NASTY, versions=[NASTY])
        episode["turns"][0]["response"] = NASTY
        run.sample(episode)
        run.sample(sample(2, prompt="<b>.</b>\n........", score=0.0))  # a board of markup
        run.summary({"checkpoint": NASTY, "play": NASTY})
    page = write_report(run.path).read_text(encoding="utf-8")
    assert "<img" not in page
    assert page.count("</script>") == 1
    assert "&lt;b&gt;" in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 8


def test_a_board_is_a_board_and_what_changed_is_marked(tmp_path: Path) -> None:
    page = render(a_run(tmp_path / "run", 1).path)
    assert '<pre class="board">P<s>.</s>\n<s>.</s>G</pre>' in page
    assert '<pre class="board"><b>.P</b>\n<s>.</s>G</pre>' in page


def test_words_around_a_board_stay_words(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", trackers=[]) as run:
        run.sample(sample(1, prompt="Walk to the goal.\n\nP..\n..G\n"))
    assert '<pre>Walk to the goal.</pre><pre class="board">P<s>..</s>\n<s>..</s>G</pre>' in render(run.path)


def test_a_run_without_anything_and_a_run_that_is_being_written_have_a_report(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", 0).path
    assert "Nothing has been measured" in render(path)
    (path / "metrics.jsonl").write_bytes(b'{"step": 1, "train/loss": null, "odd": "text"}\n[1]\n{"step": 2, "tr')
    (path / "samples.jsonl").write_bytes(b'{"step": 1, "turns": [{}]}\n{"step": 2, "turns": "none"}\n{"st')
    page = render(path)
    assert "step 1" in page
    assert "odd" not in page
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_report(tmp_path / "nowhere")


def test_a_long_run_has_a_small_report(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", 0).path
    names = [f"area/metric_{number}" for number in range(30)] + ["train/success", "train/loss", "train/entropy"]
    with (path / "metrics.jsonl").open("w") as lines:
        for step in range(1, 3001):
            numbers = {name: math.sin(step * 0.7) / 2 + 0.5 for name in names}
            lines.write(json.dumps({"step": step, "time": step, "cpu": step} | numbers) + "\n")
    with (path / "samples.jsonl").open("w") as lines:
        for step in range(1, 301):
            episode = sample(step, score=step % 3)
            turns, length = ((100, 200), (2, 8000))[step % 2]
            episode["turns"] = [{"prompt": "&<漢" * length, "response": "'\"" * length, "reward": 1.0}] * turns
            lines.write(json.dumps(episode, ensure_ascii=False) + "\n")
    page = render(path)
    assert len(page.encode()) < 2_000_000
    assert page.count('class="rollout"') <= 60
    assert "60 turns<br>left out" in page
    longest = max(len(points.split()) for points in re.findall(r'polyline[^>]* points="([^"]*)"', page))
    assert 300 <= longest <= 800


def test_episodes_come_from_the_beginning_the_middle_and_the_end_and_from_both_modes(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", trackers=[]) as run:
        for step in range(1, 101):
            for mode in ("train", "train", "val"):
                run.sample(sample(step, score=float(step), mode=mode))
    chosen = choose(find_episodes(run.path / "samples.jsonl"))
    assert max(place.step for place in chosen["Early"]) < 20
    assert all(40 < place.step < 60 for place in chosen["Middle"])
    assert min(place.step for place in chosen["Late"]) > 80
    assert {place.mode for place in chosen["Late"]} == {"train", "val"}
    assert len(chosen["Late"]) == EPISODES
    assert chosen["Best"][0].score == 100
    assert chosen["Worst"][0].score == 1


def test_smoothing_neither_lags_nor_moves_a_straight_line() -> None:
    line = [0.5 * number for number in range(300)]
    middle = slice(60, 240)
    assert smooth(line)[middle] == pytest.approx(line[middle], abs=0.01)
    noise = [number % 2 for number in range(300)]
    assert max(smooth(noise)) - min(smooth(noise)) < 0.5
    assert smooth([3.0]) == [3.0]
