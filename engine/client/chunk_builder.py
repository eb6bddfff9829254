"""Turns the token deltas of one request into chunks of text, and ends the text at a stop string.

Knows nothing of where tokens come from.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...core.direct_stream import Sink
from ...core.errors import InvalidArgument
from ...core.logprobs import Logprobs, PromptLogprobs, PromptToken, TokenLogprob
from ...core.request import FinishReason, GenerateChunk, Usage
from ...core.sampling import SamplingParams
from ...tokenization.detokenizer import StopStrings, make_detokenizer
from ...tokenization.tokenizer import Tokenizer
from .token_stream import TokenDelta

_LEAST_LOGPROB = -9999.0
"""The log-probability of an impossible token: JSON has no infinity."""


class TextEnds(NamedTuple):
    """The tokens that end a text, beside a request's own parameters."""

    eos: Sequence[int] = ()
    """Tokens by which the model itself ends it."""
    words: Sequence[tuple[int, ...]] = ()
    """Sequences of tokens, which stay in the text."""


class StopWords:
    """Finds the first of several sequences of tokens in a growing one, from token `start` on."""

    def __init__(self, words: Sequence[tuple[int, ...]], start: int = 0) -> None:
        self._words = words
        self._longest = max(map(len, words), default=0)
        self._left = start
        self._tail: tuple[int, ...] = ()
        self.matched = False

    def __bool__(self) -> bool:
        return bool(self._words)

    def push(self, token: int) -> bool:
        """Whether a word is complete with this token."""
        if self._left > 0:
            self._left -= 1
        elif self._words:
            self._tail = (*self._tail, token)[-self._longest :]
            self.matched = any(self._tail[-len(word) :] == word for word in self._words)
        return self.matched


_NO_ENDS = TextEnds()


