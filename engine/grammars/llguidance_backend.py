"""Grammars by llguidance, which computes masks lazily and limits all its work.

https://github.com/guidance-ai/llguidance
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from ...core.errors import InvalidArgument
from ...core.request import GuidedDecoding
from .backend import LIMITS, CompiledGrammar, GrammarLimits, GrammarMatcher, TokenMask
from .constraint_grammar import write_grammar
from .vocabulary import Vocabulary


def free_text_mask(tokens: Sequence[bytes], ends: Sequence[int]) -> TokenMask:
    """The mask of all tokens that have bytes and end no text."""
    allowed = np.array([bool(token) for token in tokens])
    allowed[list(ends)] = False
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view("<i4").astype(np.int32)


class FreeTextMatcher:
    """A `GrammarMatcher` that gives `inner` the tokens after `marker`. `tokens`: the bytes of each; `mask`: the tokens
    allowed before."""

    def __init__(self, inner: GrammarMatcher, marker: bytes, tokens: Sequence[bytes], mask: TokenMask) -> None:
        self._inner = inner
        self._marker = marker
        self._tokens = tokens
        self._mask = mask
        self._free: list[int] = []
        self._begun = False
        self._followed = 0

    @property
    def error(self) -> str:
        return self._inner.error

    @property
    def complete(self) -> bool:
        return self._begun and self._inner.complete

    @property
    def finished(self) -> bool:
        return self._begun and self._inner.finished

    def fill_mask(self, mask: TokenMask) -> None:
        if self._begun:
            self._inner.fill_mask(mask)
        else:
            mask[:] = self._mask

    def accept(self, tokens: Sequence[int]) -> bool:
        for at, token in enumerate(tokens):
            if self._begun:
                self._followed += len(tokens) - at
                return self._inner.accept(tokens[at:])
            self._free.append(token)
            self._begun = self._ends_in_marker()
        return True

    def acceptable(self, tokens: Sequence[int]) -> int:
        free = 0
        while not self._begun and free < len(tokens):
            self.accept(tokens[free : free + 1])
            free += 1
        following = self._inner.acceptable(tokens[free:])
        self.rollback(free)
        return free + following

    def forced_tokens(self) -> list[int]:
        return self._inner.forced_tokens() if self._begun else []

    def rollback(self, tokens: int) -> None:
        within = min(tokens, self._followed)
        if within:
            self._inner.rollback(within)
            self._followed -= within
        if tokens > within:
            del self._free[len(self._free) - (tokens - within) :]
            self._begun = False

    def _ends_in_marker(self) -> bool:
        end, at = b"", len(self._free)
        while at and len(end) < len(self._marker):
            at -= 1
            end = self._tokens[self._free[at]] + end
        return end.endswith(self._marker)


_GRAMMAR_BYTES, _BYTES_PER_TEXT_BYTE = 1 << 16, 64
"""The memory of a compiled grammar: a constant, and bytes for each byte of its text."""
_NO_TEXT = "no text can satisfy it"
_MESSAGE = 500
"""Characters of the library's messages that are passed on."""


def check_grammar(constraint: GuidedDecoding, limits: GrammarLimits = LIMITS) -> tuple[str, ...]:
    """Compile a constraint without a vocabulary; descriptions of what is not enforced. Special tokens are not checked.

    Raises:
        InvalidArgument: it is wrong or costs too much; `field` is its `parameter`.
    """
    grammar = _checked(constraint, limits)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits(limits))
    if failed:
        raise _refused(constraint, messages[0])
    return tuple(message for message in messages if not message.startswith("no tokenizer"))


class LLGuidanceBackend:
    """A `GrammarBackend` for one vocabulary. Without `jumps` its matchers force no tokens."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits = LIMITS, jumps: bool = True) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._jumps = jumps

    def compile(self, constraint: GuidedDecoding) -> CompiledGrammar:
        """See `GrammarBackend.compile`. The first mask is computed, too, since it shows what costs too much."""
        marker = constraint.after if self._vocabulary.ends_in_special(constraint.after) else ""
        grammar = _checked(constraint._replace(after="") if marker else constraint, self._limits, self._vocabulary)
        first = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0, limits=_limits(self._limits))
        if not first.is_error():
            LLGuidanceMatcher(first).fill_mask(np.zeros(-(-self._vocabulary.size // 32), np.int32))
        if first.is_error():
            raise _refused(constraint, first.get_error())
        size = _GRAMMAR_BYTES + _BYTES_PER_TEXT_BYTE * len(constraint.text)
        return LLGuidanceGrammar(first, size, self._matcher_maker(marker))

    def _matcher_maker(self, marker: str) -> Callable[[LLMatcher], GrammarMatcher]:
        begin = partial(LLGuidanceMatcher, jumps=self._jumps)
        if not marker:
            return begin
        tokens = self._vocabulary.tokens
        mask = free_text_mask(tokens, self._vocabulary.ends)
        return lambda matcher: FreeTextMatcher(begin(matcher), marker.encode(), tokens, mask)


class LLGuidanceGrammar:
    """A `CompiledGrammar`. Each matcher is a copy of the first, and shares what that has computed."""

    def __init__(self, first: LLMatcher, size: int, make: Callable[[LLMatcher], GrammarMatcher]) -> None:
        self._first = first
        self.size = size
        self._make = make
        self.warnings = tuple(first.get_grammar_warnings())

    def matcher(self) -> GrammarMatcher:
        return self._make(self._first.deep_copy())


class LLGuidanceMatcher:
    """A `GrammarMatcher`."""

    def __init__(self, matcher: LLMatcher, jumps: bool = True) -> None:
        self._matcher, self._jumps = matcher, jumps

    @property
    def error(self) -> str:
        return _first_lines(self._matcher.get_error()) if self._matcher.is_error() else ""

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def fill_mask(self, mask: TokenMask) -> None:
        try:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except ValueError:  # the matcher's error says the same
            mask[:] = 0

    def accept(self, tokens: Sequence[int]) -> bool:
        return self._matcher.consume_tokens(list(tokens))

    def acceptable(self, tokens: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(tokens))

    def forced_tokens(self) -> list[int]:
        return self._matcher.compute_ff_tokens() if self._jumps else []

    def rollback(self, tokens: int) -> None:
        self._matcher.rollback(tokens)


def _checked(constraint: GuidedDecoding, limits: GrammarLimits, vocabulary: Vocabulary | None = None) -> str:
    size = len(constraint.text) + len(constraint.after) + len(constraint.opening)
    if size > limits.text_bytes:
        raise _refused(constraint, f"it has {size} characters, and may have {limits.text_bytes}")
    return write_grammar(constraint, {} if vocabulary is None else vocabulary.special)


def _refused(constraint: GuidedDecoding, message: str) -> InvalidArgument:
    return InvalidArgument(f"{constraint.parameter}: {_first_lines(message)}", field=constraint.parameter)


def _first_lines(message: str) -> str:
    """The library's message, without the parser's state that follows it."""
    for rest in ("\n<state>", "<non-verbose/>", "<backtrace>"):
        message = message.split(rest)[0]
    message = message.removeprefix("panic: ").strip()[:_MESSAGE]
    return _NO_TEXT if message in ("NoExtension", "NoExtensionBias") else message


def _limits(limits: GrammarLimits) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=limits.compile_fuel,
        step_lexer_fuel=limits.step_fuel,
        step_max_items=limits.step_items,
        max_lexer_states=limits.states,
        max_grammar_size=limits.symbols,
        verbose_errors=False,
    )
