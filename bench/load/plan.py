"""The requests of a load: which, for how long, and when each is due.

Knows nothing of servers or clocks. The same seed makes the same requests, to the token.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from ...core.errors import InvalidArgument

Prompt: TypeAlias = list[int] | str
Form: TypeAlias = Literal["ids", "text"]

_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_ARRIVALS, _SHARED = 1, 2
"""Streams of random numbers beside those of the single prompts."""

_WORDS = re.findall(
    r"\w+",
    """the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were her all she there would their we him been has when who will more no if out so said what up its
    about into than them can only other new some could time these two may then do first any my now such like""",
)
"""Words that are one token, their space included, in most vocabularies."""


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request: `prompt` and `new` in tokens, `due` in seconds after the start (0 in a closed loop)."""

    index: int
    due: float
    prompt: int
    new: int


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are made: token ids below `vocab`, or words; the first `shared` tokens are the same in all. `fixed`
    replaces the prompt of every request."""

    form: Form = "ids"
    vocab: int = 256
    shared: int = 0
    seed: int = 0
    fixed: list[int] | None = None

    def write(self, job: PlannedRequest) -> Prompt:
        """The prompt of a job. In the text form one word stands for one token, so that lengths are approximate."""
        if self.fixed is not None:
            return self.fixed
        shared = min(self.shared, job.prompt)
        drawn = [*self._draw(shared, _SHARED), *self._draw(job.prompt - shared, 3 + job.index)]
        return drawn if self.form == "ids" else " ".join(_WORDS[number] for number in drawn)

    def _draw(self, count: int, stream: int) -> list[int]:
        top = self.vocab if self.form == "ids" else len(_WORDS)
        numbers: list[int] = np.random.default_rng((self.seed, stream)).integers(0, top, count).tolist()
        return numbers


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times in seconds: `rate` a second on average, independent of one another."""
    gaps = np.random.default_rng((seed, _ARRIVALS)).exponential(1 / rate, count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def uniform_jobs(arrivals: Iterable[float], prompt: int, new: int) -> list[PlannedRequest]:
    """Jobs of one length."""
    return [PlannedRequest(index, due, prompt, new) for index, due in enumerate(arrivals)]


def read_trace(
    path: Path, *, speedup: float = 1.0, limit: int | None = None, longest: int | None = None
) -> list[PlannedRequest]:
    """The first `limit` jobs of a CSV with arrived_at (seconds), num_prefill_tokens and num_decode_tokens.

    The first is due at once; `speedup` divides the times. Prompts are cut so that no job exceeds `longest` tokens.

    Raises:
        InvalidArgument: the file cannot be read; the message names the line.
    """
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            missing = [column for column in _COLUMNS if column not in (rows.fieldnames or ())]
            if missing:
                raise InvalidArgument(f"{path} has no column {missing[0]}")
            jobs = [_job(path, index, row) for index, row in zip(range(limit or 2**31), rows, strict=False)]
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
    return [_adapted(job, jobs[0].due, speedup, longest) for job in jobs]


def _job(path: Path, index: int, row: dict[str, str]) -> PlannedRequest:
    try:
        arrived, prompt, new = (row[column] for column in _COLUMNS)
        return PlannedRequest(index, float(arrived), int(prompt), int(new))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{path}:{index + 2}: {error}") from None


def _adapted(job: PlannedRequest, first: float, speedup: float, longest: int | None) -> PlannedRequest:
    new = max(1, job.new if longest is None else min(job.new, longest - 1))
    prompt = max(1, job.prompt if longest is None else min(job.prompt, longest - new))
    return PlannedRequest(job.index, (job.due - first) / speedup, prompt, new)


def due_within(jobs: Sequence[PlannedRequest], duration: float | None) -> list[PlannedRequest]:
    """The requests that are due within `duration` seconds."""
    return [job for job in jobs if duration is None or job.due < duration]
