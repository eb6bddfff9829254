"""Beam search over a language model: each step asks for a token of every beam, with the likeliest ones beside it.

In the shape of vLLM's `LLM.beam_search`, and by its rules, but that any of the model's end tokens ends a sequence, so
does the model's length, and each has the reason. A step's requests find all but the last block of their prompts in the
prefix cache.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ..core.errors import InvalidArgument
from ..core.logprobs import MAX_LOGPROBS
from .generation import Generator
from .outputs import Logprob, RequestOutput
from .prompts import GivenPrompt, asked_prompts
from .sampling_params import SamplingParams

_WIDEST = MAX_LOGPROBS // 2
"""A step compares twice as many tokens of each beam as there are beams, since any of them may end it."""


class BeamSearchParams(msgspec.Struct):
    """As vLLM's. Values are checked when they are used."""

    beam_width: int
    """Beams that are followed, and sequences in the answer."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    """The power of a sequence's length, prompt included and without what ended it, that its log-probability is divided
    by."""
    include_stop_str_in_output: bool = False
    """Changes nothing, as for vLLM's `LLM`: a sequence that has ended has the token that ended it."""

    def check(self) -> None:
        """Raises `InvalidArgument` for a wrong value; `field` names it."""
        for name, most in (("beam_width", _WIDEST), ("max_tokens", 2**31)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidArgument(f"{name} must be between 1 and {most}, got {value!r}", field=name)
        penalty: object = self.length_penalty
        if not isinstance(penalty, int | float):
            raise InvalidArgument(f"length_penalty must be a number, got {penalty!r}", field="length_penalty")


@dataclass(slots=True)
class BeamSearchSequence:
    """A sequence of tokens: its prompt, what was generated, and the token that ended it, if one did."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """For each token that was generated, the likeliest in its place, by id."""
    cum_logprob: float = 0.0
    """The sum over the tokens that were generated."""
    text: str = ""
    """Of all tokens, prompt included."""
    finish_reason: str | None = None
    """stop or length."""
    stop_reason: int | None = None
    """The token that ended it."""

    def continued(self, token: int, likeliest: dict[int, Logprob]) -> "BeamSearchSequence":
        """The sequence with one more token."""
        logprob = self.cum_logprob + likeliest[token].logprob
        return BeamSearchSequence([*self.tokens, token], [*self.logprobs, likeliest], logprob)


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """One search from each of several prompts. `ends`: the tokens by which the model ends a text; `longest`: tokens
    that a sequence may have."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], params: BeamSearchParams, ends: frozenset[int], longest: int
    ) -> None:
        self._params = params
        self._ends = frozenset[int]() if params.ignore_eos else ends
        self._longest = longest
        self._beams = [[BeamSearchSequence(list(tokens))] for tokens in prompts]
        self._ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]

    async def run(
        self, generator: Generator, adapter: str, on_step: Callable[[], object] | None
    ) -> list[BeamSearchOutput]:
        """The best sequences of each prompt, without their texts. `on_step` is called after each token. Raises as
        `Generator.answer_all`, and `InvalidArgument` for a prompt that leaves room for no token."""
        params = self._params
        sampling = SamplingParams(
            max_tokens=1, temperature=params.temperature, logprobs=2 * params.beam_width, ignore_eos=True
        )
        for step in range(params.max_tokens):
            if step:
                self._end_longest()
            given = [GivenPrompt(tuple(beam.tokens)) for beams in self._beams for beam in beams]
            if not given:
                break
            asked = [prompt.with_adapter(adapter) for prompt in asked_prompts(given, sampling)]
            answers = iter(await generator.answer_all(asked, None))
            self._beams = [self._widened(number, beams, answers) for number, beams in enumerate(self._beams)]
            if on_step is not None:
                on_step()
        return [
            BeamSearchOutput(self._best(ended + [_ended(beam, "length") for beam in beams]))
            for ended, beams in zip(self._ended, self._beams, strict=True)
        ]

    def _end_longest(self) -> None:
        """Beams of one prompt are equally long: those that have no room for a token end."""
        for number, beams in enumerate(self._beams):
            if beams and len(beams[0].tokens) >= self._longest:
                self._ended[number] += [_ended(beam, "length") for beam in beams]
                self._beams[number] = []

    def _widened(
        self, number: int, beams: Sequence[BeamSearchSequence], answers: Iterator[RequestOutput]
    ) -> list[BeamSearchSequence]:
        """The beams of a prompt after a step."""
        longer = []
        for beam in beams:
            [likeliest] = next(answers).outputs[0].logprobs or [{}]
            for token in likeliest:
                grown = beam.continued(token, likeliest)
                if token not in self._ends:
                    longer.append(grown)
                    continue
                self._ended[number].append(_ended(grown, "stop", token))
        return self._best(longer)

    def _best(self, sequences: Sequence[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return heapq.nlargest(self._params.beam_width, sequences, key=self._score)

    def _score(self, sequence: BeamSearchSequence) -> float:
        counted = len(sequence.tokens) - (sequence.finish_reason == "stop")
        score: float = sequence.cum_logprob / max(counted, 1) ** self._params.length_penalty
        return score


def _ended(sequence: BeamSearchSequence, reason: str, stop: int | None = None) -> BeamSearchSequence:
    sequence.finish_reason, sequence.stop_reason = reason, stop
    return sequence
