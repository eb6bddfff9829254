"""Drafts that a model computed in the executor, beside the target's steps: `engine/worker/step_drafters.py`."""

from collections.abc import Sequence

from ...scheduler.speculation import DraftRequest


class ProposedDrafts:
    """Takes the proposals that came with the last steps' results."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        """See `Drafter.propose`."""
        return [request.proposed[: request.k] for request in requests]
