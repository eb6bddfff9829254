"""What a server adds to its engine's steps, or a whole machine's formula, out of what a client saw."""

from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from .simulated_machine import SimulatedMachine, StepLoad
from .simulation import EngineShape, SimulatedRequest, Simulation
from .step_fit import MachineFit, StepSample, fit_machine, solve_least_squares

_BEYOND = 512
"""Tokens behind the last measured number of rows, to which a line is drawn that has a prompt's slope."""


class ServedDecode(NamedTuple):
    """`rows` sequences that decoded together with about so many tokens of `context` each: seconds between tokens."""

    rows: int
    context: int
    gaps: list[float]

    @property
    def load(self) -> StepLoad:
        return StepLoad.of_decoding(self.rows, self.context)


class ServedPrompt(NamedTuple):
    """A request that was alone: tokens of its prompt, and the seconds to its first token, each time."""

    tokens: int
    ttft: list[float]


class ServedTimes(NamedTuple):
    """All that a client saw."""

    decodes: list[ServedDecode]
    prompts: list[ServedPrompt]


def add_serving(machine: SimulatedMachine, shape: EngineShape, seen: ServedTimes) -> SimulatedMachine:
    """A machine whose steps were measured without a server, with what one adds: between steps, for each of their
    tokens, and before a request's first step."""
    rows = np.array([[1.0, each.rows] for each in seen.decodes])
    gaps = np.array([median(each.gaps) for each in seen.decodes])
    steps = np.array([machine.usual_seconds(each.load) for each in seen.decodes])
    between, between_token = solve_least_squares(rows / steps[:, None], gaps / steps - 1).tolist()
    served = msgspec.structs.replace(machine.steadied(), between=between, between_token=between_token)
    alone = np.array([_ttft_alone(served, shape, each.tokens) for each in seen.prompts])
    ttft = np.array([median(each.ttft) for each in seen.prompts])
    prompts = np.array([[1.0, each.tokens] for each in seen.prompts])
    arrival, arrival_token = solve_least_squares(prompts / alone[:, None], ttft / alone - 1).tolist()
    return msgspec.structs.replace(served, arrival=arrival, arrival_token=arrival_token, spread=machine.spread)


def fit_served_machine(seen: ServedTimes) -> MachineFit:
    """The formula of a machine that only a server's client saw: what decodes were seen, and a prompt's time as a
    constant, which is its way through the server, and what each token and its attention take.

    Raises:
        InvalidArgument: too little was seen.
    """
    # Tokens that were read together have no time between them.
    samples = [StepSample(each.load, gap) for each in seen.decodes for gap in each.gaps if gap > 0]
    found = fit_machine(samples, heads=False)
    ttft = np.array([median(each.ttft) for each in seen.prompts])
    features = np.array([[1.0, each.tokens, each.tokens**2 / 2] for each in seen.prompts])
    constant, token, attended = solve_least_squares(features / ttft[:, None], np.ones(len(ttft))).tolist()
    products = found.machine.products
    rows, seconds = products[-1]
    machine = msgspec.structs.replace(
        found.machine,
        products=(*products, (rows + _BEYOND, seconds + token * _BEYOND)),
        prompt_context=attended,
        arrival=max(0.0, constant - products[0][1]),
    )
    return MachineFit(machine, found.error)


def _ttft_alone(machine: SimulatedMachine, shape: EngineShape, tokens: int) -> float:
    [result] = Simulation(machine, shape).run([SimulatedRequest(0.0, tokens, 1)])
    return result.ttft
