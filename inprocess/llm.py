"""A language model, or an encoder, within a program, in the shape of vLLM's offline `LLM`.

See https://docs.vllm.ai/en/latest/api/vllm/entrypoints/llm.
"""

import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Literal, Self, TypeAlias, TypeVar

from ..cli.model_selection import parse_lora_modules
from ..core.errors import InvalidArgument, Unsupported
from ..core.gateway import ModelHandle
from ..core.request import TokenizeRequest
from ..repository.gateway import InProcessGateway
from .adapters import ProgramAdapters, lora_requests
from .beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from .generation import Generator
from .loop_thread import BridgedStream
from .output_stream import OutputStream
from .outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from .pooling import Pooler
from .prompts import AskedPrompt, GivenPrompt, asked_prompts, given_conversations, given_prompts
from .requests import ENDPOINT
from .sampling_params import SamplingParams, asks_for_nothing
from .server import Server

T = TypeVar("T")
Sampling: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, or one for each; None is the model's own."""
Progress: TypeAlias = bool | Callable[..., Any]
"""Whether there is a bar, or the class of one, such as tqdm's."""
PoolingTask: TypeAlias = Literal["embed", "classify", "token_embed", "token_classify"]

_UNSERVED = {
    "pooling_params": "pooling_task says what is wanted",
    "lora_request": "encoders have no adapters",
    "truncate_prompt_tokens": "texts are cut to the model's length",
    "tokenization_kwargs": "texts are cut to the model's length",
}
"""Arguments of vLLM's that encoders are not served with."""
_UNSERVED_PROMPTS = {
    "tokenization_kwargs": "truncate_prompt_tokens of SamplingParams cuts prompts",
    "mm_processor_kwargs": "prompts have no images, which chat takes",
}
"""Likewise of `generate`."""
_WAITING_PROMPTS = 256
"""Sequences in the engine's hands beyond those that it runs."""
_USUAL_ROWS = 256


