"""Long JSON, parsed in pieces between which other tasks get turns: names and shapes are read before large values.

Brackets, commas and quotes show the structure of a body, a block at a time. Containers longer than a piece stay text
(`UnparsedContainer`) until their values are asked for. The result is that of the parser for the whole body.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from .json_tensors import Buffer, JsonObject, NestedTooDeeply, malformed_json, parse_json, parse_json_object

PIECE_BYTES = 1 << 16
"""Bytes that are parsed at a time; shorter bodies are parsed at once."""

MAX_VALUES = 1 << 15
"""The most values of a list or an object of a long body, nested ones included, unless a caller says otherwise."""

MAX_IDS = 1 << 20
"""The most token ids, and numbers of an input in `generate`."""

MAX_STRING_BYTES = 1 << 24
"""The most bytes of one string, unless a caller says otherwise."""

_LONGEST = 1 << 16
"""The most bytes of a number, of an object's key, and of the white space beside a long value."""

_BLOCK = 1 << 15
"""Bytes that are scanned before other tasks get a turn."""

_DEEPEST = 1000
_QUOTE, _BACKSLASH, _COMMA, _OPEN, _CLOSE = range(1, 6)
_CODES = np.zeros(256, np.uint8)
for _text, _code in ((b'"', _QUOTE), (b"\\", _BACKSLASH), (b",", _COMMA), (b"[{", _OPEN), (b"]}", _CLOSE)):
    _CODES[list(_text)] = _code
