"""The model `tensorrt_llm_bls` of Triton's TensorRT-LLM repositories, without its Python code: it asks `preprocessing`,
the language model and `postprocessing` itself, and so can decode the pieces of a stream with what came before them.

Tensors and parameters: https://github.com/triton-inference-server/tensorrtllm_backend#using-the-bls-model.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.backends import AskedVersion, CompositionBackend, RequestTimes
from ...core.errors import InvalidArgument
from ...core.gateway import ModelLookup
from ...core.model import DeclaredModels, ModelConfig
from ...core.request import InferRequest, InferResponse
from ...core.request_context import RequestContext
from ...core.tensor import Tensor
from ...ensembles.lookup import AskedModel, ModelRequests
from ...ensembles.named_tensors import NamedTensors

_INCOMPLETE = "\ufffd"
_WINDOW = 64
"""Tokens that are decoded together at most, while their text does not end with half a character."""
_CONTEXT = 6
"""Tokens of a window that the next one begins with: enough for any character and its leading space."""


class StreamText:
    """The text of one growing answer. `accumulates`: a piece is decoded with the tokens before it, and half a character
    waits for its other half; else each piece is decoded by itself. `postprocessing`: the model that decodes."""

    def __init__(self, postprocessing: AskedModel, accumulates: bool) -> None:
        self._postprocessing, self._accumulates = postprocessing, accumulates
        self._window: list[int] = []
        self._shown = ""

    async def push(self, tokens: NDArray[Any]) -> str:
        """The text that these tokens add."""
        if not self._accumulates:
            return await self._decode(tokens.ravel().tolist())
        self._window += tokens.ravel().tolist()
        text = await self._decode(self._window)
        if text.endswith(_INCOMPLETE):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        if len(self._window) > _WINDOW:
            del self._window[:-_CONTEXT]
            self._shown = await self._decode(self._window)
        return piece

    async def finish(self) -> str:
        """The text that still waited: half characters show as U+FFFD."""
        return (await self._decode(self._window))[len(self._shown) :] if self._window else ""

    async def _decode(self, tokens: Sequence[int]) -> str:
        batch = {
            "TOKENS_BATCH": np.array([[tokens]], np.int32),
            "SEQUENCE_LENGTH": np.array([[len(tokens)]], np.int32),
        }
        made = await self._postprocessing.infer(batch)
        return b"".join(np.ravel(made["OUTPUT"])).decode(errors="replace")


class StopTrimmer:
    """Ends a text behind the first of several words, which stays in it."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._longest = max(map(len, words), default=0)
        self._tail = ""
        self.matched = False

    def push(self, piece: str) -> str:
        """The part of the next piece that belongs to the text."""
        if self.matched or not self._words:
            return "" if self.matched else piece
        text = self._tail + piece
        ends = [at + len(word) for word in self._words if (at := text.find(word)) >= 0]
        if ends:
            self.matched = True
            return text[len(self._tail) : min(ends)]
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return piece

    def trim_whole(self, text: str, prompt: str) -> str:
        """A whole text, which may begin with the prompt, where no word is looked for."""
        begin = len(prompt) if text.startswith(prompt) else 0
        ends = [at + len(word) for word in self._words if (at := text.find(word, begin)) >= 0]
        return text[: min(ends, default=len(text))]


_PREPROCESSING, _POSTPROCESSING = "preprocessing", "postprocessing"
_TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
_TO_LLM = {"stream": "streaming", "top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty"}
"""Inputs that the models have by other names; all others go to the language model under their own."""
_PREPROCESSED = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
_OF_DRAFTS = ("num_draft_tokens", "use_draft_logits")
_TEXT, _TOKENS, _LENGTHS = "text_output", "output_ids", "sequence_length"
_ROW, _SEQUENCE, _COUNT = "batch_index", "sequence_index", "num_return_sequences"


def _is_true(inputs: Mapping[str, NDArray[Any]], name: str) -> bool:
    return name in inputs and bool(inputs[name].any())


class _StreamedAnswer(NamedTuple):
    """One of the answers of a stream: its text, up to a stop word."""

    text: StreamText
    trimmer: StopTrimmer


