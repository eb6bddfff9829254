"""What a stateful model is beside a classic one: the rules of its sequences, and what follows from them."""

from collections.abc import Mapping
from typing import NamedTuple

from ...core.model import ModelConfig
from ...core.tensor import Tensor
from ..batching.inference_job import Job
from .sequence_config import Sequencing, read_sequencing
from .sequence_context import SequenceContext
from .sequence_flags import FlagReader
from .sequence_tensors import extended
from .stateful_batch import Stateful


class Sequences(NamedTuple):
    """`config`: as runtimes see it. `flags` reads what requests say of their sequence."""

    rules: Sequencing
    config: ModelConfig
    stateful: Stateful
    flags: FlagReader

    def rehearse(self, job: Job) -> None:
        """Make it the only request of a sequence that nobody asked for."""
        job.flags = self.flags.whole()
        job.context = SequenceContext(job.flags.id)


def read_sequences(config: ModelConfig, initial: Mapping[str, Tensor]) -> Sequences | None:
    """Of the model with this config; None without `sequence_batching`. `initial`: what the first request of a sequence
    gets of a state, by its input; zeros where nothing is.

    Raises:
        InvalidArgument: the config contradicts itself; `field` names the culprit.
        Unsupported: it wants what is not served.
    """
    rules = read_sequencing(config, initial)
    if rules is None:
        return None
    whole = extended(config, rules.controls, rules.states)
    stateful = Stateful(config.max_batch_size > 0, rules.seating.pinned, rules.controls, rules.states)
    return Sequences(rules, whole, stateful, FlagReader(config.name, rules))
