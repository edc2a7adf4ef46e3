"""The context of a request, checked before an engine gets it."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from cadenza.inference.replica import ContextTooLong, ReplicaError, Request, RequestRefused, Tokens


def checked_context(
    request: Request, *, replica: str, in_flight: Container[int], max_context: int, last_token: int
) -> Tokens:
    """The chunks of a request in one piece. Raises unless its id is new, its context leaves room for a token, and its
    tokens are those of the model."""
    if request.id in in_flight:
        raise ReplicaError(f"{replica}: request {request.id} is already in flight")
    if not 0 < request.context < max_context or request.max_tokens < 1:
        text = f"{replica}: {request.context} tokens of context and {request.max_tokens} to write"
        raise ContextTooLong(f"{text} do not fit: the context must have 1 to {max_context - 1} tokens")
    context = _join(request.chunks)
    if len(context) != request.context or not 0 <= context.min() <= context.max() <= last_token:
        text = f"{request.context} tokens of 0 to {last_token}"
        raise RequestRefused(f"{replica}: the chunks of request {request.id} are not {text}")
    return context


def _join(chunks: tuple[Tokens, ...]) -> Tokens:
    return chunks[0] if len(chunks) == 1 else np.concatenate((*chunks, np.empty(0, np.int32)))
