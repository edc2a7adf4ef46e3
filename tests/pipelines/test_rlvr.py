"""Whole runs on datasets: `pipeline: rlvr` over small files of sums, spelling and choices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopback import nowhere, serving
from pipeline_cases import Commands, Done, cadenza, column, lines, steps, until

from cadenza.datasets import DataError
from cadenza.datasets.jsonl import JsonLines
from cadenza.rollout.tasks import Domains
from cadenza.run.config_file import build_config
from cadenza.run.data_report import show as show_data
from cadenza.run.data_sources import find_data
from cadenza.run.rlvr_config import RlvrConfig
from cadenza.training import Checkpoints

KILLS = int(os.environ.get("CADENZA_KILLS", "3"))
"""How often the run that is killed is killed; `make test-kills` does it 20 times."""

COUNTING_PIPELINE = """
import json
from cadenza.pipelines.rlvr import RlvrPipeline

class Counting(RlvrPipeline):
    async def finish_step(self):
        rows = [id for chunk in self._trained_chunks for id in chunk.non_tensor_batch["task_id"]]
        await super().finish_step()
        path = self.run.path / "trained"
        path.mkdir(exist_ok=True)
        (path / f"{self.progress.step}.json").write_text(json.dumps(list(rows)))
"""


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def sums(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{n % 10}+{n // 10 % 10}=", "answer": str(n % 10)} for n in range(first, first + count)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with rows for training and for validation, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "sums.jsonl", sums(40))
    rows_file(tmp_path / "held.jsonl", sums(6, 40))
    return tmp_path


TINY: dict[str, Any] = {
    "pipeline": "rlvr",
    "name": "tiny",
    "steps": 2,
    "preset": "grpo",
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "domains": {"sums": {"data": "sums.jsonl", "reward": "exact", "validation": "held.jsonl"}},
    "sampling": {"max_tokens": 2},
    "rollout": {"batch_size": 16, "group_size": 4},
    "trackers": [],
}


def written(directory: Path, **changes: Any) -> Path:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return path


def trained(directory: Path, *overrides: str, **changes: Any) -> Done:
    done = cadenza("train", written(directory, **changes), *overrides, "--json")
    assert done.code == 0, done.err
    return done


def refused(directory: Path, *overrides: str, **changes: Any) -> str:
    """What a run that must not begin says."""
    done = cadenza("train", written(directory, **changes), *overrides)
    assert done.code != 0
    assert "Traceback" not in done.err
    return " ".join(done.err.split())


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_file_of_prompts_and_a_reward_are_enough_for_a_run(here: Path) -> None:
    done = trained(here)
    assert done.figures["domains"].keys() == {"sums"}
    assert done.figures["domains"]["sums"]["samples"] == done.figures["samples"] == 32
    assert done.figures["domains"]["sums"]["share"] == 1.0
    assert column(done.run, "val/episodes")[0] == 6


def test_the_rows_that_are_trained_are_chat_messages_and_reach_the_samples_as_text(here: Path) -> None:
    done = trained(here, samples=16)
    sample = next(sample for sample in lines(done.run, "samples") if sample["mode"] == "train")
    asked = {row["prompt"] for row in sums(40)}
    assert sample["turns"][0]["prompt"] in asked
    assert sample["task"].startswith("sums/")


def test_a_run_ends_with_its_epochs(here: Path) -> None:
    done = trained(
        here,
        steps=100,
        domains={"sums": {"data": {"path": "sums.jsonl", "epochs": 2}, "reward": "exact"}},
        validation=None,
    )
    assert done.figures["ended"] == "the tasks ran out"
    assert done.figures["samples"] == 40 * 2 * 4


def test_domains_share_the_samples_by_weight_and_each_has_its_own_reward_rollout_and_sampling(here: Path) -> None:
    (here / "domains_code.py").write_text(
        "async def twice(task, env, model):\n"
        "    await model.chat(task.data['messages'])\n"
        "    await model.chat('again')\n\n"
        "def turns(sample):\n"
        "    return len(sample.trajectory.turns)\n\n"
        "def short(sample):\n"
        "    return float(len(sample.response_tokens))\n"
    )
    done = trained(
        here,
        steps=5,
        domains={
            "sums": {"data": "sums.jsonl", "reward": "exact", "weight": 2},
            "twice": {"data": "sums.jsonl", "reward": "domains_code:turns", "rollout": "domains_code:twice"},
            "short": {"data": "sums.jsonl", "reward": "domains_code:short", "sampling": {"max_tokens": 1}},
        },
        validation=None,
    )
    shares = {name: domain["share"] for name, domain in done.figures["domains"].items()}
    assert shares == {"sums": 0.5, "twice": 0.25, "short": 0.25}
    assert set(column(done.run, "train/twice/score").values()) == {2.0}
    assert set(column(done.run, "train/twice/turns").values()) == {2.0}
    assert set(column(done.run, "train/short/response_tokens").values()) == {1.0}


def test_rewards_are_combined_and_each_is_a_metric(here: Path) -> None:
    (here / "parts.py").write_text("def one(sample):\n    return 1.0\n\ndef half(sample):\n    return 0.5\n")
    done = trained(
        here,
        domains={
            "sums": {
                "data": "sums.jsonl",
                "rewards": {"a": "parts:one", "b": {"name": "parts:half", "weight": -1.0}},
            }
        },
        validation=None,
    )
    assert set(column(done.run, "train/score").values()) == {0.5}
    assert set(column(done.run, "train/reward/a").values()) == {1.0}
    assert set(column(done.run, "train/reward/b").values()) == {0.5}


# -- validation --------------------------------------------------------------------------------------------------------


def test_a_validation_with_k_samples_gives_avg_and_pass_at_k(here: Path) -> None:
    done = trained(here, validation={"every": 2, "samples": 4})
    first = next(line for line in lines(done.run) if "val/success" in line)
    assert first["val/episodes"] == 6 * 4
    assert first["val/avg@4"] == first["val/pass@1"] == first["val/success"]
    assert first["val/pass@1"] <= first["val/pass@2"] <= first["val/pass@4"]


def test_samples_without_a_success_are_told_why_there_is_no_pass_at_k_once(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (here / "plain_number.py").write_text("def half(sample):\n    return 0.5\n")
    domains = {"sums": {"data": "sums.jsonl", "reward": "plain_number:half", "validation": "held.jsonl"}}
    done = trained(here, domains=domains, validation={"every": 1, "samples": 2})
    assert set(column(done.run, "val/score").values()) == {0.5}
    assert caplog.text.count("so there is no pass@k") == 1
    assert "Scored(success=...)" in refused(here, "name=other", "target=0.5", domains=domains)


def test_rows_of_a_validation_that_are_too_long_are_counted_once(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = sums(6, 40)
    rows[1]["prompt"] = rows[4]["prompt"] = "1" * 80 + "+1="
    rows_file(here / "held.jsonl", rows)
    done = trained(here, max_context=40, validation={"every": 1, "samples": 2})
    assert set(column(done.run, "val/episodes").values()) == {4.0 * 2}
    assert caplog.text.count("2 of 6 tasks of the validation gave no episode") == 1


def test_eval_and_play_take_each_row_once_and_share_the_episodes_among_the_domains(here: Path) -> None:
    rows_file(here / "more.jsonl", sums(9, 60))
    own = TINY["domains"]["sums"]
    domains = {"sums": own, "more": {**own, "validation": "more.jsonl"}}
    done = trained(here, domains=domains, steps=1, validation={"every": 9, "samples": 8})
    found = cadenza("eval", done.run, "--episodes", "9", "--json").figures
    assert found["episodes"] == 9
    assert {name: domain["episodes"] for name, domain in found["domains"].items()} == {"more": 5, "sums": 4}
    shown = re.findall(r"^(sums|more)/\d+$", cadenza("play", done.run, "--episodes", "4").out, re.MULTILINE)
    assert sorted(shown[:2]) == sorted(shown[2:]) == ["more", "sums"]
    table = cadenza("eval", done.run, "--episodes", "2").out
    assert re.search(r"more/success", table)


def test_eval_names_the_checkpoint_that_it_took(here: Path) -> None:
    own = {"sums": {"data": "sums.jsonl", "reward": "exact"}}
    done = trained(here, domains=own, steps=1, validation=None)
    assert best(done.run) is None
    assert "checkpoint step-000001" in " ".join(cadenza("eval", done.run, "--episodes", "2").out.split())
    found = cadenza("eval", done.run, "--episodes", "2", "--json").figures
    assert Path(found["checkpoint"]).name == "step-000001"


def test_all_validations_of_a_run_share_their_rewards_and_repeat_their_answers(here: Path) -> None:
    (here / "opening_code.py").write_text(
        "class Written:\n"
        "    async def open(self):\n"
        "        with open('opened', 'a') as file:\n"
        "            file.write('x')\n"
        "    async def __call__(self, sample):\n"
        "        return float(sum(sample.response_tokens)) if 'held' in sample.row else 0.0\n"
    )
    rows_file(here / "held.jsonl", [{**row, "held": True} for row in sums(6, 40)])
    domains = {"sums": {"data": "sums.jsonl", "reward": "opening_code:Written", "validation": "held.jsonl"}}
    done = trained(here, steps=3, domains=domains, validation={"every": 1})
    scores = column(done.run, "val/score")
    assert sorted(scores) == [0, 1, 2, 3]
    assert len(set(scores.values())) == 1, "equal scores teach nothing, so that the weights are the same"
    assert len((here / "opened").read_text()) == 2, "by the training and by the validation"


def test_a_validation_beside_the_training_gives_its_figures_at_the_step_it_began(here: Path) -> None:
    done = trained(here, steps=4, validation={"every": 2, "beside": True})
    assert sorted(column(done.run, "val/success")) == [0, 2, 4]
    order = [("val" if "val/success" in line else "train", line["step"]) for line in lines(done.run)]
    assert order.index(("val", 0)) > order.index(("train", 1)), "the first step did not wait for it"


BESIDE: dict[str, Any] = {"every": 100, "beside": True}


def judged_by(directory: Path, module: str, body: str) -> dict[str, Any]:
    """A domain whose reward is told the number of held-out answers so far, beginning with 1: six for a validation."""
    (directory / f"{module}.py").write_text(
        "import asyncio\n"
        "from cadenza.pipelines.rlvr import RlvrPipeline\n\n"
        "count = 0\n"
        "is_saved = asyncio.Event()\n\n"
        "async def judge(sample):\n"
        "    global count\n"
        "    if 'held' not in sample.row:\n"
        "        return sample.trajectory.member % 2 == 0\n"
        "    count += 1\n"
        f"    {body}\n\n"
        "class StopsAtThree(RlvrPipeline):\n"
        "    async def finish_step(self):\n"
        "        await super().finish_step()\n"
        "        if self.progress.step == 3:\n"
        "            self.stop()\n"
        "    async def save(self):\n"
        "        is_saved.set()\n"
        "        await super().save()\n"
    )
    rows_file(directory / "held.jsonl", [{**row, "held": True} for row in sums(6, 40)])
    return {"sums": {"data": "sums.jsonl", "reward": f"{module}:judge", "validation": "held.jsonl"}}


def best(run: Path) -> str | None:
    """The checkpoint that is the best."""
    path = run / "checkpoints" / "best"
    return path.resolve().name if path.exists() else None


def test_a_validation_of_earlier_weights_does_not_choose_the_best_checkpoint(here: Path) -> None:
    """Else `best` would hold weights that nobody measured."""
    domains = judged_by(here, "first_is_best", "return count <= 6")
    done = trained(here, steps=3, domains=domains, validation=BESIDE)
    assert column(done.run, "val/success") == {0: 1.0, 3: 0.0}
    assert best(done.run) is None
    domains = judged_by(here, "last_is_best", "return count > 6")
    done = trained(here, "name=other", steps=3, domains=domains, validation=BESIDE)
    assert best(done.run) == "step-000003"


@pytest.mark.parametrize("success", [True, False])
def test_of_weights_with_the_same_success_the_newest_are_the_best(here: Path, success: bool) -> None:
    domains = judged_by(here, f"always_{success}".lower(), f"return {success}")
    done = trained(here, steps=3, domains=domains, validation={"every": 1})
    assert best(done.run) == "step-000003"


def test_weights_that_are_as_good_as_the_best_get_no_checkpoint_for_it(here: Path) -> None:
    domains = judged_by(here, "as_good", "return False")
    done = trained(here, steps=5, domains=domains, validation={"every": 1}, checkpoint={"every": 2, "keep": 10})
    steps = sorted(path.name for path in (done.run / "checkpoints").glob("step-*"))
    assert steps == [f"step-{step:06d}" for step in (0, 2, 4, 5)], "the first validation, every second step, the end"
    assert best(done.run) == "step-000005"


def test_a_checkpoint_of_weights_that_were_not_validated_is_not_the_best(here: Path) -> None:
    domains = judged_by(here, "ties", "return False")
    options = {"validation": {"every": 3}, "checkpoint": {"every": 4, "keep": 10}}
    directory = trained(here, steps=5, domains=domains, **options).run / "checkpoints"
    shutil.rmtree(directory / "step-000005")
    assert (directory / "step-000004").exists()
    assert Checkpoints(directory, keep=10).best == directory / "step-000000"


def test_a_target_that_earlier_weights_reached_must_be_reached_by_the_present_ones(here: Path) -> None:
    domains = judged_by(here, "first_is_enough", "return count <= 6")
    done = trained(here, steps=3, domains=domains, validation=BESIDE, target=0.5)
    assert done.figures["steps"] == 3
    assert max(column(done.run, "val/success").items(), key=lambda found: found[1]) == (0, 1.0)
    domains = judged_by(here, "all_are_enough", "return True")
    done = trained(here, "name=other", steps=9, domains=domains, validation=BESIDE, target=0.5)
    assert "reached the target 0.5" in done.figures["ended"]
    assert done.figures["steps"] < 9
    assert max(column(done.run, "val/success")) == done.figures["steps"], "the weights that are kept were measured"
    resumed = cadenza("resume", done.run, "--json")
    assert resumed.figures["steps"] == done.figures["steps"], resumed.err


def test_a_validation_beside_the_last_step_is_finished_when_the_tasks_run_out(here: Path) -> None:
    rows_file(here / "sums.jsonl", sums(8))
    data = {"path": "sums.jsonl", "epochs": 1}
    domains = {"sums": {"data": data, "reward": "exact", "validation": "held.jsonl"}}
    done = trained(here, steps=9, domains=domains, validation={"every": 2, "beside": True})
    assert done.figures["ended"] == "the tasks ran out"
    assert sorted(column(done.run, "val/success")) == [0, 2]


def test_a_validation_that_a_stop_cut_off_is_made_when_the_run_is_resumed(here: Path) -> None:
    domains = judged_by(here, "cut_off", "return count <= 6 or await is_saved.wait()")
    plan = {"every": 2, "beside": True}
    path = written(here, pipeline="cut_off:StopsAtThree", steps=5, domains=domains, validation=plan)
    done = cadenza("train", path, "--json")
    assert (done.figures["ended"], done.figures["steps"]) == ("stopped", 3)
    assert sorted(column(done.run, "val/success")) == [0], "that of step 2 was under way"
    resumed = cadenza("resume", done.run, "--json")
    assert resumed.code == 0, resumed.err
    assert sorted(column(done.run, "val/success")) == [0, 3, 4, 5]


# -- dynamic sampling --------------------------------------------------------------------------------------------------


def test_rows_that_are_always_or_never_solved_rest_and_the_books_say_so(here: Path) -> None:
    (here / "resting_code.py").write_text(
        "def some(sample):\n"
        "    number = int(sample.prompt[0])\n"
        "    return sample.trajectory.member % 2 if number < 5 else float(number == 9)\n"
    )
    done = trained(
        here,
        steps=30,
        domains={"sums": {"data": "sums.jsonl", "reward": "resting_code:some", "rest": 2, "difficulty": [0.1, 0.9]}},
        validation=None,
    )
    last = lines(done.run)[-1]
    assert last["tasks/resting"] == 20, "those that begin with 5 and more"
    assert last["tasks/rested"] > 0
    assert set(column(done.run, "train/score").values()) == {0.5}
    assert last["fate/filtered"] > 0


# -- a run that is killed ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


def test_every_row_is_trained_once_per_epoch_however_often_the_run_is_killed(here: Path, commands: Commands) -> None:
    """Counted over the updates that the last weights come from: a step that is trained again counts with its last
    life."""
    (here / "counting.py").write_text(COUNTING_PIPELINE)
    names = ("first", "second", "third")
    for name in names:
        rows_file(here / f"{name}.jsonl", sums(200))
    written(
        here,
        pipeline="counting:Counting",
        steps=10_000,
        domains={name: {"data": {"path": f"{name}.jsonl", "epochs": 2}, "reward": "exact"} for name in names},
        rollout={"batch_size": 24, "group_size": 2, "alpha": 1.0},
        checkpoint={"every": 3},
        validation=None,
    )
    draw = random.Random(7)
    run = here / "runs" / "tiny"
    arguments: tuple[str, ...] = ("train", "config.yaml")
    for _ in range(KILLS):
        running = commands.start(here, *arguments, "--json")
        if arguments[0] == "train":
            until(lambda: any((run / "checkpoints").glob("step-*")))
        target = sum(1 for _ in (run / "trained").glob("*.json")) + draw.randint(1, 6) if run.exists() else 3
        until(lambda target=target: sum(1 for _ in (run / "trained").glob("*.json")) >= min(target, 99))
        running.signal(signal.SIGKILL)
        assert running.wait().code == -signal.SIGKILL
        arguments = ("resume", "runs/tiny")
    done = commands.run(here, *arguments, "--json")
    assert done.code == 0, done.err
    assert done.figures["ended"] == "the tasks ran out"
    ids = [
        id
        for step in range(1, done.figures["steps"] + 1)
        for id in json.loads((run / "trained" / f"{step}.json").read_text())
    ]
    wanted = {f"{name}/{row}{epoch}": 2 for name in names for row in range(200) for epoch in ("", "@1")}
    assert Counter(ids) == wanted, "two members of each group"


def open_files(directory: Path) -> set[str]:
    """Files of this directory that this process has open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found.add(link.readlink())
    return {path.name for path in found if path.parent == directory}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the open files of a process are read from /proc")
