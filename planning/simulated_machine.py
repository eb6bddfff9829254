"""How long steps take on a machine, as a formula over what they compute. Knows neither clocks nor how it was found."""

from bisect import bisect_left
from random import Random

import msgspec

from ..scheduler.prefill_budget import StepWork


class SimulatedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: reading the weights or computing with them, whichever is longer; attention; and the rest.

    `weights`: reading them. `token`: the products of one token, of the head apart; `head`: those of one sampled place.
    `decode_context`, `prompt_context`: attention of decoding rows and of prompts, for each token attended to. The
    defaults are bf16 of Qwen2.5-0.5B's shape on two Zen 4 cores. `products`: measured seconds of all products by rows,
    ascending, in place of `weights` and `token`. `spread`: quantiles, evenly apart, of what steps take over what they
    should; empty: just that.
    """

    weights: float = 27.4e-3
    token: float = 1.8e-3
    head: float = 0.7e-3
    decode_context: float = 0.8e-6
    prompt_context: float = 0.3e-6
    rest: float = 2e-3
    products: tuple[tuple[int, float], ...] = ()
    spread: tuple[float, ...] = ()

    def seconds(self, work: StepWork, samples: int) -> float:
        """Of a step that samples at so many places."""
        rows = work.decode_tokens + work.prefill_tokens
        computing = self._measured(rows) if self.products else self.token * rows
        attention = self.decode_context * work.decode_context + self.prompt_context * work.prefill_context
        return max(self.weights, computing + self.head * samples) + attention + self.rest

    def draw_seconds(self, work: StepWork, samples: int, random: Random) -> float:
        """What such a step takes this time."""
        if not self.spread:
            return self.seconds(work, samples)
        place = random.random() * (len(self.spread) - 1)
        low = min(int(place), len(self.spread) - 2) if len(self.spread) > 1 else 0
        high = min(low + 1, len(self.spread) - 1)
        factor = self.spread[low] + (place - low) * (self.spread[high] - self.spread[low])
        return factor * self.seconds(work, samples)

    def _measured(self, rows: int) -> float:
        """Between measurements, and beyond the last two, on a straight line."""
        if len(self.products) == 1:
            return self.products[0][1]
        place = min(max(bisect_left(self.products, (rows,)), 1), len(self.products) - 1)
        (fewer, short), (more, long) = self.products[place - 1 : place + 1]
        return short + (long - short) * (rows - fewer) / (more - fewer)
