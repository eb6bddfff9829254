"""The sizes, rules and load of a scheduler trial, chosen or drawn. Knows nothing of trials."""

from dataclasses import dataclass, replace
from random import Random

import msgspec

from ...scheduler.config import SchedulerConfig

SMALL = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerWorld:
    """The sizes, rules and load of a trial. `live`: sequences that it adds at once. Of a random trial's prompts,
    `long_prompts` may be of any length; `outputs`: the most new tokens that it asks for. `tenants`: their number; each
    weighs twice the one before. `adapters`: their number, beside the model itself. `token_seconds`: the time of a token
    that the scheduler is told, roughly; 0 for none.
    `drafts`: the most tokens that are drafted for a sequence in a step, each right with `draft_accuracy`.
    """

    blocks: int = 24
    block_size: int = 4
    prefix_caching: bool = True
    burst: tuple[int, int] = (1, 1)
    live: int = 16
    long_prompts: float = 0.3
    outputs: int = 20
    tenants: int = 1
    adapters: int = 0
    token_seconds: float = 0.0
    drafts: int = 0
    draft_accuracy: float = 0.0
    scheduler: SchedulerConfig = SMALL

    @classmethod
    def drawn(cls, random: Random) -> "SchedulerWorld":
        rows = random.choice((1, 2, 4, 8))
        ahead = random.choice((0, 1, 2))
        adapters = random.choice((0, 0, 2, 5))
        return cls(
            blocks=random.choice((8, 12, 24, 64)),
            block_size=random.choice((1, 2, 4)),
            prefix_caching=random.random() < 0.8,
            burst=random.choice(((1, 1), (1, 1), (0, 1), (1, 3), (0, 3))),
            live=4 * rows,
            long_prompts=random.choice((0.0, 0.1, 0.4)),
            outputs=random.choice((4, 20, 60)),
            tenants=random.choice((1, 1, 2, 4)),
            adapters=adapters,
            token_seconds=random.choice((0.0, 0.0, 1e-4, 0.02, 0.2)),
            drafts=random.choice((0, 0, 1, 2, 5)),
            draft_accuracy=random.choice((0.0, 0.5, 0.9, 1.0)),
            scheduler=SchedulerConfig(
                max_num_seqs=rows,
                max_num_batched_tokens=rows + random.choice((0, 1, 4, 16)),
                max_model_len=random.choice((16, 48, 96)),
                ahead=ahead,
                in_flight_per_sequence=random.choice((None, None, 1)),
                admission=random.choice(("optimistic", "optimistic", "no_evict")),
                ageing_steps=random.choice((1, 4, 16)),
                target_ttft_ms=random.choice((None, None, 100)),
                target_itl_ms=random.choice((None, None, 0, 50)),
                max_loras=random.choice((1, 2)) if adapters else 0,
            ),
        )

    def staged(self, stages: int) -> "SchedulerWorld":
        """The same over a pipeline, as a step loop schedules it; unchanged for one stage."""
        if stages == 1:
            return self
        scheduler = msgspec.structs.replace(self.scheduler, ahead=stages - 1, in_flight_per_sequence=1)
        return replace(self, scheduler=scheduler)
