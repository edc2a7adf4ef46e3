"""Routing rules by name: `sampler.routing` is one of `ROUTING_RULES`, or 'module:name' for a rule of your own.

Such a name means a class, or a function, that is called with the `SamplerConfig` and gives a `RoutingRule`:

    class RoundRobin:
        def __init__(self, config: SamplerConfig) -> None:
            self._count = itertools.count()

        def choose(self, route_request, sticky, cached, router):
            return router.active[next(self._count) % len(router.active)] if router.active else None
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cadenza.config import load_object
from cadenza.rollout.prefix_routing import PrefixRouting
from cadenza.rollout.router import RoutingRule
from cadenza.user_code import named_user_code

if TYPE_CHECKING:
    from cadenza.rollout.sampler import SamplerConfig

ROUTING_RULES: dict[str, Callable[[SamplerConfig], RoutingRule]] = {
    "prefix": lambda config: PrefixRouting(config.prefill_weight),
}


def check_name(name: str) -> str:
    """Refuses what is neither one of `ROUTING_RULES` nor written as 'module:name'."""
    if name not in ROUTING_RULES and ":" not in name:
        raise ValueError(
            f"routing '{name}' is not known; take one of {', '.join(ROUTING_RULES)}, or write 'module:name'"
        )
    return name


def make_rule(config: SamplerConfig) -> RoutingRule:
    """The rule that `config.routing` names."""
    name = config.routing
    factory = ROUTING_RULES.get(name) or load_object(name)
    with named_user_code("sampler.routing", name):
        rule: RoutingRule = factory(config)
    if not callable(getattr(rule, "choose", None)):
        raise ValueError(f"sampler.routing '{name}' gave {rule!r}, which has no method 'choose'; see RoutingRule")
    return rule
