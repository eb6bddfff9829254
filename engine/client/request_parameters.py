"""The parameters of a v2 request to a language model, under every name that clients have for them.

Values of wrong types, parameters that are not supported, and names that look like misspelled ones are refused. Other
unknown names are ignored and reported.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import orjson

from ...core.drafts import MAX_DRAFTS, DraftLimit
from ...core.errors import InvalidArgument, describe_validation_error, did_you_mean
from ...core.foreign_parameters import FOREIGN_NO_OPS
from ...core.request import GuidedDecoding, GuidedDecodingKind, ParameterValue
from ...core.retention import Retention, parse_retention
from ...core.sampling import SamplingParams
from ...core.structured_outputs import JsonText, only_constraint, parse_structured_outputs
from ...core.tensor import Tensor

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
Microseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

_MAX_IGNORED = 64
"""Unknown names that a request may have: each is compared with all known ones."""

MAX_CHOICES = 128
"""Answers to one prompt that may be asked for at once."""


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All parameters of a request that do not choose tokens, by their own names."""

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1
    """The number of answers."""
    stream: bool = False
    exclude_input_in_output: bool | None = None
    """None leaves it to the model's tensor layout."""
    return_finish_reason: bool = False
    return_stop_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_output_ids: bool = False
    return_log_probs: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False
    priority: int = 0
    cache_salt: str = ""
    cache_hit_threshold: float | None = None
    timeout: Microseconds = 0
    """As Triton has it; 0 is the model's default."""
    target_ttft_ms: float = 0.0
    target_itl_ms: float = 0.0
    lora_name: str = ""
    guided_decoding_guide_type: GuidedDecodingKind | None = None
    guided_decoding_guide: str = ""
    structured_outputs: JsonText = ""
    guided_decoding: JsonText = ""
    speculative_k: Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFTS)] | None = None
    retention_scope: str = ""
    retention_directives: str | list[Any] = ""
    kv_cache_retention_config: JsonText = ""

    @property
    def retention(self) -> Retention | None:
        """Raises `InvalidArgument` where it is malformed."""
        return parse_retention(self.retention_directives, self.retention_scope, self.kv_cache_retention_config)

    @property
    def drafts(self) -> DraftLimit | None:
        return None if self.speculative_k is None else DraftLimit(self.speculative_k)

    @property
    def constraint(self) -> GuidedDecoding | None:
        """Raises `InvalidArgument` for two constraints, and for a guide or its type alone."""
        own = GuidedDecoding.from_parameters(self.guided_decoding_guide_type, self.guided_decoding_guide)
        constraints = [] if own is None else [own]
        for name in ("structured_outputs", "guided_decoding"):
            if value := getattr(self, name):
                constraints += parse_structured_outputs(value, name)
        return only_constraint(constraints)


class _NamedValue(NamedTuple):
    """The value of a parameter, and the name that it came by."""

    name: str
    value: Any


_SAMPLING = set(SamplingParams.__struct_fields__) - {"prompt_logprobs"}
_OPTIONS = set(ResponseOptions.__struct_fields__)
_ALIASES = {
    "embedding_bias": "logit_bias",
    "end_id": "stop_token_ids",
    "random_seed": "seed",
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "streaming": "stream",
    "exclude_input_from_output": "exclude_input_in_output",
    "stop_words": "stop",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
}
_LISTS = {"stop_token_ids", "stop", "bad_words", "allowed_token_ids"}
"""Fields whose single element may come without a list."""
_WORDS = {"stop", "bad_words"}
"""Lists without their empty strings."""
_LLMAPI_PREFIX = "sampling_param_"

