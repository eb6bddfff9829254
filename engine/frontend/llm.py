"""A language model as the contract wants it: text goes in, text streams out, an engine core computes between.

Knows nothing of protocols, and of the engine only its client. Leaves torch to the core's process.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...core.errors import Unavailable
from ...core.memory_needs import MemoryHolder, ReservedMemory
from ...core.metrics import LlmMetrics, Outcome, Reading
from ...core.model import ModelConfig, ModelStats
from ...core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest
from ...core.request_context import RequestContext
from ...core.statistics import VersionStatistics
from ...tokenization.async_tokenizer import AsyncTokenizer
from ...tokenization.checkpoint_files import checkpoint_fingerprint, locate_checkpoint
from ...tokenization.generation_defaults import GenerationDefaults, read_generation_defaults
from ...tokenization.tokenizer import Tokenizer, TokenLimit
from ..config import EngineConfig
from ..core.messages import CoreLoading
from .add_request import build_add_request, check_vocabulary, prompt_tokens_to_keep
from .chunk_builder import ChunkBuilder
from .client import EngineClient
from .engine import Engine, EngineSpec
from .infer import INPUTS, OUTPUTS, StreamedResponses, complete_response, parse_infer_request
from .sequence_stats import RequestRecorder
from .v2_statistics import v2_statistics

OnProgress: TypeAlias = Callable[[str, float, float, str], None]
"""Called while loading: phase, fraction done, seconds so far, detail."""

_COUNTED = 65_536
"""Tokens that may be counted for a model whose own length is shorter: what is yet to be cut is longer than that."""


def ignore_progress(phase: str, fraction: float, seconds: float, detail: str) -> None:
    """An `OnProgress` that tells nobody."""


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """What the frontend reads of a checkpoint. `async_tokenizer`: the same, for what may take long. `fingerprint`: of
    its files."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    async_tokenizer: AsyncTokenizer
    fingerprint: str = ""

    @classmethod
    def load(cls, model: str, chat_template: str = "", tokenizer_of: str = "") -> "TokenizerBundle":
        """Read a checkpoint directory or hub id; `Tokenizer.load` says what may be wrong with it, or with the
        `chat_template` and the tokenizer of another that are to be taken in place of its own."""
        directory = locate_checkpoint(model)
        tokenizer = Tokenizer.load(locate_checkpoint(tokenizer_of) if tokenizer_of else directory, chat_template)
        defaults = read_generation_defaults(directory, tokenizer)
        return cls(tokenizer, defaults, AsyncTokenizer(tokenizer), checkpoint_fingerprint(directory))

    def limited_to(self, vocab_size: int) -> "TokenizerBundle":
        """The same for a model of so many tokens."""
        return replace(self, defaults=self.defaults.limited_to(vocab_size))


def own_engine_spec(config: EngineConfig) -> EngineSpec:
    """Our own engine."""

    def connect(told: Callable[[CoreLoading], None], metrics: LlmMetrics) -> EngineClient:
        return EngineClient(config, told, metrics=metrics)

    return EngineSpec(
        "charonia",
        config.model,
        connect,
        frozenset({"wants_prompt_logprobs"}),
        config.chat_template,
        tokenizer=config.tokenizer,
    )


