"""Speculation: tokens are drafted for a sequence, and the step that computes its next token verifies them.

A step samples at each draft and at the token before the first, each time the token that it would have sampled there
without drafts: the same logits, the same number of the counter. Drafts are accepted while they are what was sampled.
So the text is the same with drafts and without, whoever drafts, and however. Knows no rows, no blocks and no text.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .plan import IntArray
from .sequence import Sequence


class DraftRequest(NamedTuple):
    """A sequence for which at most `k` tokens are to be drafted. `prompt` and `outputs` are all its tokens, not to be
    changed; `state` is the drafter's own from the sequence's first request to its last."""

    prompt: IntArray
    outputs: Tokens[int]
    k: int
    state: dict[str, Any]
    tenant: str = ""


class Drafter(Protocol):
    """Guesses how sequences go on. Called on the step loop's thread, while nothing computes."""

    def propose(self, requests: Tokens[DraftRequest]) -> Tokens[Tokens[int]]:
        """The tokens that may follow, the likeliest, for each request: none where there is no guess."""


@dataclass(slots=True)
class SpeculationTotals:
    """Proposals that were verified, their tokens, and those of them that were accepted: in all, and by place."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_place: list[int] = field(default_factory=list)


class Speculation:
    """What `drafter` drafts, `most` tokens a sequence and step at most, of a vocabulary of `vocab_size` tokens."""

    def __init__(self, drafter: Drafter, most: int, vocab_size: int) -> None:
        self._drafter, self.most, self._vocab_size = drafter, most, vocab_size
        self.totals = SpeculationTotals()
        self.reset_totals()

    def reset_totals(self) -> None:
        self.totals = SpeculationTotals(accepted_by_place=[0] * self.most)

    def drafts_for(self, sequence: Sequence) -> bool:
        """Whether the sequence may have drafts: not where the host makes something of each token."""
        return not sequence.request.guided

    def draft(self, asked: Tokens[tuple[Sequence, int]]) -> list[list[int]]:
        """Tokens to verify for each sequence, so many at most."""
        requests = [
            DraftRequest(each.request.prompt, each.outputs, most, each.draft_state, each.request.tenant)
            for each, most in asked
        ]
        proposed = self._drafter.propose(requests)
        return [self._possible(tokens, request.k) for tokens, request in zip(proposed, requests, strict=True)]

    def _possible(self, tokens: Tokens[int], most: int) -> list[int]:
        """The tokens up to the first that there is not."""
        for at, token in enumerate(tokens[:most]):
            if not 0 <= token < self._vocab_size:
                return list(tokens[:at])
        return list(tokens[:most])

    def observe(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens of one sequence the first `accepted` were right."""
        totals = self.totals
        totals.drafts += 1
        totals.draft_tokens += drafted
        totals.accepted_tokens += accepted
        for place in range(accepted):
            totals.accepted_by_place[place] += 1
