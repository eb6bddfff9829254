"""Builds the request to an engine: defaults are resolved, and every number is one that the engine can hold.

Knows nothing of sockets and text.
"""

import secrets
from collections.abc import Sequence
from math import inf
from typing import TypeVar

import msgspec
import numpy as np

from ...core.errors import InvalidArgument
from ...core.kv_transfer import new_handle
from ...core.request import Conversation, GenerateRequest
from ...core.request_context import RequestContext
from ...core.resolved_sampling import LogitsParams, ResolvedSampling
from ...core.retention import Retention
from ...core.sampling import SamplingParams, TokenLimit
from ...scheduler.plan import IntArray
from ...scheduler.sequence import SequenceSpec
from ...tokenization.generation_defaults import GenerationDefaults
from ..core.messages import AddRequest, CoreReady
from ..transfer.prefix_client import RemotePrefix

_LEAST_URGENT = 2**16
"""The class of background requests, too, which never catch up with others by waiting."""

_NO_TIMEOUT = 1e9
"""Seconds that a background request may take, whatever the default timeout is."""

_FLAT = 1e6
"""A temperature at which every token is as likely as the next; more overflows single precision."""
_ONE_TOKEN = 1e-6
"""A top_p that leaves the likeliest token alone; less may vanish in single precision."""
_PENALTIES = (1e-4, 1e4)
"""Least and greatest repetition penalty that still changes something; beyond are overflows."""

NO_LOGITS_PARAMS = LogitsParams()

T = TypeVar("T")


def build_add_request(
    request: GenerateRequest,
    context: RequestContext,
    prompt: list[int],
    defaults: GenerationDefaults,
    engine: CoreReady,
    bad_words: Sequence[tuple[int, ...]] = (),
    adapter: str = "",
    prediction: Sequence[int] = (),
) -> AddRequest:
    """The engine's request for one sequence, with key 0. `bad_words` and `prediction`: the request's, as token ids.
    `adapter`: its digest.

    Raises:
        InvalidArgument: the engine cannot satisfy it.
        ContextLengthExceeded: prompt and new tokens are more than the model's length.
    """
    check_vocabulary(prompt, engine.source_vocab_size if engine.source_tokens else engine.vocab_size)
    if engine.source_tokens:
        _check_source(request, prompt, engine.source_tokens)
        prompt = [*defaults.decoder_start]
        if not prompt:
            raise InvalidArgument("config.json names no decoder_start_token_id: the decoder has nothing to begin with")
        check_vocabulary(prompt, engine.vocab_size, "decoder_start_token_id")
    sampling, hints = request.sampling, context.hints
    priority = request.priority if hints.priority is None else hints.priority
    tokens = np.array(prompt, np.int32)
    stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *defaults.eos)
    stops = tuple(token for token in sorted(set(stops)) if token < engine.vocab_size)
    spec = SequenceSpec(
        key=0,
        prompt=tokens,
        max_tokens=_max_tokens(request, len(prompt), engine.max_model_len),
        sampling=ResolvedSampling(
            temperature=min(_or_default(sampling.temperature, defaults.temperature), _FLAT),
            top_k=min(max(0, _or_default(sampling.top_k, defaults.top_k)), engine.vocab_size),
            top_p=max(_or_default(sampling.top_p, defaults.top_p), _ONE_TOKEN),
            seed=secrets.randbits(63) if sampling.chosen_seed is None else sampling.chosen_seed,
            choice=request.choice,
            min_p=_or_default(sampling.min_p, defaults.min_p),
            logits=_logits_params(sampling, defaults, stops, bad_words, engine),
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
        ),
        stop_token_ids=frozenset(stops),
        priority=_LEAST_URGENT if context.background else min(priority, _LEAST_URGENT),
        tenant=_unicode(context.tenant, "tenant"),
        weight=context.tenant_weight,
        salt=_unicode(request.cache_salt, "cache_salt"),
        cache_hit_threshold=0.0 if context.background else request.cache_hit_threshold,
        adapter=_unicode(adapter, "lora_name"),
        adapter_name=request.adapter,
        target_ttft=_target(request.target_ttft_ms or hints.target_ttft_ms, context),
        target_itl=_target(request.target_itl_ms or hints.target_itl_ms, context),
        drafts_wanted=None if request.drafts is None else request.drafts.most,
        prediction=np.array(prediction[: engine.max_model_len], np.int32) if prediction else None,
        snapshot_at=_message_ends(tokens, defaults.eos),
        retention=_retention(request, context, engine),
    )
    timeout = request.timeout or (_NO_TIMEOUT if context.background else 0.0)
    handle, remote = _transfer(request)
    return AddRequest(spec, request.guided_decoding, timeout, handle=handle, remote=remote)


def _transfer(request: GenerateRequest) -> tuple[str, RemotePrefix | None]:
    """By which name another server will ask for the prompt's cache, which is that of the first answer, and where it is
    to be fetched."""
    transfer = request.kv_transfer
    if transfer is None:
        return "", None
    if transfer.do_remote_decode:
        return "" if request.choice else new_handle(), None
    host, port, handle = transfer.remote_host or "", transfer.remote_port or 0, transfer.remote_request_id or ""
    return "", RemotePrefix(host, port, handle, transfer.remote_engine_id or "")


