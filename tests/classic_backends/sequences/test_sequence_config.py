"""What a config says of sequences, and what requests do."""

from typing import Any

import numpy as np
import pytest

from charonia.classic_backends.backend_config import sequence_tensor_names
from charonia.classic_backends.batching.batching_config import BatchingConfig
from charonia.classic_backends.batching.inference_job import InferenceJob, SequenceFlags
from charonia.classic_backends.sequences.sequence_support import SequenceSupport, read_sequence_support
from charonia.core.errors import CharoniaError, InvalidArgument, Unsupported
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor, TensorSpec

from .sequence_subjects import CONTROLS, config, control, state

OLDEST = {"max_candidate_sequences": 6}


def read(settings: ModelConfig, **initial: Tensor) -> SequenceSupport:
    found = read_sequence_support(settings, initial)
    assert found is not None
    return found


def test_without_sequence_batching_there_are_none() -> None:
    assert read_sequence_support(ModelConfig("m", "1", "test", raw={"dynamic_batching": {}}), {}) is None


def test_direct_is_what_a_config_means_that_names_no_strategy() -> None:
    rules = read(config()).config
    assert rules == read(config(direct={})).config
    assert (rules.slots.slots_per_instance, rules.slots.fixed_rows, rules.slots.max_idle_ns) == (4, True, 10**9)
    assert rules.batching == BatchingConfig(combine_requests=True, max_batch_size=4)
    assert read(config(max_batch_size=0)).config.slots.slots_per_instance == 1
    assert read(config(max_sequence_idle_microseconds=7)).config.slots.max_idle_ns == 7000


def test_a_delay_is_heeded_together_with_a_least_utilization_alone() -> None:
    delay = {"max_queue_delay_microseconds": 9}
    assert read(config(direct=delay)).config.batching.max_delay_ns == 0
    rules = read(config(max_batch_size=10, direct=delay | {"minimum_slot_utilization": 0.7})).config.batching
    assert (rules.max_delay_ns, rules.preferred_sizes) == (9000, range(7, 11))
    rules = read(config(max_batch_size=2**31 - 1, direct=delay | {"minimum_slot_utilization": 0.5})).config.batching
    assert rules.target_size == 2**31 - 1


@pytest.mark.parametrize("dims", [[2**63 - 1, -1], [1] * 65])
def test_a_state_that_a_few_digits_make_too_large_is_refused(dims: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="state 'S' must have at most 64 dims and 2147483647 bytes"):
        read(config(state=[state(dims)]))


def test_oldest_has_the_rules_of_a_dynamic_batcher() -> None:
    asked = {"preferred_batch_size": [2], "max_queue_delay_microseconds": 5, "preserve_ordering": True}
    rules = read(config(oldest=OLDEST | asked)).config
    assert (rules.slots.slots_per_instance, rules.slots.fixed_rows) == (6, False)
    assert rules.batching == BatchingConfig(True, 4, (2,), 5000, preserve_ordering=True)
    assert read(config(oldest={})).config.slots.slots_per_instance == 4


def test_a_runtime_sees_controls_and_states_and_a_client_does_not() -> None:
    settings = config(state=[state([-1, 2])])
    whole = read(settings).runtime_config
    assert [(spec.name, spec.datatype, spec.dims) for spec in whole.inputs[1:]] == [
        ("START", "INT32", (1,)),
        ("READY", "FP32", (1,)),
        ("END", "BOOL", (1,)),
        ("ID", "INT64", (1,)),
        ("S", "INT32", (-1, 2)),
    ]
    assert whole.outputs[1:] == (TensorSpec("T", "INT32", (-1, 2)),)
    assert sequence_tensor_names(settings.raw) == ({"START", "READY", "END", "ID", "S"}, {"T"})


def test_an_output_that_is_a_state_too_is_there_once() -> None:
    both = [state([1]) | {"output_name": "SUM"}]
    assert [spec.name for spec in read(config(state=both)).runtime_config.outputs] == ["SUM"]


