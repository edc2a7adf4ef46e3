"""What README, CONTRIBUTING and docs/ say is so: their code runs, their commands parse, their names exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from sandbox_cases import needs_bwrap

from cadenza.cli import app
from cadenza.run.agentic_config import AgenticConfig
from cadenza.run.config_file import build_config, read_config
from cadenza.run.pipeline import PIPELINES

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / name
        for name in ("datasets.md", "rewards.md", "rlvr.md", "scheduler.md", "training.md", "writing-environments.md")
    ),
    pytest.param(ROOT / "docs" / "sandbox.md", marks=needs_bwrap),
]
"""Documents whose Python blocks are programs."""
PACKAGE, TESTS = (
    "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py")))
    for folder in ("cadenza", "tests")
)


class Block(NamedTuple):
    """A fenced block of a document."""

    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def quoted(document: Path) -> list[str]:
    """What stands in backticks, outside blocks."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def is_excerpt(block: Block) -> bool:
    """It shows a method of a pipeline, which does not run alone."""
    return block.text.startswith("async def ") and "self" in block.text.splitlines()[0]


def environment() -> dict[str, str]:
    """Of a process that runs elsewhere, with this tree."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


# -- code --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", RUNNABLE, ids=of)
def test_the_programs_of_a_document_run_and_print_what_it_shows(document: Path, tmp_path: Path) -> None:
    code = [block for block in blocks(document) if block.language == "python" and not is_excerpt(block)]
    shown = [block.text for block in blocks(document) if block.language == "text"]
    assert code
    program = tmp_path / "document.py"
    program.write_text("\n".join(block.text for block in code), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    if shown:
        assert done.stdout == "".join(shown)


def test_what_the_documents_plug_into_a_run_works_in_one(tmp_path: Path) -> None:
    shown = [block.text for name in ("training", "engines") for block in blocks(ROOT / f"docs/{name}.md")]
    plugged = [text for text in shown if re.search(r"^(class|def) \w+", text, re.MULTILINE)]
    (tmp_path / "documented.py").write_text("\n".join(plugged), encoding="utf-8")
    short = ["steps=1", "cold_start=null", "validation=null", "rollout={batch_size: 16, group_size: 8}"]
    lake = ROOT / "examples/frozenlake.yaml"
    said = train(
        tmp_path, lake, *short, "estimator={name: documented:AboveBar, bar: 0.7}",
        "sampler.routing=documented:RoundRobin", "trackers=[documented:Prints]",
    )  # fmt: skip
    assert re.search(r"^1 {.*'train/", said, re.MULTILINE), "the tracker prints the metrics of the step"
    said = train(
        tmp_path, lake, *short, "estimator={name: documented:above_mean}", "actor.loss=documented:capped_ratio",
        "trackers=[documented:Prints]",
    )  # fmt: skip
    assert "'train/ratio_mean'" in said, "the metrics of the loss are those of the step"


def test_the_pipeline_in_the_documents_runs_with_the_config_beside_it(tmp_path: Path) -> None:
    shown = blocks(ROOT / "docs/training.md")
    (program,) = [block.text for block in shown if "(Pipeline)" in block.text]
    (config,) = [block.text for block in shown if block.language == "yaml" and "pipeline:" in block.text]
    (tmp_path / "my_module.py").write_text(program, encoding="utf-8")
    (tmp_path / "copy.yaml").write_text(config, encoding="utf-8")
    assert "8 steps" in train(tmp_path, "copy.yaml", "trackers=[]")


def train(directory: Path, *arguments: str | Path) -> str:
    """What `cadenza train` prints, in a process whose working directory this is."""
    program = "import sys; from cadenza.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", *arguments],
        capture_output=True, text=True, timeout=100, check=False, cwd=directory, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_in_the_readme_is_the_source() -> None:
    (shown,) = [block.text for block in blocks(ROOT / "README.md") if is_excerpt(block)]
    path = ROOT / "cadenza/pipelines/agentic.py"
    source = path.read_text(encoding="utf-8")
    (name,) = re.findall(r"async def (\w+)", shown)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AsyncFunctionDef)]
    (function,) = [node for node in functions if node.name == name]
    assert shown.rstrip() == textwrap.dedent(ast.get_source_segment(source, function, padded=True) or "").rstrip()


def test_the_environment_in_the_readme_is_the_example() -> None:
    example = (ROOT / "examples/guess.py").read_text(encoding="utf-8")
    assert any(block.text in example for block in blocks(ROOT / "README.md") if block.language == "python")


# -- settings ----------------------------------------------------------------------------------------------------------


def merged(below: dict[str, object], above: dict[str, object]) -> dict[str, object]:
    both = {key: (below[key], above[key]) for key in below.keys() & above.keys()}
    deeper = {key: merged(a, b) for key, (a, b) in both.items() if isinstance(a, dict) and isinstance(b, dict)}
    return {**below, **above, **deeper}


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_the_settings_that_a_document_shows_are_accepted(document: Path) -> None:
    base = yaml.safe_load((ROOT / "examples/guess.yaml").read_text(encoding="utf-8"))
    base |= {"cold_start": None, "backend": "ray"}
    for block in blocks(document):
        if block.language != "yaml" or document.name == "rlvr.md":  # its settings have tests of their own
            continue
        values = yaml.safe_load(block.text)
        if "pipeline" not in values:
            build_config(merged(base, values), source=of(document))
        elif values["pipeline"] in PIPELINES:
            build_config(values, source=of(document))


def fields_below(annotation: object) -> dict[str, object] | None:
    """The keys of the config class in an annotation; of a mapping, None: every key is one of its own."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    if get_origin(annotation) is dict:
        return None
    return next((found for item in get_args(annotation) if (found := fields_below(item)) is None or found), {})


