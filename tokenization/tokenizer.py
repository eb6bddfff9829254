"""Text to token ids and back, by the `tokenizers` library alone, never by transformers or torch. Thread-safe once
loaded. For an event loop, long texts are handled in threads."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import tokenizers
from tokenizers import decoders

from ..core.errors import InvalidArgument, Unavailable
from ..core.logprobs import TokenPiece, TokenPieces
from ..core.native_calls import NativeCall
from ..core.request import Conversation, Prompt, TextWithMedia
from ..core.sampling import TokenLimit
from .bounded_encoder import BoundedEncoder
from .byte_level_bpe import LETTER_BYTES
from .chat_template import DEFAULT, TOOL_USE, ChatTemplate, find_templates, read_template
from .media_text import MediaText, expand_media, text_with_places
from .speech_words import SpokenWord, split_words
from .tokenizer_json import read_tokenizer

_HALF = "\ufffd"
_FAILED = "the tokenizer failed"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def read_token_piece(backend: tokenizers.Tokenizer, token: int) -> TokenPiece:
    """The piece of one token; an unknown one has no text."""
    with NativeCall(_FAILED):
        once = backend.decode([token], skip_special_tokens=False)
        if _HALF in once:
            return TokenPiece(once, _raw(backend.id_to_token(token) or once))
        # Some decoders take the space from the first token of a text: the second one shows it.
        text = backend.decode([token, token], skip_special_tokens=False)[len(once) :]
        return TokenPiece(text, text.encode())


_STOPS = 16
"""Requests' stop strings for which the texts beside them are kept."""


class TokenBytes(dict[int, bytes]):
    """The bytes that each token of a byte-level vocabulary adds to a text. Tokens that decoding leaves out, and
    `hidden` ones, add none."""

    def __init__(self, read: Callable[[int], bytes], hidden: Iterable[int] = ()) -> None:
        """`read`: those of a token, asked once."""
        super().__init__(dict.fromkeys(hidden, b""))
        self._read = read
        self.texts: dict[int, str] = {}
        """The text that a detokenizer has made of a token by itself, where no character is begun before or after it."""
        self._beside: dict[tuple[str, ...], dict[int, str]] = {}

    def texts_beside(self, stops: tuple[str, ...]) -> dict[int, str]:
        """Those of `texts` in which none of these stop strings is or begins, as far as somebody has put them there; the
        same for all who ask for the same strings, as long as few others do."""
        if not stops:
            return self.texts
        if stops not in self._beside and len(self._beside) >= _STOPS:
            self._beside.pop(next(iter(self._beside)))
        return self._beside.setdefault(stops, {})

    def __missing__(self, token: int) -> bytes:
        data = self[token] = self._read(token)
        return data


def _read_bytes(backend: tokenizers.Tokenizer, token: int) -> bytes:
    """The bytes of a token of a byte-level vocabulary; an unknown one has none."""
    with NativeCall(_FAILED):
        name = backend.id_to_token(token)
    return b"" if name is None else _letters(name)


def _byte_piece(data: Callable[[int], bytes], token: int) -> TokenPiece:
    """As `read_token_piece`, of a byte-level vocabulary: a tenth of its cost."""
    return TokenPiece(data(token).decode(errors="replace"), data(token))


def _raw(name: str) -> bytes:
    """The bytes of a vocabulary's entry, in either of the two customary spellings."""
    fallback = _BYTE.fullmatch(name)
    return bytes([int(fallback[1], 16)]) if fallback else _letters(name)


def _letters(name: str) -> bytes:
    """The bytes of an entry with a letter for each byte; an added token may be spelt otherwise and stands for
    itself."""
    try:
        return bytes([LETTER_BYTES[letter] for letter in name])
    except KeyError:
        return name.encode()