def test_a_state_begins_with_zeros_or_what_is_given() -> None:
    [of] = read(config(state=[state([-1, 2])])).config.states
    assert of.initial.tolist() == [[[0, 0]]]
    given = Tensor.from_values("S", "INT32", [[1, 2], [3, 4]])
    [of] = read(config(max_batch_size=0, state=[state([-1, 2])]), S=given).config.states
    assert of.initial.tolist() == [[1, 2], [3, 4]]
    texts = state([2]) | {"data_type": "TYPE_STRING"}
    [of] = read(config(state=[texts])).config.states
    assert of.initial.tolist() == [[b"", b""]]


TWICE = [*CONTROLS, control("AGAIN", "START", fp32_false_true=[0.0, 1.0])]
BOTH = control("A", "START", fp32_false_true=[0.0, 1.0], int32_false_true=[0, 1])


@pytest.mark.parametrize(
    ("sequences", "field", "says"),
    [
        ({"oldest": {"max_candidate_sequences": -1}}, "oldest.max_candidate_sequences", "at least 0 for m, got -1"),
        ({"oldest": OLDEST | {"preferred_batch_size": [5]}}, "oldest.preferred_batch_size", "sequence batching pref"),
        ({"direct": {"minimum_slot_utilization": 1.5}}, "direct.minimum_slot_utilization", "in range \\[0.0, 1.0\\]"),
        ({"control_input": [{"name": "", "control": []}]}, "control_input", "must have a name"),
        ({"control_input": [{"name": "A", "control": []}]}, "control_input", "'A' must have exactly one control"),
        ({"control_input": [control("A", "READY")]}, "control_input", "'A' of kind .*READY must have exactly one of"),
        ({"control_input": [control("A", "END", int32_false_true=[1])]}, "control_input", "with 2 values"),
        ({"control_input": [BOTH]}, "control_input", "must have exactly one of"),
        ({"control_input": [control("A", "CORRID")]}, "control_input", "must have a data_type of UINT64"),
        ({"control_input": [control("A", "CORRID", data_type="TYPE_FP32")]}, "control_input", "must have a data_type"),
        (
            {"control_input": [control("A", "END", int32_false_true=[0, 1], data_type="TYPE_INT32")]},
            "control_input",
            "must not have a data_type",
        ),
        ({"control_input": TWICE}, "control_input", "control kind 'CONTROL_SEQUENCE_START' is there more than once"),
        ({"control_input": [control("X", "CORRID", data_type="TYPE_INT32")]}, "control_input", "input 'X' is there mo"),
        ({"state": [state([1]) | {"input_name": ""}]}, "state", "must have an input_name and an output_name"),
        ({"state": [state([0])]}, "state", "dims that are at least 1, or -1, got \\[0\\]"),
        ({"state": [state([1]) | {"data_type": "TYPE_INVALID"}]}, "state", "must have a data_type"),
        ({"state": [state([1]), state([1]) | {"input_name": "U"}]}, "control_input", "output of a state 'T' is there"),
        (
            {"state": [state([1]) | {"output_name": "SUM", "data_type": "TYPE_FP32"}]},
            "state",
            "INT32 as an output and FP32 as a state",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(sequences: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as refused:
        read(config(**sequences))
    assert refused.value.field == f"sequence_batching.{field}"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (config(iterative_sequence=True), "iterative_sequence"),
        (config(decoupled=True, state=[state([1])], oldest=OLDEST), "state"),
        (config(decoupled=True), "direct"),
    ],
)
def test_what_is_not_served_is_refused_by_name(settings: ModelConfig, field: str) -> None:
    with pytest.raises(Unsupported, match=f"model 'm': sequence batching {field}") as refused:
        read(settings)
    assert refused.value.field == f"sequence_batching.{field}"


def test_a_runtime_that_takes_requests_can_do_all_of_it() -> None:
    for settings in (config(iterative_sequence=True), config(decoupled=True, state=[state([1])])):
        found = read_sequence_support(settings, {}, by_request=True)
        assert found is not None
        assert found.config.batching.combine_requests


def test_a_request_that_is_a_sequence_needs_no_id() -> None:
    text = config(iterative_sequence=True, control_input=[control("ID", "CORRID", data_type="TYPE_STRING")])
    for settings, none in ((config(iterative_sequence=True), 0), (text, "")):
        found = read_sequence_support(settings, {}, by_request=True)
        assert found is not None
        assert found.read_flags(InferRequest(), 1) == SequenceFlags(none, start=True)
    whole = {"sequence_id": "a", "sequence_start": True, "sequence_end": True}
    assert found.read_flags(InferRequest(parameters=whole), 1) == SequenceFlags("a", start=True)


def ids(datatype: str) -> SequenceSupport:
    return read(config(control_input=[control("ID", "CORRID", data_type=datatype)]))


def test_flags_of_a_request() -> None:
    reader = ids("TYPE_UINT64")
    assert reader.read_flags(InferRequest(parameters={"sequence_id": 2**64 - 1}), 1) == SequenceFlags(2**64 - 1)
    asked = InferRequest(parameters={"sequence_id": 5, "sequence_start": True, "sequence_end": True})
    assert reader.read_flags(asked, 1) == SequenceFlags(5, start=True, end=True)
    assert ids("TYPE_STRING").read_flags(InferRequest(parameters={"sequence_id": "a"}), 1) == SequenceFlags("a")
    untold = read(config(control_input=[]))
    assert [untold.read_flags(InferRequest(parameters={"sequence_id": each}), 1).id for each in ("a", -7)] == ["a", -7]
    for found, sequence_id in ((reader, 1), (ids("TYPE_STRING"), "warmup")):
        job = InferenceJob({})
        found.mark_warm_up(job)
        assert job.sequence_flags == SequenceFlags(sequence_id, start=True, end=True)
        assert job.sequence is not None
        assert job.sequence.id == sequence_id


@pytest.mark.parametrize(
    ("parameters", "rows", "says"),
    [
        ({"sequence_id": 1}, 2, "to model 'm' must specify batch-size 1 due to requirements of sequence batcher"),
        ({}, 1, "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": ""}, 1, "must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": 1.5}, 1, "[request id: 7] parameter 'sequence_id' must be an integer or a string, got 1.5"),
        ({"sequence_id": True}, 1, "parameter 'sequence_id' must be an integer or a string, got True"),
        (
            {"sequence_id": "a"},
            1,
            "[request id: 7] sequence batching control 'ID' data-type is 'BYTES', but model 'm' expects 'INT32'",
        ),
        ({"sequence_id": 2**64}, 1, "sequence id 18446744073709551616 has more than 64 bits"),
        ({"sequence_id": 1, "sequence_end": 1}, 1, "parameter 'sequence_end' must be true or false, got 1"),
    ],
)
def test_a_request_of_no_sequence_is_refused(parameters: dict[str, Any], rows: int, says: str) -> None:
    with pytest.raises(CharoniaError) as refused:
        ids("TYPE_INT32").read_flags(InferRequest(id="7", parameters=parameters), rows)
    assert says in refused.value.message


