"""What asks to be run, and what the scheduler remembers of it while it waits or runs. No counters: see rows.py."""

from dataclasses import dataclass, field

import numpy as np

from ..core.logprobs import PromptLogprobs
from .plan import IntArray, SamplerParams

GREEDY = SamplerParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One sequence to run. `key` is unique among the live ones; `hashes` come from `KVCacheManager.digest(prompt)`.

    `max_tokens` counts new tokens; 0 wants none, and gets the one that a computed prompt brings anyway.
    `stop_token_ids` end the sequence, the stop token being its last.
    `priority` 0 is the most urgent class; `weight` is the share of `tenant` beside others of a class. `extras` are
    those the hashes were made with: generated blocks need them.
    """

    key: int
    prompt: IntArray
    max_tokens: int
    hashes: tuple[bytes, ...] | list[bytes] = ()
    sampling: SamplerParams = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    extras: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and what became of it so far; outlives its stays in the running set.

    `seniority`: the step it arrived in, later by `ageing_steps` for each class below the most urgent one.
    `number` counts arrivals and breaks ties. `slot`: its tenant's number. `rank`: its place in the line, see
    `Scheduler.add`. `row`: where it runs, if it does. `awaited`: the hash of the block it is parked for. `long`: its
    prompt goes in the lane of long ones, see `Pace`. `scored`: prompt tokens with nothing more to be said of them, the
    first at least, before which there is nothing.
    """

    request: SequenceRequest
    arrival_number: int
    seniority: int
    rank: int
    hashes: list[bytes]
    tenant_slot: int = 0
    outputs: list[int] = field(default_factory=list)
    row: int | None = None
    awaited_hash: bytes | None = None
    long_prompt: bool = False
    admitted: bool = False
    prompt_logprobs_done: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_logprobs_done = len(self.request.prompt) if self.request.sampling.prompt_logprobs is None else 1

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def known(self) -> int:
        """Tokens the host knows: prompt and outputs."""
        return len(self.request.prompt) + len(self.outputs)

    @property
    def token_limit(self) -> int:
        """Tokens at which it ends."""
        return len(self.request.prompt) + max(self.request.max_tokens, 1)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Not all of its prompt that is to be scored is."""
        return self.prompt_logprobs_done < len(self.request.prompt)

    @property
    def shareable_tokens(self) -> int:
        """Of so many tokens it may share the blocks, the last one's apart: what is to be scored has to run."""
        return self.prompt_logprobs_done if self.lacks_prompt_logprobs else self.known

    @property
    def sampling(self) -> SamplerParams:
        """What it still wants."""
        asked = self.request.sampling
        return (
            asked
            if asked.prompt_logprobs is None or self.lacks_prompt_logprobs
            else asked._replace(prompt_logprobs=None)
        )

    def take_prompt_logprobs(self, scores: PromptLogprobs) -> PromptLogprobs:
        """Those of them that are new: after a preemption some come again.

        Raises:
            RuntimeError: some before them are missing.
        """
        if scores.start > self.prompt_logprobs_done:
            raise RuntimeError(f"scores from position {scores.start} on, where {self.prompt_logprobs_done} is next")
        fresh = scores.from_position(min(self.prompt_logprobs_done, scores.end))
        self.prompt_logprobs_done = max(self.prompt_logprobs_done, scores.end)
        return fresh

    def known_tokens(self) -> IntArray:
        """All known tokens."""
        return np.concatenate([self.request.prompt, np.array(self.outputs, np.int32)])

    def token_window(self, start: int, end: int) -> list[int]:
        """Known tokens from position `start` up to but not including `end`."""
        prompt = len(self.request.prompt)
        given: list[int] = self.request.prompt[start:end].tolist() if start < prompt else []
        return given + self.outputs[max(start - prompt, 0) : max(end - prompt, 0)]