_MOVES = np.zeros(6, np.int32)
_MOVES[[_OPEN, _CLOSE]] = 1, -1
_ENDS = {ord("["): ord("]"), ord("{"): ord("}")}
_KEY = re.compile(rb'\s*("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)
_SPACE = b" \t\n\r"
_SPACES = re.compile(rb"[ \t\n\r]*")


JsonParser: TypeAlias = Callable[[Buffer, int], Any]
"""Parses a text, which begins at an offset of the body: errors name places in the body."""


class TooManyValues(InvalidArgument):
    """A list or an object of more values than a request may have there."""


class _State(NamedTuple):
    """The state of the scan at the beginning of a block: in a string, after a backslash, so many brackets deep."""

    quoted: bool = False
    escaped: bool = False
    depth: int = 0


class _Marks(NamedTuple):
    """Commas and brackets outside of strings: their offsets, their kinds, and the depths after them."""

    at: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    depths: NDArray[np.int32]

    def part(self, which: slice) -> "_Marks":
        return _Marks(self.at[which], self.kinds[which], self.depths[which])


class _Text:
    """The whole body and the states at its blocks. `_least`: the smallest depth in each block."""

    def __init__(self, body: Buffer, read: JsonParser, longest: int) -> None:
        self.view = memoryview(body)
        self.parse = read
        self.longest = longest
        self._bytes = np.frombuffer(self.view, np.uint8)
        self._states: list[_State] = []
        self._least: list[int] = []

    def __len__(self) -> int:
        return len(self._bytes)

    async def scan(self) -> None:
        """Raises `InvalidArgument` for a body that is nested too deeply, or ends within a string or a container."""
        state = _State()
        for block in range(-(-len(self) // _BLOCK)):
            self._states.append(state)
            marks, state = self._marks(block)
            self._least.append(min(self._states[block].depth, int(marks.depths.min(initial=_DEEPEST))))
            if marks.depths.max(initial=0) > _DEEPEST:
                raise NestedTooDeeply(block * _BLOCK)
            await asyncio.sleep(0)
        if state.depth > 0 or state.quoted:
            raise malformed_json("unexpected end of data", len(self))

    async def marks(self, begin: int, deepest: int) -> AsyncIterator[_Marks]:
        """The marks from `begin` on, a block at a time, without blocks that are deeper than `deepest` throughout."""
        first = begin // _BLOCK
        for block in range(first, len(self._states)):
            if self._least[block] > deepest:
                continue
            await asyncio.sleep(0)
            marks, _ = self._marks(block)
            if block == first:
                marks = marks.part(slice(int(np.searchsorted(marks.at, begin)), None))
            yield marks

    def _marks(self, block: int) -> tuple[_Marks, _State]:
        before, offset = self._states[block], block * _BLOCK
        codes = _CODES[self._bytes[offset : offset + _BLOCK]]
        if before.escaped:
            codes[0] = 0
        escaped = _drop_escaped(codes)
        at = np.flatnonzero(codes)
        kinds = codes[at]
        quotes = np.cumsum(kinds == _QUOTE) + before.quoted
        outside = (kinds >= _COMMA) & (quotes & 1 == 0)
        at, kinds = at[outside], kinds[outside]
        depths = np.cumsum(_MOVES[kinds], dtype=np.int32) + np.int32(before.depth)
        quoted = bool(quotes[-1] & 1) if len(quotes) else before.quoted
        after = _State(quoted, escaped, int(depths[-1]) if len(depths) else before.depth)
        return _Marks(at + offset, kinds, depths), after


def _drop_escaped(codes: NDArray[np.uint8]) -> bool:
    """Clear the codes of escaped characters; whether the character after the block is escaped."""
    slashes = np.flatnonzero(codes == _BACKSLASH)
    if not len(slashes):
        return False
    first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    lengths = np.diff(first, append=len(slashes))
    escaped = (slashes[first] + lengths)[lengths % 2 == 1]
    codes[escaped[escaped < len(codes)]] = 0
    return bool(len(escaped) and escaped[-1] == len(codes))


class ValueBudget:
    """The number of values that may still be read; those of nested containers count too."""

    def __init__(self, most: int = MAX_VALUES) -> None:
        self._most = self._left = most

    def take(self, count: int) -> None:
        """Raises `TooManyValues`."""
        self._left -= count
        if self._left < 0:
            raise TooManyValues(f"a list or an object in the request has more than {self._most} values")


class UnparsedContainer:
    """An array or an object whose text is longer than a piece: from its bracket at `begin` to before `stop`. Its
    methods raise `InvalidArgument` for malformed JSON, and `TooManyValues`."""

    def __init__(self, text: _Text, begin: int, stop: int, depth: int) -> None:
        self._text = text
        self._begin = begin
        self._stop = stop
        self._depth = depth
        self._bracket = text.view[begin]

    @property
    def is_object(self) -> bool:
        return self._bracket == ord("{")

    async def items(self, values: ValueBudget) -> list[Any]:
        """The items of an array, long ones as text."""
        items: list[Any] = []
        async for begin, end in self._parts(values):
            if end - begin > PIECE_BYTES:
                items.append(self._long(begin, end))
            else:
                items += self._text.parse(self._piece(begin, end, b"[", b"]"), begin - 1)
        return items

    async def members(self, values: ValueBudget) -> JsonObject:
        """The members of an object, long ones as text; the last of several with one name."""
        return dict(await self.pairs(lambda text, offset: self._text.parse(text, offset).items(), values))

    async def pairs(self, load: JsonParser, values: ValueBudget) -> list[tuple[str, Any]]:
        """The members of an object in their order. `load` parses a short object into pairs."""
        pairs: list[tuple[str, Any]] = []
        async for begin, end in self._parts(values):
            if end - begin > PIECE_BYTES:
                key = _KEY.match(self._text.view, begin, min(end, begin + _LONGEST))
                if key is None:
                    raise malformed_json("an object's key is missing or too long", begin)
                pairs.append((self._text.parse(key[1], begin), self._long(key.end(), end)))
            else:
                pairs += load(self._piece(begin, end, b"{", b"}"), begin - 1)
        return pairs

    async def parse(self, values: ValueBudget) -> Any:
        if self.is_object:
            return {key: await parse_fully(value, values) for key, value in (await self.members(values)).items()}
        return [await parse_fully(value, values) for value in await self.items(values)]

    async def flat_elements(self) -> AsyncIterator[list[Any]]:
        """The elements of an array in their order, some at a time, each in as many arrays as in the body."""
        if self.is_object:
            raise malformed_json("an array was expected", self._begin)
        begin = self._begin + 1
        before = 1
        async for marks in self._text.marks(begin, _DEEPEST):
            ends = np.flatnonzero(marks.depths < self._depth)
            if len(ends):
                end = int(marks.at[ends[0]])
                self._check_end(end)
                yield self._text.parse(self._piece(begin, end, b"[" * before, b"]"), begin - before)
                return
            commas = np.flatnonzero(marks.kinds == _COMMA)
            if len(commas):
                end = int(marks.at[commas[-1]])
                after = int(marks.depths[commas[-1]]) - self._depth + 1
                yield self._text.parse(self._piece(begin, end, b"[" * before, b"]" * after), begin - before)
                begin = end + 1
                before = after

    async def _parts(self, values: ValueBudget) -> AsyncIterator[tuple[int, int]]:
        """The container's text in parts, each up to a comma or bracket; one longer than a piece is a single value."""
        begin = self._begin + 1
        cut = -1
        held = np.empty(0, np.int64)
        async for marks in self._text.marks(begin, self._depth):
            ends = np.flatnonzero(marks.depths < self._depth)
            if len(ends):
                marks = marks.part(slice(int(ends[0]) + 1))
                self._check_end(int(marks.at[-1]))
            held = np.concatenate((held, marks.at[marks.kinds == _COMMA]))  # of values that are not told yet
            own = marks.at[((marks.kinds == _COMMA) & (marks.depths == self._depth)) | (marks.depths < self._depth)]
            done = 0
            while done < len(own):
                within = int(np.searchsorted(own, begin + PIECE_BYTES, "right"))
                if within > done:
                    cut, done = int(own[within - 1]), within
                    continue
                if cut >= begin:
                    values.take(int(np.searchsorted(held, cut)))
                else:
                    cut, done = int(own[done]), done + 1
                    values.take(1)
                yield begin, cut
                begin, held = cut + 1, held[np.searchsorted(held, cut, "right") :]
            if len(ends):
                if cut >= begin:
                    values.take(len(held))
                    yield begin, cut
                return

    def _piece(self, begin: int, end: int, opening: bytes, closing: bytes) -> bytes:
        """The text of some values, made a JSON text of its own."""
        self._check_length(begin, end)
        text = bytes(self._text.view[begin:end])
        inside, comma = text.strip(_SPACE), self._text.view[end] == ord(",")
        if not inside and (comma or begin > self._begin + 1):
            raise malformed_json("a value is missing beside a comma", begin)
        if inside[:1] in (b"]", b"}") or (comma and inside[-1:] in (b"[", b"{")):
            raise malformed_json("a value is missing beside a comma", begin)
        return opening + text + closing

    def _long(self, begin: int, end: int) -> Any:
        view = self._text.view
        begin = _after_space(view, begin, end)
        if begin < end and view[begin] in _ENDS:
            return UnparsedContainer(self._text, begin, end, self._depth + 1)
        if end - begin > _LONGEST and view[begin] != ord('"'):
            raise malformed_json("a value is too long", begin)
        self._check_length(begin, end)
        with suppress(msgspec.MsgspecError, UnicodeError):  # on which the parser has its own word
            return msgspec.json.decode(view[begin:end], type=str)  # in two thirds of orjson's time: others wait for it
        return self._text.parse(view[begin:end], begin)

    def _check_length(self, begin: int, end: int) -> None:
        if end - begin > self._text.longest:
            raise TooManyValues(f"a text in the request has more than {self._text.longest} bytes")

    def _check_end(self, at: int) -> None:
        if self._text.view[at] != _ENDS[self._bracket]:
            raise malformed_json("a bracket closes one of another kind", at)
        if _after_space(self._text.view, at + 1, self._stop) < self._stop:
            raise malformed_json("trailing characters", at + 1)


def _after_space(view: memoryview, begin: int, end: int) -> int:
    spaces = _SPACES.match(view, begin, min(end, begin + _LONGEST))
    behind = spaces.end() if spaces else begin
    if behind - begin == _LONGEST:
        raise malformed_json("there is too much space", begin)
    return behind


async def read_long_json(body: Buffer, read: JsonParser = parse_json, longest: int = MAX_STRING_BYTES) -> Any:
    """The value of a long body, long containers as text. `read` parses pieces; `longest`: the most bytes of a string.
    Raises `InvalidArgument` if the JSON is malformed, as far as it was read."""
    text = _Text(body, read, longest)
    await text.scan()
    begin = _after_space(text.view, 0, len(text))
    if begin < len(text) and text.view[begin] in _ENDS:
        return UnparsedContainer(text, begin, len(text), 1)
    return read(text.view, 0)


async def read_json_object(body: Buffer, longest: int = MAX_STRING_BYTES) -> JsonObject:
    """The object that a body is; its long values may still be text."""
    if len(body) <= PIECE_BYTES:
        return parse_json_object(body)
    container = await read_long_json(body, longest=longest)
    if not isinstance(container, UnparsedContainer) or not container.is_object:
        raise malformed_json("the body must be a JSON object")
    return await container.members(ValueBudget())


async def read_whole_json_object(body: Buffer) -> JsonObject:
    """The object that a body is, fully parsed; a string in it may be as long as the body."""
    members = await read_json_object(body, len(body))
    if len(body) <= PIECE_BYTES:
        return members
    values = ValueBudget()
    return {key: await parse_fully(value, values) for key, value in members.items()}


async def parse_fully(value: Any, values: ValueBudget) -> Any:
    """The value, parsed if it is still text."""
    return await value.parse(values) if isinstance(value, UnparsedContainer) else value


async def check_config_size(config: str) -> None:
    """Raises `InvalidArgument` for a load's `config`, JSON in a string, that has too many values or is no JSON.

    A long one is scanned in pieces before protobuf's parser takes it at once.
    """
    if len(config) <= PIECE_BYTES:
        return
    try:
        await read_whole_json_object(config.encode(errors="surrogatepass"))
    except InvalidArgument as error:
        raise InvalidArgument(f"config: {error.message}", field="config") from None
