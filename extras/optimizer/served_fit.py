"""What a server adds to its engine's steps, or a whole machine's formula, out of what a client saw."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from .simulated_machine import SimulatedMachine, StepLoad
from .step_fit import MachineFit, StepSample, fit_machine, solve_least_squares, solve_robust

_BEYOND = 512
"""Tokens behind the last measured number of rows, to which a line is drawn that has a prompt's slope."""

_LEAST = 1e-6
"""Seconds without a step: no load had none, but clocks differ."""


class ServedLoad(NamedTuple):
    """Requests to a server that had nothing else to do, which began with a prompt `begun` times after everything was
    answered: tokens of these `prompts`, its `steps`, `tokens` that came before the last ones, and seconds in which a
    request `waited` and no step ran. However long steps take meanwhile, this stays."""

    begun: int
    prompts: int
    steps: int
    tokens: int
    waited: float


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
    """All that a client saw of a server whose steps it cannot know."""

    decodes: list[ServedDecode]
    prompts: list[ServedPrompt]


def add_serving(machine: SimulatedMachine, loads: Sequence[ServedLoad], overhead: float) -> SimulatedMachine:
    """A machine whose steps were measured without a server, with what one adds: between steps, for each of their
    tokens, and before a request's first step. `overhead`: seconds that a server counts to a step and they do not."""
    features = np.array(
        [[load.steps - load.begun, load.tokens, load.begun, load.prompts] for load in loads], dtype=np.float64
    )
    seconds = np.array([load.waited + overhead * load.steps for load in loads])
    between, between_token, arrival, arrival_token = solve_robust(features, np.maximum(seconds, _LEAST)).tolist()
    return msgspec.structs.replace(
        machine, between=between, between_token=between_token, arrival=arrival, arrival_token=arrival_token
    )


def fit_served_machine(seen: ServedTimes) -> MachineFit:
    """The formula of a machine that only a server's client saw: what decodes were seen, and a prompt's time as a
    constant, which is its way through the server, and what each token and its attention take.

    Raises:
        InvalidArgument: too little was seen.
    """
    # Tokens that were read together have no time between them.
    samples = [StepSample(decode.load, gap) for decode in seen.decodes for gap in decode.gaps if gap > 0]
    fit = fit_machine(samples, heads=False)
    ttft = np.array([median(prompt.ttft) for prompt in seen.prompts])
    features = np.array([[1.0, prompt.tokens, prompt.tokens**2 / 2] for prompt in seen.prompts])
    constant, token, attended = solve_least_squares(features / ttft[:, None], np.ones(len(ttft))).tolist()
    products = fit.machine.products
    rows, seconds = products[-1]
    machine = msgspec.structs.replace(
        fit.machine,
        products=(*products, (rows + _BEYOND, seconds + token * _BEYOND)),
        prompt_context=attended,
        arrival=max(0.0, constant - products[0][1]),
    )
    return MachineFit(machine, fit.error)