@pytest.mark.parametrize("reward", ["exact", "failing:reward"])
def test_the_files_of_datasets_are_closed_at_the_end_of_a_run_also_when_it_fails(
    here: Path, monkeypatch: pytest.MonkeyPatch, reward: str
) -> None:
    (here / "failing.py").write_text("def reward(sample):\n    raise ValueError('no score')\n")
    kept: list[JsonLines] = []
    begin = JsonLines.__init__

    def remembered(self: JsonLines, *arguments: Any) -> None:
        """Keep the source alive: the files of one that is collected are closed too, some time."""
        kept.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(JsonLines, "__init__", remembered)
    domains = {"sums": {"data": "sums.jsonl", "reward": reward, "validation": "held.jsonl"}}
    done = cadenza("train", written(here, domains=domains), "--json")
    assert (done.code == 0) == (reward == "exact"), done.err
    if done.code == 0:
        assert cadenza("resume", done.run, "steps=3", "--json").code == 0
        assert cadenza("eval", done.run, "--json").code == 0
    rows_file(here / "bad.jsonl", [{}])
    refused(here, domains={**domains, "worse": {"data": "bad.jsonl", "reward": "exact"}})
    assert len(kept) >= 4
    assert open_files(here) == set()


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_row_without_its_answer_is_named_with_file_row_and_field(here: Path) -> None:
    rows_file(here / "sums.jsonl", [*sums(3), {"prompt": "2+2="}])
    said = refused(here)
    assert "sums.jsonl" in said
    assert "'answer'" in said
    assert "line 4" in said


