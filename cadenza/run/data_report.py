"""`cadenza data CONFIG`: what a run will train on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cadenza.config import import_from_working_directory
from cadenza.datasets import DataError, DatasetReport, describe_dataset, open_dataset
from cadenza.datasets.describe import RenderedPrompt
from cadenza.datasets.errors import FILTERED
from cadenza.inference.codec import TextCodec
from cadenza.run.config import ConfigError, RunConfig
from cadenza.run.config_file import read_config
from cadenza.run.data_sources import DataSource, find_data
from cadenza.run.tokenizer import load_run_codec

TOKENS_SHOWN = 48
PLACES_SHOWN = 5
_GIVEN_VARIABLES = {
    "messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token", "unk_token", "pad_token",
    "raise_exception", "strftime_now", "namespace", "range",
}  # fmt: skip
"""Variables of chat templates that are no switches."""


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How messages become a prompt."""

    tokenizer: str
    template: str
    generation_prompt: str
    """What stands behind the last message: the answer begins there."""
    answer_end: str
    """The token that ends an answer."""
    options: Mapping[str, Any]
    """`tokenizer.template_options`, as `enable_thinking`."""
    switches: tuple[str, ...]
    """Options that the template knows."""

    @property
    def unused(self) -> list[str]:
        """Options that are set and change nothing."""
        return [name for name in self.options if name not in self.switches]


@dataclass(frozen=True, slots=True)
class DataReport:
    """All datasets of a config, by the paths of their keys."""

    sources: Sequence[DataSource]
    reports: Mapping[str, DatasetReport]
    prompt_format: PromptFormat
    context: int | None
    """Tokens that prompt and answer may have together, if that is known."""

    def over_context(self, name: str) -> int:
        """Rows whose prompt leaves no room for an answer."""
        return 0 if self.context is None else int((self.reports[name].token_counts >= self.context).sum())

    def also_in(self, name: str) -> dict[str, int]:
        """How many of the rows another dataset has too: what is trained should not be validated."""
        found = {
            other: int(np.isin(self.reports[name].fingerprints, report.fingerprints).sum())
            for other, report in self.reports.items()
            if other != name
        }
        return {other: count for other, count in found.items() if count}

    @property
    def shares(self) -> dict[str, float]:
        """Of the domains that are mixed by weight."""
        total: dict[str, float] = {}
        for source in self.sources:
            total[source.group] = total.get(source.group, 0.0) + (source.weight or 0.0)
        return {s.path: s.weight / total[s.group] for s in self.sources if s.weight is not None}

    @property
    def bad_rows(self) -> int:
        """Rows that are refused for anything but the filters of the config."""
        counts = [report.refused for report in self.reports.values()]
        return sum(n for refused in counts for reason, n in refused.items() if reason not in FILTERED)

    def to_json(self) -> dict[str, Any]:
        shares, arrays = self.shares, ("fingerprints", "token_counts")
        datasets = {
            name: {key: value for key, value in asdict(report).items() if key not in arrays}
            | {"share": shares.get(name), "also_in": self.also_in(name), "over_context": self.over_context(name)}
            for name, report in self.reports.items()
        }
        return {"format": asdict(self.prompt_format), "context": self.context, "datasets": datasets}