_BRIEF = 1024
"""Characters that are encoded faster than other threads are let run."""
_PROBE = 16
"""Characters of a very long text that are encoded first, for each token of the longest prompt."""
_TEMPLATES = 16
"""Templates of requests that stay compiled."""
_TAIL = 128
"""Characters of a text's end that are encoded first, for each wanted token of it."""
_WORD = "a"
"""A text to find what is added to any."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template, as transformers reads them. `shown` are special tokens that stay in
    any text."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        templates: Mapping[str, ChatTemplate],
        shown: frozenset[str] = frozenset(),
        encoder: BoundedEncoder | None = None,
    ) -> None:
        self._backend = backend
        encoder = encoder or BoundedEncoder(backend, "tokenizer.json")
        self._encoder = encoder
        self._limited = encoder if encoder.may_run_apart else None
        """None where texts of any length may be encoded in this process."""
        self.bounded = encoder.bounded
        """Whether encoding a short text takes little time."""
        self._special_tokens = special_tokens
        self._templates = templates
        self._shown = shown
        added = backend.get_added_tokens_decoder().items()
        self._hidden = frozenset(token for token, entry in added if entry.special and entry.content not in shown)
        self.showing = lru_cache(_TEMPLATES)(self._showing)
        compiled = partial(ChatTemplate, tokens=special_tokens, whose="the request's", field="chat_template")
        self._given = lru_cache(_TEMPLATES)(compiled)
        self.pieces = TokenPieces(partial(read_token_piece, backend))
        self.bytes: TokenBytes | None = None
        """The bytes of each token, if they do not depend on its neighbours."""
        self.bytes_with_special: TokenBytes | None = None
        """The same, with special tokens in the text."""
        if isinstance(backend.decoder, decoders.ByteLevel):
            self.bytes_with_special = TokenBytes(partial(_read_bytes, backend))
            self.bytes = TokenBytes(self.bytes_with_special.__getitem__, self._hidden)
            self.pieces = TokenPieces(partial(_byte_piece, self.bytes_with_special.__getitem__))

    @classmethod
    def load(cls, directory: Path, chat_template: str = "") -> "Tokenizer":
        """Read a checkpoint, and try its tokenizer out. `chat_template`, a file or a template, replaces its own. Raises
        as `read_tokenizer` and `BoundedEncoder.try_out`."""
        backend, special_tokens = read_tokenizer(directory)
        backend.no_truncation()
        backend.no_padding()
        sources = {DEFAULT: read_template(chat_template)} if chat_template else find_templates(directory)
        templates = {name: ChatTemplate(source, special_tokens) for name, source in sources.items()}
        encoder = BoundedEncoder(backend, str(directory if directory.is_file() else directory / "tokenizer.json"))
        encoder.try_out(sources.get(DEFAULT, ""))
        return cls(backend, special_tokens, templates, encoder=encoder)

    def prompt_ids(
        self,
        prompt: Prompt,
        special: bool = True,
        limit: TokenLimit | None = None,
        kept: int | None = None,
        media: MediaText | None = None,
    ) -> list[int]:
        """The token ids of any kind of prompt; with `kept`, only the last ones, within what `special` adds. The
        placeholders of `media` stand where its text, or its chat template, has their token.

        Raises:
            InvalidArgument: the model cannot render the conversation, or the text is not Unicode.
            ContextLengthExceeded: the text has far more tokens than `limit`; it was not read to its end.
        """
        if isinstance(prompt, tuple):
            return list(prompt if kept is None else prompt[-kept:])
        if isinstance(prompt, str):
            field, text = "prompt", prompt
        elif isinstance(prompt, TextWithMedia):
            field, text = "prompt", text_with_places(prompt, media)
        else:
            field = "messages"
            text = self._render(prompt, media)
            bos = self._special_tokens.get("bos_token")
            special = media is not None and media.adds_special and not (bos and text.startswith(bos))
        if media is not None and media.placeholders:
            if kept is not None:
                raise InvalidArgument("a prompt with media can't be cut", field="truncate_prompt_tokens")
            text = expand_media(text, media, field)
        return self.text_ids(text, special, limit, field) if kept is None else self._last(text, special, kept)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The token ids of `text`; `special` adds what the model wants around a prompt. Other threads run meanwhile if
        the text is long. Raises as `BoundedEncoder.encode`, but `InvalidArgument` for a text that is not Unicode."""
        try:
            if self._limited is not None:
                return [*self._limited.encode([text], special)[0].ids]
            with NativeCall(_FAILED):
                if len(text) <= _BRIEF:
                    return self._backend.encode(text, add_special_tokens=special).ids
                return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates
            raise InvalidArgument("the prompt is not valid Unicode", field="prompt") from error

    def text_ids(self, text: str, special: bool, limit: TokenLimit | None, field: str) -> list[int]:
        """The token ids of the text in `field`. A text whose beginning has more than twice `limit` tokens is refused
        unread, since each character costs 1 us and 200 bytes; the last tokens of a beginning may differ in the whole
        text."""
        length = len(text) if limit is None else _PROBE * limit.tokens
        while limit is not None and length < len(text):
            tokens = len(self.encode(text[:length], special))
            if tokens > 2 * limit.tokens:
                raise limit.error(f"the first {length} characters of {field} are {tokens} tokens", field)
            length *= 4
        return self.encode(text, special)

    def _last(self, text: str, special: bool, count: int) -> list[int]:
        """The last tokens of a text, which do not depend on a beginning far away; what `special` adds counts, and goes
        first."""
        before, behind = self._special_ids if special else ([], [])
        room = count - len(before) - len(behind)
        if room <= 0:
            return [*before, *behind][:count]
        if len(text) > _TAIL * room:
            end = self.encode(text[-_TAIL * room :], special=False)
            if len(end) > room:
                return [*before, *end[-room:], *behind]
        return [*before, *self.encode(text, special=False)[-room:], *behind]

    @cached_property
    def _special_ids(self) -> tuple[list[int], list[int]]:
        """What the model wants before and behind a prompt."""
        alone, whole = self.encode(_WORD, special=False), self.encode(_WORD)
        begin = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
        return whole[:begin], whole[begin + len(alone) :]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of `ids`, without unknown ones; with special tokens if `special`."""
        if self._shown and not special:
            ids, special = [token for token in ids if token not in self._hidden], True
        try:
            with NativeCall(_FAILED):
                return self._backend.decode(ids, skip_special_tokens=not special)
        except OverflowError as error:
            raise InvalidArgument("token ids must be between 0 and 2**32 - 1", field="tokens") from error

    def _showing(self, texts: tuple[str, ...]) -> "Tokenizer":
        """This tokenizer, but with those of the `texts` that are special tokens shown in any text."""
        added = self._backend.get_added_tokens_decoder().values()
        shown = frozenset(entry.content for entry in added if entry.special) & frozenset(texts)
        return Tokenizer(self._backend, self._special_tokens, self._templates, shown, self._encoder) if shown else self

    def template_source(self, prompt: Prompt) -> str:
        """The source of the chat template that renders a prompt; empty if none does."""
        chat = self._template(prompt) if isinstance(prompt, Conversation) else None
        return "" if chat is None else chat.source

    def prompt_text(self, prompt: Prompt, ids: Sequence[int]) -> str:
        """The text of a prompt with these ids: itself, or the decoded ids with special tokens."""
        if isinstance(prompt, TextWithMedia):
            return prompt.text
        return prompt if isinstance(prompt, str) else self.decode(ids, special=True)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry of each token; empty for unknown ids."""
        with NativeCall(_FAILED):
            return [self._backend.id_to_token(token) or "" for token in ids]

    @property
    def own_template(self) -> str:
        """The source of the checkpoint's chat template; empty if it has none."""
        return self._templates[DEFAULT].source if DEFAULT in self._templates else ""

    def added_tokens(self, size: int) -> dict[str, int]:
        """The ids below `size` of added tokens, special ones included."""
        with NativeCall(_FAILED):
            added = self._backend.get_added_tokens_decoder().items()
        return {entry.content: token for token, entry in added if token < size}

    @property
    def separates_special_tokens(self) -> bool:
        """Whether decoding puts something between special tokens."""
        added = self._backend.get_added_tokens_decoder().items()
        token = next((token for token, entry in added if entry.special), None)
        return token is not None and self.decode([token] * 2, special=True) != self.decode([token], special=True) * 2

    @property
    def size(self) -> int:
        """Tokens in the vocabulary, added ones included."""
        return self._backend.get_vocab_size()

    def token_id(self, name: str) -> int | None:
        """The id of a special token by its role, such as `eos_token`."""
        text = self._special_tokens.get(name)
        with NativeCall(_FAILED):
            return None if text is None else self._backend.token_to_id(text)

    def word_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The token ids of each word as it begins a text and as it follows a space, unless it is a space itself."""
        forms = (form for word in words for form in (word, f" {word.lstrip()}") if word.strip() or form == word)
        ids = (tuple(self.encode(form, special=False)) for form in forms)
        return list(dict.fromkeys(word for word in ids if word))

    def _render(self, conversation: Conversation, media: MediaText | None) -> str:
        chat = self._template(conversation)
        if chat is None:
            raise InvalidArgument("this model has no chat template; send a plain prompt instead", field="messages")
        if not conversation.messages:
            raise InvalidArgument("messages must not be empty", field="messages")
        return chat.render(conversation, media)

    def _template(self, conversation: Conversation) -> ChatTemplate | None:
        if conversation.chat_template:
            return self._given(conversation.chat_template)
        default = self._templates.get(DEFAULT)
        return self._templates.get(TOOL_USE, default) if conversation.tools else default


_THREADS = 2
_SHORT = 256
"""Characters or tokens that are converted faster than handed to another thread."""

P = ParamSpec("P")
T = TypeVar("T")


class AsyncTokenizer:
    """The methods of `tokenizer` for one event loop. They raise as its own, and `Unavailable` for long texts after
    `close`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, "tokenizer")
        self._short = _SHORT if tokenizer.bounded else -1

    async def prompt_ids(
        self,
        prompt: Prompt,
        special: bool = True,
        limit: TokenLimit | None = None,
        kept: int | None = None,
        media: MediaText | None = None,
    ) -> list[int]:
        # A template counts as long whatever it renders.
        is_rendered = isinstance(prompt, Conversation | TextWithMedia)
        size = _SHORT + 1 if is_rendered else len(prompt) if isinstance(prompt, str) else 0
        return await self._run(size, self._tokenizer.prompt_ids, prompt, special, limit, kept, media)

    async def text_ids(self, text: str, limit: TokenLimit, field: str) -> list[int]:
        return await self._run(len(text), self._tokenizer.text_ids, text, False, limit, field)

    async def word_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        return await self._run(sum(map(len, words)), self._tokenizer.word_ids, words)

    async def call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Encode a few words of ours, in the event loop if that takes little time."""
        return await self._run(0, work, *args, **kwargs)

    async def prompt_text(self, prompt: Prompt, ids: Sequence[int]) -> str:
        return await self._run(0 if isinstance(prompt, str) else len(ids), self._tokenizer.prompt_text, prompt, ids)

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._run(len(ids), self._tokenizer.decode, ids)

    async def split_words(self, ids: Sequence[int], spaced: bool) -> list[SpokenWord]:
        """See `speech_words.split_words`."""
        return await self._run(len(ids), split_words, ids, self._tokenizer.decode, spaced)

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        return await self._run(len(ids), self._tokenizer.token_strings, ids)

    def close(self) -> None:
        """Refuse further long texts; accepted ones are finished."""
        self._threads.shutdown(wait=False)

    async def _run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if size <= self._short:
            return work(*args, **kwargs)
        try:
            future = self._threads.submit(work, *args, **kwargs)
        except RuntimeError:
            raise Unavailable("the model is unloaded") from None
        return await asyncio.wrap_future(future)
