"""How a program wants its tokens chosen, in the names and with the defaults that vLLM's offline users know."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from typing import Any

import msgspec

from ..core import sampling
from ..core.errors import InvalidArgument, Unsupported, describe_validation_error
from ..core.request import GuidedDecoding
from ..core.structured_outputs import only_constraint, parse_structured_outputs

_MOST_CHOICES = 128
_STRUCTURED = "structured_outputs"
_UNSERVED: Mapping[str, bool | None] = {
    "best_of": None,
    "detokenize": True,
    "extra_args": None,
    "flat_logprobs": False,
    "guided_decoding": None,
    "logits_processors": None,
    "skip_reading_prefix_cache": False,
}
"""Fields of vLLM's, and their values that ask for nothing beside None and what is empty."""
_OWN = ("n", _STRUCTURED, "output_kind", *_UNSERVED)
_WORDS = ("stop", "bad_words")


def asks_for_nothing(value: Any) -> bool:
    """Whether a value that is not served is None or empty. An array is neither: it may have no truth value."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


class SamplingParams(msgspec.Struct, kw_only=True):
    """As vLLM's: what is left out samples from the whole distribution. None leaves it to the model's own
    generation_config.json, as `LLM.generate` does without any. Values are checked when they are used."""

    n: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = 16
    """None: up to the model's length."""
    min_tokens: int = 0
    temperature: float | None = 1.0
    """0 is greedy."""
    top_p: float | None = 1.0
    top_k: int | None = 0
    """0 and -1 are off."""
    min_p: float | None = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = 1.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    """The likeliest tokens to report beside each one."""
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """The last tokens of the prompt to keep; -1: as many as fit."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: Any = None
    """What the answer is held to: `{"json": schema}`, `regex`, `choice`, `grammar` or `json_object`, as a dict or an
    object with these attributes."""
    output_kind: Any = None
    """Of no account, as for vLLM's `LLM`: `generate` gives whole answers, `stream` what is new."""
    best_of: Any = None
    detokenize: Any = True
    extra_args: Any = None
    flat_logprobs: Any = False
    guided_decoding: Any = None
    logits_processors: Any = None
    skip_reading_prefix_cache: Any = None
    """This one and those above are vLLM's, and are refused where they ask for something."""

    @classmethod
    def of_model(cls) -> "SamplingParams":
        """The parameters of the model's generation_config.json."""
        return cls(temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=None)

    def clone(self) -> "SamplingParams":
        """One with the same values, which shares none."""
        return deepcopy(self)

    def to_sampling(self) -> sampling.SamplingParams:
        """As requests have it. Raises `InvalidArgument` for a wrong value; `field` names it."""
        if not isinstance(self.n, int) or not 1 <= self.n <= _MOST_CHOICES:
            raise InvalidArgument(f"n must be between 1 and {_MOST_CHOICES}, got {self.n!r}", field="n")
        for name, nothing in _UNSERVED.items():
            value = getattr(self, name)
            if value is not nothing and not asks_for_nothing(value):
                hint = "; see structured_outputs" if name == "guided_decoding" else ""
                raise Unsupported(f"{name} {value!r:.100} is not served{hint}", field=name)
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in _OWN}
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        named = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        try:
            return msgspec.convert(named, sampling.SamplingParams, from_attributes=True)
        except msgspec.ValidationError as error:
            mismatch = describe_validation_error(error)
            raise InvalidArgument(f"{mismatch.path} {mismatch}", field=mismatch.path or None) from None

    def constraint(self) -> GuidedDecoding | None:
        """What the answer is held to. Raises `InvalidArgument`."""
        wanted = self.structured_outputs
        if wanted is None:
            return None
        if not isinstance(wanted, Mapping):
            wanted = asdict(wanted) if is_dataclass(wanted) and not isinstance(wanted, type) else vars(wanted)
        fields = {name: value for name, value in wanted.items() if value is not None and not name.startswith("_")}
        return only_constraint(parse_structured_outputs(fields, _STRUCTURED))
