"""A sequence to run, and what the scheduler remembers of it while it waits or runs. No counters: see running_set.py."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from ..core.errors import InvalidArgument
from ..core.logprobs import PromptLogprobs
from ..core.resolved_sampling import ResolvedSampling
from ..core.retention import Retention
from ..core.sampling import TokenLimit
from ..kvcache.block_hashes import HashExtras
from ..kvcache.block_table import BlockTable
from ..kvcache.manager import KVCacheManager
from .drafts.sequence_drafts import SequenceDrafts
from .encoders.encoder_rows import EmbeddedSpan, EncoderRows, chunk_of_spans
from .plan import IntArray

GREEDY = ResolvedSampling()


class SequenceSpec(msgspec.Struct, array_like=True, kw_only=True, frozen=True, eq=False):
    """One sequence to run. The client's half makes it, it crosses the wire as it is, and the core adds `hashes`
    and `constrained` before the scheduler gets it."""

    key: int
    """Unique among the live ones, and not negative."""
    prompt: IntArray
    """Token ids, which the client's half has found in the vocabulary."""
    max_tokens: int
    """New tokens at most. 0 wants none, and gets the one that a computed prompt brings anyway."""
    sampling: ResolvedSampling = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence, one of them being its last; the model's eos is among them unless it is ignored."""
    priority: int = 0
    """The class; 0 is the most urgent one."""
    tenant: str = ""
    weight: float = 1.0
    """The share of the tenant beside others of a class."""
    salt: str = ""
    """Sets the cached blocks of equal prompts apart."""
    adapter: str = ""
    """The digest of the adapter that computes it; "" is the model itself."""
    adapter_name: str = ""
    """The name by which the request called that adapter, for who follows the cache."""
    target_ttft: float | None = None
    """Seconds to the first token that are wanted, `inf` where nobody waits; None leaves them to the scheduler."""
    target_itl: float | None = None
    """Seconds between tokens that are wanted, in the same way."""
    drafts_wanted: int | None = None
    """Tokens that a step may draft for it at most; None leaves that to the scheduler."""
    prediction: IntArray | None = None
    """What the new tokens will likely be: where it is right, they come faster."""
    embedded: tuple[EmbeddedSpan, ...] = ()
    """Parts of the prompt that are no tokens, ascending."""
    encoded: EncoderRows | None = None
    """What a decoder of a model with an encoder attends to beside its tokens; of other models None."""
    hashes: Collection[bytes] = ()
    """What `KVCacheManager.digest` makes of the prompt's `identities` and `extras`."""
    cache_hit_threshold: float | None = None
    """The part of the prompt that has to be cached, or else it ends unbegun: see `FinishReason.CACHE_THRESHOLD`. None
    is that of `SchedulerConfig`."""
    constrained: bool = False
    """The host follows the tokens and may force some, see `ForcedTokens`: no second step has the sequence before what
    the host makes of the last is known."""
    snapshot_at: tuple[int, ...] = ()
    """Counts of its first tokens after which others may go on differently, such as ends of messages: where layers keep
    states, that after so many is kept if it spares enough."""
    retention: Retention | None = None
    """What is to be kept of it for its session."""
    handed_over: bool = False
    """What it computes of its prompt is for another server: where layers keep states, that after the prompt's last full
    block is kept before all others."""

    @property
    def identities(self) -> IntArray:
        """The prompt by which equal ones are known: its tokens, and what stands for the places that are none."""
        if not self.embedded:
            return self.prompt
        identities = self.prompt.copy()
        for span in self.embedded:
            identities[span.start : span.end] = span.identities()
        return identities

    @property
    def extras(self) -> HashExtras:
        """What sets its blocks apart from those of others with the same tokens."""
        of_request = self.adapter, self.tenant, self.salt
        return of_request if self.encoded is None else (*of_request, self.encoded.digest.hex())

    def check_fits(self, max_model_len: int, cache: KVCacheManager) -> None:
        """Raises `InvalidArgument` where the sequence could never run, whatever else runs: the model's length or the
        cache is too small. `field` is the parameter to change."""
        prompt, new = len(self.prompt), self.max_tokens
        if prompt < 1:
            raise InvalidArgument("the prompt is empty", field="prompt")
        if new < 0:
            raise InvalidArgument(f"max_tokens must be at least 0, got {new}", field="max_tokens")
        TokenLimit(max_model_len).check_sequence(prompt, new)
        if cache.blocks_for(prompt + max(new, 1) - 1) > cache.blocks:
            field = "max_tokens" if cache.blocks_for(prompt) <= cache.blocks else "prompt"
            message = f"{prompt} prompt tokens and {new} new ones exceed the cache's {cache.longest}"
            raise InvalidArgument(message, field=field)


