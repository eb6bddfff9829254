"""The chat template of a reranker: how a query, a document and an instruction become its prompt.

As sentence-transformers renders pairs: messages of the roles `query` and `document`, and the instruction as a `system`
message. A template cut at its end would lose what the model answers to, so that end replaces the last tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from ...core.encoder_tensors import PAIR
from ...core.errors import InvalidArgument
from ...core.request import ChatMessage, Conversation
from ...tokenization.bounded_encoder import EncodedText
from ...tokenization.chat_template import ChatTemplate
from ...tokenization.tokenizer_json import EncoderTokenizer

QWEN3_RERANKER = """\
{%- set system = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ system or "Given a web search query, retrieve relevant passages that answer the query" }}
<Query>: {{ query }}
<Document>: {{ document }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""
"""The prompt of Qwen3-Reranker's model card, for checkpoints from before it was in their chat template."""

_PROBES = (("alpha", "bravo", ""), ("charlie", "bravo", ""), ("alpha", "foxtrot", ""), ("alpha", "bravo", "golf"))
_FILLERS = ("0", "1 2 3 4")
"""Contents that end in different tokens."""


class PairTemplate:
    """A compiled template, rendered with `variables`. `carries_pairs`, `carries_instruction`: whether what it writes
    depends on these."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._template = ChatTemplate(source, special_tokens)
        self._variables = dict(variables)
        self._opens_answer = bool(self._variables.pop("add_generation_prompt", False))
        try:
            plain, query, document, instruction = (self.render(*probe) for probe in _PROBES)
        except InvalidArgument:
            plain = query = document = instruction = ""
        self.carries_pairs = query != plain and document != plain
        self.carries_instruction = instruction != plain

    def render(self, query: str, document: str, instruction: str) -> str:
        """The prompt; without a system message if `instruction` is empty. Raises `InvalidArgument` for texts that the
        template refuses, or that take it too much work."""
        system = [ChatMessage("system", instruction)] if instruction else []
        messages = (*system, ChatMessage("query", query), ChatMessage("document", document))
        try:
            return self._template.render(Conversation(messages, self._variables, "", self._opens_answer))
        except InvalidArgument as error:
            raise InvalidArgument(f"a query and a document: {error.message}", field=PAIR) from error


class PairEncoder:
    """Encodes the prompts of pairs, of at most `max_tokens`."""

    def __init__(self, template: PairTemplate, tokenizer: EncoderTokenizer, max_tokens: int) -> None:
        self._template = template
        self._encode = partial(tokenizer.encode, special=False)
        self._max_tokens = max_tokens

    def encode(
        self, queries: Sequence[str], documents: Sequence[str], instructions: Sequence[str]
    ) -> Iterator[EncodedText]:
        """The tokens of each pair with its instruction. Raises as `EncoderTokenizer.encode`."""
        prompts = [*map(self._template.render, queries, documents, instructions)]
        ends: dict[str, list[int]] = {}
        for encoded, instruction in zip(self._encode(prompts), instructions, strict=True):
            if len(encoded.ids) < self._max_tokens:
                yield encoded
                continue
            if instruction not in ends:
                ends[instruction] = self._template_end(instruction)[-self._max_tokens :]
            end = ends[instruction]
            yield EncodedText([*encoded.ids[: len(encoded.ids) - len(end)], *end], encoded.segments)

    def _template_end(self, instruction: str) -> list[int]:
        """The tokens that every prompt with this instruction ends with."""
        first, second = self._encode([self._template.render(filler, filler, instruction) for filler in _FILLERS])
        end: list[int] = []
        for token, other in zip(reversed(first.ids), reversed(second.ids), strict=False):
            if token != other:
                break
            end.append(token)
        return end[::-1]
