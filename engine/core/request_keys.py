"""Whose sequence is whose: one key space for the scheduler, one message per client on the way out."""

from collections.abc import Sequence
from itertools import compress
from typing import TypeVar

from ...scheduler.plan import StepUpdates
from .messages import NO_STEP, NO_TOTALS, CoreTotals, EngineLoad, RequestUpdates, StepStats

_CLIENT_BITS = 8
MAX_CLIENTS = 1 << _CLIENT_BITS
"""Clients one core can tell apart."""

_CLIENT = MAX_CLIENTS - 1
T = TypeVar("T")


def scheduler_key(client: int, key: int) -> int:
    """One number for (client, its own key)."""
    return key << _CLIENT_BITS | client


def client_key(key: int) -> tuple[int, int]:
    """The (client, its own key) of a `scheduler_key`."""
    return key & _CLIENT, key >> _CLIENT_BITS


def split_updates(
    updates: StepUpdates,
    step: int,
    load: EngineLoad,
    clients: int,
    turn: StepStats = NO_STEP,
    totals: CoreTotals = NO_TOTALS,
) -> list[RequestUpdates]:
    """What a step means to each client, in their order; those it does not touch get an empty message."""
    parts = [updates] if clients == 1 else [_part(updates, client) for client in range(clients)]
    return [
        RequestUpdates(
            step,
            [key >> _CLIENT_BITS for key in part.keys],
            part.counts,
            part.tokens,
            _owned(part.started),
            _owned(part.finished),
            load,
            turn,
            totals,
            list(part.logprobs),
            _owned(part.prompt_logprobs),
        )
        for part in parts
    ]


def _owned(entries: Sequence[tuple[int, T]]) -> list[tuple[int, T]]:
    """By the client's own keys."""
    return [(key >> _CLIENT_BITS, what) for key, what in entries] if entries else []


def _part(updates: StepUpdates, client: int) -> StepUpdates:
    """What is this client's."""
    own = [key & _CLIENT == client for key in updates.keys]
    each = [mine for mine, count in zip(own, updates.counts, strict=True) for _ in range(count)]
    return StepUpdates(
        list(compress(updates.keys, own)),
        list(compress(updates.counts, own)),
        list(compress(updates.tokens, each)),
        [entry for entry in updates.started if entry[0] & _CLIENT == client],
        [entry for entry in updates.finished if entry[0] & _CLIENT == client],
        list(compress(updates.logprobs, each)),
        [entry for entry in updates.prompt_logprobs if entry[0] & _CLIENT == client],
    )