def has_key(key: str) -> bool:
    annotation: object = AgenticConfig
    for name in key.split("."):
        fields = fields_below(annotation)
        if fields is not None and name not in fields:
            return False
        annotation = get_args(annotation)[1] if fields is None else fields[name]
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_the_keys_that_a_document_names_exist(document: Path) -> None:
    sections = "envs|rollout|actor|critic|engine|sampler|validation|cold_start|checkpoint|tokenizer"
    named = [re.match(rf"((?:{sections})(?:\.\w+)+)(?:=| *:|$)", piece) for piece in quoted(document)]
    keys = {found[1] for found in named if found and not re.search(r"\.(md|py|jsonl?|html|yaml|step)$", found[1])}
    assert not {key for key in keys if not has_key(key)}


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(document: Path) -> list[str]:
    """The lines of its blocks that are commands of ours."""
    text = document.read_text(encoding="utf-8")
    fenced = [line for block in blocks(document) if not block.language for line in block.text.splitlines()]
    indented = [line[4:] for line in text.splitlines() if line.startswith("    cadenza ")]
    lines = [re.sub(r"^(\$ |[A-Z_]+=\S+ )", "", line.split(" #")[0].strip()) for line in [*fenced, *indented]]
    return [line for line in lines if re.match(r"(cadenza|make) [a-z]", line)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_the_commands_that_a_document_shows_are_accepted(document: Path) -> None:
    for line in commands(document):
        program, *arguments = shlex.split(re.sub(r" ?\[[^]]*\]", "", line))
        if program == "cadenza":
            app.parse_args(arguments, exit_on_error=False, print_error=False)
        if arguments[0] in ("train", "plan") and (ROOT / arguments[1]).is_file():
            read_config(ROOT / arguments[1], [word for word in arguments[2:] if re.match(r"[\w.]+=", word)])


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_the_commands_and_targets_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {"help", *re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)}
    assert not set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", text, re.MULTILINE)) - targets
    for words in re.findall(r"`cadenza ([a-z][a-z -]*)", text):
        names = [word for word in words.split() if not word.startswith("-")][: 2 if words.startswith("bench ") else 1]
        assert app.parse_commands(names)[0] == tuple(names), words


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_the_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (document.parent / link).exists()]
    files = re.findall(r"(?<![\w./-])((?!runs/)(?:[\w-]+/)+[\w-]+\.(?:py|md|html|yaml|png|svg))\b", text)
    folders = re.findall(r"(?<![\w./-])((?:cadenza|tests|docs|examples)/(?:[\w-]+/)*)(?![\w-])", text)
    for path in [*files, *folders]:
        missing += [path] if not any((base / path).exists() for base in (ROOT, ROOT / "cadenza", ROOT / "docs")) else []
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_the_tables_that_a_document_names_are_in_the_files_that_it_says(document: Path) -> None:
    for table, path in re.findall(
        r"`([A-Z_]+)` (?:of|in) `(cadenza/[\w/]+\.py)`", document.read_text(encoding="utf-8")
    ):
        assert re.search(rf"^{table}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), f"{table} in {path}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_the_anchors_that_a_document_links_to_exist(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings], link


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_the_dotted_names_of_a_document_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"\bcadenza(?:\.\w+)+(?::\w+)?", text):
        parts = name.replace(":", ".").split(".")
        if parts[-1] in ("py", "env"):
            continue
        found: object = importlib.import_module("cadenza")
        for depth, part in enumerate(parts[1:], 2):
            if inspect.ismodule(found) and not hasattr(found, part):
                found = importlib.import_module(".".join(parts[:depth]))
            else:
                assert hasattr(found, part), name
                found = getattr(found, part)


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_the_classes_methods_and_tests_that_a_document_names_exist(document: Path) -> None:
    classes = {name for piece in quoted(document) for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+\b", piece)}
    methods = {name for piece in quoted(document) for name in re.findall(r"^[A-Z]\w+\.([a-z_]\w+)", piece)}
    tests = {name for piece in quoted(document) for name in re.findall(r"^test_\w+$", piece)}
    assert not {name for name in classes | methods if not re.search(rf"\b{name}\b", PACKAGE)}
    assert not {name for name in tests if f"def {name}(" not in TESTS}
