"""Whose sequence is whose: one key space for the scheduler, one message per client on the way out."""

from ..scheduler.plan import StepUpdates
from .messages import IDLE, NO_TOTALS, Load, Totals, Turn, Updates

_CLIENT_BITS = 8
MAX_CLIENTS = 1 << _CLIENT_BITS
"""Clients one core can tell apart."""


def scheduler_key(client: int, key: int) -> int:
    """One number for (client, its own key)."""
    return key << _CLIENT_BITS | client


def client_key(key: int) -> tuple[int, int]:
    """The (client, its own key) of a `scheduler_key`."""
    return key & (MAX_CLIENTS - 1), key >> _CLIENT_BITS


def split(
    updates: StepUpdates, step: int, load: Load, clients: int, turn: Turn = IDLE, totals: Totals = NO_TOTALS
) -> list[Updates]:
    """What a step means to each client, in their order; those it does not touch get an empty message."""
    messages = [Updates(step, [], [], [], [], [], load, turn, totals) for _ in range(clients)]
    at = 0
    for key, count in zip(updates.keys, updates.counts, strict=True):
        client, own = client_key(key)
        message = messages[client]
        message.keys.append(own)
        message.counts.append(count)
        message.tokens.extend(updates.tokens[at : at + count])
        message.logprobs.extend(updates.logprobs[at : at + count])
        at += count
    for key, scores in updates.scores:
        client, own = client_key(key)
        messages[client].scores.append((own, scores))
    for key, cached in updates.started:
        client, own = client_key(key)
        messages[client].started.append((own, cached))
    for key, reason in updates.finished:
        client, own = client_key(key)
        messages[client].finished.append((own, reason))
    return messages
