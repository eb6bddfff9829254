"""The numbers that shape a step."""

from typing import Annotated, Literal

import msgspec

from ..core.errors import InvalidArgument


class SnapshotRule(msgspec.Struct, frozen=True, kw_only=True):
    """How often the state of a sequence is kept, in tokens; for models that have states. See `StateSaves`."""

    prompt_stride: Annotated[int, msgspec.Meta(ge=1)] = 512
    """Between two snapshots of a prompt: twice as many, and so on, for one that would have too many of them."""
    most_per_prompt: Annotated[int, msgspec.Meta(ge=1)] = 8
    generated_stride: Annotated[int, msgspec.Meta(ge=1)] = 128
    """Between two snapshots of generated text."""
    least_gain: Annotated[int, msgspec.Meta(ge=1)] = 64
    """A snapshot spares so many tokens at least, or is not taken."""
    prompt_tail: Annotated[int, msgspec.Meta(ge=0)] = 16
    """Last tokens of a prompt that its snapshot leaves out: a template's beginning of an answer, which the conversation
    need not have in its next turn."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one scheduler.

    Raises:
        InvalidArgument: more sequences than tokens in a step.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] = 2048
    ahead: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Plans scheduled beyond the oldest unapplied one."""
    in_flight_per_sequence: int | None = None
    """Plans in flight that may have the same sequence; None means ahead + 1."""
    admission: Literal["optimistic", "no_evict"] = "optimistic"
    """`optimistic` admits what fits now and preempts when it must; `no_evict` admits what fits to its last token."""
    ageing_steps: int = 256
    """A waiting sequence gains one priority class in so many steps."""
    target_ttft_ms: float | None = None
    """Milliseconds to a first token that are wanted, of sequences that say nothing else; None leaves them to
    `PrefillBudget`'s balance."""
    target_itl_ms: float | None = None
    """Milliseconds between tokens, in the same way. With 0, prompts have no bound at all."""
    max_loras: int = 0
    """Different adapters of running sequences; 0 is no limit."""
    cache_hit_threshold: float = 0.0
    """The part of a prompt that has to be cached, of sequences that say nothing else."""
    snapshots: SnapshotRule = SnapshotRule()

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise InvalidArgument(
                f"max_num_seqs {self.max_num_seqs} must be at least 1 and at most max_num_batched_tokens "
                f"{self.max_num_batched_tokens}: a step has room for one token of each sequence",
                field="max_num_seqs",
            )

    @property
    def max_in_flight(self) -> int:
        """Plans in flight that may have the same sequence."""
        return self.in_flight_per_sequence or self.ahead + 1

    @property
    def tokens_in_flight(self) -> int:
        """The most tokens that plans in flight compute together."""
        return (self.ahead + 1) * self.max_num_batched_tokens

    @property
    def rank_step_tokens(self) -> int:
        """Prompt tokens that count as a step of waiting when prompts are ranked: about what one gets in a step."""
        return self.max_num_batched_tokens if self.target_itl_ms == 0 else min(self.max_num_batched_tokens, 16)
