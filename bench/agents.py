"""Agents' traffic: conversations that grow turn by turn, with pauses while tools run.

    python -m charonia.bench.agents trace agents.csv --sessions 8

A trace that `charonia simulate` plays: each session asks again some time after its last answer, with all of the
conversation so far and what a tool said. Turns, lengths and pauses are as published of coding agents: 43 turns, a
prompt of 142,000 tokens in the end, 444 new ones each; 86 of 100 pauses are within a second, 95 within ten, none is
longer than a minute. `--scale` divides lengths, for models and machines that are small.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import App, Parameter
from cyclopts.validators import Number

from .command import Count, exit_on_error, run_command
from .load.planned_requests import PlannedRequest, write_trace

_TURNS, _LAST_PROMPT, _NEW = 43, 142_000, 444
_FIRST_PROMPT = 20_000
"""Instructions and tools, and the task."""
_SPREAD = 0.8
"""Of what turns add: the sigma of a lognormal distribution."""
_PAUSES = ((0.0, 0.05), (0.86, 1.0), (0.95, 10.0), (1.0, 60.0))
"""Quantiles of pauses in seconds, between which their logarithm is on a straight line."""

app = App(name="python -m charonia.bench.agents", help=__doc__)


def agent_sessions(
    sessions: int, conversations: int, scale: float = 1.0, turns: int = _TURNS, seed: int = 0
) -> Iterator[PlannedRequest]:
    """The requests of so many sessions at a time, each of which has several conversations, one after the other."""
    random = np.random.default_rng(seed)
    levels, seconds = zip(*_PAUSES, strict=True)
    index = 0
    for session in range(sessions):
        start = float(random.uniform(0, _PAUSES[-1][1]))
        for conversation in range(conversations):
            steps = random.lognormal(0.0, _SPREAD, turns - 1)
            added = np.maximum(steps / steps.sum() * (_LAST_PROMPT - _FIRST_PROMPT), _NEW)
            prompts = np.maximum((_FIRST_PROMPT + np.cumsum([0.0, *added])) / scale, 2)
            pauses = np.exp(np.interp(random.random(turns), levels, np.log(seconds)))
            for turn in range(turns):
                prompt = int(prompts[turn])
                new = max(int(_NEW / scale), 1)
                pause = float(pauses[turn]) if turn or conversation else 0.0
                yield PlannedRequest(index, start, prompt, new, str(session), pause)
                index += 1


@app.command
def trace(
    file: Path,
    /,
    *,
    sessions: Count = 8,
    conversations: Count = 2,
    turns: Count = _TURNS,
    scale: Annotated[float, Parameter(validator=Number(gt=0))] = 1.0,
    seed: int = 0,
) -> None:
    """Write a trace for `charonia simulate --trace`.

    Parameters
    ----------
    sessions
        Agents at a time.
    conversations
        Of each, one after the other.
    scale
        Divides lengths.
    """
    with exit_on_error():
        write_trace(file, agent_sessions(sessions, conversations, scale, turns, seed))


if __name__ == "__main__":
    run_command(app)
