"""What an engine is asked for a request: every default resolved, every number one that it can hold.

Knows nothing of sockets and text.
"""

import secrets
from collections.abc import Sequence

from ...core.errors import InvalidArgument
from ...core.request import Conversation, GenerateRequest, SamplingParams
from ...core.request_context import RequestContext
from ...scheduler.plan import LogitsParams, SamplerParams
from ...tokenization.generation_defaults import GenerationDefaults, ResolvedSampling, resolve_sampling
from ...tokenization.tokenizer import TokenLimit
from ..core.messages import AddRequest, CoreReady

_LEAST_URGENT = 2**16
_FLAT = 1e6
"""A temperature at which every token is as likely as the next; more overflows single precision."""
_ONE_TOKEN = 1e-6
"""A top_p that leaves the likeliest token alone; less may vanish in single precision."""
_PENALTIES = (1e-4, 1e4)
"""Repetition penalties beyond which nothing changes any more, save overflows."""

NO_LOGITS_PARAMS = LogitsParams()


def build_add_request(
    request: GenerateRequest,
    context: RequestContext,
    prompt: list[int],
    defaults: GenerationDefaults,
    engine: CoreReady,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> AddRequest:
    """`bad_words` are the request's, as token ids.

    Raises:
        InvalidArgument: it asks for what this engine never has.
        TooLong: for more tokens than the model's length.
    """
    check_vocabulary(prompt, engine.vocab_size)
    sampling = resolve_sampling(request.sampling, defaults)
    stops = [token for token in sampling.stop_token_ids if token < engine.vocab_size]
    shaping = _logits_params(request.sampling, sampling, stops, bad_words, engine)
    return AddRequest(
        key=0,
        prompt=prompt,
        max_tokens=_max_tokens(request, len(prompt), engine.max_model_len),
        sampling=_row_sampling(request, sampling, shaping, engine.vocab_size),
        stop_token_ids=stops,
        priority=min(request.priority, _LEAST_URGENT),
        tenant=_unicode(context.tenant, "tenant"),
        salt=_unicode(request.cache_salt, "cache_salt"),
        adapter=_unicode(request.adapter, "lora_name"),
        guide=request.guided_decoding,
        weight=context.tenant_weight,
        timeout=request.timeout,
    )


def _row_sampling(
    request: GenerateRequest, sampling: ResolvedSampling, shaping: LogitsParams | None, vocab_size: int
) -> SamplerParams:
    seed = request.sampling.seed
    return SamplerParams(
        temperature=min(sampling.temperature, _FLAT),
        top_k=min(sampling.top_k, vocab_size),
        top_p=max(sampling.top_p, _ONE_TOKEN),
        seed=secrets.randbits(63) if seed is None else seed,
        choice=request.choice,
        min_p=sampling.min_p,
        logits=shaping,
        logprobs=request.sampling.logprobs,
        prompt_logprobs=request.sampling.prompt_logprobs,
    )


def _logits_params(
    asked: SamplingParams,
    sampling: ResolvedSampling,
    stops: Sequence[int],
    bad_words: Sequence[tuple[int, ...]],
    engine: CoreReady,
) -> LogitsParams | None:
    least, most = _PENALTIES
    shaping = LogitsParams(
        repetition_penalty=min(max(sampling.repetition_penalty, least), most),
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=_bias(asked.logit_bias, engine.vocab_size),
        # A word with a token that the model does not have is never written anyway.
        bad_words=tuple(word for word in bad_words if max(word) < engine.vocab_size),
        min_tokens=min(asked.min_tokens, engine.max_model_len) if stops else 0,
        stop_token_ids=tuple(stops) if asked.min_tokens else (),
        allowed_token_ids=_allowed(asked.allowed_token_ids or (), engine.vocab_size),
    )
    forbidden = {*shaping.stop_token_ids, *(word[0] for word in shaping.bad_words if len(word) == 1)}
    if shaping.allowed_token_ids and forbidden.issuperset(shaping.allowed_token_ids):
        message = "allowed_token_ids: bad_words, or tokens that end the text before min_tokens, leave none of them"
        raise InvalidArgument(message, field="allowed_token_ids")
    return None if shaping == NO_LOGITS_PARAMS else shaping


def _bias(bias: dict[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for token in bias:
        if token >= vocab_size:
            message = f"logit_bias: token id {token} is outside the vocabulary of {vocab_size} tokens"
            raise InvalidArgument(message, field="logit_bias")
    return tuple(bias.items())


def _allowed(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(tokens) > vocab_size:
        message = f"allowed_token_ids has {len(tokens)} token ids, more than the vocabulary's {vocab_size}"
        raise InvalidArgument(message, field="allowed_token_ids")
    check_vocabulary(tokens, vocab_size, "allowed_token_ids")
    return tuple(sorted(set(tokens)))


def check_vocabulary(tokens: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Raises InvalidArgument: a token of `field` is not one of the model's."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab_size:
            raise InvalidArgument(
                f"{field}: token id {token} is outside the vocabulary of {vocab_size} tokens", field=field
            )


def prompt_tokens_to_keep(asked: SamplingParams, length: int) -> int | None:
    """How many of a prompt's last tokens a model of this `length` is given; None: all there are.

    Raises:
        InvalidArgument: more are asked for than the model's length.
    """
    kept = asked.truncate_prompt_tokens
    if kept is None:
        return None
    if kept > length:
        message = f"truncate_prompt_tokens must be at most the model's length of {length} tokens, got {kept}"
        raise InvalidArgument(message, field="truncate_prompt_tokens")
    return max(1, length - (1 if asked.max_tokens is None else asked.max_tokens)) if kept < 0 else kept


def _max_tokens(request: GenerateRequest, prompt: int, length: int) -> int:
    asked = request.sampling.max_tokens
    new = max(1, length - prompt) if asked is None else asked
    if prompt + new > length:
        field = "max_tokens" if prompt < length else _field(request)
        raise TokenLimit(length).error(f"a prompt of {prompt} with max_tokens {new} exceeds it", field)
    return new


def _field(request: GenerateRequest) -> str:
    """Where its prompt stands."""
    return "messages" if isinstance(request.prompt, Conversation) else "prompt"


def _unicode(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{field} is not valid Unicode", field=field) from error
    return text
