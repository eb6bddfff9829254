"""How long steps take on a machine, as a formula over what they compute. Knows neither clocks nor how it was found."""

from bisect import bisect_left
from collections.abc import Sequence
from math import log
from random import Random
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from ...scheduler.plan import StepPlan
from ...scheduler.prefill_budget import StepWork
from ...telemetry.roofline import NotNegative, SecondsTable, require_ascending


class StepSpread(NamedTuple):
    """What single steps of about so many `seconds` take over what they should: quantiles, evenly apart."""

    seconds: Annotated[float, msgspec.Meta(gt=0)]
    factors: Annotated[tuple[NotNegative, ...], msgspec.Meta(min_length=1)]

    def at(self, level: float) -> float:
        """The quantile of this level, on a straight line between two."""
        place = level * (len(self.factors) - 1)
        low = int(place)
        high = min(low + 1, len(self.factors) - 1)
        return self.factors[low] + (place - low) * (self.factors[high] - self.factors[low])

    def scaled(self, factor: float) -> "StepSpread":
        return self._replace(factors=tuple(factor * each for each in self.factors))


class StepLoad(NamedTuple):
    """What decides how long a step takes: the tokens that it computes, the places that it samples, and the tokens of
    context that its chunks of prompts read, once for each chunk."""

    work: StepWork
    samples: int
    chunk_reads: int = 0

    @classmethod
    def of_decoding(cls, rows: int, context: int) -> "StepLoad":
        """Of sequences that decode, with so many tokens of context each."""
        return cls(StepWork(rows, rows * context), rows)

    @classmethod
    def of_prompt(cls, tokens: int) -> "StepLoad":
        """Of one whole prompt."""
        return cls(StepWork(0, 0, tokens, tokens * tokens // 2), 1, tokens)

    @property
    def rows(self) -> int:
        """Tokens of all rows, each a row of the step's matrix products."""
        return self.work.decode_tokens + self.work.prefill_tokens


class StepLoadReader:
    """Reads the plans of one scheduler, in their order: rows that sampled before decode, from there on."""

    def __init__(self) -> None:
        self._decoding = np.zeros(64, np.bool_)  # by row

    def read(self, plan: StepPlan) -> StepLoad:
        if (highest := int(plan.rows.max())) >= len(self._decoding):
            self._decoding = np.concatenate([self._decoding, np.zeros(highest, np.bool_)])
        left = [*(row for row in plan.closed.tolist() if row < len(self._decoding)), *(new.row for new in plan.new)]
        self._decoding[left] = False
        decoding = self._decoding[plan.rows]
        context = plan.counts * (plan.starts + plan.counts // 2)
        self._decoding[plan.rows[plan.samples]] = True
        own, other = plan.counts[decoding], plan.counts[~decoding]
        work = int(own.sum()), int(context[decoding].sum()), int(other.sum()), int(context[~decoding].sum())
        reads = int((plan.starts + plan.counts)[~decoding].sum())
        return StepLoad(StepWork(*work), int(plan.samples.sum()), reads)


class SimulatedMachine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: reading the weights or computing with them, whichever is longer; attention; and the rest. And
    the seconds around steps.

    `weights`: reading them. `token`: the products of one token, of the head apart; `head`: those of one sampled place.
    `decode_context`, `prompt_context`: attention of decoding rows and of prompts, for each token attended to, and
    `chunk_context` for each token that a chunk of a prompt reads. The defaults are bf16 of Qwen2.5-0.5B's shape on two
    Zen 4 cores. `products`: measured seconds of all products by rows, in place of `weights` and `token`; `heads`: those
    of the head by sampled places, in place of `head`. `spread`: how single steps differ from that, ascending by their
    seconds, for what holds a short step up for half its time is little of a long one; empty: not at all.

    `between`: from a step's end until the next can begin, and `between_token` for each token that the step brought: the
    step loop, and what the server takes of the cores that compute. `arrival`: until a request is in the engine, and
    `arrival_token` for each of its prompt.
    """

    weights: NotNegative = 27.4e-3
    token: NotNegative = 1.8e-3
    head: NotNegative = 0.7e-3
    decode_context: NotNegative = 0.8e-6
    prompt_context: NotNegative = 0.3e-6
    chunk_context: NotNegative = 0.0
    rest: NotNegative = 2e-3
    products: SecondsTable = ()
    heads: SecondsTable = ()
    spread: tuple[StepSpread, ...] = ()
    between: NotNegative = 0.0
    between_token: NotNegative = 0.0
    arrival: NotNegative = 0.0
    arrival_token: NotNegative = 0.0

    def __post_init__(self) -> None:
        """Raises `ValueError`, which a reader of JSON makes its own: a table does not ascend."""
        for name, table in (("products", self.products), ("heads", self.heads), ("spread", self.spread)):
            require_ascending(name, table)

    def seconds(self, load: StepLoad) -> float:
        """Of a step, on average."""
        work = load.work
        computing = interpolate(self.products, load.rows) if self.products else self.token * load.rows
        sampling = interpolate(self.heads, load.samples) if self.heads else self.head * load.samples
        attention = self.decode_context * work.decode_context + self.prompt_context * work.prefill_context
        attention += self.chunk_context * load.chunk_reads
        return max(self.weights, computing + sampling) + attention + self.rest

    def draw_seconds(self, load: StepLoad, random: Random) -> float:
        """What such a step takes this time."""
        return self._vary(self.seconds(load), random.random()) if self.spread else self.seconds(load)

    def _vary(self, seconds: float, level: float) -> float:
        """Between two spreads by the logarithm of the seconds."""
        place = bisect_left(self.spread, (seconds,))
        low, high = self.spread[max(place - 1, 0)], self.spread[min(place, len(self.spread) - 1)]
        near = log(seconds / low.seconds) / log(high.seconds / low.seconds) if low is not high else 0.0
        return seconds * (low.at(level) + near * (high.at(level) - low.at(level)))

    def seconds_between(self, samples: int) -> float:
        """From the end of a step that brought so many tokens until the next can begin."""
        return self.between + self.between_token * samples

    def arrival_seconds(self, prompt: int) -> float:
        """Until a request with such a prompt is in the engine."""
        return self.arrival + self.arrival_token * prompt

    def slowed(self, factor: float) -> "SimulatedMachine":
        """The machine whose steps take so many times as long."""
        spread = self.spread or (StepSpread(1.0, (1.0,)),)
        return msgspec.structs.replace(self, spread=tuple(each.scaled(factor) for each in spread))


def interpolate(table: Sequence[tuple[int, float]], count: int) -> float:
    """What a table of one line or more says of a count."""
    if len(table) == 1:
        return table[0][1]
    place = min(max(bisect_left(table, (count,)), 1), len(table) - 1)
    (fewer, short), (more, long) = table[place - 1 : place + 1]
    return short + (long - short) * (count - fewer) / (more - fewer)
