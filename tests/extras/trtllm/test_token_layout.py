"""The model `tensorrt_llm` of Triton's repositories: what its tensors ask for, and what its answers are."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.request import FinishReason, GenerateChunk, GenerateRequest, InferRequest, Usage
from charonia.core.request_context import RequestContext
from charonia.core.sampling import TokenLimit
from charonia.core.tensor import NUMPY_TYPES, Tensor, TensorSpec
from charonia.engine.core.messages import CoreReady
from charonia.extras.trtllm.token_fields import FIELDS, FieldUse
from charonia.extras.trtllm.token_layout import TokenLayout
from charonia.extras.trtllm.token_request import TokenQuestion, parse_token_request

LIMIT = TokenLimit(64)
EOS = 9


def tensor(name: str, value: Any) -> Tensor:
    datatype = FIELDS[name].spec.datatype if name in FIELDS else "INT32"
    return Tensor.from_values(name, datatype, np.asarray(value, NUMPY_TYPES[datatype]))


def asked(ids: Any = ((1, 2),), id: str = "", outputs: Any = None, **others: Any) -> InferRequest:
    size = len(ids)
    values = {"input_ids": ids, "input_lengths": [[len(row)] for row in ids], "request_output_len": [[4]] * size}
    inputs = {name: tensor(name, value) for name, value in (values | others).items()}
    return InferRequest(id, inputs, outputs)


def parse(**others: Any) -> TokenQuestion:
    return parse_token_request(asked(**others), True, LIMIT)


def only(**others: Any) -> GenerateRequest:
    [[request]] = parse(**others).rows
    return request


def test_sampling_is_tensorrt_llms() -> None:
    greedy = only().sampling
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.repetition_penalty) == (0.0, 0, 1.0, 1.0)
    assert only(runtime_top_k=[[0]], runtime_top_p=[[0.0]]).sampling.temperature == 0
    assert only(runtime_top_k=[[5]], runtime_top_p=[[0.0]]).sampling.top_p == 1
    warm = only(temperature=[[0.5]], seed=[[2**64 - 1]], min_tokens=[[2]], presence_penalty=[[0.25]]).sampling
    assert (warm.temperature, warm.seed, warm.min_tokens, warm.presence_penalty) == (0.5, 2**64 - 1, 2, 0.25)
    assert only(end_id=[[-1]]).sampling.ignore_eos
    assert only(end_id=[[7]]).sampling.stop_token_ids == (7,)
    assert only(embedding_bias=[[0, 2.5, 0, -1]]).sampling.logit_bias == {1: 2.5, 3: -1.0}
    assert only(return_log_probs=[[True]]).sampling.logprobs == 0


def test_words_are_read_as_they_are_encoded() -> None:
    request = only(stop_words_list=[[[5, 6, 7, 0], [2, 3, -1, -1]]], bad_words_list=[[[0], [-1]]])
    assert (request.stop_word_ids, request.bad_word_ids) == (((5, 6), (7,)), ())
    for ends in ([2, 1], [0, -1], [3, -1]):
        with pytest.raises(InvalidArgument, match="bad_words_list: the ends of words must rise up to 2"):
            parse(bad_words_list=[[[5, 6], ends]])


def test_an_adapter_is_named_by_its_number_and_brought_by_rows() -> None:
    assert only().lora_task is only(lora_task_id=[[0]]).lora_task is None
    named = only(lora_task_id=[[2**63]], lora_weights=[[]]).lora_task
    assert named is not None
    assert (named.number, named.weights, named.config) == (2**63, None, None)
    task = only(lora_task_id=[[0]], lora_weights=[[[1, 2], [3, 4]]], lora_config=[[[1, 0, 2], [2, 0, 2]]]).lora_task
    assert task is not None
    assert (task.number, task.weights.tolist(), task.config.tolist()) == (0, [1, 2, 3, 4], [1, 0, 2, 2, 0, 2])
    with pytest.raises(InvalidArgument, match="lora_weights and lora_config need a lora_task_id"):
        only(lora_weights=[[[1, 2]]])


def test_an_input_wins_over_the_parameter_of_the_same_meaning() -> None:
    both = asked()
    both = InferRequest(both.id, both.inputs, both.outputs, {"max_tokens": 9, "temperature": 0.5})
    [[request]] = parse_token_request(both, True, LIMIT).rows
    assert (request.sampling.max_tokens, request.sampling.temperature) == (4, 0.5)


REFUSED = [name for name, field in FIELDS.items() if field.use is FieldUse.REFUSED]


@pytest.mark.parametrize("name", [*REFUSED, "of_a_later_version"])
def test_what_is_not_there_is_refused_where_it_asks_for_something(name: str) -> None:
    neutral = FIELDS[name].neutral if name in FIELDS else (0,)
    for nothing in ([[]], *([[value]] for value in neutral)):
        assert parse(**{name: nothing}).rows
    with pytest.raises(InvalidArgument, match=f"input '{name}' is not supported") as refusal:
        parse(**{name: [[True if neutral == (False,) else 3]]})
    assert refusal.value.field == name


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"input_lengths": [[3]]}, "input_lengths must be between 1 and the 2 of input_ids, got 3"),
        ({"ids": [[1] * 65]}, "maximum context length is 64 tokens"),
        ({"temperature": [[-1.0]]}, "temperature must be"),
        ({"guided_decoding_guide": [[b"x"]]}, "guided_decoding_guide needs guided_decoding_guide_type"),
        ({"ids": [[1], [1]], "num_return_sequences": [[1], [2]]}, "must be the same in all rows"),
    ],
)
def test_what_is_wrong(others: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse(**others)


class Counting:
    """A model whose next token is the last plus one, until the ninth."""

    info = CoreReady(vocab_size=99, max_model_len=64, block_size=2, blocks=9)

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[GenerateChunk, None]:
        context.sequences.append(SimpleNamespace(opened=1.0, begun=2.0, first=3.0, last=4.0))  # type: ignore[arg-type]
        assert isinstance(request.prompt, tuple)
        token = request.prompt[-1]
        for count in range(1, (request.sampling.max_tokens or 0) + 1):
            token += 1
            last = token == EOS or (token,) in request.stop_word_ids
            length = FinishReason.LENGTH if count == request.sampling.max_tokens else None
            usage = Usage(len(request.prompt), count, 2)
            reason = FinishReason.STOP if last else length
            ended = last and (token,) not in request.stop_word_ids
            yield GenerateChunk(text="", token_ids=(token,), usage=usage, finish_reason=reason, end_token=ended)
            if last:
                return


def layout(**fields: Any) -> TokenLayout:
    inputs = tuple(FIELDS[name].spec for name in ("input_ids", "input_lengths", "request_output_len"))
    values = {"max_batch_size": 4, "decoupled": True, "inputs": inputs} | fields
    return TokenLayout.of_config(ModelConfig("m", "1", "tensorrtllm", **values))


async def answers(request: InferRequest, chosen: TokenLayout | None = None) -> list[dict[str, Any]]:
    responses = (chosen or layout()).infer(request, RequestContext("test"), Counting())
    return [{output.name: output.data.tolist() for output in response.outputs} async for response in responses]


async def test_a_whole_answer_has_the_prompt_and_no_end_token() -> None:
    [whole] = await answers(asked([[1, 6]]))
    assert whole == {"output_ids": [[[1, 6, 7, 8]]], "sequence_length": [[4]]}
    [alone] = await answers(asked([[1, 6]], exclude_input_in_output=[[True]], stop_words_list=[[[8], [1]]]))
    assert alone == {"output_ids": [[[7, 8]]], "sequence_length": [[2]]}
    [unbatched] = await answers(
        InferRequest(inputs={name: tensor(name, value) for name, value in UNBATCHED.items()}), layout(max_batch_size=0)
    )
    assert unbatched == {"output_ids": [[1, 2]], "sequence_length": [2]}


UNBATCHED = {"input_ids": [1], "input_lengths": [1], "request_output_len": [1]}


async def test_rows_and_sequences() -> None:
    lengths = {"request_output_len": [[1], [3]], "num_return_sequences": [[2], [2]]}
    outputs = ("output_ids", "sequence_length", "batch_index", "output_log_probs", "context_logits")
    [whole] = await answers(asked([[1], [3]], outputs=outputs, **lengths))
    assert whole["output_ids"] == [[[1, 2, 0, 0]] * 2, [[3, 4, 5, 6]] * 2]
    assert (whole["sequence_length"], whole["batch_index"]) == ([[2, 2], [4, 4]], [[0], [1]])
    assert whole["output_log_probs"] == [[[0.0] * 3] * 2] * 2
    assert whole["context_logits"] == [[[0.0]]] * 2


async def test_a_stream_has_what_is_new() -> None:
    found = await answers(asked([[6]], streaming=[[True]]))
    assert [each["output_ids"] for each in found] == [[[[7]]], [[[8]]]], "the end token makes no response"
    [nothing] = await answers(asked([[8]], streaming=[[True]]))
    assert nothing == {"output_ids": [[[]]], "sequence_length": [[0]]}
    *_, last = await answers(asked([[6]], streaming=[[True]], return_perf_metrics=[[True]]))
    assert (last["arrival_time_ns"], last["last_token_time_ns"]) == ([[10**9]], [[4 * 10**9]])
    assert (last["kv_cache_alloc_total_blocks"], last["kv_cache_alloc_new_blocks"]) == ([[2]], [[1]])
    with pytest.raises(InvalidArgument, match="Streaming is only supported if model is deployed using decoupled mode"):
        await answers(asked(streaming=[[True]]), layout(decoupled=False))


async def test_each_response_of_a_stream_of_several_has_tokens_of_one() -> None:
    outputs = ("output_ids", "batch_index", "sequence_index")
    lengths = {"request_output_len": [[1], [3]], "num_return_sequences": [[2], [2]], "streaming": [[True]] * 2}
    question = asked([[1], [3]], outputs=outputs, **lengths)
    streamed: dict[tuple[int, int], list[int]] = {}
    responses = [each async for each in layout().infer(question, RequestContext("test"), Counting())]
    for response in responses:
        tokens, row, sequence = (output.data.ravel().tolist() for output in response.outputs)
        streamed.setdefault((*row, *sequence), []).extend(tokens)
    assert streamed == {(0, 0): [2], (0, 1): [2], (1, 0): [4, 5, 6], (1, 1): [4, 5, 6]}
    assert [response.final for response in responses] == [False] * 7 + [True]


async def test_stop_cancels_by_id() -> None:
    model = Counting()
    stopping = asked(id="one", stop=[[True]])
    [response] = [each async for each in layout().infer(stopping, RequestContext("test"), model)]
    assert (response.outputs, response.final, model.cancelled) == ((), True, ["one"])
    with pytest.raises(InvalidArgument, match="A request id must be provided for request cancellation"):
        await answers(asked(stop=[[True]]))


def test_a_configs_own_tensors_are_kept_and_checked() -> None:
    own = TensorSpec("of_a_later_version", "INT32", (1,), True)
    made = layout(inputs=(*layout().inputs[:1], own), outputs=(TensorSpec("context_logits", "FP16", (-1, -1)),))
    assert own in made.inputs
    assert {spec.name for spec in made.inputs} >= FIELDS.keys()
    assert [spec.datatype for spec in made.output_specs if spec.name == "context_logits"] == ["FP16"]
    with pytest.raises(InvalidArgument, match="input 'seed' of model 'm' must be UINT64, not INT32"):
        layout(inputs=(TensorSpec("seed", "INT32", (1,)),))
    with pytest.raises(InvalidArgument, match="model 'm' has no output 'texts'; it has output_ids"):
        layout(outputs=(TensorSpec("texts", "BYTES", (1,)),))
