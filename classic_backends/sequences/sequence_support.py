"""A stateful model's additions to a classic one, and the sequence parameters of its requests.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_sequence.md. Knows nothing
of which sequences are open.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...core.errors import InvalidArgument, request_id_prefix
from ...core.model import ModelConfig
from ...core.request import InferRequest
from ...core.tensor import Tensor
from ..batching.queued_request import InferenceJob, SequenceContext, SequenceFlags, SequenceId
from .sequence_config import SequenceConfig, read_sequence_config
from .sequence_tensors import ControlKind, ControlTensor, with_sequence_tensors
from .stateful_batch import StatefulLayout


class SequenceSupport(NamedTuple):
    """`runtime_config`: the model's config with the tensors of its sequences, as runtimes see it. `id_control`: the
    tensor that tells the model the sequence's id, if there is one."""

    config: SequenceConfig
    runtime_config: ModelConfig
    layout: StatefulLayout
    id_control: ControlTensor | None

    def read_flags(self, request: InferRequest, batch_size: int) -> SequenceFlags:
        """Raises `InvalidArgument` for a request that can be in no sequence of this model."""
        if batch_size != 1:
            message = "must specify batch-size 1 due to requirements of sequence batcher"
            raise InvalidArgument(f"inference request to model '{self.runtime_config.name}' {message}")
        sequence_id = self._read_id(request)
        return SequenceFlags(sequence_id, _read_flag(request, "sequence_start"), _read_flag(request, "sequence_end"))

    def mark_warm_up(self, job: InferenceJob) -> None:
        """Make a warm-up job the only request of a sequence."""
        text = self.id_control is not None and self.id_control.datatype == "BYTES"
        job.sequence_flags = SequenceFlags("warmup" if text else 1, start=True, end=True)
        job.sequence = SequenceContext(job.sequence_flags.id)

    def _read_id(self, request: InferRequest) -> SequenceId:
        found = request.parameters.get("sequence_id", 0)
        if isinstance(found, bool) or not isinstance(found, (int, str)):
            raise _refuse(request, f"parameter 'sequence_id' must be an integer or a string, got {found!r}")
        if not found:
            message = "must specify a non-zero or non-empty correlation ID"
            raise InvalidArgument(
                f"inference request to model '{self.runtime_config.name}' {message}", field="sequence_id"
            )
        if self.id_control is None:
            return found
        name, datatype = self.id_control.name, self.id_control.datatype
        if isinstance(found, str) != (datatype == "BYTES"):
            kind = "BYTES" if isinstance(found, str) else "UINT64"
            expected = f"but model '{self.runtime_config.name}' expects '{datatype}'"
            raise _refuse(request, f"sequence batching control '{name}' data-type is '{kind}', {expected}")
        if isinstance(found, int):
            limits = np.iinfo(datatype.lower())
            if not limits.min <= found <= limits.max:
                raise _refuse(request, f"sequence id {found} does not fit '{name}' of type {datatype}")
        return found


def _read_flag(request: InferRequest, name: str) -> bool:
    value = request.parameters.get(name, False)
    if not isinstance(value, bool):
        raise _refuse(request, f"parameter '{name}' must be true or false, got {value!r}", name)
    return value


def _refuse(request: InferRequest, message: str, field: str = "sequence_id") -> InvalidArgument:
    return InvalidArgument(f"{request_id_prefix(request.id)}{message}", field=field)


def read_sequence_support(config: ModelConfig, initial: Mapping[str, Tensor]) -> SequenceSupport | None:
    """None for a model without `sequence_batching`. `initial`: the first request's state, by its input; zeros where
    absent.

    Raises:
        InvalidArgument: values of the config contradict each other; `field` names one of them.
        Unsupported: the config asks for what is not built.
    """
    sequences = read_sequence_config(config, initial)
    if sequences is None:
        return None
    runtime_config = with_sequence_tensors(config, sequences.controls, sequences.states)
    fixed_rows = sequences.slots.fixed_rows
    layout = StatefulLayout(config.max_batch_size > 0, fixed_rows, sequences.controls, sequences.states)
    id_control = next((each for each in sequences.controls if each.kind is ControlKind.ID), None)
    return SequenceSupport(sequences, runtime_config, layout, id_control)
