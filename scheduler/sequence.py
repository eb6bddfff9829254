"""A sequence to run, and what the scheduler remembers of it while it waits or runs. No counters: see running_set.py."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from ..core.logprobs import PromptLogprobs
from ..kvcache.manager import KVCacheManager
from .plan import IntArray, ResolvedSampling

GREEDY = ResolvedSampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One sequence to run. `key` is unique among the live ones; `hashes` come from `KVCacheManager.digest(prompt)`.

    `max_tokens` counts new tokens; 0 wants none, and gets the one that a computed prompt brings anyway.
    `stop_token_ids` end the sequence, the stop token being its last. `priority` 0 is the most urgent class; `weight`
    is the share of `tenant` beside others of a class. `extras` are those the hashes were made with: generated blocks
    need them. `max_in_flight`: steps in flight that may have the sequence at once; 0 is no limit of its own, 1 is for
    a sequence whose next token depends on what the host makes of the last one. `guided`: the host does that.
    `adapter`: the digest of the one that computes it; "" is the model itself.
    `target_ttft`, `target_itl`: seconds to its first token and between tokens that are wanted, `inf` where nobody
    waits; None leaves them to the scheduler.
    `drafts_wanted`: the most tokens that a step may draft for it; None leaves that to the scheduler. `prediction`:
    what its new tokens will likely be.
    """

    key: int
    prompt: IntArray
    max_tokens: int
    hashes: tuple[bytes, ...] | list[bytes] = ()
    sampling: ResolvedSampling = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    extras: tuple[str, ...] = ()
    max_in_flight: int = 0
    guided: bool = False
    adapter: str = ""
    target_ttft: float | None = None
    target_itl: float | None = None
    drafts_wanted: int | None = None
    prediction: IntArray | None = None

    def check_fits(self, max_model_len: int, cache: KVCacheManager) -> None:
        """Raises `InvalidArgument` where the sequence could never run, whatever else runs: the model's length or the
        cache is too small. `field` is the parameter to change."""
        prompt, new = len(self.prompt), self.max_tokens
        if prompt < 1:
            raise InvalidArgument("the prompt is empty", field="prompt")
        if new < 0:
            raise InvalidArgument(f"max_tokens must be at least 0, got {new}", field="max_tokens")
        asked = f"{prompt} prompt tokens and {new} new ones exceed"
        if prompt + new > max_model_len:
            field = "max_tokens" if prompt < max_model_len else "prompt"
            raise InvalidArgument(f"{asked} the model's {max_model_len}", field=field)
        if cache.blocks_for(prompt + max(new, 1) - 1) > cache.blocks:
            field = "max_tokens" if cache.blocks_for(prompt) <= cache.blocks else "prompt"
            raise InvalidArgument(f"{asked} the cache's {cache.blocks * cache.block_size}", field=field)


class DraftGuess(NamedTuple):
    """What was to follow a sequence's first `outputs` ones, as `drafter` says; `own`: how many of them it said itself,
    and its grammar did not force."""

    outputs: int = 0
    tokens: list[int] = []
    drafter: str = ""
    own: int = 0


NO_GUESS = DraftGuess()


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and its state so far; outlives its stays in the running set.

    `arrival_number` counts arrivals and breaks ties. `seniority`: the step it arrived in, later by `ageing_steps` for
    each class below the most urgent one. `rank`: its place in the waiting queue, see `Scheduler.add`. `row`: the one it
    holds, if any. `awaited_hash`: the block it is parked for. `held_since`: the step
    from which on it was held because too many adapters ran. `arrived_at`: when, by the scheduler's clock.
    `target_ttft`, `target_itl`: the request's, or what all have that say nothing. `shared`: tokens that the cache had
    of it when it was enqueued. `long_prompt`: see `PrefillBudget`.
    `drafts`: the most tokens that are drafted for it in a step; `draft_state` is the drafter's own; `draft_chance`: the
    probability that a drafted token is right, as it seems; `draft_guess`: what was to follow last.
    `drafts_from`: tokens that it has before it is drafted for again, after a rest of `draft_rest`.
    `proposed`: tokens that were known, and what a draft model says that follows them.
    `preempted_at`: tokens that were computed when it was last preempted.
    `prompt_logprobs_done`: tokens of the prompt whose log-probability is known or not wanted; the first has none.
    """

    request: SequenceRequest
    arrival_number: int
    seniority: int
    rank: int
    hashes: list[bytes]
    tenant_slot: int = 0
    arrived_at: float = 0.0
    target_ttft: float | None = None
    target_itl: float | None = None
    shared: int = 0
    outputs: list[int] = field(default_factory=list)
    row: int | None = None
    awaited_hash: bytes | None = None
    held_since: int = 0
    long_prompt: bool = False
    admitted: bool = False
    preempted_at: int = 0
    drafts: int = 0
    draft_state: dict[str, Any] = field(default_factory=dict)
    draft_chance: float | None = None
    draft_guess: DraftGuess = NO_GUESS
    drafts_from: int = 0
    draft_rest: int = 0
    proposed: tuple[int, list[int]] = (0, [])
    prompt_logprobs_done: int = field(init=False)

    def __post_init__(self) -> None:
        wanted = self.request.sampling.prompt_logprobs is not None
        self.prompt_logprobs_done = 1 if wanted else len(self.request.prompt)

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
        return self.prompt_logprobs_done < len(self.request.prompt)

    @property
    def shareable_tokens(self) -> int:
        """Leading tokens whose blocks it may share, the last token's apart: tokens that lack log-probabilities have to
        run."""
        return self.prompt_logprobs_done if self.lacks_prompt_logprobs else self.known

    def take_prompt_logprobs(self, computed: PromptLogprobs) -> PromptLogprobs:
        """Take in `computed` and return the part that is new: after a preemption some come again. Raises `RuntimeError`
        where some before them are missing."""
        done = self.prompt_logprobs_done
        if computed.start > done:
            raise RuntimeError(f"log-probabilities from position {computed.start} on, where {done} is next")
        self.prompt_logprobs_done = max(done, computed.end)
        return computed.from_position(min(done, computed.end))

    def token_window(self, start: int, end: int) -> list[int]:
        """Known tokens from position `start` up to but not including `end`."""
        prompt = len(self.request.prompt)
        given: list[int] = self.request.prompt[start:end].tolist() if start < prompt else []
        return given + self.outputs[max(start - prompt, 0) : max(end - prompt, 0)]