def test_a_control_has_the_low_bytes_of_an_id() -> None:
    low = {
        "TYPE_INT32": {2**40 + 7: 7, 2**31: -(2**31), -7: -7},
        "TYPE_UINT32": {2**40 + 7: 7, 2**31: 2**31, -7: 2**32 - 7},
        "TYPE_INT64": {2**63: -(2**63), -7: -7},
        "TYPE_UINT64": {2**64 - 1: 2**64 - 1, -7: 2**64 - 7},
    }
    for datatype, told in low.items():
        reader = ids(datatype)
        jobs = []
        for sequence_id in told:
            flags = reader.read_flags(InferRequest(parameters={"sequence_id": sequence_id}), 1)
            assert flags.id == sequence_id
            jobs.append(InferenceJob({"X": np.zeros((1, 1), np.int32)}, sequence_flags=flags))
        control = reader.sequence_inputs(jobs)["ID"]
        assert control.dtype.name == datatype.removeprefix("TYPE_").lower()
        assert control.ravel().tolist() == list(told.values())


def test_controls_have_the_types_that_their_values_have() -> None:
    sequences = read(config(max_batch_size=0))
    job = InferenceJob({"X": np.zeros(1, np.int32)})
    sequences.mark_warm_up(job)
    told = sequences.sequence_inputs([job])
    assert {name: (array.dtype.name, array.tolist()) for name, array in told.items()} == {
        "START": ("int32", [1]),
        "READY": ("float32", [1.0]),
        "END": ("bool", [True]),
        "ID": ("int64", [1]),
    }