@pytest.mark.parametrize("reward", ["exact", "math", {"name": "choice"}, {"name": "fuzzy", "weight": 2}])
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "2+2="}], "sums.jsonl line 1: the field 'answer' is missing"),
        (
            [*[{"prompt": "2+3=", "answer": "A"}] * 3, {"prompt": "2+2=", "answer": {"value": 4}}],
            "sums.jsonl line 4: the field 'answer' must be text, a number or a list of them, got dict {'value': 4}",
        ),
        (
            [{"prompt": "2+2=", "answer": [["4"]]}],
            "line 1: the field 'answer' must be text, a number or a list of them",
        ),
        ([{"prompt": "2+2=", "answer": []}], "sums.jsonl line 1: the field 'answer' is an empty list"),
    ],
)
def test_an_answer_that_no_reward_can_compare_is_refused_before_the_run(
    here: Path, reward: Any, rows: list[dict[str, Any]], said: str
) -> None:
    rows_file(here / "sums.jsonl", rows)
    config = build_config({**TINY, "domains": {"sums": {"data": "sums.jsonl", "reward": reward}}, "validation": None})
    assert isinstance(config, RlvrConfig)
    with pytest.raises(DataError, match=re.escape(said)):
        Domains(config.env_manager)
    (source,) = find_data(config)
    assert source.answered, "cadenza data refuses it too"


