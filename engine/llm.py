"""A language model as the contract wants it: text goes in, text streams out, an engine core computes between.

Knows nothing of protocols, and of the engine only its client. Leaves torch to the core's process.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from ..core.errors import InvalidArgument, Unavailable
from ..core.metrics import LlmMetrics, Outcome, Reading
from ..core.model import ModelConfig, ModelStats
from ..core.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    Prompt,
    TokenizeRequest,
    Usage,
)
from ..tokenization.detokenizer import Detokenizer
from ..tokenization.files import locate
from ..tokenization.generation import GenerationDefaults, read_defaults, resolve
from ..tokenization.tokenizer import Tokenizer
from .account import Account, Accounts
from .channel import Delta
from .client import EngineClient
from .config import EngineConfig
from .infer import INPUTS, OUTPUTS, answers, read_question
from .intake import check_vocabulary
from .messages import Add, Loading, Ready

OnProgress: TypeAlias = Callable[[str, float, float, str], None]
"""Called while loading: phase, fraction done, seconds so far, detail."""

_TOKENIZER_THREADS = 2
_LEAST_URGENT = 2**16
_FLAT = 1e6
"""A temperature at which every token is as likely as the next; more overflows single precision."""
_ONE_TOKEN = 1e-6
"""A top_p that leaves the likeliest token alone; less may vanish in single precision."""


def silent(phase: str, fraction: float, seconds: float, detail: str) -> None:
    """An `OnProgress` that tells nobody."""


@dataclass(frozen=True, slots=True)
class Language:
    """What the frontend reads of a checkpoint."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults

    @classmethod
    def load(cls, model: str) -> "Language":
        """Read a checkpoint directory or hub id; `Tokenizer.load` says what may be wrong with it."""
        directory = locate(model)
        tokenizer = Tokenizer.load(directory)
        return cls(tokenizer, read_defaults(directory, tokenizer))


class LlmModel:
    """One checkpoint served by one engine: a `TextModel`.

    `generate` and `infer` raise what `EngineClient.stream` raises, and `InvalidArgument` for a prompt that cannot
    be tokenized.
    """

    def __init__(self, name: str, version: str, engine: EngineConfig, on_progress: OnProgress = silent) -> None:
        created = int(time.time())
        self._config = ModelConfig(
            name, version, "charonia", decoupled=True, inputs=INPUTS, outputs=OUTPUTS, created=created
        )
        self._checkpoint = engine.model
        self._on_progress = on_progress
        self._metrics = LlmMetrics()
        self._accounts = Accounts(name, version, self._metrics)
        self._client = EngineClient(engine, self._report, metrics=self._metrics)
        self._threads = ThreadPoolExecutor(_TOKENIZER_THREADS, "tokenizer")
        self._loaded: Language | None = None

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def client(self) -> EngineClient:
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

    def readings(self) -> Iterator[Reading]:
        """Everything measured, for a scrape."""
        return self._metrics.readings(self._client.state())

    async def load(self) -> None:
        """Return when a token was generated.

        Raises:
            CharoniaError: the checkpoint or the configuration is wrong; nothing is left running.
        """
        try:
            self._loaded = await asyncio.to_thread(Language.load, self._checkpoint)
            await self._client.start()
        except BaseException:
            await self.unload()
            raise

    async def unload(self) -> None:
        await self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        with self._accounts.open(request.id) as account:
            async with aclosing(self._generate(request, account)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        with self._accounts.open(request.id) as account:
            question = read_question(request)
            async with (
                aclosing(self._generate(question.request, account)) as chunks,
                aclosing(answers(question, chunks, self.detokenize)) as responses,
            ):
                async for response in responses:
                    yield response

    async def _generate(self, request: GenerateRequest, account: Account) -> AsyncGenerator[GenerateChunk, None]:
        account.name_tenant(request.tenant)
        language = self._language
        with self._client.place() as engine:
            prompt = await self._prompt_ids(request.prompt)
            add = addition(request, prompt, language.defaults, engine)
        writer = Writer(language.tokenizer, prompt)
        async with aclosing(self._client.stream(add, account)) as deltas:
            async for delta in deltas:
                chunk = writer.chunk(delta)
                if delta.finish_reason is not None:
                    account.finish(delta.finish_reason)
                yield chunk

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        return await self._prompt_ids(request.prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return self._language.tokenizer.decode(ids)

    @property
    def _language(self) -> Language:
        if self._loaded is None:
            raise Unavailable(f"model '{self._config.name}' is not loaded")
        return self._loaded

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._language.tokenizer.prompt_ids, prompt)

    def _report(self, loading: Loading) -> None:
        self._on_progress(loading.phase, loading.fraction, loading.seconds, loading.detail)


class Writer:
    """Turns what the engine says of one request into chunks of text."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._prompt_tokens = len(prompt)
        self._completion_tokens = 0
        self._text = Detokenizer(tokenizer, prompt)

    def chunk(self, delta: Delta) -> GenerateChunk:
        self._completion_tokens += len(delta.token_ids)
        usage = Usage(self._prompt_tokens, self._completion_tokens, delta.cached_tokens)
        return GenerateChunk(
            text=self._write(delta), token_ids=delta.token_ids, usage=usage, finish_reason=delta.finish_reason
        )

    def _write(self, delta: Delta) -> str:
        if delta.finish_reason is None:
            return self._text.push(delta.token_ids)
        # The token that stopped it ends the text and is no part of it.
        written = delta.token_ids[:-1] if delta.finish_reason is FinishReason.STOP else delta.token_ids
        return self._text.push(written) + self._text.finish()


def addition(request: GenerateRequest, prompt: list[int], defaults: GenerationDefaults, engine: Ready) -> Add:
    """What the engine is asked, every default resolved and every number one that it can hold.

    Raises:
        InvalidArgument: it asks for what this engine never has.
    """
    check_vocabulary(prompt, engine.vocab_size)
    sampling = resolve(request.sampling, defaults)
    seed = request.sampling.seed
    return Add(
        client=0,
        key=0,
        prompt=prompt,
        max_tokens=_max_tokens(request.sampling.max_tokens, len(prompt), engine.max_model_len),
        temperature=min(sampling.temperature, _FLAT),
        top_k=min(sampling.top_k, engine.vocab_size),
        top_p=max(sampling.top_p, _ONE_TOKEN),
        seed=secrets.randbits(63) if seed is None else seed,
        stop_token_ids=[token for token in sampling.stop_token_ids if token < engine.vocab_size],
        priority=min(max(0, request.priority), _LEAST_URGENT),
        tenant=_unicode(request.tenant, "tenant"),
        salt=_unicode(request.cache_salt, "cache_salt"),
        weight=request.weight,
        timeout=request.timeout,
    )


def _max_tokens(asked: int | None, prompt: int, length: int) -> int:
    if asked is None:
        return max(1, length - prompt)
    if asked > length:
        raise InvalidArgument(f"max_tokens {asked} exceeds the model's length of {length} tokens", field="max_tokens")
    return asked


def _unicode(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{field} is not valid Unicode", field=field) from error
    return text
