"""A language model as a `TextModel`: text goes in, text streams out, an engine computes between.

Knows nothing of protocols, and of the engine only `Engine`. Imports no torch.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import msgspec

from ...core.backends import OnProgress, ignore_progress
from ...core.direct_stream import DirectStream
from ...core.drafts import summarize_drafts
from ...core.errors import Cancelled, InvalidArgument, Unavailable
from ...core.gateway import ResponseStream
from ...core.metrics import Reading, VersionStatistics
from ...core.model import Capabilities, ModelConfig, ModelStats
from ...core.request import (
    GenerateChunk,
    GenerateRequest,
    GuidedDecoding,
    InferRequest,
    InferResponse,
    TokenizedPrompt,
    TokenizeRequest,
    prompt_media,
)
from ...core.request_context import Outcome, RequestContext
from ...core.sampling import TokenLimit
from ...telemetry.llm_metrics import LlmMetrics, record_request, v2_statistics
from ..config import EngineConfig
from ..core.messages import AddRequest, CoreLoading, CoreReady
from .adapters import with_adapter
from .add_request import build_add_request, check_vocabulary, prompt_tokens_to_keep
from .admission import BackgroundLimit, QueueTicket
from .answer_plan import plan_answer
from .chunk_builder import TextEnds
from .client import own_engine_spec
from .constraint_checker import ConstraintChecker
from .engine import Engine, EngineSpec
from .infer import OWN_LAYOUT, InferLayout
from .media_tensors import with_media
from .model_adapters import ModelAdapters
from .model_media import ModelMedia, PromptMedia
from .open_generation import OpenGeneration
from .prompted_transcriber import PromptedTranscriber
from .sequence_stats import SequenceStats, open_sequence
from .token_stream import DeltaReader
from .tokenizer_bundle import TokenizerBundle
from .transcriber import PromptPlaces, Transcriber, load_transcriber

Chunks: TypeAlias = DirectStream[GenerateChunk]

_MIN_COUNTED = 65_536
"""Tokens that `tokenize` accepts whatever the model's length: clients count texts that they then cut."""


@dataclass(frozen=True, slots=True)
class TextModelSpec:
    """A loaded language model for another process, which connects an engine of its own. `spec` makes none, so that all
    can be pickled. `plain`: as of `ModelMedia`."""

    spec: EngineSpec
    layout: InferLayout
    info: CoreReady
    plain: PromptMedia | None


def _no_engine(on_progress: Callable[[CoreLoading], None], metrics: LlmMetrics) -> Engine:
    raise Unavailable("an engine is to be connected first")


_SOME_REQUEST = GenerateRequest(id="", prompt=())
_NO_ADAPTER = nullcontext("")


