"""Errors that user code may raise or meet, below everything that raises them."""

import asyncio


class InfrastructureError(Exception):
    """Something under the rollout broke: a process, a network, a time-out. It is retried elsewhere and never becomes
    a reward. An env or a reward may raise it to say that the task is not to blame."""


class DeadlinePassed(InfrastructureError):
    """Something did not answer in time."""


class OtherRanksLost(InfrastructureError):
    """A rank lost the others that it computes together with. Why, only the lost one could tell."""


class EnvError(Exception):
    """An env broke its contract."""


class RewardError(Exception):
    """A reward function broke its contract."""


class UserCodeError(Exception):
    """Code that a config names as 'module:name' raised. The message has the key, the name, the error and its place."""


USER_CODE_ERRORS = (Exception, SystemExit, asyncio.CancelledError)
"""What user code may raise and the run survives: an env that calls `sys.exit`, or awaits something that was cancelled,
ends its attempt and not the job."""


def is_cancelled_from_outside(error: BaseException) -> bool:
    """Whether this is a cancellation from outside, and not one that the called code brought about itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def raise_if_cancelled(error: BaseException) -> None:
    """A cancellation from outside is not user code's: it goes on."""
    if is_cancelled_from_outside(error):
        raise error
