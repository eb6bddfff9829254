"""Turns the token deltas of one request into chunks of text, and ends the text at a stop string.

Knows nothing of where tokens come from.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...core.direct_stream import TextSink
from ...core.errors import InvalidArgument
from ...core.logprobs import Logprobs, PromptLogprobs, PromptToken, TokenLogprob
from ...core.request import FinishReason, GenerateChunk, Usage
from ...core.sampling import SamplingParams
from ...tokenization.detokenizer import StopStrings, make_detokenizer
from ...tokenization.tokenizer import Tokenizer
from .token_stream import TokenDelta, TokenWriter


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
        self.completion_tokens = 0
        self._min_tokens = sampling.min_tokens
        self._includes_stop = sampling.include_stop_str_in_output
        own = () if sampling.ignore_eos else ends.eos
        self._stop_tokens = frozenset(sampling.stop_token_ids) - frozenset(own)
        self._end_tokens = self._stop_tokens.union(own)
        self._text = make_detokenizer(tokenizer, prompt, not sampling.skip_special_tokens)
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._words = StopWords(ends.words, sampling.min_tokens)
        self._may_stop = bool(self._stops or self._words)
        self._has_logprobs = sampling.logprobs is not None
        self._by_token = self._may_stop or self._has_logprobs

    def build_chunk(self, delta: TokenDelta) -> GenerateChunk:
        """The chunk of a delta's tokens, without those behind a stop string."""
        built = self.build_text(delta)
        return self.text_chunk(built, delta) if isinstance(built, str) else built

    def build_text(self, delta: TokenDelta, pushed: str | None = None) -> GenerateChunk | str:
        """The text of the next delta where its chunk has nothing else, or that chunk. `pushed`: the text of its only
        token, if the detokenizer has that already."""
        token_ids = delta.token_ids
        goes_on = self.completion_tokens and delta.finish_reason is None
        if goes_on and not self._by_token:
            self.completion_tokens += len(token_ids)
            return self._text.push(token_ids) if pushed is None else pushed
        text, widths = self._write(delta, pushed)
        if goes_on and not (self._may_stop and self._stopped):
            self.completion_tokens += len(token_ids)
            if not self._has_logprobs:
                return text
            return self.text_chunk(text, delta, self._generated(token_ids, delta.logprobs, widths))
        taken = len(widths) if self._stopped else len(token_ids)
        text += self._end_text(taken, delta)
        if self._has_logprobs and len(widths) < taken:  # the token that ended the text
            widths.append(len(self._text.push(token_ids[-1:])))
        self.completion_tokens += taken
        token_ids = token_ids[:taken]
        echo, self._echo = self._echo, ""
        prompt_ids, self._prompt_ids = self._prompt_ids, ()
        return GenerateChunk(
            text=echo + text,
            token_ids=token_ids,
            usage=Usage(self._prompt_tokens, self.completion_tokens, delta.cached_tokens),
            finish_reason=FinishReason.STOP if self._stopped else delta.finish_reason,
            stop_reason=self._stop_reason(delta),
            logprobs=self._generated(token_ids, delta.logprobs, widths),
            prompt_logprobs=self._scored(delta.scores) if self._unscored else (),
            prompt_ids=prompt_ids,
            end_token=self._ended_by_token(delta) and not self._stopped,
        )

    def pass_text(self, delta: TokenDelta, sink: TextSink, text: str | None = None) -> GenerateChunk | None:
        """See `DeltaReader.pass_text`."""
        goes_on = self.completion_tokens > 0
        built = self.build_text(delta, text)
        tokens = self.completion_tokens
        if isinstance(built, str):
            taken = not delta.token_ids or sink(built, tokens, None)
            return None if taken else self.text_chunk(built, delta)
        scored = goes_on and built.finish_reason is None and len(built.token_ids) == len(built.logprobs) == 1
        return None if scored and sink(built.text, tokens, built.logprobs[0]) else built

    def token_writer(self, sink: TextSink) -> TokenWriter | None:
        """See `DeltaReader.token_writer`."""
        if self._words or not self.completion_tokens:
            return None
        detokenizer = self._text
        pieces = self._tokenizer.pieces
        stops = self._stops
        texts = detokenizer.texts_beside(stops.strings)
        known = texts.get

        def write(token: int, logprobs: Logprobs | None) -> str | None:
            text = known(token)
            if text is None or detokenizer.incomplete or stops.held:
                text = detokenizer.push((token,))
                if not stops.lets_pass(text):
                    return text
                if detokenizer.texts.get(token) is text:
                    texts[token] = text
            tokens = self.completion_tokens + 1
            scored = None if logprobs is None else TokenLogprob(token, logprobs.finite(), pieces, len(text))
            if not sink(text, tokens, scored):
                return text
            self.completion_tokens = tokens
            return None

        return write

    def text_chunk(
        self,
        text: str,
        delta: TokenDelta,
        logprobs: tuple[TokenLogprob, ...] = (),
        reasoning: str = "",
        reasoning_tokens: int = 0,
    ) -> GenerateChunk:
        """The chunk of a delta that neither begins nor ends the text."""
        usage = Usage(self._prompt_tokens, self.completion_tokens, delta.cached_tokens, reasoning_tokens)
        return GenerateChunk(text=text, token_ids=delta.token_ids, usage=usage, logprobs=logprobs, reasoning=reasoning)

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

    def _write(self, delta: TokenDelta, pushed: str | None) -> tuple[str, list[int]]:
        """The text of the delta's tokens up to a stop and, if it is written token by token, the characters that each
        adds to it, held back or not."""
        tokens = delta.token_ids
        # The token that stopped it ends the text and is no part of it, unless what stops it is wanted there.
        if delta.finish_reason is not None and self._ended_by_token(delta) and not self._includes_stop:
            tokens = tokens[:-1]
        if not self._by_token:
            return self._text.push(tokens), []
        shown = ""
        widths: list[int] = []
        for token in tokens:
            piece = self._text.push((token,)) if pushed is None else pushed
            widths.append(len(piece))
            if not self._may_stop:
                shown += piece
                continue
            shown += self._show(piece, len(widths))
            # Which token completes a stop does not depend on how many come at once.
            if self._words.push(token) or self._stops.matched is not None:
                break
        return shown, widths

    def _end_text(self, taken: int, delta: TokenDelta) -> str:
        """The rest of a text that ends with this delta."""
        ends = self._words.matched or delta.finish_reason is not None
        if self._stops.matched is not None or not ends or not (delta.token_ids or self.completion_tokens):
            return ""  # what a prompt left incomplete does not belong to a text without tokens
        return self._show(self._text.finish(), taken) + self._stops.finish()

    def _show(self, piece: str, taken: int) -> str:
        too_early = self.completion_tokens + taken < self._min_tokens
        return piece if too_early else self._stops.push(piece)

    def _scored(self, scores: Sequence[PromptLogprobs]) -> tuple[PromptToken, ...]:
        """The whole prompt with its log-probabilities, once."""
        (first, *others), self._unscored = self._unscored, []
        widths = _PromptWidths(self._tokenizer, self._prompt_text)
        tokens = [PromptToken(first, self._tokenizer.pieces.text(first), width=widths.push(first))]
        ranked = (score for computed in scores for score in computed.to_list())
        for token, score in zip(others, ranked, strict=True):
            logprob = TokenLogprob(token, score.logprobs.finite(), self._tokenizer.pieces)
            tokens.append(PromptToken(token, logprob.text, logprob, score.rank, widths.push(token)))
        return tuple(tokens)

    def _generated(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs], widths: Sequence[int]
    ) -> tuple[TokenLogprob, ...]:
        pieces = self._tokenizer.pieces
        columns = zip(token_ids, logprobs, widths, strict=False)
        return tuple([TokenLogprob(token, scores.finite(), pieces, width) for token, scores, width in columns])
