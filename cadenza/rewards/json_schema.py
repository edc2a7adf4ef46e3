"""`json_schema`: the response is JSON that a schema accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import field_validator

from cadenza.errors import RewardError
from cadenza.rewards.base import ConfiguredReward, row_problem
from cadenza.rewards.fenced import last_block
from cadenza.rewards.sample import Sample, Scored


class JsonSchema(ConfiguredReward):
    """1 where the JSON of the response is valid, else 0; the part `parsed` says whether it was JSON at all.

    The JSON is the whole response, or its last fenced block.
    """

    definition: dict[str, Any] | None = None
    """A JSON schema; None takes the field `schema` of the row, an object or its text."""

    @field_validator("definition")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            _check_schema(schema)
        return schema

    def open(self) -> None:
        """Say at once if the package is missing."""
        _package()

    def check_row(self, row: Mapping[str, Any]) -> str | None:
        return row_problem(_schema_of, row) if self.definition is None else None

    def __call__(self, sample: Sample) -> Scored:
        jsonschema = _package()
        schema = self.definition if self.definition is not None else _schema_of(sample)
        try:
            document = parsed(sample.response)
        except ValueError as error:
            return Scored(0.0, False, {"parsed": 0.0}, f"no JSON: {error}")
        trouble = next(jsonschema.validators.validator_for(schema)(schema).iter_errors(document), None)
        if trouble is None:
            return Scored(1.0, True, {"parsed": 1.0})
        return Scored(0.0, False, {"parsed": 1.0}, f"{trouble.json_path}: {trouble.message}"[:200])


def parsed(response: str) -> Any:
    """The JSON of a response; raises ValueError if there is none."""
    block = last_block(response, ("json",))
    try:
        return json.loads(response if block is None else block, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _schema_of(sample: Sample) -> dict[str, Any]:
    schema = sample.get("schema")
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        _check_schema(schema)
    except ValueError as error:
        raise RewardError(f"{sample.row_name} has a 'schema' that is none: {error}") from error
    found: dict[str, Any] = schema
    return found


def _check_schema(schema: Any) -> None:
    jsonschema = _package()
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"no JSON schema: {error.json_path}: {error.message}") from error


def _package() -> Any:
    try:
        import jsonschema
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("JSON schemas are checked with jsonschema: pip install 'cadenza[schema]'") from error
    return jsonschema