_PROTOCOL = {"id", "pad_id", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "user"}
"""Parameters of the protocol that mean nothing to a model: it never pads, and `user` is for routes."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "beam_width": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "len_penalty": (1,),
    "early_stopping": (False,),
    "prompt_logprobs": (False,),
    "prompt_logprob_token_ids": (),
    "prompt_logprob_start": (),
    "flat_logprobs": (False,),
    "image": (),
    "audio": (),
    "kv_transfer_params": (),
    "embedding_request": (),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "detokenize": (True,),
    "output_kind": (),
    "stream_interval": (1,),
    "extra_args": ({},),
    "skip_reading_prefix_cache": (False,),
    "thinking_token_budget": (-1,),
    "logits_processors": (),
    "response_format": (),
    "lora_id": (),
    "lora_task_id": (),
    "lora_path": (),
    "lora_ckpt_source": (),
    "image_url": (),
    "logits_post_processor_name": (),
    "embedding_bias_words": (),
    "embedding_bias_weights": (),
    **FOREIGN_NO_OPS,
}
"""Known parameters that are not supported, with their values without effect (beside "", [] and null)."""


def parse_request_parameters(
    parameters: Mapping[str, ParameterValue],
    replacement: Tensor | None,
    tensors: Mapping[str, Any] = MappingProxyType({}),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    ignored: list[str] | None = None,
) -> tuple[SamplingParams, ResponseOptions]:
    """Parse a request's parameters. A `sampling_parameters` tensor, `replacement`, replaces those that choose tokens;
    `tensors`, which came as inputs, win over both. `ignored` gets unknown names; None refuses them.

    Raises:
        InvalidArgument: one is unknown, not supported or of the wrong type; `field` names it.
    """
    named = _by_own_names(parameters, ignored)
    if replacement is not None:
        try:
            content = orjson.loads(text_of(replacement))
        except ValueError as error:
            raise InvalidArgument(f"{replacement.name} is not JSON: {error}", field=replacement.name) from error
        if not isinstance(content, dict):
            raise InvalidArgument(f"{replacement.name} must be a JSON object", field=replacement.name)
        options = {name: value for name, value in named.items() if name in _OPTIONS}
        named = options | _by_own_names(content, ignored)
    named |= _by_own_names(tensors, ignored)
    named = {name: _NamedValue(name, value) for name, value in defaults.items()} | named
    return _convert(named, _SAMPLING, SamplingParams), _convert(named, _OPTIONS, ResponseOptions)


def parse_fields(parameters: Mapping[str, Any], kind: type[S], ignored: list[str]) -> S:
    """The parameters that are fields of `kind`, under no other names. `ignored` gets unknown names. Raises as
    `parse_request_parameters`."""
    fields = set(kind.__struct_fields__)
    named = {
        name: _NamedValue(name, value) for name, value in parameters.items() if name in fields and value is not None
    }
    for name in parameters.keys() - fields - _PROTOCOL:
        if name.startswith("triton_") or parameters[name] is None:
            continue
        alike = did_you_mean(name, fields)
        if alike or len(ignored) >= _MAX_IGNORED:
            raise InvalidArgument(f"unknown parameter '{name}'{alike}", field=name)
        ignored.append(name)
    return _convert(named, fields, kind)


def one_element(tensor: Tensor) -> Any:
    """The only element of a tensor. Raises `InvalidArgument` for none or several."""
    if tensor.data.size != 1:
        raise InvalidArgument(f"{tensor.name} must hold one element, got {tensor.data.size}", field=tensor.name)
    return tensor.scalar


def text_of(tensor: Tensor) -> str:
    """The only element of a BYTES tensor, as text. Raises as `one_element` and `decode_text`."""
    return decode_text(tensor.name, one_element(tensor))


def decode_text(name: str, element: Any) -> str:
    """The text of an element of the BYTES tensor `name`. Raises `InvalidArgument` if it is not UTF-8."""
    try:
        return element if isinstance(element, str) else bytes(element).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name} is not UTF-8: {error}", field=name) from error


def _by_own_names(parameters: Mapping[str, Any], ignored: list[str] | None) -> dict[str, _NamedValue]:
    """The parameters that have an effect, by our own names."""
    renamed: dict[str, _NamedValue] = {}
    for alias, value in parameters.items():
        name = alias.removeprefix(_LLMAPI_PREFIX)
        name = _ALIASES.get(name, name)
        if _is_unknown(alias, name) and name.lower() in _UNSUPPORTED:
            name = name.lower()
        if _is_unknown(alias, name):
            if value is None:
                continue
            if ignored is None or len(ignored) >= _MAX_IGNORED or _alike(alias):
                raise InvalidArgument(f"unknown parameter '{alias}'{_alike(alias)}", field=alias)
            ignored.append(alias)
            continue
        if _asks_for_nothing(alias, name, value):
            continue
        if name in renamed:
            text = f"parameter '{alias}' says again what '{renamed[name].name}' says"
            raise InvalidArgument(text, field=alias)
        renamed[name] = _NamedValue(alias, value)
    return renamed


def _is_unknown(alias: str, name: str) -> bool:
    known = name in _SAMPLING or name in _OPTIONS or name in _PROTOCOL or name in _UNSUPPORTED
    return not (known or name.startswith("triton_"))


@lru_cache(1024)
def _alike(alias: str) -> str:
    return did_you_mean(alias, (*_SAMPLING, *_OPTIONS, *_ALIASES))


def _asks_for_nothing(alias: str, name: str, value: Any) -> bool:
    if name in {*_LISTS, "logit_bias"} - {"allowed_token_ids"}:
        # TensorRT-LLM has a boolean that is called stop, too.
        return value is None or value is False or value in ("", [], {})
    if name in _SAMPLING or name in _OPTIONS:
        return value is None or (name == "logprobs" and value is False)
    if name in _PROTOCOL or name.startswith("triton_"):
        return True
    if value in (None, "", []) or value in _UNSUPPORTED[name]:
        return True
    raise InvalidArgument(f"parameter '{alias}' is not supported yet", field=alias)


def _convert(named: Mapping[str, _NamedValue], names: set[str], kind: type[T]) -> T:
    wanted = {name: parameter.value for name, parameter in named.items() if name in names}
    for name, value in wanted.items():  # an integer of more than 64 bits comes as a float, and its range is checked
        if type(value) is float and value.is_integer():
            wanted[name] = int(value)
    for name in _LISTS & wanted.keys():
        if isinstance(wanted[name], int | str):
            wanted[name] = [wanted[name]]
        if name in _WORDS and isinstance(wanted[name], list) and all(isinstance(word, str) for word in wanted[name]):
            wanted[name] = [word for word in wanted[name] if word]
    try:
        # Not strict: some clients can send numbers only as text.
        return msgspec.convert(wanted, kind, strict=False)
    except msgspec.ValidationError as error:
        mismatch = describe_validation_error(error)
        own = mismatch.path.partition("[")[0]
        name, value = named[own]
        element = mismatch.path.removeprefix(own) if isinstance(value, list) else ""
        raise InvalidArgument(f"parameter '{name}{element}' {mismatch}", field=name) from error
    except InvalidArgument as error:
        culprit = named.get(error.field or "")
        if culprit is None or culprit.name == error.field:
            raise
        raise InvalidArgument(f"parameter '{culprit.name}': {error.message}", field=culprit.name) from None
