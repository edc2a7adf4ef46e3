"""Parsers of the arguments of `cadenza simulate` and `cadenza plan`: workloads, strategies, ratios, settings, costs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cadenza.simulation.comparison.experiment import STRATEGIES
from cadenza.simulation.comparison.strategy import StrategySettings
from cadenza.simulation.comparison.traces import COSTS, read_run, read_trace
from cadenza.simulation.comparison.workloads import WORKLOADS, Workload, find_workload

COST_KEYS = {"a": "a", "b": "b", "c": "c", "p": "p", "kv": "kv_capacity", "running": "max_running"}
"""Names of the costs on the command line, and the fields of `CostModel` that they set."""
WHOLE = ("kv_capacity", "max_running")
"""Fields of `CostModel` that are integers."""


class InvalidArgument(ValueError):
    """A command-line argument names something unknown or impossible."""


def workloads(names: str) -> list[Workload]:
    """Return the named workloads (with commas between them), or for 'all' those that ship."""
    if names == "all":
        return list(WORKLOADS.values())
    given = split(names, "workload")
    found = [workload(name) for name in given]
    count = Counter(one.name for one in found)
    return [replace(one, name=name) if count[one.name] > 1 else one for name, one in zip(given, found, strict=True)]


def workload(name: str, *, needs_costs: bool = True) -> Workload:
    """Return the workload of a name that ships, a trace file or the directory of a run."""
    path = Path(name)
    try:
        if path.suffix == ".json":
            found = read_trace(path)
        elif path.is_dir() and name not in WORKLOADS:
            found = read_run(path, needs_costs=needs_costs)
        else:
            return find_workload(name)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    return replace(found, name=name) if _ships(found.name) else found


def _ships(name: str) -> bool:
    try:
        find_workload(name)
    except ValueError:
        return False
    return True


def strategies(names: str) -> list[str]:
    chosen = list(STRATEGIES) if names == "all" else split(names, "policy")
    if unknown := [name for name in chosen if name not in STRATEGIES]:
        raise InvalidArgument(f"policy '{unknown[0]}' is not known; take some of {', '.join(STRATEGIES)}, or all")
    return chosen


def alphas(values: str) -> list[float]:
    found = []
    for value in split(values, "alpha"):
        try:
            found.append(float(value))
        except ValueError:
            raise InvalidArgument(f"alpha must be numbers with commas between them, got '{value}'") from None
        if not 0 <= found[-1] <= 64:
            raise InvalidArgument(f"alpha must be from 0 to 64, got {value}")
    return found


def settings(text: str) -> dict[str, Any]:
    """Return the fields of `StrategySettings` that the text fixes: 'parts=1,balance_seconds=0'."""
    types = {name: type(value) for name, value in asdict(StrategySettings()).items()}
    found: dict[str, Any] = {}
    for item in split(text, "settings") if text else []:
        name, separator, value = item.partition("=")
        if not separator or name not in types:
            raise InvalidArgument(f"settings '{item}' is not known; give key=value of {', '.join(types)}")
        try:
            found[name] = types[name](value)
        except ValueError:
            kind = "a whole number" if types[name] is int else "a number"
            raise InvalidArgument(f"settings: {name} must be {kind}, got '{value}'") from None
    return found


def with_cost(workload: Workload, text: str) -> Workload:
    """Return the workload on another GPU or model: the name of a cost model, 'a=..,b=..,c=..,p=..,kv=..,running=..,
    train=..' in seconds and tokens, or a name and then the keys that differ. The others keep their value."""
    cost, train = workload.cost, workload.train_seconds
    values: dict[str, float] = {}
    for number, item in enumerate(split(text, "model cost")):
        key, separator, value = item.partition("=")
        if not separator and not number and item in COSTS:
            cost = COSTS[item]
        elif separator and key in (*COST_KEYS, "train"):
            try:
                values[key] = float(value)
            except ValueError:
                values[key] = math.nan
            if not math.isfinite(values[key]):
                raise InvalidArgument(f"model cost: {key} must be a number, got '{value}'")
        else:
            keys = ", ".join((*COST_KEYS, "train"))
            raise InvalidArgument(
                f"model cost '{item}' is not known; begin with {', '.join(COSTS)}, or give key=value of {keys}"
            )
    train = values.pop("train", train)
    changed: dict[str, Any] = {COST_KEYS[key]: value for key, value in values.items()}
    try:
        if not 0 <= train < float("inf"):
            raise ValueError(f"train must be >= 0, got {train:g}")
        cost = replace(cost, **{name: int(value) if name in WHOLE else value for name, value in changed.items()})
    except ValueError as error:
        raise InvalidArgument(f"model cost: {error}") from None
    return replace(workload, cost=cost, train_seconds=train)


def split(names: str, what: str) -> list[str]:
    items = [item.strip() for item in names.split(",")]
    if not all(items):
        raise InvalidArgument(f"{what} must be names with commas between them, got '{names}'")
    return list(dict.fromkeys(items))
