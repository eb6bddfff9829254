"""The text of a stream that another model decodes: whole characters with accumulation, and the end at a stop word."""

from typing import Any, cast

import numpy as np
import pytest

from charonia.ensembles.lookup import AskedModel
from charonia.extras.trtllm.bls import StopTrimmer, StreamText

TEXT = "Grüße, 東京 🚣 and plain words, again and again. " * 3
TRIMMED = "go on, stop. more"


class Bytes:
    """A `postprocessing` whose tokens are the bytes of UTF-8; it counts what it decodes."""

    def __init__(self) -> None:
        self.most = 0

    async def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        tokens = inputs["TOKENS_BATCH"][0, 0].tolist()
        assert inputs["SEQUENCE_LENGTH"].tolist() == [[len(tokens)]]
        self.most = max(self.most, len(tokens))
        return {"OUTPUT": np.array([bytes(tokens).decode(errors="replace").encode()], object)}


async def pieces(data: bytes, size: int, accumulates: bool) -> list[str]:
    model = Bytes()
    text = StreamText(cast(AskedModel, model), accumulates)
    found = [await text.push(np.array([[list(data[at : at + size])]])) for at in range(0, len(data), size)]
    found.append(await text.finish())
    assert model.most < 80, "the window does not grow with the text"
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_accumulated_pieces_are_whole_characters(size: int) -> None:
    found = await pieces(TEXT.encode(), size, accumulates=True)
    assert "".join(found) == TEXT
    assert len([piece for piece in found if piece]) > len(TEXT) // (size + 1)


async def test_half_a_character_at_the_end_is_shown_as_one() -> None:
    assert "".join(await pieces("né".encode()[:-1], 1, accumulates=True)) == "n\ufffd"


async def test_pieces_of_their_own_come_apart() -> None:
    assert "".join(await pieces("né".encode(), 1, accumulates=False)) == "n\ufffd\ufffd"


@pytest.mark.parametrize("size", [1, 2, 5, 99])
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["stop"], "go on, stop"),
        (["op.", "p"], "go on, stop"),
        (["nowhere"], "go on, stop. more"),
        ([], "go on, stop. more"),
    ],
)
def test_a_text_ends_behind_a_stop_word(size: int, words: list[str], shown: str) -> None:
    text, trimmer = TRIMMED, StopTrimmer(words)
    assert "".join(trimmer.push(text[at : at + size]) for at in range(0, len(text), size)) == shown
    assert trimmer.matched == (shown != text)
    assert StopTrimmer(words).trim_whole(text, "") == shown
    assert StopTrimmer(["go"]).trim_whole("go on, go", "go on") == "go on, go"
