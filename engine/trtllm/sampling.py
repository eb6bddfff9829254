"""From what our model asks of an engine to TensorRT-LLM's `SamplingParams`, by version world.

Every field of a request is passed on, or refused by its name: what their sampler would accept and not apply, too. Stop
strings, and text as a whole, stay with us: one way for all engines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import InvalidArgument
from ...core.guided_decoding import GuidedDecoding
from ...scheduler.plan import LogitsParams, SamplerParams
from ..core.messages import AddRequest
from .package import TrtllmPackage

_SEEDS = 2**63

_NO_LOGITS_PARAMS = LogitsParams()


@dataclass(frozen=True, slots=True)
class SamplingTranslator:
    """`unapplied`: fields that the sampler of this model would ignore. `text`: of token ids."""

    package: TrtllmPackage
    vocab_size: int
    unapplied: frozenset[str]
    text: Callable[[Sequence[int]], str]

    def params(self, add: AddRequest) -> Any:
        """The `SamplingParams` of one sequence.

        Raises:
            InvalidArgument: the sampler cannot do what is asked; `field` names it.
        """
        shaping = add.sampling.logits or _NO_LOGITS_PARAMS
        self._refuse(shaping, add.sampling.min_p)
        given = _ends(add, shaping) | _choice(add.sampling) | self._shaped(shaping, len(add.prompt))
        if add.sampling.logprobs is not None:
            given["logprobs"] = max(1, add.sampling.logprobs)  # older versions take 0 for none
        if add.guide is not None:
            given["guided_decoding"] = self.package.make("GuidedDecodingParams", **_guide(add.guide))
        return self.package.make("SamplingParams", detokenize=False, **given)

    def _refuse(self, shaping: LogitsParams, min_p: float) -> None:
        asked = {name: getattr(shaping, name) != getattr(_NO_LOGITS_PARAMS, name) for name in LogitsParams._fields}
        asked["min_p"] = min_p > 0
        for name in self.unapplied:
            if asked[name]:
                raise InvalidArgument(
                    f"{name}: the PyTorch sampler of tensorrt_llm {self.package.version} does not apply it; load the "
                    "model with sampler_type TRTLLMSampler",
                    field=name,
                )
        if shaping.allowed_token_ids:
            raise InvalidArgument("allowed_token_ids: TensorRT-LLM has nothing like it", field="allowed_token_ids")
        if shaping.min_tokens and any(len(word) > 1 for word in shaping.bad_words):
            message = "min_tokens and bad_words of several tokens do not go together in TensorRT-LLM"
            raise InvalidArgument(message, field="min_tokens")

    def _shaped(self, shaping: LogitsParams, prompt: int) -> dict[str, Any]:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        given = {
            name: getattr(shaping, name) for name in names if getattr(shaping, name) != getattr(_NO_LOGITS_PARAMS, name)
        }
        if {"presence_penalty", "frequency_penalty"} & given.keys() and self._ignores_prompts:
            given["prompt_ignore_length"] = prompt
        if shaping.logit_bias:
            given["embedding_bias"] = self._bias(shaping.logit_bias)
        if single := [word[0] for word in shaping.bad_words if len(word) == 1]:
            given["bad_token_ids"] = single
        if several := [self.text(word) for word in shaping.bad_words if len(word) > 1]:
            given["bad"] = several
        return given

    @property
    def _ignores_prompts(self) -> bool:
        """Penalties may leave the prompt out, as OpenAI's do."""
        return "prompt_ignore_length" in self.package.world.calls["SamplingParams"].arguments

    def _bias(self, bias: Sequence[tuple[int, float]]) -> Any:
        import torch

        added = torch.zeros(self.vocab_size, dtype=torch.float32)
        for token, value in bias:
            added[token] = value
        return added


def _ends(add: AddRequest, shaping: LogitsParams) -> dict[str, Any]:
    """Theirs holds back one end token until `min_tokens`; what stops beside it, whoever reads the tokens must see."""
    given: dict[str, Any] = {"max_tokens": max(add.max_tokens, 1), "include_stop_str_in_output": True}
    if shaping.min_tokens:
        return given | {"min_tokens": shaping.min_tokens, "end_id": add.stop_token_ids[0]}
    return given | {"ignore_eos": True, "stop_token_ids": list(add.stop_token_ids) or None}


def _choice(sampling: SamplerParams) -> dict[str, Any]:
    if sampling.temperature == 0:
        return {"top_k": 1}  # a temperature of 0 is none in older versions
    given = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    # Answers to one prompt that share a seed have random numbers of their own.
    given["seed"] = (sampling.seed + sampling.choice) % _SEEDS
    return given | ({"min_p": sampling.min_p} if sampling.min_p else {})


def _guide(guide: GuidedDecoding) -> dict[str, Any]:
    match guide.kind:
        case "json":
            return {"json_object": True}
        case "json_schema":
            return {"json": guide.text}
        case "regex":
            return {"regex": guide.text}
        case "ebnf_grammar":
            return {"grammar": guide.text}
