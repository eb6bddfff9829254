"""Builds the drafter that a configuration names."""

from collections.abc import Sequence
from pathlib import Path

from ...scheduler.drafts.speculation import Drafter, DraftRequest
from ..config import SpeculationConfig
from ..drafters.custom import CustomDrafter
from ..drafters.laboratory import OracleDrafter, RandomDrafter, SyntheticDrafter, read_records
from ..drafters.ngram import NgramDrafter
from ..drafters.suffix import SuffixDrafter


class ProposedDrafts:
    """A `Drafter` whose proposals came with the last steps' results."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        return [request.proposed[: request.k] for request in requests]


_SEED = 0
"""The seed of drafters that draw, so that runs can be compared."""


def build_drafter(config: SpeculationConfig, vocab_size: int) -> Drafter:
    """The drafter for a model with so many tokens. Raises `InvalidArgument` for a file that cannot be read or run."""
    match config.method:
        case "ngram":
            return NgramDrafter(*config.lookup_range)
        case "suffix":
            return SuffixDrafter(**config.suffix_limits)
        case "custom":
            return CustomDrafter(Path(config.path), config.keys)
        case "draft_model" | "eagle3" | "mtp":
            return ProposedDrafts()
        case "oracle":
            return OracleDrafter(read_records(Path(config.record)))
        case "synthetic":
            return SyntheticDrafter(read_records(Path(config.record)), config.synthetic_acceptance_rates, _SEED)
        case "random":
            return RandomDrafter(vocab_size, _SEED)
