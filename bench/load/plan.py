"""The prompts of a load's requests. The same seed makes the same, to the token."""

import re
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from .planned_requests import PlannedRequest

Prompt: TypeAlias = list[int] | str
Form: TypeAlias = Literal["ids", "text"]

_SHARED = 2
"""The stream of random numbers of what prompts share; single prompts have those above."""

WORDS = re.findall(
    r"\w+",
    """the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were her all she there would their we him been has when who will more no if out so said what up its
    about into than them can only other new some could time these two may then do first any my now such like""",
)
"""Words that are one token, their space included, in most vocabularies."""


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
        drawn = [*self._draw(shared, _SHARED), *self._draw(job.prompt - shared, _SHARED + 1 + job.index)]
        return drawn if self.form == "ids" else " ".join(WORDS[number] for number in drawn)

    def _draw(self, count: int, stream: int) -> list[int]:
        top = self.vocab if self.form == "ids" else len(WORDS)
        numbers: list[int] = np.random.default_rng((self.seed, stream)).integers(0, top, count).tolist()
        return numbers
