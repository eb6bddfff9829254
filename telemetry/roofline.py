"""What of a step's time reading and arithmetic take, by the formula that `charonia calibrate` fitted to a machine and a
checkpoint."""

from bisect import bisect_left
from typing import TypeAlias

import msgspec

Seconds: TypeAlias = tuple[tuple[int, float], ...]
"""Measured seconds by a count, ascending."""


class StepRoofline(msgspec.Struct, frozen=True):
    """The seconds that a step of a language model takes on its machine, by the names of `SimulatedMachine`: reading
    the `weights`, and keys and values of each token of context that decoding rows attend to; the products of a `token`,
    and the `head` of a sampled place. `products` and `heads` are measured, by tokens and by sampled places, and take
    the place of `weights` and `token`, and of `head`."""

    weights: float = 0.0
    token: float = 0.0
    head: float = 0.0
    decode_context: float = 0.0
    products: Seconds = ()
    heads: Seconds = ()

    def reading_seconds(self, context: float) -> float:
        """The least of them is what reading takes: one token is hardly computed with."""
        weights = self.products[0][1] if self.products else self.weights
        first = next((seconds for places, seconds in self.heads if places), 0.0)
        return weights + first + context * self.decode_context

    def arithmetic_seconds(self, tokens: float, samples: float) -> float:
        products = _beyond_first(self.products, tokens) if self.products else tokens * self.token
        sampled = tuple(each for each in self.heads if each[0])
        return products + (_beyond_first(sampled, samples) if sampled else samples * self.head)


def _beyond_first(table: Seconds, count: float) -> float:
    """What `count` take if each takes as long as, on average, those do that are computed beside the first."""
    if count <= 1 or len(table) < 2:
        return 0.0
    place = min(max(bisect_left(table, (count,)), 1), len(table) - 1)
    (fewer, short), (more, long) = table[place - 1 : place + 1]
    whole = short + (long - short) * (count - fewer) / (more - fewer)
    return count * max(whole - table[0][1], 0.0) / (count - 1)
