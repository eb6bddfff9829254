"""Our sampling parameters as TensorRT-LLM's `SamplingParams`.

Every field of a request is passed on, or refused by its name: what TensorRT-LLM's sampler would accept and not apply,
too. Stop strings, and text as a whole, stay with us: one way for all engines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.errors import InvalidArgument
from ...core.request import GuidedDecoding
from ...scheduler.plan import LogitsParams, SamplerParams
from ..core.messages import AddRequest

if TYPE_CHECKING:
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.llmapi import GuidedDecodingParams
    from torch import Tensor

_SEEDS = 2**63

_NO_LOGITS_PARAMS = LogitsParams()

_IGNORED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_p")
"""Parameters that the default sampler of the PyTorch backend accepts and does not apply."""

_TRANSLATED = {*_IGNORED, "logit_bias", "min_tokens", "stop_token_ids", "temperature", "top_k", "top_p", "seed"}
_TRANSLATED |= {"choice", "logprobs", "logits"}
"""Parameters of a row that `translate` passes on; any other, also one that is new, is refused by its name."""

_DEFAULTS = {**SamplerParams._field_defaults, **LogitsParams._field_defaults}


@dataclass(frozen=True, slots=True)
class SamplingTranslator:
    """Makes the `SamplingParams` of one model's sequences. `version`: of TensorRT-LLM. `applies_all`: its sampler is
    one that ignores nothing. `decode`: the text of token ids."""

    version: str
    vocab_size: int
    applies_all: bool
    decode: Callable[[Sequence[int]], str]

    def translate(self, add: AddRequest) -> "SamplingParams":
        """The `SamplingParams` of one sequence.

        Raises:
            InvalidArgument: the sampler cannot do what is asked; `field` names it.
        """
        from tensorrt_llm import SamplingParams

        sampling, logits = add.sampling, add.sampling.logits or _NO_LOGITS_PARAMS
        self._check(sampling, logits)
        greedy, held_back = sampling.temperature == 0, logits.min_tokens > 0
        return SamplingParams(
            max_tokens=max(add.max_tokens, 1),
            # Theirs holds back one end token until `min_tokens`; those that stop beside it, our reader sees.
            min_tokens=logits.min_tokens or None,
            end_id=add.stop_token_ids[0] if held_back else None,
            ignore_eos=not held_back,
            stop_token_ids=None if held_back else add.stop_token_ids or None,
            include_stop_str_in_output=True,
            # Greedy is the likeliest token: a temperature of 0 stands for none.
            top_k=1 if greedy else sampling.top_k,
            top_p=None if greedy else sampling.top_p,
            temperature=None if greedy else sampling.temperature,
            min_p=None if greedy else sampling.min_p or None,
            # Answers to one prompt that share a seed have random numbers of their own.
            seed=None if greedy else (sampling.seed + sampling.choice) % _SEEDS,
            repetition_penalty=None if logits.repetition_penalty == 1 else logits.repetition_penalty,
            presence_penalty=logits.presence_penalty or None,
            frequency_penalty=logits.frequency_penalty or None,
            embedding_bias=self._bias(logits.logit_bias) if logits.logit_bias else None,
            bad_token_ids=[word[0] for word in logits.bad_words if len(word) == 1] or None,
            bad=[self.decode(word) for word in logits.bad_words if len(word) > 1] or None,
            logprobs=None if sampling.logprobs is None else max(1, sampling.logprobs),  # 0 may stand for none
            guided_decoding=None if add.guide is None else _guided_decoding(add.guide),
            detokenize=False,
        )

    def _check(self, sampling: SamplerParams, logits: LogitsParams) -> None:
        values = sampling._asdict() | logits._asdict()
        asked = [name for name, value in values.items() if value != _DEFAULTS[name]]
        for name in asked:
            if name in _IGNORED and not self.applies_all:
                raise InvalidArgument(
                    f"{name}: the PyTorch sampler of tensorrt_llm {self.version} does not apply it; load the "
                    "model with sampler_type TRTLLMSampler",
                    field=name,
                )
            if name not in _TRANSLATED:
                raise InvalidArgument(f"{name}: TensorRT-LLM has nothing like it", field=name)
        if logits.min_tokens and any(len(word) > 1 for word in logits.bad_words):
            message = "min_tokens and bad_words of several tokens do not go together in TensorRT-LLM"
            raise InvalidArgument(message, field="min_tokens")

    def _bias(self, bias: Sequence[tuple[int, float]]) -> "Tensor":
        """float32 [vocab], added to the logits."""
        import torch

        added = torch.zeros(self.vocab_size, dtype=torch.float32)
        for token, value in bias:
            added[token] = value
        return added


def _guided_decoding(guided: GuidedDecoding) -> "GuidedDecodingParams":
    from tensorrt_llm.llmapi import GuidedDecodingParams

    if guided.after:
        message = f"{guided.parameter}: TensorRT-LLM takes no constraints behind reasoning, which would have to be off"
        raise InvalidArgument(message, field=guided.parameter)
    match guided.kind:
        case "json":
            return GuidedDecodingParams(json_object=True)
        case "json_schema":
            return GuidedDecodingParams(json=guided.text)
        case "regex":
            return GuidedDecodingParams(regex=guided.text)
        case "ebnf_grammar":
            return GuidedDecodingParams(grammar=guided.text)
        case "structural_tag" | "choice" | "lark":
            message = f"{guided.parameter}: TensorRT-LLM does not take constraints of the kind '{guided.kind}'"
            raise InvalidArgument(message, field=guided.parameter)