class TensorRtLlmBls:
    """One version. Parameters: `tensorrt_llm_model_name`, and `accumulate_tokens`: decode the pieces of a stream with
    what came before them."""

    def __init__(self, config: ModelConfig, gateway: ModelLookup) -> None:
        self._config = config
        parameters = {name: value for name, value in config.parameters.items() if value and not value.startswith("${")}
        self._llm = parameters.get("tensorrt_llm_model_name", "tensorrt_llm")
        self._accumulates = parameters.get("accumulate_tokens", "").lower() in ("true", "1")
        self._models = DeclaredModels(frozenset((_PREPROCESSING, self._llm, _POSTPROCESSING)))
        self._gateway = gateway

    async def load(self) -> ModelConfig:
        return self._config

    async def unload(self) -> None: ...

    @property
    def asked(self) -> list[AskedVersion]:
        return [AskedVersion(model) for model in self._models.required]

    async def answer(
        self, request: InferRequest, context: RequestContext, times: RequestTimes
    ) -> AsyncGenerator[InferResponse, None]:
        """Raises what the models raise."""
        requests = ModelRequests(self._config.name, self._models, self._gateway, request, context, times)
        try:
            async with aclosing(self._answer(request, requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            await requests.close()

    async def _answer(self, request: InferRequest, requests: ModelRequests) -> AsyncGenerator[InferResponse, None]:
        inputs = NamedTensors(request.inputs.values(), {})
        streams = _is_true(inputs, "stream")
        if streams and not self._config.decoupled:
            message = "Streaming is only supported if model is deployed using decoupled mode."
            raise InvalidArgument(message, field="stream")
        for name in _OF_DRAFTS:
            if _is_true(inputs, name):
                raise InvalidArgument(f"input '{name}' is not supported by this model", field=name)
        llm = requests.lookup(self._llm)
        postprocessing = requests.lookup(_POSTPROCESSING, inherit=False)
        words = [word for word in (inputs.texts("stop_words") if "stop_words" in inputs else ()) if word]
        llm_inputs = await self._preprocess(inputs, requests.lookup(_PREPROCESSING, inherit=False))
        count = inputs["text_input"].size * (int(inputs[_COUNT].max()) if _COUNT in inputs else 1)
        always = (_TOKENS, _LENGTHS, _ROW, _SEQUENCE) if streams and count > 1 else (_TOKENS, _LENGTHS)
        whole, streamed = StopTrimmer(words), dict[tuple[int, ...], _StreamedAnswer]()
        async with llm.stream(llm_inputs, outputs=self._outputs_of(llm, request, always)) as responses:
            async for response in responses:
                if not streams:
                    texts = await decode_answers(postprocessing, response)
                    prompt = inputs.text("text_input") if len(texts) == 1 else ""
                    yield self._response(request, [whole.trim_whole(text, prompt) for text in texts], response, True)
                    return
                which = tuple(response[name].item() for name in always[2:])
                if which not in streamed:
                    streamed[which] = _StreamedAnswer(StreamText(postprocessing, self._accumulates), StopTrimmer(words))
                text, trimmer = streamed[which]
                piece = "" if trimmer.matched else trimmer.push(await text.push(response[_TOKENS]))
                if piece or (len(response) > len(always) and not trimmer.matched):
                    yield self._response(request, [piece], response)
                if sum(answer.trimmer.matched for answer in streamed.values()) == count:
                    return
        for which, (text, trimmer) in streamed.items():
            if rest := trimmer.push(await text.finish()):
                numbers = {name: np.full((1, 1), number) for name, number in zip(always[2:], which, strict=True)}
                yield self._response(request, [rest], numbers)

    async def _preprocess(self, inputs: NamedTensors, preprocessing: AskedModel) -> dict[str, NDArray[Any]]:
        queried = {_TO_PREPROCESSING[name]: array for name, array in inputs.items() if name in _TO_PREPROCESSING}
        made = await preprocessing.infer(queried)
        kept = {name: array for name, array in inputs.items() if name not in (*_TO_PREPROCESSING, *_OF_DRAFTS)}
        return {_TO_LLM.get(name, name): array for name, array in kept.items()} | {
            _PREPROCESSED[name]: array for name, array in made.items() if name in _PREPROCESSED
        }

    def _outputs_of(self, llm: AskedModel, request: InferRequest, always: Sequence[str]) -> tuple[str, ...] | None:
        """The outputs to ask of the language model, `always` among them, if they are not those that its inputs ask
        for."""
        if request.outputs is None and len(always) == 2:
            return None
        known = {spec.name for spec in llm.config.outputs}.difference(always)
        wanted = [spec.name for spec in self._config.outputs] if request.outputs is None else request.outputs
        return (*always, *(name for name in wanted if name in known))

    def _response(
        self, request: InferRequest, texts: Sequence[str], numbers: Mapping[str, NDArray[Any]], final: bool = False
    ) -> InferResponse:
        tensors = []
        for spec in self._config.outputs:
            if request.outputs is not None and spec.name not in request.outputs:
                continue
            if spec.name == _TEXT:
                tensors.append(Tensor.from_values(_TEXT, "BYTES", [text.encode() for text in texts]))
            elif spec.name in numbers:
                tensors.append(Tensor(spec.name, spec.datatype, numbers[spec.name].shape, numbers[spec.name]))
        return InferResponse(tuple(tensors), final=final)


async def decode_answers(postprocessing: AskedModel, response: NamedTensors) -> list[str]:
    """The texts of all answers in a response of the language model."""
    made = await postprocessing.infer({"TOKENS_BATCH": response[_TOKENS], "SEQUENCE_LENGTH": response[_LENGTHS]})
    return [element.decode(errors="replace") for element in np.ravel(made["OUTPUT"])]


BLS = CompositionBackend(lambda config, gateway, _: TensorRtLlmBls(config, gateway))
