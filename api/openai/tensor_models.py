"""Completions and chat of models that take and give tensors: ensembles, pipelines and Python models.

A model is served so if its config has the parameter `openai`. A body's fields become its inputs, its output
`text_output` the text. Tokens are counted in the request's context.
"""

from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import orjson

from ...core.errors import Internal, InvalidArgument
from ...core.gateway import ModelHandle
from ...core.model import ModelConfig
from ...core.request import ChatMessage, Conversation, FinishReason, GenerateChunk, InferRequest, ParameterValue, Prompt
from ...core.request_context import RequestContext
from ...core.sampling import SamplingParams
from ...core.tensor import Tensor, TensorSpec
from .. import json_tensors
from ..infer_call import ResponseSize
from ..size_limits import MAX_RESPONSE_BYTES
from .json_body import NoOpValues, field_error, shortened
from .request_parsing import ParsedCompletion

MESSAGES, TEXT, STREAM, OUTPUT = "messages", "text_input", "stream", "text_output"
SAMPLING = "sampling_parameters"

_OF_THE_ENDPOINT = frozenset(("model", "messages", "prompt", "stream", "stream_options", "priority", "timeout"))
"""Fields that become something else than an input of their name."""

_SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__) - {"logprobs", "prompt_logprobs"}

_OTHER_NAMES = {"max_completion_tokens": "max_tokens"}

_NO_OP_VALUES: NoOpValues = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "return_token_ids": (False,),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
    "separate_reasoning": (True, False),
    "cache_salt": ("",),
    "cache_hit_threshold": (0,),
    "lora_name": ("",),
    "guided_decoding_guide": ("",),
    "logit_bias": ({},),
    "stop": ([], "", [""]),
    "bad_words": ([], "", [""]),
    "stop_token_ids": ([],),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
"""By field: the values that ask a model for nothing, so that it needs no input for them."""


def read_tensor_request(config: ModelConfig, endpoint: str, parsed: ParsedCompletion) -> InferRequest:
    """The request to a model for a body of the endpoint `chat` or `completions`.

    Raises:
        InvalidArgument: the model serves the other endpoint, or has no input for a field; `field` names it.
    """
    if config.openai_api != endpoint:
        raise field_error("model", f"'{config.name}' serves {config.openai_api}, not {endpoint}")
    specs, first = {spec.name: spec for spec in config.inputs}, parsed.requests[0]
    if first.prompt_count > 1:
        raise InvalidArgument(f"model '{config.name}' takes one prompt at a time", field="prompt")
    values = _prompt_input(specs, first.prompt) | _field_inputs(config, specs, parsed.fields)
    if _has(specs, STREAM, "BOOL"):
        values[STREAM] = parsed.stream
    inputs = {name: _tensor(specs[name], value, config.max_batch_size > 0) for name, value in values.items()}
    parameters: dict[str, ParameterValue] = {}
    if "priority" in parsed.fields:
        parameters["priority"] = first.priority
    if first.timeout:
        parameters["timeout"] = round(first.timeout * 1e6)
    return InferRequest(first.id, inputs, (OUTPUT,), parameters)


def _prompt_input(specs: Mapping[str, TensorSpec], prompt: Prompt) -> dict[str, Any]:
    """The messages as JSON or, where the model has no input for them, the last text of the user's; or the prompt."""
    if isinstance(prompt, str):
        return {TEXT: prompt}
    if not isinstance(prompt, Conversation):
        raise field_error("prompt", "must be text for this model, and not token ids")
    if MESSAGES in specs:
        return {MESSAGES: [_turn(message) for message in prompt.messages]}
    texts = [message.content for message in prompt.messages if message.role == "user"]
    if not texts:
        raise field_error("messages", "must have one of the role user for this model")
    return {TEXT: texts[-1]}


def _turn(message: ChatMessage) -> dict[str, Any]:
    """A message as OpenAI has it, without the fields that say nothing."""
    turn = {
        "role": message.role,
        "content": message.content,
        "name": message.name,
        "reasoning": message.reasoning,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id,
    }
    return {key: value for key, value in turn.items() if value or key == "content"}


def _field_inputs(config: ModelConfig, specs: Mapping[str, TensorSpec], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the inputs that fields are for; those of sampling that have none go, together, into
    `sampling_parameters`, as on /generate."""
    values: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for field, value in fields.items():
        name = field if field in specs else _OTHER_NAMES.get(field, field)
        if field in _OF_THE_ENDPOINT:
            continue
        if name in specs:
            values[name] = value
        elif name in _SAMPLING_FIELDS and SAMPLING in specs:
            sampling[name] = value
        elif value not in _NO_OP_VALUES.get(field, ()):
            raise field_error(field, f": model '{config.name}' has no input of that name, got {shortened(value)}")
    return values | {SAMPLING: sampling} if sampling else values


def _has(specs: Mapping[str, TensorSpec], name: str, datatype: str) -> bool:
    return name in specs and specs[name].datatype == datatype


def _tensor(spec: TensorSpec, value: Any, batched: bool) -> Tensor:
    """The input of a field; an object, or several, become the JSON of a text."""
    nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
    if nested and spec.datatype == "BYTES":
        value = orjson.dumps(value).decode()
    return json_tensors.input_tensor(spec, value, batched)


async def generate_from_tensors(
    model: ModelHandle, request: InferRequest, context: RequestContext, limit: int = MAX_RESPONSE_BYTES
) -> AsyncGenerator[GenerateChunk, None]:
    """The text of a model's responses; its end and its usage are those of the language models that it asked.

    Raises as `ModelHandle.infer`, and `Internal` for a response without text, or text that is not UTF-8. `limit`: bytes
    of all responses (`ResponseSize`).
    """
    size, text_of = ResponseSize(limit), _TextDecoder(model.config.name)
    async with aclosing(model.infer(request)) as responses:
        async for response in responses:
            if response.outputs:
                output = _text_output(model.config.name, response.outputs)
                size.add(output, as_json=True)
                text = text_of(b"".join(output.data.ravel().tolist()))
                yield GenerateChunk(text=text, token_ids=(), usage=context.usage)
    ends = [sequence.finish_reason for sequence in context.all_sequences if sequence.finish_reason is not None]
    reason = ends[-1] if ends else FinishReason.STOP
    yield GenerateChunk(text=text_of.end(), token_ids=(), usage=context.usage, finish_reason=reason)


class _TextDecoder:
    """The text of bytes that come in pieces, of which each may end within a character."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._decoder = getincrementaldecoder("utf-8")()

    def __call__(self, piece: bytes) -> str:
        """Raises `Internal` for what is not UTF-8."""
        try:
            return self._decoder.decode(piece)
        except UnicodeDecodeError as error:
            message = f"model '{self._model}' has answered with an output '{OUTPUT}' that is not UTF-8: {error.reason}"
            raise Internal(message) from None

    def end(self) -> str:
        """The replacement of a last character that a length limit cut off; mostly nothing."""
        pending, _ = self._decoder.getstate()
        return pending.decode(errors="replace")


def _text_output(model: str, outputs: tuple[Tensor, ...]) -> Tensor:
    for tensor in outputs:
        if tensor.name == OUTPUT and tensor.datatype == "BYTES":
            return tensor
    raise Internal(f"model '{model}' has answered without its output '{OUTPUT}' of TYPE_STRING")