@pytest.mark.parametrize(
    ("reward", "row", "said"),
    [
        (
            "code",
            {"test": ["assert f(1) == 2"]},
            "'code' cannot score it: the row has no 'tests'; it has 'prompt', 'test'",
        ),
        ("code", {"tests": "print(1)"}, "'code' cannot score it: the row has 'tests' 'print(1)'; it must be a list of"),
        ("instructions", {}, "'instructions' cannot score it: the row has no 'instructions'; it has 'prompt'"),
        (
            "instructions",
            {"instructions": [{"kind": "wrods", "at_most": 3}]},
            "is no constraint; did you mean 'words'?",
        ),
        ("instructions", {"instructions": [{"kind": "words", "most": 3}]}, "words with {'most': 3}: "),
        (
            "choice",
            {"answer": "E", "choices": ["4", "5"]},
            "the row has the answer 'E', which is none of the letters A to B",
        ),
    ],
)
def test_a_row_that_its_reward_cannot_score_is_refused_before_the_run_and_by_cadenza_data(
    here: Path, capsys: pytest.CaptureFixture[str], reward: str, row: dict[str, Any], said: str
) -> None:
    rows_file(here / "sums.jsonl", [{"prompt": "2+2=", **row}])
    domains = {"sums": {"data": "sums.jsonl", "reward": reward}}
    config = build_config({**TINY, "domains": domains, "validation": None})
    assert isinstance(config, RlvrConfig)
    with pytest.raises(DataError) as refused:
        Domains(config.env_manager)
    assert str(refused.value).startswith(f"sums.jsonl line 1: reward '{reward}' cannot score it: ")
    assert said in str(refused.value)
    assert show_data(written(here, domains=domains, validation=None), [], as_json=True) == 1
    (found,) = json.loads(capsys.readouterr().out)["datasets"].values()
    assert found["refused"] == {"cannot be scored": 1}


