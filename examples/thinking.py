"""Rollouts of your own, for a domain without an env: `rollout: thinking:budget` in a config that this file is beside.

A rollout asks the model as often as it likes. Every token that the model wrote trains, and the reward gets the last
answer. The second argument is the env, None in a domain that has none.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cadenza.rollout.model import Model


async def budget(task: Any, env: None, model: Model) -> None:
    """The model thinks for at most 48 tokens. Where that cuts it off, it is asked for the answer."""
    thought = await model.chat(task.data["messages"], sampling={"max_tokens": 48})
    if thought.finish == "length":  # else the answer is there, and ended by the model itself
        await model.generate(model.encode("\nAnswer: "), sampling={"max_tokens": 8})


async def two_answers(task: Any, env: None, model: Model) -> None:
    """Two branches go on from one thought, side by side. Each is a row of its own, in which the thought is prompt: it
    trains once, in the row of the conversation that wrote it. The reward sees the last branch."""
    thought = await model.chat(task.data["messages"], sampling={"max_tokens": 48})
    if thought.finish != "length":
        return
    branches = [model.branch(), model.branch()]
    await asyncio.gather(
        *[branch.generate(branch.encode("\nAnswer: "), sampling={"max_tokens": 8}) for branch in branches]
    )


async def draft_and_choose(task: Any, env: None, model: Model) -> None:
    """Two drafts are written side by side from the same prompt; then the model reads both and gives its answer."""
    first, second = model, model.branch()
    drafts = await asyncio.gather(*[draft.chat(task.data["messages"]) for draft in (first, second)])
    read = "\n".join(f"Draft {number}: {draft.text}" for number, draft in enumerate(drafts, 1))
    chooser = model.branch()
    await chooser.chat([*task.data["messages"], {"role": "user", "content": f"{read}\nAnswer: "}], fresh=True)