class _PromptWidths:
    """Measures the characters of a prompt's `text` that each token stands for; 0 for a special token that the tokenizer
    has added."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._plain = make_detokenizer(tokenizer)
        self._whole = make_detokenizer(tokenizer, special=True)
        self._text = text
        self._at = 0

    def push(self, token: int) -> int:
        plain = self._plain.push((token,))
        piece = self._whole.push((token,))
        added = piece and not plain and not self._text.startswith(piece, self._at)
        width = 0 if added else len(piece)
        self._at += width
        return width


class ChunkBuilder:
    """Writes the text of one request, which begins with `echo`. `prompt_ids`: the prompt's tokens, for the first chunk.
    The chunk with a finish reason is the last, though the engine may go on.

    Raises:
        InvalidArgument: special tokens are wanted without the spaces that this tokenizer puts between them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        sampling: SamplingParams,
        ends: TextEnds = _NO_ENDS,
        echo: str = "",
        prompt_ids: tuple[int, ...] = (),
    ) -> None:
        joined = not (sampling.skip_special_tokens or sampling.spaces_between_special_tokens)
        if joined and tokenizer.separates_special_tokens:
            field = "spaces_between_special_tokens"
            raise InvalidArgument(f"{field}: this model's tokenizer cannot leave them out", field=field)
        self._tokenizer = tokenizer
        self._prompt_tokens = len(prompt)
        self._echo = self._prompt_text = echo
        self._prompt_ids = prompt_ids
        self._unscored = [] if sampling.prompt_logprobs is None else prompt
        self._completion_tokens = 0
        self._min_tokens = sampling.min_tokens
        self._includes_stop = sampling.include_stop_str_in_output
        own = () if sampling.ignore_eos else ends.eos
        self._stop_tokens = frozenset(sampling.stop_token_ids) - frozenset(own)
        self._end_tokens = self._stop_tokens.union(own)
        self._special = not sampling.skip_special_tokens
        self._text = make_detokenizer(tokenizer, prompt, self._special)
        # What each token adds to the text, which comes in pieces of several.
        self._widths = None if sampling.logprobs is None else make_detokenizer(tokenizer, prompt, self._special)
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._words = StopWords(ends.words, sampling.min_tokens)
        self._plain = not (self._stops or self._words) and sampling.logprobs is None
        """Whether a delta in the middle is nothing but text."""

    def build_chunk(self, delta: TokenDelta) -> GenerateChunk:
        """The chunk of a delta's tokens, without those behind a stop string."""
        built = self.build_text(delta)
        return self.text_chunk(built, delta) if isinstance(built, str) else built

    def build_text(self, delta: TokenDelta) -> GenerateChunk | str:
        """The text of the next delta where its chunk has nothing else, or that chunk."""
        token_ids = delta.token_ids
        if self._plain and self._completion_tokens and delta.finish_reason is None:
            self._completion_tokens += len(token_ids)
            return self._text.push(token_ids)
        text, taken = self._write(delta)
        self._completion_tokens += taken
        token_ids = token_ids[:taken]
        echo, self._echo = self._echo, ""
        prompt_ids, self._prompt_ids = self._prompt_ids, ()
        return GenerateChunk(
            text=echo + text,
            token_ids=token_ids,
            usage=Usage(self._prompt_tokens, self._completion_tokens, delta.cached_tokens),
            finish_reason=FinishReason.STOP if self._stopped else delta.finish_reason,
            stop_reason=self._stop_reason(delta),
            logprobs=tuple(map(self._generated, token_ids, delta.logprobs)),
            prompt_logprobs=self._scored(delta.scores) if self._unscored else (),
            prompt_ids=prompt_ids,
            end_token=self._ended_by_token(delta) and not self._stopped,
        )

    def pass_text(self, delta: TokenDelta, sink: Sink[str]) -> GenerateChunk | None:
        built = self.build_text(delta)
        if not isinstance(built, str):
            return built
        return None if not built or sink(built) else self.text_chunk(built, delta)

    def text_chunk(self, text: str, delta: TokenDelta) -> GenerateChunk:
        """The chunk of the delta whose text `build_text` was."""
        usage = Usage(self._prompt_tokens, self._completion_tokens, delta.cached_tokens)
        return GenerateChunk(text=text, token_ids=delta.token_ids, usage=usage)

    def _ended_by_token(self, delta: TokenDelta) -> bool:
        """Whether an end or stop token ended the text; a grammar may end it without one."""
        return delta.finish_reason is FinishReason.STOP and not self._end_tokens.isdisjoint(delta.token_ids[-1:])

    @property
    def _stopped(self) -> bool:
        """Whether a stop string or word ended the text."""
        return self._stops.matched is not None or self._words.matched

    def _stop_reason(self, delta: TokenDelta) -> str | int | None:
        if self._stopped or delta.finish_reason is not FinishReason.STOP:
            return self._stops.matched
        last = delta.token_ids[-1] if delta.token_ids else None
        return last if last in self._stop_tokens else None

    def _write(self, delta: TokenDelta) -> tuple[str, int]:
        """The text of the delta, and how many of its tokens it took."""
        if not (delta.token_ids or self._completion_tokens):
            return "", 0  # nor does what the prompt left incomplete belong to it
        if delta.finish_reason is None and not (self._stops or self._words):
            return self._text.push(delta.token_ids), len(delta.token_ids)
        # The token that stopped it ends the text and is no part of it, unless what stops it is wanted there.
        cut = self._ended_by_token(delta) and not self._includes_stop
        written = delta.token_ids[:-1] if cut else delta.token_ids
        text, taken = self._show_all(written)
        if self._stops.matched is None and (self._words.matched or delta.finish_reason is not None):
            text += self._show(self._text.finish(), taken) + self._stops.finish()
        return text, taken if self._stopped else len(delta.token_ids)

    def _show_all(self, tokens: tuple[int, ...]) -> tuple[str, int]:
        if not (self._stops or self._words):
            return self._text.push(tokens), len(tokens)
        shown = ""
        # One by one: which token completed a stop string must not depend on how many came at once.
        for taken, token in enumerate(tokens, start=1):
            shown += self._show(self._text.push((token,)), taken)
            if self._words.push(token) or self._stops.matched is not None:
                return shown, taken
        return shown, len(tokens)

    def _show(self, piece: str, taken: int) -> str:
        too_early = self._completion_tokens + taken < self._min_tokens
        return piece if too_early else self._stops.push(piece)

    def _scored(self, scores: Sequence[PromptLogprobs]) -> tuple[PromptToken, ...]:
        """The whole prompt with its log-probabilities, once."""
        (first, *others), self._unscored = self._unscored, []
        widths = _PromptWidths(self._tokenizer, self._prompt_text)
        tokens = [PromptToken(first, self._tokenizer.token_piece(first).text, width=widths.push(first))]
        ranked = (score for computed in scores for score in computed.to_list())
        for token, score in zip(others, ranked, strict=True):
            logprob = self._logprob(token, score.logprobs)
            tokens.append(PromptToken(token, logprob.text, logprob, score.rank, widths.push(token)))
        return tuple(tokens)

    def _generated(self, token: int, logprobs: Logprobs) -> TokenLogprob:
        width = None if self._widths is None else len(self._widths.push((token,)))
        return msgspec.structs.replace(self._logprob(token, logprobs), width=width)

    def _logprob(self, token: int, logprobs: Logprobs) -> TokenLogprob:
        top = tuple(self._named(*pair) for pair in zip(logprobs.ids, logprobs.values, strict=True))
        return self._named(token, logprobs.chosen, top, logprobs.rank)

    def _named(self, token: int, value: float, top: tuple[TokenLogprob, ...] = (), rank: int = 0) -> TokenLogprob:
        text, data = self._tokenizer.token_piece(token)
        return TokenLogprob(token, text, data, value if value > _LEAST_LOGPROB else _LEAST_LOGPROB, top, rank)
