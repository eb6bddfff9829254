"""The numbers that shape a step."""

from typing import Annotated, Literal

import msgspec

from ..core.errors import InvalidArgument


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`ahead`: plans scheduled beyond the oldest unapplied one. `in_flight_per_sequence` None means ahead + 1.

    `admission`: "optimistic" admits what fits now and preempts when it must; "no_evict" admits only what fits
    to its last token. A waiting sequence gains one priority class every `ageing_steps` steps. `target_ttft_ms`,
    `target_itl_ms`: milliseconds to a first token and between tokens that are wanted, of sequences that say nothing
    else; None leaves them to `PrefillBudget`'s balance. With a `target_itl_ms` of 0 prompts have no bound at all.
    `max_loras`: different adapters of running sequences; 0 is no limit.

    Raises:
        InvalidArgument: more sequences than tokens in a step.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] = 2048
    ahead: Annotated[int, msgspec.Meta(ge=0)] = 0
    in_flight_per_sequence: int | None = None
    admission: Literal["optimistic", "no_evict"] = "optimistic"
    ageing_steps: int = 256
    target_ttft_ms: float | None = None
    target_itl_ms: float | None = None
    max_loras: int = 0

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
    def rank_step_tokens(self) -> int:
        """Prompt tokens that count as a step of waiting when prompts are ranked: about what one gets in a step."""
        return self.max_num_batched_tokens if self.target_itl_ms == 0 else min(self.max_num_batched_tokens, 16)
