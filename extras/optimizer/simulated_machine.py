"""How long steps take on a machine, as a formula over what they compute. Knows neither clocks nor how it was found."""

from bisect import bisect_left
from collections.abc import Sequence
from math import log
from random import Random
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from ...scheduler.plan import StepPlan, StepWork
from ...telemetry.roofline import NotNegative, SecondsTable, require_ascending


class StepSpread(NamedTuple):
    """What single steps of about so many `seconds` take over what they should: quantiles, evenly apart."""

    seconds: Annotated[float, msgspec.Meta(gt=0)]
    factors: Annotated[tuple[NotNegative, ...], msgspec.Meta(min_length=1)]

    def at(self, level: float) -> float:
        """The quantile of this level, on a straight line between two."""
        position = level * (len(self.factors) - 1)
        low = int(position)
        high = min(low + 1, len(self.factors) - 1)
        return self.factors[low] + (position - low) * (self.factors[high] - self.factors[low])

    def scaled(self, factor: float) -> "StepSpread":
        return self._replace(factors=tuple(factor * quantile for quantile in self.factors))


class StepLoad(NamedTuple):
    """What decides how long a step takes: the tokens that it computes, the places that it samples, the tokens of
    context that its chunks of prompts read, once for each chunk, and the sequences that it computes tokens of."""

    work: StepWork
    samples: int
    chunk_reads: int = 0
    sequences: int = 0

    @classmethod
    def of_decoding(cls, rows: int, context: int) -> "StepLoad":
        """The load of sequences that decode, with so many tokens of context each."""
        return cls(StepWork(rows, rows * context), rows, sequences=rows)

    @classmethod
    def of_prompt(cls, tokens: int) -> "StepLoad":
        """The load of one whole prompt."""
        return cls(StepWork(0, 0, tokens, tokens * tokens // 2), 1, tokens, sequences=1)

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
        own = plan.counts[decoding]
        other = plan.counts[~decoding]
        work = int(own.sum()), int(context[decoding].sum()), int(other.sum()), int(context[~decoding].sum())
        reads = int((plan.starts + plan.counts)[~decoding].sum())
        return StepLoad(StepWork(*work), int(plan.samples.sum()), reads, len(plan.rows))


class SimulatedMachine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: reading the weights or computing with them, whichever is longer; attention; and the rest. And
    the seconds around steps. The defaults are bf16 of Qwen2.5-0.5B's shape on two Zen 4 cores."""

    weights: NotNegative = 27.4e-3
    """Seconds to read the weights."""
    token: NotNegative = 1.8e-3
    """The products of one token, of the head apart."""
    head: NotNegative = 0.7e-3
    """Seconds of the head for one sampled place."""
    decode_context: NotNegative = 0.8e-6
    """Attention of decoding rows, for each token attended to."""
    prompt_context: NotNegative = 0.3e-6
    """Attention of prompts, for each token attended to."""
    chunk_context: NotNegative = 0.0
    """The same for each token that a chunk of a prompt reads."""
    state: NotNegative = 0.0
    """Reading and writing the recurrent state of a sequence, once a step whatever its tokens. In what was measured it
    is among the products."""
    rest: NotNegative = 2e-3
    products: SecondsTable = ()
    """Measured seconds of all products by rows, in place of `weights` and `token`."""
    heads: SecondsTable = ()
    """Measured seconds of the head by sampled places, in place of `head`."""
    spread: tuple[StepSpread, ...] = ()
    """How single steps differ from that, ascending by their seconds: what holds a short step up for half its time is
    little of a long one. Empty: not at all."""
    between: NotNegative = 0.0
    """Seconds from a step's end until the next can begin: the step loop, and the server's work on the cores that
    compute."""
    between_token: NotNegative = 0.0
    """The same for each token that the step brought."""
    arrival: NotNegative = 0.0
    """Seconds until a request is in the engine."""
    arrival_token: NotNegative = 0.0
    """The same for each token of its prompt."""

    def __post_init__(self) -> None:
        """Raises `ValueError`, which a reader of JSON makes its own: a table does not ascend."""
        for name, table in (("products", self.products), ("heads", self.heads), ("spread", self.spread)):
            require_ascending(name, table)

    def seconds(self, load: StepLoad) -> float:
        """The seconds of a step, on average."""
        work = load.work
        computing = interpolate(self.products, load.rows) if self.products else self.token * load.rows
        sampling = interpolate(self.heads, load.samples) if self.heads else self.head * load.samples
        attention = self.decode_context * work.decode_context + self.prompt_context * work.prefill_context
        attention += self.chunk_context * load.chunk_reads
        states = self.state * load.sequences
        return max(self.weights, computing + sampling) + attention + states + self.rest

    def draw_seconds(self, load: StepLoad, random: Random) -> float:
        """What such a step takes this time."""
        return self._vary(self.seconds(load), random.random()) if self.spread else self.seconds(load)

    def _vary(self, seconds: float, level: float) -> float:
        """The seconds at a level of their spread, which lies between two known ones by the logarithm of the seconds."""
        index = bisect_left(self.spread, (seconds,))
        low = self.spread[max(index - 1, 0)]
        high = self.spread[min(index, len(self.spread) - 1)]
        near = log(seconds / low.seconds) / log(high.seconds / low.seconds) if low is not high else 0.0
        return seconds * (low.at(level) + near * (high.at(level) - low.at(level)))

    def seconds_between(self, samples: int) -> float:
        """The seconds from the end of a step that brought so many tokens until the next can begin."""
        return self.between + self.between_token * samples

    def arrival_seconds(self, prompt: int) -> float:
        """The seconds until a request with such a prompt is in the engine."""
        return self.arrival + self.arrival_token * prompt

    def slowed(self, factor: float) -> "SimulatedMachine":
        """The machine whose steps take so many times as long."""
        spread = self.spread or (StepSpread(1.0, (1.0,)),)
        return msgspec.structs.replace(self, spread=tuple(step_spread.scaled(factor) for step_spread in spread))


def interpolate(table: Sequence[tuple[int, float]], count: int) -> float:
    """What a table of one line or more says of a count."""
    if len(table) == 1:
        return table[0][1]
    index = min(max(bisect_left(table, (count,)), 1), len(table) - 1)
    (fewer, short), (more, long) = table[index - 1 : index + 1]
    return short + (long - short) * (count - fewer) / (more - fewer)
