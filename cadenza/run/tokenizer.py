"""The codec of a run, from its config."""

from __future__ import annotations

from cadenza.inference.codec import TextCodec, TokenizerNotFound, load_codec
from cadenza.run.config import ConfigError, RunConfig


def load_run_codec(config: RunConfig) -> TextCodec:
    """Between text and tokens: the tokenizer that the config names, or that of its model."""
    tokenizer = config.tokenizer
    try:
        return load_codec(
            tokenizer.path or config.model.path,
            template=tokenizer.template,
            system=tokenizer.system,
            template_options=tokenizer.template_options,
        )
    except TokenizerNotFound as error:
        raise ConfigError(f"{'tokenizer' if tokenizer.path else 'model'}.path: {error}") from error
    except ValueError as error:  # it does not fit the template
        raise ConfigError(f"tokenizer: {error}") from error