class LLM:
    """A checkpoint, loaded when it is made, between that and `shutdown`, or in a block. It takes the arguments of
    `charonia serve`, as `Server` does, and its methods may be called by any thread; those that wait have an `async_`
    form for any event loop. It ends with the program, or with the last reference to it."""

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        """`model`: a directory, a file in GGUF, or a hub id. Raises as `Server` and its `start`."""
        self.server = Server(model, **options)
        """The server of that one model: its metrics, statistics and health."""
        self.server.start()
        configs = self.server.look(InProcessGateway.model_configs)
        if len(configs) != 1:
            self.server.stop()
            raise InvalidArgument(f"'{model}' has {len(configs)} models: a repository is for Server", field="model")
        self.model_name = configs[0].name
        rows = self.server.options.engine.max_num_seqs or _USUAL_ROWS
        self._source = os.fspath(model)
        self._pooler = Pooler(self._ask)
        gateway = self.server.running.gateway
        configured = parse_lora_modules(self.server.options.adapters.lora_modules)
        self._adapters = ProgramAdapters(gateway, self.model_name, configured)
        self._generator = Generator(gateway, self.model_name, rows + _WAITING_PROMPTS)

    def generate(
        self,
        prompts: Any,
        sampling_params: Sampling = None,
        *,
        use_tqdm: Progress = False,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        **unserved: Any,
    ) -> list[RequestOutput]:
        """The answers to prompts, in their order.

        `prompts`: a text, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a list of these.
        `lora_request`: an adapter's name, or an object with `lora_name`, `lora_path` and maybe `lora_int_id`, which is
        loaded if need be, or a list with one for each prompt. `priority`: the class of each prompt, 0 the most urgent.

        Raises:
            CharoniaError: a prompt is refused or fails; the others are cancelled.
        """
        _refuse(unserved, _UNSERVED_PROMPTS)
        asked = list(asked_prompts(given_prompts(prompts, priority), sampling_params))
        return self._run(lambda: self._answer(asked, use_tqdm, lora_request))

    async def async_generate(
        self,
        prompts: Any,
        sampling_params: Sampling = None,
        *,
        use_tqdm: Progress = False,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        **unserved: Any,
    ) -> list[RequestOutput]:
        """As `generate`."""
        _refuse(unserved, _UNSERVED_PROMPTS)
        asked = list(asked_prompts(given_prompts(prompts, priority), sampling_params))
        return await self._run_from_loop(lambda: self._answer(asked, use_tqdm, lora_request))

    def chat(
        self,
        messages: Any,
        sampling_params: Sampling = None,
        use_tqdm: Progress = False,
        lora_request: Any = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """The answers to conversations, each a list of messages as OpenAI has them, rendered by the chat template.
        `template`: `tools`, `chat_template`, `chat_template_kwargs`, `add_generation_prompt`,
        `continue_final_message` and what a body says of reasoning. Raises as `generate`, and `TypeError` for others."""
        asked = self._asked_chats(messages, sampling_params, template)
        return self._run(lambda: self._answer(asked, use_tqdm, lora_request))

    async def async_chat(
        self,
        messages: Any,
        sampling_params: Sampling = None,
        use_tqdm: Progress = False,
        lora_request: Any = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """As `chat`."""
        asked = self._asked_chats(messages, sampling_params, template)
        return await self._run_from_loop(lambda: self._answer(asked, use_tqdm, lora_request))

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None, **template: Any) -> OutputStream:
        """The answer to one prompt, or to one conversation, as it grows: each item has the text and the tokens that are
        new. A thread iterates over it, or a task of any event loop. Raises as `chat`."""
        lora_request = template.pop("lora_request", None)
        is_chat = isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(item, dict) for item in prompt)
        if not is_chat:
            _refuse(template, {})
        given = given_conversations(prompt, **template) if is_chat else given_prompts(prompt)
        asked = list(asked_prompts(given, sampling_params))
        if len(asked) != 1:
            raise InvalidArgument(f"a stream answers one prompt, got {len(asked)}", field="prompt")
        stream = BridgedStream(
            self.server.running.thread, partial(_stream, self._generator, self._adapters, asked[0], lora_request)
        )
        return OutputStream(self, stream)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, which is as `generate` has it, by beam search. Each step is a
        request for each beam. `concurrency_limit`: prompts that are searched from at once, by default all. Raises as
        `generate`."""
        given = given_prompts(prompts)
        params.check()
        at_once = _prompts_at_once(concurrency_limit, given)
        return self._run(lambda: self._search(given, params, lora_request, use_tqdm, at_once))

    async def async_beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """As `beam_search`."""
        given = given_prompts(prompts)
        params.check()
        at_once = _prompts_at_once(concurrency_limit, given)
        return await self._run_from_loop(lambda: self._search(given, params, lora_request, use_tqdm, at_once))

    def embed(self, prompts: Any, *, use_tqdm: Progress = False, **unserved: Any) -> list[EmbeddingRequestOutput]:
        """The vectors of texts, or of lists of token ids, by an encoder; there is no bar. Raises `InvalidArgument` for
        another model, and `Unsupported` for vLLM's other arguments."""
        _refuse(unserved)
        return self._run(lambda: self._pooler.embed(prompts))

    async def async_embed(
        self, prompts: Any, *, use_tqdm: Progress = False, **unserved: Any
    ) -> list[EmbeddingRequestOutput]:
        """As `embed`."""
        _refuse(unserved)
        return await self._run_from_loop(lambda: self._pooler.embed(prompts))

    def encode(
        self,
        prompts: Any,
        pooling_params: Any = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: Progress = False,
        **unserved: Any,
    ) -> list[PoolingRequestOutput]:
        """What an encoder makes of texts, or of lists of token ids, as it is: a vector, the probabilities of classes,
        or a row for each token. Without a task, the first of these that the model does. Raises as `embed`, and
        `InvalidArgument` for a task that this model does not do."""
        _refuse({"pooling_params": pooling_params, **unserved})
        return self._run(lambda: self._pooler.encode(prompts, pooling_task))

    def reward(self, prompts: Any, *, use_tqdm: Progress = False, **unserved: Any) -> list[PoolingRequestOutput]:
        """What `encode` gives for `token_classify`: a score of each token, as models of rewards have them."""
        return self.encode(prompts, pooling_task="token_classify", **unserved)

    def classify(
        self, prompts: Any, *, use_tqdm: Progress = False, **unserved: Any
    ) -> list[ClassificationRequestOutput]:
        """The classes of texts, or of lists of token ids if the model takes them. Raises as `embed`."""
        _refuse(unserved)
        return self._run(lambda: self._pooler.classify(prompts))

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, use_tqdm: Progress = False, **unserved: Any
    ) -> list[ScoringRequestOutput]:
        """How well the texts of one side go with those of the other, pair by pair, or one with all: by a model that
        ranks, or the cosine of an embedder's vectors. Raises as `embed`, and `InvalidArgument` for sides of different
        lengths."""
        _refuse(unserved)
        one, other = ([side] if isinstance(side, str) else list(side) for side in (text_1, text_2))
        one = one * len(other) if len(one) == 1 else one
        if len(one) != len(other):
            raise InvalidArgument(f"there are {len(one)} texts on one side and {len(other)} on the other")
        pairs = list(zip(one, other, strict=True))
        return self._run(lambda: self._pooler.score(pairs))

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, as `generate` would have them."""
        return self._run(lambda: self._ask(lambda handle: _prompt_ids(handle, GivenPrompt(text))))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self._run(lambda: self._ask(lambda handle: handle.detokenize(list(ids))))

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers reads it, which is imported for that. Raises `Unsupported` for files
        that it does not read: those of GGUF, and of encoders that are no checkpoint here."""
        try:
            source = self.server.look(lambda gateway: gateway.text_model(self.model_name)).tokenizer_files
        except InvalidArgument:  # an encoder's, which its own process has
            source = self._source
        try:
            return import_module("transformers").AutoTokenizer.from_pretrained(source)
        except Exception as error:
            message = f"transformers reads no tokenizer from '{source}': {error}"
            raise Unsupported(message) from error

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of the checkpoint's generation_config.json."""
        return SamplingParams.of_model()

    def shutdown(self) -> None:
        """End running requests, and the engine. May be called again."""
        self.server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.async_stop()

    def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self.server.running.thread.run(make)

    async def _run_from_loop(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self.server.running.thread.run_from_loop(make)

    @staticmethod
    def _asked_chats(messages: Any, sampling: Sampling, template: dict[str, Any]) -> list[AskedPrompt]:
        return list(asked_prompts(given_conversations(messages, **template), sampling))

    async def _answer(self, asked: list[AskedPrompt], bar: Progress, lora_request: Any) -> list[RequestOutput]:
        wanted = lora_requests(lora_request, len(asked))
        async with AsyncExitStack() as used:
            names = {
                key: await used.enter_async_context(self._adapters.use(adapter))
                for key, adapter in {id(adapter): adapter for adapter in wanted}.items()
            }
            asked = [prompt.with_adapter(names[id(adapter)]) for prompt, adapter in zip(asked, wanted, strict=True)]
            with _progress(bar, len(asked), "Prompts") as on_answer:
                outputs = await self._generator.answer_all(asked, on_answer)
        for output, adapter in zip(outputs, wanted, strict=True):
            output.lora_request = adapter
        return outputs

    async def _search(
        self, given: list[GivenPrompt], params: BeamSearchParams, lora_request: Any, bar: Progress, at_once: int
    ) -> list[BeamSearchOutput]:
        async def prepare(handle: ModelHandle) -> list[BeamSearch]:
            tokens = [await _prompt_ids(handle, prompt) for prompt in given]
            ends = frozenset(self._gateway.text_model(self.model_name).end_tokens)
            longest = int(handle.config.parameters["max_model_len"])
            parts = (tokens[start : start + at_once] for start in range(0, len(tokens), at_once))
            return [BeamSearch(part, params, ends, longest) for part in parts]

        async def write(handle: ModelHandle) -> None:
            for sequence in (sequence for output in found for sequence in output.sequences):
                sequence.text = await handle.detokenize(sequence.tokens)

        searches, found = await self._ask(prepare), list[BeamSearchOutput]()
        async with self._adapters.use(lora_request) as adapter:
            with _progress(bar, params.max_tokens * len(searches), "Tokens") as on_step:
                for search in searches:
                    found += await search.run(self._generator, adapter, on_step)
        await self._ask(write)
        return found

    @property
    def _gateway(self) -> InProcessGateway:
        return self.server.running.gateway

    async def _ask(self, use: Callable[[ModelHandle], Coroutine[Any, Any, T]]) -> T:
        with self._gateway.open_request(ENDPOINT) as context:
            return await use(await self._gateway.acquire(context, self.model_name))


async def _stream(
    generator: Generator, adapters: ProgramAdapters, asked: AskedPrompt, lora_request: Any
) -> AsyncGenerator[RequestOutput, None]:
    async with (
        adapters.use(lora_request) as adapter,
        aclosing(generator.stream(asked.with_adapter(adapter))) as outputs,
    ):
        async for output in outputs:
            output.lora_request = lora_request
            yield output


@contextmanager
def _progress(bar: Progress, total: int, what: str) -> Iterator[Callable[[], object] | None]:
    """What is called at each step, to move a bar if there is one."""
    if not bar or not total:
        yield None
        return
    make = bar if callable(bar) else import_module("tqdm.auto").tqdm
    with make(total=total, desc=what) as shown:
        yield partial(shown.update, 1)


def _refuse(arguments: Mapping[str, Any], reasons: Mapping[str, str] = _UNSERVED) -> None:
    """Raise `Unsupported` for an argument that asks for something, and `TypeError` for one that vLLM's have not."""
    for name, value in arguments.items():
        if name not in reasons:
            raise TypeError(f"got an unexpected keyword argument '{name}'")
        if not asks_for_nothing(value):
            raise Unsupported(f"{name} is not served: {reasons[name]}", field=name)


def _prompts_at_once(limit: int | None, given: Sequence[GivenPrompt]) -> int:
    if limit is None:
        return max(len(given), 1)
    if not isinstance(limit, int) or limit < 1:
        raise InvalidArgument(f"concurrency_limit must be at least 1, got {limit!r}", field="concurrency_limit")
    return limit


async def _prompt_ids(handle: ModelHandle, given: GivenPrompt) -> list[int]:
    prompt = given.prompt
    return list(prompt) if isinstance(prompt, tuple) else (await handle.tokenize(TokenizeRequest(prompt=prompt))).ids
