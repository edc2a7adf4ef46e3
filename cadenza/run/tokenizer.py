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


def check_vocabulary(key: str, path: str, codec: TextCodec) -> None:
    """Raise unless a token means the same to the model at `path`, which the config names at `key`, as to this codec. A
    model without a tokenizer is believed to know the same tokens."""
    try:
        known = load_codec(path, template="plain").tokenizer.get_vocab()
    except TokenizerNotFound:
        return
    if known != codec.tokenizer.get_vocab():
        raise ConfigError(
            f"{key}: the tokenizer of {path} has another vocabulary ({len(known)} tokens) than {codec.name} "
            f"({codec.vocab_size} tokens), so their distributions cannot be compared: take models of one family"
        )