class LlmModel:
    """One checkpoint served by one engine: a `TextModel`. `engine`: a spec, or the configuration of our own engine.

    `generate` and `infer` raise as `Engine.admit` and `Engine.open_stream`, and `InvalidArgument` for a prompt that
    cannot be tokenized.
    """

    def __init__(
        self,
        name: str,
        version: str,
        engine: EngineConfig | EngineSpec,
        on_progress: OnProgress = ignore_progress,
        layout: InferLayout = OWN_LAYOUT,
        media: ModelMedia | None = None,
    ) -> None:
        self._media = media or ModelMedia()
        self._spec = spec = engine if isinstance(engine, EngineSpec) else own_engine_spec(engine)
        self._layout = layout
        self._config = ModelConfig(
            name,
            version,
            spec.backend,
            max_batch_size=layout.max_batch_size,
            decoupled=layout.decoupled,
            inputs=layout.inputs,
            outputs=layout.output_specs,
            created=int(time.time()),
            implied_stream=layout.implied_stream,
        )
        self._on_progress = on_progress
        self._metrics = LlmMetrics()
        self._client = spec.connect(self._report, self._metrics)
        shared = self._client.capabilities.shared
        self.cancel_elsewhere = None if shared is None else shared.cancel_elsewhere
        """Has other processes that generate with this model end their requests with an id."""
        self._loaded: TokenizerBundle | None = None
        self._info = CoreReady(0, 0, 0, 0)
        self._open: set[OpenGeneration] = set()
        """The generations that this process reads."""
        self._transcriber: Transcriber | PromptedTranscriber | None = None
        self._constraints: ConstraintChecker | None = None
        self._background = BackgroundLimit(spec.most_in_background)
        self.adapters = ModelAdapters(name, spec, self._client.capabilities.adapters)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def client(self) -> Engine:
        """The engine that computes for it."""
        return self._client

    @property
    def info(self) -> CoreReady:
        """The engine's sizes; zeros before it is loaded."""
        return self._info

    @property
    def metrics(self) -> LlmMetrics:
        """The instruments of the model's requests, in whatever process their text is read."""
        return self._metrics

    def with_engine(self, engine: Engine) -> "LlmModel":
        """The same model with another engine that computes the same."""
        other = copy(self)
        other._client = engine
        return other

    def export_spec(self) -> TextModelSpec:
        """The loaded model for other processes, which read the same files, whatever the hub has by then."""
        bundle, spec = self.bundle, replace(self._spec, connect=_no_engine, lora=None)
        spec = replace(spec, checkpoint=bundle.checkpoint, tokenizer=bundle.tokenizer_of)
        return TextModelSpec(spec, self._layout, self._info, self._media.plain)

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
        """The model's series, for a scrape."""
        yield from self._metrics.readings(self._client.state())
        yield from self._media.readings()
        yield from self.adapters.readings()

    def count(self, context: RequestContext) -> None:
        record_request(self._metrics, context)

    @property
    def capabilities(self) -> Capabilities:
        engine = self._client.capabilities
        memory = self._media.memory_beside(engine.memory)
        own = Capabilities(text=self, adapters=self.adapters, queue=self, memory=memory, measured=self)
        return replace(own, retention=engine.retention)

    async def load(self) -> None:
        """Return when the engine has generated a token. Raises a `CharoniaError` for a wrong checkpoint or
        configuration, and leaves nothing running."""
        await self.adapters.locate_first()
        starting = asyncio.create_task(self._client.start())  # takes longest: all else is read meanwhile
        seeing = asyncio.create_task(self._media.load(self._config.name, self._on_progress))
        try:
            bundle = await asyncio.to_thread(
                TokenizerBundle.load, self._spec.checkpoint, self._spec.chat_template, self._spec.tokenizer
            )
            info = await starting
            await seeing
            self._loaded = replace(bundle, defaults=bundle.defaults.limited_to(info.vocab_size))
            self._info = info
            await self.adapters.load_first(self._on_progress)
            if self._spec.checks_constraints:
                self._constraints = ConstraintChecker(bundle.tokenizer.added_tokens(info.vocab_size))
            parameters = {"max_model_len": str(info.max_model_len)}
            self._config = replace(self._config, parameters=parameters, fingerprint=bundle.fingerprint)
            self._config = replace(self._config, refused_media=self._media.refusals)
            self._config = with_media(self._config, self._media.kinds, self._media.transcribes, self._media.row_width)
            if self._media.kinds:
                timeout = self._spec.default_timeout
                self._transcriber = load_transcriber(self._media, bundle, info, self._ask, self.check_room, timeout)
        except BaseException:
            starting.cancel()
            seeing.cancel()
            await asyncio.gather(starting, seeing, self.unload(), return_exceptions=True)
            raise

    async def unload(self) -> None:
        """Close everything: open streams end with `Unavailable`, texts that are being tokenized are finished."""
        bundle, self._loaded = self._loaded, None
        constraints, self._constraints = self._constraints, None
        await self.adapters.close()
        await self._client.close()
        await self._media.unload()
        if constraints is not None:
            await constraints.close()
        if bundle is not None:
            bundle.async_tokenizer.close()

    def generate(self, request: GenerateRequest, context: RequestContext) -> Chunks:
        if self._transcriber is not None:
            return self._transcriber.generate(request, context)
        if request.speech is not None:
            raise InvalidArgument(f"model '{self._config.name}' writes down no sounds", field="model")
        return self._ask(request, context)

    def _ask(self, request: GenerateRequest, context: RequestContext, media: PromptPlaces | None = None) -> Chunks:
        return DirectStream(partial(self._generate, request, context, media))

    async def _generate(
        self, request: GenerateRequest, context: RequestContext, media: PromptPlaces | None, output: Chunks
    ) -> AsyncGenerator[GenerateChunk, None]:
        # A token's whole way is one generator: every further one would cost each chunk of each stream.
        with open_sequence(self._metrics, request, context) as stats:
            bundle = self.bundle
            if request.adapter or context.adapter:
                request = with_adapter(request, context)
            self._spec.check_request(request, context.tenant)
            generation = OpenGeneration(request.id, context, self._spec.timeout_of(request, context), self._open)
            waits, adapts = context.waits_for_room, request.adapter or request.lora_task
            with (
                generation,
                await generation.wait_for(self._admit_in_turn(request, context))
                if waits
                else self._admit(request, context) as ticket,
                await generation.wait_for(self.adapters.use(request, stats, context))
                if adapts
                else _NO_ADAPTER as adapter,
            ):
                add, builder = await generation.wait_for(
                    self._prepare(bundle, request, context, media, adapter, generation.timeout)
                )
                if waits:
                    take = partial(ticket.admission.add_prompt, ticket, add.prompt_tokens)
                    await generation.wait_for(ticket.admission.take_turn("tokens", take))
                with self._client.open_stream(add, stats, ticket) as stream:
                    generation.read_from(stream)
                    while (chunk := await stream.read_chunk(builder, output)).finish_reason is None:
                        yield chunk
            # The engine is aborted by now: a stop string may end a text long before its last token.
            stats.record_finish(chunk.finish_reason)
            yield self._completed(chunk, request, stats)

    async def _prepare(
        self,
        bundle: TokenizerBundle,
        request: GenerateRequest,
        context: RequestContext,
        media: PromptPlaces | None,
        adapter: str,
        timeout: float,
    ) -> tuple[AddRequest, DeltaReader]:
        """What the engine is asked, and what makes chunks of its tokens."""
        info, tokenizer, sampling = self._info, bundle.async_tokenizer, request.sampling
        kept, limit = prompt_tokens_to_keep(sampling, info.max_model_len), TokenLimit(info.max_model_len)
        if media is None and prompt_media(request.prompt):
            media = await self._media.read(request.prompt, context, request.cache_salt, timeout)
        media = media or self._media.plain
        stand_ins = None if media is None else media.text
        prompt = await tokenizer.prompt_ids(request.prompt, limit=limit, kept=kept, media=stand_ins)
        banned = [*await tokenizer.word_ids(sampling.bad_words), *request.bad_word_ids]
        echoed = request.prompt if kept is None or len(prompt) < kept else tuple(prompt)
        echo = await tokenizer.prompt_text(echoed, prompt) if request.echo else ""
        plan = await tokenizer.call(plan_answer, request, prompt, bundle.tokenizer, self._spec.parsers)
        if plan.warning:
            context.warn(plan.warning)
        self._spec.check_constraint(plan.constraint)
        predicted = list[int]()
        if request.prediction:
            predicted = await tokenizer.text_ids(request.prediction, limit, "prediction")
        add = build_add_request(request, context, plan.prompt, bundle.defaults, info, banned, adapter, predicted)
        if media is not None:
            add = media.place(add, request.prompt)
        if info.source_tokens:
            add = await self._media.encode_source(add, plan.prompt, context, timeout)
        if plan.constraint is not None:  # the most expensive check comes last
            plan = replace(plan, constraint=await self._enforce(plan.constraint, context))
        add = await tokenizer.call(plan.complete, add)
        prompt_ids = tuple(plan.prompt) if request.return_prompt_ids else ()
        ends = TextEnds(bundle.defaults.eos, request.stop_word_ids)
        return add, plan.builder(sampling, ends, echo, prompt_ids, predicted)

    def _completed(self, last: GenerateChunk, request: GenerateRequest, stats: SequenceStats) -> GenerateChunk:
        """The last chunk of a text, with how another server goes on, and the report about its drafts, where wanted."""
        report, most = self._spec.draft_report, self._spec.most_drafts_of(request)
        drafts = summarize_drafts(stats.drafts, most, report == "detailed") if most and report != "none" else None
        return msgspec.structs.replace(last, drafts=drafts, kv_transfer_params=stats.held)

    def check_room(self, tenant: str) -> None:
        self._client.admit(_SOME_REQUEST, tenant).release()

    def _admit(self, request: GenerateRequest, context: RequestContext) -> AbstractContextManager[QueueTicket]:
        ticket = self._client.admit(request, context.tenant)
        if not context.background:
            return ticket
        ticket.release()  # a full queue refuses this, too, but it takes no place in it
        return self._background.admit(context.tenant, len(context.sequences) == 1, self._client.kv_tokens)

    async def _admit_in_turn(
        self, request: GenerateRequest, context: RequestContext
    ) -> AbstractContextManager[QueueTicket]:
        return await self._client.admission.take_turn("requests", partial(self._admit, request, context))

    def infer(self, request: InferRequest, context: RequestContext) -> ResponseStream[InferResponse]:
        return self._layout.infer(request, context, self)

    async def _enforce(self, constraint: GuidedDecoding, context: RequestContext) -> GuidedDecoding:
        """The constraint as the engine gets it; a warning names what of it is not enforced."""
        if self._constraints is None:
            return constraint
        enforced, left_out = await self._constraints.check(constraint, context.tenant)
        if left_out:
            context.warn(f"{constraint.parameter}: not enforced: {', '.join(left_out)}")
        return enforced

    def cancel(self, request_id: str) -> None:
        """End all generations with this request id; their readers get `Cancelled`."""
        if self.cancel_elsewhere is not None:
            self.cancel_elsewhere(request_id)
        self.cancel_here(request_id)

    def cancel_here(self, request_id: str) -> None:
        """As `cancel`, for generations that this process reads."""
        for generation in self._open:
            if request_id and generation.request_id == request_id:
                generation.interrupt(Cancelled("Request cancelled by client"))

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        limit = TokenLimit(self._max_counted, "what is only tokenized may have at most")
        tokenizer = self.bundle.async_tokenizer
        media = await self._media.text(request.prompt, RequestContext("tokenize"))
        ids = await tokenizer.prompt_ids(request.prompt, request.add_special_tokens, limit, media=media)
        return TokenizedPrompt(ids, await tokenizer.token_strings(ids) if request.with_strings else None)

    async def detokenize(self, ids: Sequence[int]) -> str:
        if len(ids) > self._max_counted:
            limit = TokenLimit(self._max_counted, "what is only detokenized may have at most")
            raise limit.error(f"these are {len(ids)}", "tokens")
        check_vocabulary(ids, self._info.vocab_size, "tokens")
        return await self.bundle.async_tokenizer.decode(ids)

    async def tokenizer_info(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.bundle.tokenizer_info)

    @property
    def end_tokens(self) -> Sequence[int]:
        return self.bundle.defaults.eos

    @property
    def tokenizer_files(self) -> str:
        return self.bundle.tokenizer_of or self.bundle.checkpoint

    @property
    def _max_counted(self) -> int:
        return max(self._info.max_model_len, _MIN_COUNTED)

    @property
    def bundle(self) -> TokenizerBundle:
        if self._loaded is None:
            raise Unavailable(f"model '{self._config.name}' is not loaded")
        return self._loaded

    def _report(self, loading: CoreLoading) -> None:
        if self._loaded is None:  # the progress of a restarted core is not shown
            self._on_progress(loading.phase, loading.fraction, loading.seconds, loading.detail)
