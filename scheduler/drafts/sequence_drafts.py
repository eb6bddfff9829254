"""What is remembered of a sequence that is drafted for. Knows no sequences and no steps."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class DraftGuess(NamedTuple):
    """What was to follow a sequence's first `outputs` ones, as `drafter` says; `own`: how many of them it said itself,
    and its grammar did not force."""

    outputs: int = 0
    tokens: list[int] = []
    drafter: str = ""
    own: int = 0


NO_GUESS = DraftGuess()


@dataclass(eq=False, slots=True)
class SequenceDrafts:
    """One sequence's, from its arrival to its end."""

    most: int
    """Tokens that a step drafts for it at most."""
    state: dict[str, Any] = field(default_factory=dict)
    """The drafter's own."""
    acceptance_rate: float | None = None
    """The probability that a drafted token is right, as it seems; None while nothing is known of it."""
    guess: DraftGuess = NO_GUESS
    """What was to follow, when it was last asked."""
    resume_at: int = 0
    """Tokens that the sequence has before it is drafted for again."""
    cooldown: int = 0
    """Tokens for which nothing is drafted while its drafts are wrong."""
    proposed: tuple[int, list[int]] = (0, [])
    """Tokens that were known, and what a draft model says that follows them."""
