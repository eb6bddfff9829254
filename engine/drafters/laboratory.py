"""Drafters for measuring, not for serving, over recorded answers: `OracleDrafter` is always right, `SyntheticDrafter`
as often as configured, and `RandomDrafter` never, which shows the cost of useless drafts."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec

from ...core.errors import InvalidArgument
from ...scheduler.drafts.speculation import DraftRequest

_STATE = "laboratory"


class Record(msgspec.Struct, frozen=True):
    """A prompt's token ids and those of its answer: a line of a file, which may have other fields."""

    prompt_tokens: list[int]
    output_tokens: list[int]


def read_records(path: Path) -> list[Record]:
    """The records of a file in JSON Lines. Raises `InvalidArgument` if it cannot be read, or a line is no record."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidArgument(f"record {path}: {error.strerror}", field="record") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(msgspec.json.decode(line, type=Record))
        except msgspec.MsgspecError as error:
            raise InvalidArgument(f"record {path}, line {number}: {error}", field="record") from None
    return records


class OracleDrafter:
    """Drafts the recorded answer; nothing for other prompts."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._outputs = {tuple(record.prompt_tokens): record.output_tokens for record in records}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self.known(request) for request in requests]

    def known(self, request: DraftRequest) -> list[int]:
        """The record's next `k` tokens."""
        output = request.state.get(_STATE)
        if output is None:
            output = request.state[_STATE] = self._outputs.get(tuple(request.prompt.tolist()), [])
        done = len(request.outputs)
        return output[done : done + request.k]


class SyntheticDrafter:
    """Drafts the recorded answer with errors. `rates`: how often the draft at each place is accepted, as vLLM's
    `synthetic_acceptance_rates`. Raises `InvalidArgument` unless they are from 1 to 0 and do not rise."""

    def __init__(self, records: Iterable[Record], rates: Sequence[float], seed: int) -> None:
        places = [1.0, *rates]
        if not rates or any(not 0 <= rate <= before for before, rate in pairwise(places)):
            message = f"synthetic_acceptance_rates are to fall, from 1 to 0 at most, not to be {list(rates)}"
            raise InvalidArgument(message, field="speculative_config")
        self._oracle, self._random = OracleDrafter(records), Random(seed)
        self._chances = [rate / before if before else 0.0 for before, rate in pairwise(places)]

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """See `Drafter.propose`: as many tokens as there are rates."""
        return [self._err(self._oracle.known(request)) for request in requests]

    def _err(self, tokens: list[int]) -> list[int]:
        tokens = tokens[: len(self._chances)]
        for place, chance in zip(range(len(tokens)), self._chances, strict=False):
            if self._random.random() >= chance:
                return tokens[:place] + wrong_tokens(tokens[place:])
        return tokens


def wrong_tokens(tokens: Iterable[int]) -> list[int]:
    """As many other tokens of the same vocabulary."""
    return [token - 1 if token else 1 for token in tokens]


class RandomDrafter:
    """Drafts `k` tokens of a vocabulary of `vocab_size`, whatever came before."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._random = vocab_size, Random(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._random.choices(range(self._vocab_size), k=request.k) for request in requests]
