from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from charonia.tokenization.detokenizer import make_detokenizer
from charonia.tokenization.tokenizer import Tokenizer, read_token_piece

TEXT = "the été 🦊👩‍👩‍👧 日本語</s>fox\ufffd!"
SPLITS = st.lists(st.integers(1, 4), max_size=200)
ONE_FIXTURE_IS_FINE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)


def pieces(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], prompt: tuple[int, ...] = (), special: bool = False
) -> list[str]:
    text, out, rest = make_detokenizer(tokenizer, prompt, special), [], list(ids)
    for size in [*sizes, *[1] * len(ids)]:
        out.append(text.push(rest[:size]))
        rest = rest[size:]
    return [*out, text.finish()]


@ONE_FIXTURE_IS_FINE
@given(sizes=SPLITS)
def test_pieces_join_to_the_text_and_are_whole_characters(checkpoint: Path, sizes: list[int]) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    got = pieces(tokenizer, tokenizer.encode(TEXT), sizes)
    assert "".join(got) == TEXT.replace("</s>", "")
    assert "".join(got).count("\ufffd") == TEXT.count("\ufffd")


@ONE_FIXTURE_IS_FINE
@given(ids=st.lists(st.integers(0, 399), max_size=40), sizes=SPLITS)
def test_garbage_joins_to_what_decoding_at_once_gives(checkpoint: Path, ids: list[int], sizes: list[int]) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    for _ in range(2):
        assert "".join(pieces(tokenizer, ids, sizes)) == tokenizer.decode(ids)
        assert "".join(pieces(tokenizer, ids, sizes, special=True)) == tokenizer.decode(ids, special=True)
        tokenizer.bytes = tokenizer.bytes_with_special = None


def test_a_byte_level_tokens_piece_is_what_the_library_decodes(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.bytes is not None
    size = tokenizer._backend.get_vocab_size()
    for token in range(size + 1):  # the last one is unknown
        assert tokenizer.pieces.piece(token) == read_token_piece(tokenizer._backend, token)


def test_texts_beside_stop_strings_are_kept_for_the_last_of_them(checkpoint: Path) -> None:
    table = Tokenizer.load(checkpoint).bytes
    assert table is not None
    texts = [table.texts_beside((letter,)) for letter in "abcdefghijklmnop"]
    assert [table.texts_beside((letter,)) for letter in "abcdefghijklmnop"] == texts
    assert table.texts_beside(("a",)) is texts[0], "who asks again loses nothing"
    table.texts_beside(("q",))
    assert table.texts_beside(("a",)) is not texts[0]
    assert table.texts_beside(("p",)) is texts[15]


def test_special_tokens_are_shown_if_wanted(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    ids = tokenizer.encode(f"{TEXT}<|end|></s>")
    for _ in range(2):
        assert "".join(pieces(tokenizer, ids, [], special=True)) == f"<s>{TEXT}<|end|></s>"
        tokenizer.bytes = tokenizer.bytes_with_special = None
    assert not tokenizer.separates_special_tokens


def test_a_character_begun_by_the_prompt_comes_whole(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    ids = tokenizer.encode("x🦊y")
    cut = next(at for at in range(len(ids)) if tokenizer.decode(ids[:at]).endswith("\ufffd"))
    assert "".join(pieces(tokenizer, ids[cut:], [], prompt=tuple(ids[:cut]))) == "🦊y"


@pytest.fixture
def spaced() -> Tokenizer:
    """Marks spaces as Llama 2 and Mistral do: decoding strips the first one."""
    vocabulary = {"<s>": 0, "▁the": 1, "▁dog": 2, "▁": 3, "s": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, {}, None)


def test_spaces_between_pieces_survive(spaced: Tokenizer) -> None:
    ids = [1, 2, 0, 2, 3, 3, 4, 1]
    assert pieces(spaced, ids, [])[:2] == ["the", " dog"]
    assert "".join(pieces(spaced, ids, [])) == spaced.decode(ids) == "the dog dog  s the"


def test_a_continuation_keeps_its_leading_space(spaced: Tokenizer) -> None:
    assert "".join(pieces(spaced, [2, 4], [], prompt=(0, 1))) == " dogs"