@dataclass(eq=False, slots=True)
class Sequence:
    """A spec and its state so far; outlives its stays in the running set."""

    spec: SequenceSpec
    arrival_number: int
    """Counts arrivals, and breaks ties."""
    seniority: int
    """The step it arrived in, later by `ageing_steps` for each class below the most urgent one."""
    rank: int
    """Its order in the waiting queue, see `Scheduler.add`."""
    hashes: list[bytes]
    """The hashes of its full blocks: the prompt's, then those of generated ones."""
    tenant_slot: int = 0
    arrived_at: float = 0.0
    """When it arrived, by the scheduler's clock."""
    target_ttft: float | None = None
    """The spec's, or what all have that say nothing."""
    target_itl: float | None = None
    """As `target_ttft`."""
    shared: int = 0
    """Tokens that the cache had of it when it was enqueued."""
    outputs: list[int] = field(default_factory=list)
    row: int | None = None
    """The row it holds, if any."""
    awaited: bytes | None = None
    """What it is set aside for, see `WaitingQueue.set_aside`."""
    long_prompt: bool = False
    """Whether its prompt goes in the lane of long ones, see `PrefillBudget`."""
    admitted: bool = False
    """Whether it ever held a row."""
    preempted_at: int = 0
    """Tokens that were computed when it was last preempted."""
    drafts: SequenceDrafts | None = None
    """None: nothing is drafted for it."""
    uncut: int = field(init=False)
    """The most places of its prompt that one step computes together, because they see one another; 0: none do."""
    prompt_logprobs_done: int = field(init=False)
    """Tokens of the prompt whose log-probability is known or not wanted; the first has none."""

    def __post_init__(self) -> None:
        wanted = self.spec.sampling.prompt_logprobs is not None
        self.prompt_logprobs_done = 1 if wanted else len(self.spec.prompt)
        self.uncut = max((span.length for span in self.spec.embedded if span.bidirectional), default=0)

    @property
    def known(self) -> int:
        """Tokens the host knows: prompt and outputs."""
        return len(self.spec.prompt) + len(self.outputs)

    def has_media_after(self, computed: int) -> bool:
        """Whether a place of its prompt after so many tokens takes what an encoder has made, as of an image, and was
        never computed before a preemption."""
        return bool(self.spec.embedded) and self.spec.embedded[-1].end > max(computed, self.preempted_at)

    @property
    def token_limit(self) -> int:
        """Tokens at which it ends."""
        return len(self.spec.prompt) + max(self.spec.max_tokens, 1)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs_done < len(self.spec.prompt)

    @property
    def shareable_tokens(self) -> int:
        """Leading tokens whose blocks it may share, the last token's apart: tokens that lack log-probabilities have to
        run."""
        return self.prompt_logprobs_done if self.lacks_prompt_logprobs else self.known

    def close_table(self, table: BlockTable, cache: KVCacheManager) -> None:
        """Give its blocks back; its scope retains what it asked for."""
        if self.spec.retention is not None and cache.retention is not None:
            cache.retention.keep(table, self.hashes, len(self.spec.prompt), self.spec.tenant, self.spec.retention)
        cache.close(table)

    def uncut_chunk(self, start: int, count: int, most: int) -> int:
        """How many of `count` tokens from `start` on a step computes that has room for `most`, see `chunk_of_spans`."""
        return chunk_of_spans(self.spec.embedded, start, count, most) if self.uncut else count

    def take_prompt_logprobs(self, computed: PromptLogprobs) -> PromptLogprobs:
        """Take in `computed` and return the part that is new: after a preemption some come again. Raises `RuntimeError`
        where some before them are missing."""
        done = self.prompt_logprobs_done
        if computed.start > done:
            raise RuntimeError(f"log-probabilities from position {computed.start} on, where {done} is next")
        self.prompt_logprobs_done = max(done, computed.end)
        return computed.from_position(min(done, computed.end))

    def identity_window(self, start: int, end: int) -> list[int]:
        """Known tokens from position `start` up to but not including `end`, as `SequenceSpec.identities` has them."""
        prompt = len(self.spec.prompt)
        of_prompt: list[int] = self.spec.identities[start:end].tolist() if start < prompt else []
        return of_prompt + self.outputs[max(start - prompt, 0) : max(end - prompt, 0)]


def most_uncut(sequences: Iterable[Sequence | None]) -> int:
    """The most places that one of these prompts has to compute in one step."""
    return max((sequence.uncut for sequence in sequences if sequence is not None), default=0)
