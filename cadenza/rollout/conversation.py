"""The conversation of an episode as messages: what a reward sees of several turns and branches.

    turns       Q | a        "Shorter" | b        branch, whose prompt is: Q a "Longer" | c
    messages                                      user Q, assistant a, user "Longer", assistant c

Tokens become messages again as far as they can: the messages of the row stand for the first prompt, a branch is
followed back to the turns that it goes on from, and what a rollout wrote into an answer is part of that answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cadenza.inference.replica import Finish, Tokens
from cadenza.rollout.model import Codec
from cadenza.rollout.records import Turn

Message: TypeAlias = Mapping[str, Any]


def last_conversation(turns: Sequence[Turn], asked: object, codec: Codec) -> list[Message]:
    """The messages of the last branch or context of an episode. `asked` are those of the row, if it has any; they are
    what the first turn was asked."""
    contexts: list[list[Turn]] = []
    for turn in turns:
        if turn.fresh or not contexts:
            contexts.append([])
        contexts[-1].append(turn)
    return _messages(contexts, tuple(asked) if isinstance(asked, (list, tuple)) else (), codec)


def _messages(contexts: Sequence[list[Turn]], asked: tuple[Message, ...], codec: Codec) -> list[Message]:
    """Those of the last of these contexts."""
    *earlier, turns = contexts
    prompt = turns[0].prompt
    shared = [_shared_turns(context, prompt) for context in earlier]
    longest = max(range(len(shared)), key=lambda n: _length(shared[n]), default=0)
    messages: list[Message] = []
    previous: Turn | None = None
    is_asked = bool(asked) and np.array_equal(prompt, contexts[0][0].prompt)
    if shared and shared[longest]:
        messages = _messages([*earlier[:longest], shared[longest]], asked, codec)
        previous, prompt = shared[longest][-1], prompt[_length(shared[longest]) :]
    elif is_asked:
        messages = list(asked)
    for number, turn in enumerate(turns):
        new = turn.prompt if number else prompt
        answer = codec.decode(turn.response)
        if previous is not None and _writes_on(previous, new, codec):
            answer = f"{messages.pop()['content']}{codec.decode(new)}{answer}"
        elif number or previous is not None or not is_asked:
            messages.append({"role": "user", "content": codec.decode(new)})
        messages.append({"role": "assistant", "content": answer})
        previous = turn
    return messages


def _shared_turns(context: Sequence[Turn], prompt: Tokens) -> list[Turn]:
    """The first turns of a context that a prompt begins with."""
    found: list[Turn] = []
    start = 0
    for turn in context:
        said = np.concatenate((turn.prompt, turn.response))
        if not np.array_equal(prompt[start : start + len(said)], said):
            break
        found.append(turn)
        start += len(said)
    return found


def _length(turns: Sequence[Turn]) -> int:
    return sum(len(turn.prompt) + len(turn.response) for turn in turns)


def _writes_on(previous: Turn, prompt: Tokens, codec: Codec) -> bool:
    """Whether a prompt goes on inside the answer before it: that was cut off, and the prompt does not end it."""
    end = getattr(codec, "end_token_id", None)
    return previous.finish is Finish.LENGTH and end is not None and (not len(prompt) or int(prompt[0]) != end)
