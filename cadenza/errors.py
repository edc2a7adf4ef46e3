"""Errors that user code may raise or meet, below everything that raises them."""


class InfrastructureError(Exception):
    """Something under the rollout broke: a process, a network, a time-out. It is retried elsewhere and never becomes
    a reward. An env or a reward may raise it to say that the task is not to blame."""


class EnvError(Exception):
    """An env broke its contract."""


class RewardError(Exception):
    """A reward function broke its contract."""
