"""What a stateful model is beside a classic one: the rules of its sequences, and what follows from them."""

from collections.abc import Mapping
from typing import NamedTuple

from ...core.model import ModelConfig
from ...core.tensor import Tensor
from ..batching.inference_job import InferenceJob
from .sequence_config import SequenceConfig, read_sequence_config
from .sequence_context import SequenceContext
from .sequence_flags import SequenceFlagReader
from .sequence_tensors import with_sequence_tensors
from .stateful_batch import StatefulLayout


class SequenceSupport(NamedTuple):
    """`config`: as runtimes see it. `flags` reads what requests say of their sequence."""

    rules: SequenceConfig
    config: ModelConfig
    layout: StatefulLayout
    flag_reader: SequenceFlagReader

    def mark_warm_up(self, job: InferenceJob) -> None:
        """Make it the only request of a sequence that nobody asked for."""
        job.sequence_flags = self.flag_reader.warm_up_flags()
        job.sequence = SequenceContext(job.sequence_flags.id)


def read_sequence_support(config: ModelConfig, initial: Mapping[str, Tensor]) -> SequenceSupport | None:
    """Of the model with this config; None without `sequence_batching`. `initial`: what the first request of a sequence
    gets of a state, by its input; zeros where nothing is.

    Raises:
        InvalidArgument: the config contradicts itself; `field` names the culprit.
        Unsupported: it wants what is not served.
    """
    rules = read_sequence_config(config, initial)
    if rules is None:
        return None
    whole = with_sequence_tensors(config, rules.controls, rules.states)
    stateful = StatefulLayout(config.max_batch_size > 0, rules.slots.fixed_rows, rules.controls, rules.states)
    return SequenceSupport(rules, whole, stateful, SequenceFlagReader(config.name, rules))
