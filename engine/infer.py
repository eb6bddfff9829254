"""The v2 face of a language model: tensors and parameters become a generation, its chunks become responses.

Names are those that Triton's TensorRT-LLM and vLLM back ends made known. Knows nothing of engines or tokenizers.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..core.errors import InvalidArgument
from ..core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, Prompt
from ..core.tensor import Tensor, TensorSpec
from .settings import Manner, one_element, read_settings, text_of

INPUTS = (
    TensorSpec("text_input", "BYTES", (1,), optional=True),
    TensorSpec("input_ids", "INT32", (-1,), optional=True),
    TensorSpec("stream", "BOOL", (1,), optional=True),
    TensorSpec("sampling_parameters", "BYTES", (1,), optional=True),
)

OUTPUTS = (
    TensorSpec("text_output", "BYTES", (-1,)),
    TensorSpec("finish_reason", "BYTES", (-1,)),
    TensorSpec("num_input_tokens", "INT32", (1,)),
    TensorSpec("num_output_tokens", "INT32", (1,)),
    TensorSpec("output_ids", "INT32", (-1,)),
)
"""All but the first come when asked for: by a parameter `return_...`, or by name."""

Detokenize = Callable[[Sequence[int]], Awaitable[str]]


class Question(NamedTuple):
    """What a v2 request asks of a language model. `outputs`: the names to answer with, in order."""

    request: GenerateRequest
    manner: Manner
    outputs: tuple[str, ...]


def read_question(request: InferRequest) -> Question:
    """Understand a v2 request.

    Raises:
        InvalidArgument: a name is unknown, a value is wrong, or they contradict each other; `field` names it.
    """
    settings = read_settings(request.parameters, request.inputs.get("sampling_parameters"))
    manner = settings.manner
    if "stream" in request.inputs:
        manner = msgspec.structs.replace(manner, stream=bool(one_element(request.inputs["stream"])))
    if manner.stream and not manner.exclude_input_in_output:
        raise InvalidArgument(
            "When streaming, `exclude_input_in_output` = False is not allowed.", field="exclude_input_in_output"
        )
    generate = GenerateRequest(
        id=request.id,
        prompt=_prompt(request.inputs),
        sampling=settings.sampling,
        priority=manner.priority,
        cache_salt=manner.cache_salt,
        tenant=request.tenant,
        weight=request.weight,
        timeout=manner.timeout / 1e6,
    )
    return Question(generate, manner, _wanted(request, manner))


async def answers(
    question: Question, chunks: AsyncIterator[GenerateChunk], detokenize: Detokenize
) -> AsyncGenerator[InferResponse, None]:
    """The responses that these chunks make: as they come, or all in exactly one."""
    if question.manner.stream:
        async for chunk in chunks:
            if chunk.text or chunk.finish_reason is not None or "output_ids" in question.outputs:
                yield _response(chunk, question.outputs)
    else:
        whole = _join([chunk async for chunk in chunks])
        if not question.manner.exclude_input_in_output:
            whole = msgspec.structs.replace(whole, text=await _text(question.request.prompt, detokenize) + whole.text)
        yield _response(whole, question.outputs)


async def _text(prompt: Prompt, detokenize: Detokenize) -> str:
    return prompt if isinstance(prompt, str) else await detokenize(prompt if isinstance(prompt, tuple) else ())


def _join(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    text = "".join(chunk.text for chunk in chunks)
    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    return msgspec.structs.replace(chunks[-1], text=text, token_ids=ids)


def _response(chunk: GenerateChunk, outputs: Sequence[str]) -> InferResponse:
    values: dict[str, list[Any]] = {
        "text_output": [chunk.text.encode()],
        "finish_reason": [(chunk.finish_reason or "").encode()],
        "num_input_tokens": [chunk.usage.prompt_tokens],
        "num_output_tokens": [len(chunk.token_ids)],
        "output_ids": list(chunk.token_ids),
    }
    tensors = tuple(Tensor.of(name, _DATATYPES[name], values[name]) for name in outputs)
    return InferResponse(tensors, final=chunk.finish_reason is not None)


_DATATYPES = {spec.name: spec.datatype for spec in OUTPUTS}


def _wanted(request: InferRequest, manner: Manner) -> tuple[str, ...]:
    if request.outputs is not None:
        return request.outputs
    asked = (name for name in _DATATYPES if getattr(manner, f"return_{name}", False))
    return ("text_output", *asked)


def _prompt(inputs: Mapping[str, Tensor]) -> Prompt:
    if ("text_input" in inputs) == ("input_ids" in inputs):
        raise InvalidArgument("give the prompt either as text_input or as input_ids", field="text_input")
    if "input_ids" in inputs:
        return tuple(inputs["input_ids"].data.ravel().tolist())
    return text_of(inputs["text_input"])
