"""A setting that does nothing is refused, so that no one relies on it.

It counts as set when it differs from its default: a config that was written out names every key, also the idle ones.
"""

from __future__ import annotations

from cadenza.config import Config


def refuse_unused(config: Config, names: tuple[str, ...], when: str) -> None:
    """Raise for the first of these settings that is set; `when` says why it does nothing."""
    for name in names:
        value = getattr(config, name)
        if value != type(config).model_fields[name].get_default(call_default_factory=True):
            raise ValueError(f"{name}={value!r} does nothing {when}: remove it")