def show(path: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print it; returns 1 if rows are refused for anything but the filters of the config."""
    import_from_working_directory()
    config = read_config(path, overrides)
    sources = find_data(config)
    if not sources:
        raise ConfigError(f"{path} names no dataset: the tasks of pipeline '{config.pipeline}' come from elsewhere")
    codec = load_run_codec(config)
    report = DataReport(
        sources,
        {source.path: _report(source, config, codec) for source in sources},
        describe_format(codec, config.tokenizer.template_options),
        context_size(config),
    )
    if as_json:
        print(json.dumps(report.to_json(), default=str))
    else:
        _print(report)
    return 1 if report.bad_rows else 0


def context_size(config: RunConfig) -> int | None:
    """Tokens that a context may have: what the run allows, or the model knows positions for."""
    allowed = [
        value for owner in (config, getattr(config, "envs", None)) if (value := getattr(owner, "max_context", 0))
    ]
    if config.model.path is None:
        allowed.append(config.model.max_positions)
    elif (file := Path(config.model.path) / "config.json").is_file():
        positions = json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings")
        allowed += [] if positions is None else [positions]
    return min(allowed, default=None)


def describe_format(codec: TextCodec, options: Mapping[str, Any]) -> PromptFormat:
    """How a codec puts messages together."""
    end = codec.tokenizer.decode([codec.end_token_id])
    if codec.template == "plain":
        return PromptFormat(codec.name, "plain", "", end, {}, ())
    from jinja2 import Environment, meta

    def rendered(prompt: bool) -> str:
        messages = [{"role": "user", "content": "Hello"}]
        text: str = codec.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **options
        )
        return text

    # transformers marks the tokens to train by a tag of its own.
    source = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", codec.tokenizer.get_chat_template())
    known = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source))
    switches = tuple(sorted(known - _GIVEN_VARIABLES))
    behind = rendered(True).removeprefix(rendered(False))
    return PromptFormat(codec.name, "chat", behind, end, dict(options), switches)


def _report(source: DataSource, config: RunConfig, codec: TextCodec) -> DatasetReport:
    try:
        dataset = open_dataset(
            source.config,
            key=source.key,
            seed=config.seed,
            count_tokens=lambda messages: len(codec.encode(messages, first=True)),
            answered=source.answered,
            check_row=source.check_row,
            examine=True,
        )
    except DataError as error:
        raise ConfigError(f"{source.path}: {error}") from error
    try:
        return describe_dataset(dataset, codec)
    finally:
        dataset.close()


# -- on the screen -----------------------------------------------------------------------------------------------------


def _print(report: DataReport) -> None:
    console = Console(highlight=False)
    console.print(_table(report))
    _print_format(console, report.prompt_format)
    for name, found in report.reports.items():
        times = "again and again" if found.epochs is None else "once" if found.epochs == 1 else f"{found.epochs} epochs"
        which = f"the first {found.examined} are counted" if found.rows is None else times
        console.print(f"\n{name}", style="bold", markup=False)
        console.print(f"  {found.source}; {which}", markup=False, soft_wrap=True)
        for prompt in found.prompts:
            _print_prompt(console, prompt, report.prompt_format.generation_prompt)
        if over := report.over_context(name):
            console.print(f"  {over} prompts leave no room in a context of {report.context} tokens", style="red")
        for other, count in report.also_in(name).items():
            console.print(f"  {count} rows are in {other} too", style="yellow", markup=False)
        _print_findings(console, found)


def _table(report: DataReport) -> Table:
    table = Table(box=None, pad_edge=False, caption="min to max: tokens of a prompt", caption_justify="left")
    for column in ("dataset", "rows", "share", "min", "median", "p95", "max", "repeated", "refused"):
        table.add_column(column, justify="left" if column == "dataset" else "right", no_wrap=column != "dataset")
    shares = report.shares
    for source in report.sources:
        found = report.reports[source.path]
        sizes = found.lengths
        lengths = ("-",) * 4 if sizes is None else (sizes.min, sizes.median, sizes.p95, sizes.max)
        share = f"{shares[source.path]:.0%}" if source.path in shares else "-"
        rows = "endless" if found.rows is None else found.rows
        cells = (rows, share, *lengths, found.duplicates, sum(found.refused.values()))
        table.add_row(source.key, *map(str, cells))
    return table


def _print_format(console: Console, prompt_format: PromptFormat) -> None:
    if prompt_format.template == "plain":
        console.print(f"{prompt_format.tokenizer}, template 'plain': the text as it is", markup=False)
        return
    switches = [f"{name}={prompt_format.options.get(name, '(not set)')}" for name in prompt_format.switches]
    console.print(
        f"chat template of {prompt_format.tokenizer.removeprefix('the tokenizer ')}: an answer begins behind "
        f"{prompt_format.generation_prompt!r} and ends with {prompt_format.answer_end}; "
        f"switches: {', '.join(switches) or 'none'}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    for name in prompt_format.unused:
        console.print(f"template_options.{name} changes nothing: the template does not know it", style="red")


def _print_prompt(console: Console, prompt: RenderedPrompt, generation_prompt: str) -> None:
    answer = f", answer {prompt.fields['answer']!r}" if "answer" in prompt.fields else ""
    console.print(f"  {prompt.place}: {len(prompt.tokens)} tokens{answer}", style="cyan", markup=False, soft_wrap=True)
    text = Text(prompt.text)
    if generation_prompt and prompt.text.endswith(generation_prompt):
        text.stylize("bold", len(prompt.text) - len(generation_prompt))
    console.print(text, soft_wrap=True)
    pairs = zip(prompt.tokens[:TOKENS_SHOWN], prompt.pieces, strict=False)
    more = len(prompt.tokens) - TOKENS_SHOWN
    tokens = " ".join(f"{token}:{piece!r}" for token, piece in pairs) + (f" and {more} more" if more > 0 else "")
    console.print(f"  {tokens}", style="dim", markup=False, soft_wrap=True)


def _print_findings(console: Console, report: DatasetReport) -> None:
    if report.duplicates:
        console.print(f"  {report.duplicates} rows repeat an earlier one", style="yellow")
        for place, original in report.duplicate_places[:PLACES_SHOWN]:
            console.print(f"    {place} is {original}", markup=False, soft_wrap=True)
    for reason, count in report.refused.items():
        console.print(f"  {count} rows refused: {reason}", style="red", markup=False)
    for place, message in report.refused_places[:PLACES_SHOWN]:
        console.print(f"    {place}: {message}", markup=False, soft_wrap=True)
