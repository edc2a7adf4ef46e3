"""docs/rlvr.md is what a user does first: its file, its config and its commands in the order of the page, in a
directory of their own. Its Python blocks run in test_documents.py, as those of all pages do."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline_cases import Done, cadenza
from test_documents import ROOT, blocks

from cadenza.datasets import DataConfig, DataError
from cadenza.rollout.config import DomainConfig
from cadenza.rollout.task_sources import open_tasks
from cadenza.rollout.tasks import Domains
from cadenza.run.config_file import build_config
from cadenza.run.rlvr_config import RlvrConfig

PAGE = ROOT / "docs/rlvr.md"
QUICK = ("steps=2", "trackers=[]", "rollout.batch_size=32", "domains.sums.validation.limit=16")
"""What makes the run of the page one for a test."""


def shown(language: str) -> list[str]:
    return [block.text for block in blocks(PAGE) if block.language == language]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader: the files that the page says to write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file, scoring, thinking = shown("python")
    exec(compile(file, str(PAGE), "exec"), {})
    Path("scoring.py").write_text(scoring)
    Path("thinking.py").write_text(thinking)
    Path("sums.yaml").write_text(shown("yaml")[0])
    return tmp_path


def with_fragment(config: dict[str, Any], text: str) -> dict[str, Any]:
    """A config with the keys of a later block: a domain and `rollout` get them, other sections become them."""
    fragment = yaml.safe_load(text)
    domains, rollout = dict(config["domains"]), {**config["rollout"], **fragment.get("rollout", {})}
    for name, own in fragment.get("domains", {}).items():
        domains[name] = {**domains.get(name, {}), **own}
        if "rewards" in own:
            del domains[name]["reward"]
    return {**config, **fragment, "domains": domains, "rollout": rollout}


def run(line: str) -> Done:
    words = shlex.split(line)
    done = cadenza(*words[1:], *(QUICK if words[1] == "train" else ()))
    assert done.code == 0, (line, done.err)
    return done


def test_the_page_leads_from_a_file_to_a_run_that_plays(page: Path) -> None:
    (commands,) = [text for text in shown("") if "cadenza data sums.yaml" in text]
    looked, trained, played, measured = map(run, commands.splitlines())
    assert re.search(r"train/sums +650", looked.out)
    assert "in 2 steps, 64 episodes" in trained.out
    assert played.out.count("score") == 5
    assert measured.figures["episodes"] == 16


@pytest.mark.parametrize("text", shown("yaml")[1:], ids=lambda text: text.split(":")[0] + text[-20:].strip())
def test_the_keys_of_the_page_are_accepted_in_its_config_and_its_data_can_be_read(page: Path, text: str) -> None:
    config = build_config(with_fragment(yaml.safe_load(shown("yaml")[0]), text), source="docs/rlvr.md")
    assert isinstance(config, RlvrConfig)
    config.check_names()
    Domains(config.env_manager).close()
    assert config.validation is not None
    Domains(config.validation_env_manager(config.validation), "val").close()


def test_rewards_several_tries_filters_and_a_rollout_of_the_page_work_in_one_run(page: Path) -> None:
    config = yaml.safe_load(shown("yaml")[0])
    for text in shown("yaml")[1:]:
        if "rewards:" in text or "samples:" in text or "rest:" in text:
            config = with_fragment(config, text)
    config["domains"]["sums"] |= {"rollout": "thinking:budget", "difficulty": [0, 2]}
    Path("sums.yaml").write_text(yaml.safe_dump(config))
    figures = run("cadenza train sums.yaml --json").figures
    assert figures["domains"]["sums"]["samples"] == 64
    metrics = (page / "runs/sums/metrics.jsonl").read_text()
    for name in ("val/avg@8", "val/pass@1", "val/pass@8", "train/reward/near", "train/reward/short"):
        assert f'"{name}"' in metrics


def test_the_rollout_of_the_page_is_that_of_the_example() -> None:
    def body(source: str) -> str:
        function = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "budget")
        assert isinstance(function, ast.AsyncFunctionDef)
        return "\n".join(ast.unparse(line) for line in function.body if not isinstance(line, ast.Expr | ast.Constant))

    example = (ROOT / "examples/thinking.py").read_text(encoding="utf-8")
    assert body(shown("python")[2]) == body(example)


def test_the_errors_that_the_page_quotes_are_those_that_a_run_prints(page: Path) -> None:
    cells = re.findall(r"^\| [^|]* \| `(sums\..*)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    good = Path("sums.jsonl").read_text().splitlines(keepends=True)[:3]
    printed = ""
    for row in (
        '{"prompt": "1+1=", "anwser": "2"}', '{"prompt": "1+1=", "answer": ', '{"prompt": 11, "answer": "3"}',
        '{"prompt": "1+2=", "answer": {"value": 3}}',
    ):  # fmt: skip
        printed += failure([*good, row])
    printed += failure(['{"prompt": "", "answer": "1"}'])
    for override in ("domains.sums.weight=0", "domains.sums.reward=exakt", "sampling.max_token=4"):
        printed += cadenza("train", "sums.yaml", override).err
    tested = ['{"prompt": "f", "tests": ["assert f(1)"], "answer": ""}\n'] * 3
    printed += failure([*tested, '{"prompt": "1+1=", "answer": "2"}'], reward="code")
    assert len(cells) == 9
    for cell in cells:
        assert cell in printed


def failure(lines: list[str], reward: str = "exact") -> str:
    """What a domain with this reward says of a file with these lines, of which the last is wrong."""
    Path("sums.jsonl").write_text("".join(lines))
    config = DomainConfig(data=DataConfig(path="sums.jsonl"), reward=reward)
    with pytest.raises(DataError) as caught:
        open_tasks("sums", "sums", config, 0, 0, None)
    return f"{caught.value}\n"