class LlmModel:
    """One checkpoint served by one engine: a `TextModel`. `engine`: what drives it, or our own's configuration.

    `generate` and `infer` raise what `EngineClient.stream` raises, and `InvalidArgument` for a prompt that cannot
    be tokenized.
    """

    def __init__(
        self, name: str, version: str, engine: EngineConfig | EngineSpec, on_progress: OnProgress = ignore_progress
    ) -> None:
        self._driver = driver = engine if isinstance(engine, EngineSpec) else own_engine_spec(engine)
        created = int(time.time())
        self._config = ModelConfig(
            name, version, driver.backend, decoupled=True, inputs=INPUTS, outputs=OUTPUTS, created=created
        )
        self._on_progress = on_progress
        self._metrics = LlmMetrics()
        self._accounts = RequestRecorder(self._metrics)
        self._client = driver.connect(self._report, self._metrics)
        self._loaded: TokenizerBundle | None = None
        self._vocab_size = 0
        self._counted, self._length = _COUNTED, 0

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def client(self) -> Engine:
        """The engine behind it."""
        return self._client

    def stats(self) -> ModelStats:
        total, (used, capacity) = self._metrics.total, self._client.kv_tokens
        return ModelStats(
            self._client.ready,
            success=self._metrics.answered,
            failure=total(Outcome.ERROR, Outcome.REJECTED, Outcome.TIMEOUT),
            cancelled=total(Outcome.CANCELLED),
            kv_tokens=used,
            kv_token_capacity=capacity,
        )

    def statistics(self) -> VersionStatistics:
        return v2_statistics(self._metrics)

    def readings(self) -> Iterator[Reading]:
        """Everything measured, for a scrape."""
        return self._metrics.readings(self._client.state())

    def count(self, context: RequestContext) -> None:
        self._accounts.record_request(context)

    def reserved_memory(self) -> ReservedMemory:
        """What it holds of the host's memory; nothing is known of somebody else's engine."""
        return self._client.reserved_memory() if isinstance(self._client, MemoryHolder) else ReservedMemory()

    async def load(self) -> None:
        """Return when a token was generated.

        Raises:
            CharoniaError: the checkpoint or the configuration is wrong; nothing is left running.
        """
        starting = asyncio.create_task(self._client.start())  # takes longest: the tokenizer is read meanwhile
        try:
            language = await asyncio.to_thread(
                TokenizerBundle.load, self._driver.checkpoint, self._driver.chat_template, self._driver.tokenizer
            )
            info = await starting
            self._loaded = language.limited_to(info.vocab_size)
            self._vocab_size = info.vocab_size
            self._counted, self._length = max(info.max_model_len, _COUNTED), info.max_model_len
            parameters = {"max_model_len": str(info.max_model_len)}
            self._config = replace(self._config, parameters=parameters, fingerprint=language.fingerprint)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, self.unload(), return_exceptions=True)
            raise

    async def unload(self) -> None:
        """Streams still open end with `Unavailable`; what is only tokenized comes to its end."""
        language, self._loaded = self._loaded, None
        await self._client.close()
        if language is not None:
            language.async_tokenizer.close()

    async def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[GenerateChunk, None]:
        # The whole way of a token in one generator: each more would cost every frame of every stream.
        with self._accounts.open_sequence(request, context) as account:
            language = self._language
            tokenizer = language.async_tokenizer
            self._driver.check_request(request)
            self._client.check_size(request)
            with self._client.reserve(context.tenant) as engine:
                kept = prompt_tokens_to_keep(request.sampling, engine.max_model_len)
                prompt = await tokenizer.prompt_ids(request.prompt, limit=TokenLimit(engine.max_model_len), kept=kept)
                self._client.check_size(request, len(prompt))
                banned = await tokenizer.word_ids(request.sampling.bad_words)
                add = build_add_request(request, context, prompt, language.defaults, engine, banned)
                whole = request.prompt if kept is None or len(prompt) < kept else tuple(prompt)
                echo = await tokenizer.prompt_text(whole, prompt) if request.echo else ""
            told = tuple(prompt) if request.return_prompt_ids else ()
            writer = ChunkBuilder(language.tokenizer, prompt, request.sampling, language.defaults.eos, echo, told)
            with self._client.open_stream(add, account) as channel:
                while (chunk := writer.build_chunk(await channel.read())).finish_reason is None:
                    yield chunk
            # By now the engine was told, if it does not know: a stop string may end a text long before its last token.
            account.record_finish(chunk.finish_reason)
            yield chunk

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        question = parse_infer_request(request, TokenLimit(self._length))
        streams = [self.generate(each, context) for each in question.requests]
        if not question.options.stream:
            yield await complete_response(question, streams)
            return
        spoken = StreamedResponses(question.outputs)
        async with aclosing(streams[0]) as chunks:
            async for chunk in chunks:
                if (response := spoken.build_response(chunk)) is not None:
                    yield response

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        limit = TokenLimit(self._counted, "what is only tokenized may have at most")
        return await self._language.async_tokenizer.prompt_ids(request.prompt, request.add_special_tokens, limit)

    async def detokenize(self, ids: Sequence[int]) -> str:
        if len(ids) > self._counted:
            limit = TokenLimit(self._counted, "what is only detokenized may have at most")
            raise limit.error(f"these are {len(ids)}", "tokens")
        check_vocabulary(ids, self._vocab_size, "tokens")
        return await self._language.async_tokenizer.decode(ids)

    @property
    def _language(self) -> TokenizerBundle:
        if self._loaded is None:
            raise Unavailable(f"model '{self._config.name}' is not loaded")
        return self._loaded

    def _report(self, loading: CoreLoading) -> None:
        if self._loaded is None:  # who watches the start is gone when a core is started again
            self._on_progress(loading.phase, loading.fraction, loading.seconds, loading.detail)