def _retention(request: GenerateRequest, context: RequestContext, engine: CoreReady) -> Retention | None:
    wish = request.retention
    if wish is None:
        return None
    if not engine.retained_blocks:
        context.warn("retention: nothing is retained beyond its turn: the model has no --kv-cache-retention-bytes")
        return None
    scope = wish.scope or context.hints.session or request.id or secrets.token_hex(8)
    return msgspec.structs.replace(wish, scope=scope)


def _check_source(request: GenerateRequest, prompt: list[int], most: int) -> None:
    """Raises `InvalidArgument` for a prompt that an encoder cannot read, or of which more is wanted."""
    if not 1 <= len(prompt) <= most:
        field = "messages" if isinstance(request.prompt, Conversation) else "prompt"
        raise InvalidArgument(
            f"{field}: the encoder reads 1 to {most} tokens, and these are {len(prompt)}", field=field
        )
    if request.sampling.prompt_logprobs is not None:
        raise InvalidArgument(
            "prompt_logprobs: an encoder reads the prompt, and foresees no token of it", field="prompt_logprobs"
        )


def _message_ends(prompt: IntArray, eos: Sequence[int]) -> tuple[int, ...]:
    """The counts of tokens after which the first message of a chat ends, which all chats of an application may have,
    and its last two, of which the last may be asked anew. They end by the tokens that end a text, as most templates
    have it."""
    ends = np.flatnonzero(np.isin(prompt, eos)) + 1
    return tuple(np.unique(ends[[0, -2, -1]] if len(ends) > 2 else ends).tolist())


def _target(milliseconds: float, context: RequestContext) -> float | None:
    """Seconds, infinitely many for a background request; None for no target."""
    return inf if context.background else milliseconds / 1e3 or None


def _logits_params(
    sampling: SamplingParams,
    defaults: GenerationDefaults,
    stops: tuple[int, ...],
    bad_words: Sequence[tuple[int, ...]],
    engine: CoreReady,
) -> LogitsParams | None:
    """None where nothing changes the logits."""
    least, most = _PENALTIES
    params = LogitsParams(
        repetition_penalty=min(max(_or_default(sampling.repetition_penalty, defaults.repetition_penalty), least), most),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sampling.logit_bias.items()),
        # A word with a token that the model does not have is never written anyway.
        bad_words=tuple(word for word in bad_words if max(word) < engine.vocab_size),
        min_tokens=min(sampling.min_tokens, engine.max_model_len) if stops else 0,
        stop_token_ids=stops if sampling.min_tokens else (),
        allowed_token_ids=_allowed(sampling.allowed_token_ids or (), engine.vocab_size),
        suppressed=tuple(token for token in defaults.suppressed if token < engine.vocab_size),
    )
    for token, _ in params.logit_bias:
        if token >= engine.vocab_size:
            message = f"logit_bias: token id {token} is outside the vocabulary of {engine.vocab_size} tokens"
            raise InvalidArgument(message, field="logit_bias")
    forbidden = {*params.stop_token_ids, *(word[0] for word in params.bad_words if len(word) == 1)}
    if params.allowed_token_ids and forbidden.issuperset(params.allowed_token_ids):
        message = "allowed_token_ids: bad_words, or tokens that end the text before min_tokens, leave none of them"
        raise InvalidArgument(message, field="allowed_token_ids")
    return None if params == NO_LOGITS_PARAMS else params


def _or_default(chosen: T | None, default: T) -> T:
    """What a request says of its sampling, or else its model."""
    return default if chosen is None else chosen


def _allowed(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(tokens) > vocab_size:
        message = f"allowed_token_ids has {len(tokens)} token ids, more than the vocabulary's {vocab_size}"
        raise InvalidArgument(message, field="allowed_token_ids")
    check_vocabulary(tokens, vocab_size, "allowed_token_ids")
    return tuple(sorted(set(tokens)))


def check_vocabulary(tokens: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Raises `InvalidArgument` for a token of `field` outside the vocabulary."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab_size:
            raise InvalidArgument(
                f"{field}: token id {token} is outside the vocabulary of {vocab_size} tokens", field=field
            )


def prompt_tokens_to_keep(sampling: SamplingParams, length: int) -> int | None:
    """How many of a prompt's last tokens a model of this `length` gets; None for all. Raises `InvalidArgument` for more
    than the length."""
    kept = sampling.truncate_prompt_tokens
    if kept is None:
        return None
    if kept > length:
        message = f"truncate_prompt_tokens must be at most the model's length of {length} tokens, got {kept}"
        raise InvalidArgument(message, field="truncate_prompt_tokens")
    return max(1, length - (1 if sampling.max_tokens is None else sampling.max_tokens)) if kept < 0 else kept


def _max_tokens(request: GenerateRequest, prompt: int, length: int) -> int:
    wanted = request.sampling.max_tokens
    fitting = max(1, length - prompt)
    new = fitting if wanted is None else wanted
    new = min(new, fitting) if request.lenient_limits else new
    field = "messages" if isinstance(request.prompt, Conversation) else "prompt"
    TokenLimit(length).check_sequence(prompt, new, field)
    return new


def _unicode(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{field} is not valid Unicode", field=field) from error
    return text
