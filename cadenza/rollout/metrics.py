"""The counters of a rollout as one flat dict: 'area/name' -> number."""

from __future__ import annotations

from cadenza.rollout.group_queue import GroupQueue
from cadenza.rollout.records import Fate
from cadenza.rollout.sampler import Sampler
from cadenza.rollout.slot_pool import SlotPool

DISPATCHED = (Fate.TRAINED, Fate.STALE, Fate.SURPLUS)
"""Whose lengths the length bias compares: what was sent out to be trained. Attempts that were cut short count with
the tokens they had, so that the true bias may be larger."""


def rollout_metrics(queue: GroupQueue, slots: SlotPool, sampler: Sampler) -> dict[str, float]:
    """A snapshot."""
    ledger = queue.ledger
    metrics: dict[str, float] = {
        "attempts/issued": ledger.issued,
        "attempts/live": ledger.live,
        "groups/opened": ledger.groups_opened,
        "groups/consumed": queue.consumed,
        "groups/ahead": queue.started - queue.consumed,
        "slots/busy": slots.busy,
        "slots/leases_expired": slots.expired_leases,
        "envs/leaked": slots.leaked_envs,
        "errors/user_code": queue.errors.total,
        **sampler.counters(),
    }
    domains = queue.domains.all.values()
    if any(domain.rest_epochs for domain in domains):
        metrics["tasks/resting"] = sum(len(domain.resting) for domain in domains)
        metrics["tasks/rested"] = sum(domain.rested for domain in domains)
    for domain in domains:
        if (level := domain.tasks.level) is not None:
            metrics[f"tasks/level/{domain.name}"] = level
    if queue.outages.has_paused:
        metrics["domains/paused"] = len(queue.outages.pauses)
    if slots.judge_calls:
        metrics["judge/calls"] = slots.judge_calls
        metrics["judge/tokens"] = slots.judge_tokens
    for fate in Fate:
        metrics[f"fate/{fate.value}"] = ledger.fates[fate]
        metrics[f"tokens/{fate.value}"] = ledger.tokens[fate]
    for cause, tokens in ledger.lost_tokens.items():
        metrics[f"tokens_lost/{cause}"] = tokens
    trained = queue.staleness.total()
    if trained:
        metrics["staleness/mean"] = sum(age * count for age, count in queue.staleness.items()) / trained
        metrics["staleness/max"] = max(queue.staleness)
        attempts = sum(ledger.fates[fate] for fate in DISPATCHED)
        tokens = sum(ledger.tokens[fate] for fate in DISPATCHED)
        if tokens:
            mean = ledger.tokens[Fate.TRAINED] / ledger.fates[Fate.TRAINED]
            metrics["length_bias"] = mean / (tokens / attempts)
    return metrics
