"""Text of one request: what a stop string cuts, and what is counted then."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from charonia.core.errors import InvalidArgument
from charonia.core.logprobs import Logprobs, PromptLogprobs, TokenLogprob
from charonia.core.request import FinishReason, GenerateChunk, Usage
from charonia.core.request import join_chunks as join
from charonia.core.sampling import SamplingParams
from charonia.engine.client.chunk_builder import ChunkBuilder, TextEnds
from charonia.engine.client.token_stream import TokenDelta
from charonia.tokenization.tokenizer import Tokenizer

LETTERS = {chr(ord("a") + token): token for token in range(26)}
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def alphabet() -> Tokenizer:
    """Token 0 writes a, token 1 writes b."""
    backend = Backend(models.WordLevel(LETTERS, unk_token="a"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, {}, None)


ALPHABET = alphabet()


def ids(text: str) -> tuple[int, ...]:
    return tuple(LETTERS[letter] for letter in text)


def write(pieces: list[str], finish: FinishReason = LENGTH, **asked: object) -> list[GenerateChunk]:
    """Chunks up to the last one the writer wants."""
    words = tuple(map(ids, asked.pop("words", ())))  # type: ignore[call-overload]
    writer = ChunkBuilder(ALPHABET, [0], SamplingParams(**asked), TextEnds(words=words))
    chunks = []
    for place, piece in enumerate(pieces, start=1):
        delta = TokenDelta(ids(piece), 0, finish if place == len(pieces) else None)
        chunks.append(writer.build_chunk(delta))
        if chunks[-1].finish_reason is not None:
            break
    return chunks


@pytest.mark.parametrize("pieces", [["xabcdy"], ["x", "ab", "cdy"], list("xabcdy")], ids=len)
def test_tokens_behind_a_stop_string_do_not_count(pieces: list[str]) -> None:
    whole = join(write(pieces, stop=("bc",)))
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("xa", ids("xabc"), STOP)
    assert whole.usage == Usage(1, 4)
    assert join(write(pieces, stop=("bc",), include_stop_str_in_output=True)).text == "xabc"


@pytest.mark.parametrize("pieces", [["xabcdy"], ["x", "ab", "cdy"], list("xabcdy")], ids=len)
def test_a_stop_word_ends_the_text_and_stays_in_it(pieces: list[str]) -> None:
    whole = join(write(pieces, words=("zz", "bc", "cd")))
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("xabc", ids("xabc"), STOP)
    assert whole.stop_reason is None
    assert join(write(pieces, words=("ab",), min_tokens=2)).text == "xabcdy"
    assert join(write(pieces, words=("bc",), min_tokens=2)).text == "xabc"
    assert join(write(pieces, words=("bcd",), stop=("bc",))).text == "xa"


@pytest.mark.parametrize(
    ("finish", "asked", "reason"),
    [
        (LENGTH, {"stop": ("zz",), "stop_token_ids": (2,)}, None),
        (LENGTH, {"stop": ("bc",), "stop_token_ids": (2,)}, "bc"),
        (STOP, {"stop_token_ids": (2,)}, 2),
        (STOP, {"stop_token_ids": (3,)}, None),
        (STOP, {}, None),
    ],
)
def test_what_stopped_it(finish: FinishReason, asked: Any, reason: str | int | None) -> None:
    chunks = write(["a", "bc"], finish, **asked)
    assert [chunk.stop_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]


def test_the_models_own_end_is_no_stop_reason() -> None:
    for ignore_eos, reason in ((False, None), (True, 2)):
        asked = SamplingParams(stop_token_ids=(2,), ignore_eos=ignore_eos)
        writer = ChunkBuilder(ALPHABET, [0], asked, TextEnds(eos=(2,)))
        assert writer.build_chunk(TokenDelta(ids("bc"), 0, STOP)).stop_reason == reason


def test_a_text_that_ends_shows_what_was_held_back() -> None:
    assert [chunk.text for chunk in write(["xab", "ab"], stop=("abc",))] == ["x", "abab"]
    ended = join(write(["xab", "e"], STOP, stop=("abc",), stop_token_ids=ids("e")))
    assert (ended.text, ended.finish_reason, ended.usage.completion_tokens) == ("xab", STOP, 4)


def test_a_text_that_a_grammar_ends_has_its_last_token() -> None:
    for pieces in (["xab"], ["x", "ab"], ["xab", ""]):
        ended = join(write(pieces, STOP, stop_token_ids=ids("e")))
        assert (ended.text, ended.finish_reason, ended.end_token) == ("xab", STOP, False)
    assert join(write(["xab", "e"], STOP, stop_token_ids=ids("e"))).end_token
    assert not join(write(["xab", "e"], STOP, stop_token_ids=ids("e"), stop=("ab",))).end_token


def test_a_stop_string_waits_for_the_minimum() -> None:
    assert join(write(["abab"], stop=("ab",), min_tokens=3)).text == "ab"
    assert join(write(["abab"], stop=("ab",), min_tokens=1)).text == ""
    assert join(write(["abcd"], stop=("ab",), min_tokens=3)).finish_reason is LENGTH


@given(text=st.text("abc", max_size=20), sizes=st.lists(st.integers(1, 5), max_size=20), least=st.integers(0, 5))
def test_it_does_not_matter_how_many_tokens_come_at_once(text: str, sizes: list[int], least: int) -> None:
    asked = {"stop": ("ab", "ca"), "min_tokens": least}
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert join(write([*pieces, rest], **asked)) == join(write([text], **asked))


@given(
    text=st.text("abc", min_size=1, max_size=20),
    stop=st.sampled_from([(), ("ab", "ca"), ("bca",)]),
    words=st.sampled_from([(), ("cc",)]),
    least=st.integers(0, 5),
    scored=st.booleans(),
    takes=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_a_text_is_the_same_whether_it_goes_to_a_sink_or_into_chunks(
    text: str, stop: tuple[str, ...], words: tuple[str, ...], least: int, scored: bool, takes: list[bool]
) -> None:
    sampling = SamplingParams(stop=stop, min_tokens=least, logprobs=1 if scored else None)
    ends = TextEnds(words=tuple(map(ids, words)))
    one, other = (ChunkBuilder(ALPHABET, [0], sampling, ends) for _ in range(2))
    said, told = "", ""
    named: list[tuple[int, int | None]] = []
    wanted: list[tuple[int, int | None]] = []
    for letter, takes_it in zip(text, takes, strict=False):
        taken: list[tuple[str, int, TokenLogprob | None]] = []
        logprobs = (Logprobs(-0.5, [0], [-0.5]),) if scored else ()
        delta = TokenDelta(ids(letter), 0, LENGTH if len(told) == len(text) - 1 else None, logprobs)
        left = one.pass_text(delta, lambda *item, takes_it=takes_it, taken=taken: takes_it and not taken.append(item))
        whole = other.build_chunk(delta)
        for piece, tokens, logprob in taken:
            said += piece
            assert tokens == whole.usage.completion_tokens
            named += [(logprob.id, logprob.width)] if logprob else []
        if left is not None:
            said += left.text
            named += [(token.id, token.width) for token in left.logprobs]
        told += whole.text
        wanted += [(token.id, token.width) for token in whole.logprobs]
        assert (said, named) == (told, wanted)
        assert (left and left.finish_reason) == whole.finish_reason
        if left is not None:
            assert (left.usage, left.stop_reason) == (whole.usage, whole.stop_reason)
        if whole.finish_reason is not None:
            break


BYTES = [*"abc", "\u00c3", "\u00a9", "ab"]
"""Tokens of a byte-level vocabulary: the fourth and the fifth are the halves of an \u00e9."""


def byte_letters() -> Tokenizer:
    backend = Backend(models.BPE({piece: token for token, piece in enumerate(BYTES)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, None)


BYTE_LETTERS = byte_letters()


@given(
    tokens=st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=20),
    stop=st.sampled_from([(), ("ab",), ("ca", "bca"), ("\u00e9a",), ("bb", "aab")]),
    scored=st.booleans(),
    least=st.integers(0, 5),
    takes=st.lists(st.booleans(), min_size=20, max_size=20),
    tokenizer=st.sampled_from([ALPHABET, BYTE_LETTERS]),
)
def test_a_text_is_the_same_whether_its_tokens_are_written_or_come_in_chunks(
    tokens: list[int], stop: tuple[str, ...], scored: bool, least: int, takes: list[bool], tokenizer: Tokenizer
) -> None:
    sampling = SamplingParams(stop=stop, min_tokens=least, logprobs=1 if scored else None)
    one, other = (ChunkBuilder(tokenizer, [0], sampling) for _ in range(2))
    logprobs = Logprobs(-0.5, [0], [-0.5]) if scored else None
    columns = (logprobs,) if logprobs else ()
    first = TokenDelta((0,), 0, None, columns)
    assert one.token_writer(lambda *item: True) is None, "the first chunk has more than text"
    assert told(one.build_chunk(first)) == told(other.build_chunk(first))
    said: list[tuple[Any, ...]] = []
    taking = iter(takes)

    def take(text: str, count: int, logprob: TokenLogprob | None) -> bool:
        taken = next(taking, True)
        if taken:
            said.append((text, count, [(logprob.id, logprob.scores, logprob.width)] if logprob else []))
        return taken

    write = one.token_writer(take)
    assert write is not None
    for token in tokens:
        delta = TokenDelta((token,), 0, None, columns)
        text = write(token, logprobs)
        left = None if text is None else one.pass_text(delta, take, text)
        whole = other.build_chunk(delta)
        assert (said or [told(left)]) == [told(whole)]
        said.clear()
        if left is not None:
            assert (left.usage, left.finish_reason, left.stop_reason) == (
                whole.usage,
                whole.finish_reason,
                whole.stop_reason,
            )
        if whole.finish_reason is not None:
            assert left is not None
            return
    last = TokenDelta((), 0, LENGTH)
    assert one.build_chunk(last) == other.build_chunk(last)


def told(chunk: GenerateChunk | None) -> tuple[Any, ...]:
    """What a sink would be given of it."""
    assert chunk is not None
    scored = [(token.id, token.scores, token.width) for token in chunk.logprobs]
    return chunk.text, chunk.usage.completion_tokens, scored


def test_what_ends_with_tokens_has_no_writer() -> None:
    builder = ChunkBuilder(ALPHABET, [0], SamplingParams(), TextEnds(words=((1, 2),)))
    builder.build_chunk(TokenDelta((0,), 0, None))
    assert builder.token_writer(lambda *item: True) is None


def test_logprobs_are_named_and_finite() -> None:
    writer = ChunkBuilder(ALPHABET, [0], SamplingParams(stop=("b",)))
    logprobs = (Logprobs(-0.5, [0, 1], [-0.5, -1.0]), Logprobs(float("-inf"), [], []), Logprobs(-1.0, [], []))
    chunk = writer.build_chunk(TokenDelta(ids("abc"), 0, None, logprobs))
    first, second = chunk.logprobs
    assert (first.pieces.piece(first.id), first.logprob) == (("a", b"a"), -0.5)
    assert [(other.text, other.logprob) for other in first.top] == [("a", -0.5), ("b", -1.0)]
    assert second.logprob == -9999.0


def scores(first: int, *chosen: float) -> PromptLogprobs:
    """The likeliest token is always b."""
    count = len(chosen)
    ones = np.ones((count, 1), np.int32)
    return PromptLogprobs.from_arrays(
        first, np.array(chosen, np.float32), 2 * ones[:, 0], ones, -ones.astype(np.float32) / 4
    )


def test_the_whole_prompt_stands_in_the_first_chunk() -> None:
    writer = ChunkBuilder(ALPHABET, [0, 2, 3], SamplingParams(prompt_logprobs=1), echo="acd")
    first = writer.build_chunk(TokenDelta(ids("b"), 0, None, (), (scores(1, -0.5), scores(2, -2.0))))
    second = writer.build_chunk(TokenDelta(ids("a"), 0, LENGTH))
    assert [(token.text, token.id, token.rank) for token in first.prompt_logprobs] == [
        ("a", 0, 0),
        ("c", 2, 2),
        ("d", 3, 2),
    ]
    opening, *others = [token.given for token in first.prompt_logprobs]
    assert opening is None
    assert [(given.logprob, given.text, given.top[0].text) for given in others if given] == [
        (-0.5, "c", "b"),
        (-2.0, "d", "b"),
    ]
    assert (first.text, second.text, second.prompt_logprobs) == ("acdb", "a", ())


def test_a_prompt_of_one_token_has_nothing_before_it() -> None:
    writer = ChunkBuilder(ALPHABET, [2], SamplingParams(prompt_logprobs=0))
    [token] = writer.build_chunk(TokenDelta(ids("b"), 0, None)).prompt_logprobs
    assert (token.text, token.given) == ("c", None)


def test_an_echo_alone_ends_where_the_prompt_does() -> None:
    chunk = ChunkBuilder(ALPHABET, [0], SamplingParams(max_tokens=0), echo="a").build_chunk(TokenDelta((), 0, LENGTH))
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("a", (), LENGTH)
    assert chunk.usage == Usage(1, 0)


def test_spaces_between_special_tokens_that_cannot_be_left_out_are_told() -> None:
    backend = Backend(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    backend.add_special_tokens(["<s>"])
    asked = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    with pytest.raises(InvalidArgument, match="spaces_between_special_tokens: this model's tokenizer"):
        ChunkBuilder(Tokenizer(backend, {}, None), [0], asked)
    backend.decoder = decoders.Fuse()
    assert (
        ChunkBuilder(Tokenizer(backend, {}, None), [0], asked).build_chunk(TokenDelta((1, 1), 0, LENGTH)).text
        == "<s><s>"
    )


def test_offsets_count_what_each_token_adds_to_the_text() -> None:
    """Half a character adds nothing, nor does a special token that the prompt has not."""
    backend = Backend(models.BPE({symbol: token for token, symbol in enumerate(["Ã", "©", "a", "Ġ"])}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend, {}, {})
    prompt, scored = [4, 0, 1, 2], (scores(1, -1.0, -1.0, -1.0),)
    for echo, widths in (("éa", [0, 0, 1, 1]), ("<s>éa", [3, 0, 1, 1])):
        builder = ChunkBuilder(tokenizer, prompt, SamplingParams(prompt_logprobs=1, logprobs=0), echo=echo)
        ones = tuple(Logprobs(-1.0, [], [], 1) for _ in range(4))
        chunk = builder.build_chunk(TokenDelta((0, 1, 3, 4), 0, LENGTH, ones, scored))
        assert [token.width for token in chunk.prompt_logprobs] == widths
        assert [token.width for token in chunk.logprobs] == [0, 1, 1, 0]
        assert chunk.text == f"{echo}é "
    assert tokenizer.prompt_text((4, 0, 1), (4, 0, 1)) == "<s>é"