def test_a_row_needs_no_answer_where_the_reward_needs_none(here: Path) -> None:
    rows_file(here / "sums.jsonl", [{"prompt": "2+2="}, {"prompt": "2+3="}])
    form = {"data": "sums.jsonl", "reward": {"name": "format", "pattern": "\\d+"}}
    assert trained(here, domains={"sums": form}, validation=None).figures["samples"] == 32


@pytest.mark.parametrize("key", ["data", "validation"])
def test_bad_rows_are_found_before_a_cold_start_that_may_be_long(here: Path, key: str) -> None:
    rows_file(here / "bad.jsonl", [{"prompt": "2+2="}])
    domains = {"sums": {**TINY["domains"]["sums"], key: "bad.jsonl"}}
    said = refused(here, domains=domains, cold_start={"data": "sums.jsonl"})
    assert "bad.jsonl line 1: the field 'answer' is missing" in said, "and not that sums.jsonl has no response"


def test_a_malformed_line_is_named(here: Path) -> None:
    with (here / "sums.jsonl").open("a") as file:
        file.write('{"prompt": "2+2=", \n')
    assert "sums.jsonl" in refused(here)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"domains": {"sums": {"data": "nowhere.jsonl", "reward": "exact"}}, "validation": None},
            "no file nowhere.jsonl",
        ),
        ({"domains": {"sums": {"data": "sums.jsonl"}}}, "the answers need a reward"),
        ({"domains": {"sums": {"reward": "exact"}}}, "domains.sums.data: Field required"),
        ({"domains": {"sums": {"data": "sums.jsonl", "reward": "exact", "weight": 0}}}, "domains.sums.weight"),
        ({"domains": {"sums": {"data": "sums.jsonl", "reward": "exat"}}}, "did you mean 'exact'?"),
        ({"domains": {"sums": {"data": "sums.jsonl", "reward": "exact", "env": "guess"}}}, "pipeline: agentic"),
        ({"domains": {"sums": {"data": "sums.jsonl", "reward": "exact"}}}, "no domain has rows to validate with"),
        ({"cold_start": {"source": "format"}}, "give it rows with cold_start.data"),
        (
            {"domains": {"sums": {"data": "sums.jsonl", "reward": "exact", "sampling": {"temperature": 0.3}}}},
            "domains.sums.sampling.temperature 0.3 differs from sampling.temperature 1.0",
        ),
        *(
            (
                {
                    "domains": {"sums": {"data": "sums.jsonl", "reward": "exact", **setting}},
                    "rollout": {"batch_size": 8, "group_size": 1},
                    "preset": "reinforce++",
                    "validation": None,
                },
                f"domains.sums.{next(iter(setting))} looks at the scores of a group",
            )
            for setting in ({"rest": 1}, {"difficulty": [0, 1]})
        ),
    ],
)
def test_a_domain_that_cannot_be_trained_is_refused(here: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refused(here, **changes)


def test_a_dataset_that_is_shorter_than_a_batch_fills_it_with_its_next_epochs(here: Path) -> None:
    rows_file(here / "sums.jsonl", sums(3))
    assert trained(here).figures["samples"] == 32


def judge(url: str, **settings: Any) -> dict[str, Any]:
    """A domain whose answers a model at this address judges."""
    asked = {"name": "judge", "url": url, "model": "m", "tries": 2, "retry_seconds": 0.001, **settings}
    return {"data": {"path": "sums.jsonl", "epochs": 1, "limit": 3}, "reward": asked}


def test_an_endpoint_that_is_down_costs_its_domain_alone_and_is_named_once(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = asyncio.run(nowhere())
    domains = {"sums": TINY["domains"]["sums"], "judged": {**judge(url), "validation": "held.jsonl"}}
    done = trained(here, domains=domains)
    assert done.figures["domains"]["sums"]["samples"] == 32
    assert done.figures["domains"].get("judged", {"samples": 0})["samples"] == 0, "never a zero: no reward, no sample"
    said = [message for message in caplog.messages if f"POST {url}/v1/chat/completions" in message]
    failed = [message for message in said if message.startswith("an attempt of domain 'judged'")]
    paused = [message for message in said if message.startswith("domain 'judged' is paused")]
    assert (len(failed), len(paused), len(said)) == (2, 2, 4), "once in training and once in validation"
    assert "asked 2 times" in failed[0]


def test_a_run_in_which_no_answer_can_be_judged_says_why(here: Path) -> None:
    url = asyncio.run(nowhere())
    said = refused(here, domains={"sums": judge(url)}, validation=None)
    assert f"RewardUnavailable (reward 'judge' of domain 'sums': POST {url}/v1/chat/completions: All" in said


def test_a_judge_that_talks_nonsense_ends_a_run_that_has_no_other_domain_with_what_it_said(here: Path) -> None:
    with serving(lambda body: (200, {"choices": [{"message": {"content": "I like turtles."}}]})) as url:
        said = refused(here, domains={"sums": judge(url)}, validation=None)
    assert "no verdict in 2 replies; the last one ends with 'I like turtles.'" in said


def test_a_prompt_longer_than_the_context_is_left_out_and_told_once(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = sums(10)
    rows[2]["prompt"] = rows[5]["prompt"] = "1" * 80 + "+1="
    rows_file(here / "sums.jsonl", rows)
    domains = {"sums": {"data": {"path": "sums.jsonl", "epochs": 1}, "reward": "exact"}}
    done = trained(here, domains=domains, validation=None, max_context=40, steps=10)
    assert done.figures["samples"] == 8 * 4
    warned = [said for said in caplog.messages if "max_context" in said]
    assert len(warned) == 1
    assert "83 tokens leave no room in max_context 40" in warned[0]
    said = refused(here, domains=domains, validation=None, max_context=3)
    assert "ContextFull" in said
    assert "tokens leave no room in max_context 3" in said


def test_a_prompt_beyond_the_positions_of_the_model_is_left_out_and_told_once(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = sums(10)
    rows[2]["prompt"] = rows[5]["prompt"] = "1" * 80 + "+1="
    rows_file(here / "sums.jsonl", rows)
    domains = {"sums": {"data": {"path": "sums.jsonl", "epochs": 1, "shuffle": False}, "reward": "exact"}}
    model = {**TINY["model"], "max_positions": 40}
    done = trained(here, domains=domains, validation=None, model=model, steps=10)
    assert done.figures["samples"] == 8 * 4
    (warned,) = [said for said in caplog.messages if "83 tokens of context" in said]
    assert "domain 'sums' (task sums/2, row 2 of its data" in warned
    assert "the context must have 1 to 39 tokens" in warned
    assert not [said for said in caplog.messages if "RequestRefused" in said]


def test_a_run_that_is_resumed_goes_on_with_the_rows_that_a_file_had_before_it_grew(here: Path) -> None:
    domains = {"sums": {"data": {"path": "sums.jsonl", "epochs": 1}, "reward": "exact"}}
    trained(here, steps=1, domains=domains, validation=None)
    with (here / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "0+0=", "answer": "0"}) + "\n")
    resumed = cadenza("resume", "runs/tiny", "steps=50", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.figures["samples"] == 40 * 4


def test_a_file_that_is_written_anew_during_a_run_ends_it_with_one_error_and_it_can_be_resumed(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "rewriting.py").write_text(
        "from pathlib import Path\n"
        "calls = 0\n"
        "def reward(sample):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 24:\n"
        "        file = Path('sums.jsonl')\n"
        "        file.write_text(file.read_text().replace('+', ' - '))\n"
        "    return 0.0\n"
    )
    rows = (here / "sums.jsonl").read_text()
    domains = {"sums": {"data": {"path": "sums.jsonl", "epochs": 1}, "reward": "rewriting:reward"}}
    done = cadenza("train", written(here, steps=50, domains=domains, validation=None))
    assert done.code == 1
    assert done.err.count("sums.jsonl was changed while it is read") == 1
    assert "a row is left out" not in caplog.text
    assert "Traceback" not in done.err + caplog.text
    assert "digest" in cadenza("resume", "runs/tiny").err, "the rows are others"
    (here / "sums.jsonl").write_text(rows)
    resumed = cadenza("resume", "runs/tiny", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.figures["samples"] == 40 * 4


def test_a_bad_row_behind_those_that_are_checked_costs_its_own_attempts_and_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(JsonLines, "checked_rows", 10)
    rows = sums(100)
    del rows[50]["answer"]
    rows_file(here / "sums.jsonl", rows)
    done = trained(
        here,
        steps=1000,
        rollout={"batch_size": 50, "group_size": 2},
        domains={"sums": {"data": {"path": "sums.jsonl", "epochs": 1}, "reward": "exact"}},
        validation=None,
    )
    assert done.figures["samples"] == 99 * 2
    assert "a row is left out: sums.jsonl line 51: the field 'answer' is missing" in caplog.text


# -- the policy as its own judge ---------------------------------------------------------------------------------------

SELF_JUDGED = {
    "name": "judge",
    "model": "policy",
    "template": "{prompt} {response} good? ",
    "max_tokens": 24,
    "temperature": 1.0,
    "pattern": r"([a-zA-Z0-9])",
    "labels": {letter: number / 35 for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz0123456789")},
}
"""The last letter of what the policy says is worth something, whichever it is."""


@pytest.mark.parametrize("alpha", [0, 1])
def test_a_run_is_judged_by_its_own_policy_and_trains_on_no_token_of_the_judge(here: Path, alpha: int) -> None:
    domains = {"sums": {"data": "sums.jsonl", "reward": SELF_JUDGED, "validation": "held.jsonl"}}
    rollout = {**TINY["rollout"], "alpha": alpha}
    done = trained(here, "samples=64", steps=4, domains=domains, rollout=rollout, validation={"every": 2})
    told = steps(done.run)[4]
    assert told["judge/calls"] >= 4 * 16
    assert told["judge/tokens"] >= told["judge/calls"]
    assert told["tokens/trained"] == sum(column(done.run, "train/tokens").values()) <= 4 * 16 * 2
    asked = {row["prompt"] for row in sums(40)}
    samples = [sample for sample in lines(done.run, "samples") if sample["mode"] == "train"]
    assert len(samples) == 64
    assert {sample["turns"][0]["prompt"] for sample in samples} <= asked
    assert len({sample["score"] for sample in samples}) > 1
    assert told["fate/trained"] == 64


def test_a_run_that_judges_itself_is_the_same_run_again(here: Path) -> None:
    domains = {"sums": {"data": "sums.jsonl", "reward": SELF_JUDGED}}
    runs = [trained(here, f"name=r{n}", "samples=32", domains=domains, validation=None).run for n in range(2)]
    one, two = ([(s["task"], s["score"], s["turns"]) for s in lines(run, "samples")] for run in runs)
    assert one == two


def test_playing_a_checkpoint_asks_its_policy_too(here: Path) -> None:
    domains = {"sums": {"data": "sums.jsonl", "reward": SELF_JUDGED, "validation": "held.jsonl"}}
    done = trained(here, domains=domains)
    found = cadenza("eval", done.run, "--episodes", "4", "--json")
    assert found.code == 0, found.err
    assert 0 <= found.figures["reward_mean"] <= 1
