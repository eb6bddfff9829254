"""What takes long is done beside the event loop, and comes to its end."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import Unavailable
from charonia.core.request import ChatMessage, Conversation
from charonia.tokenization.tokenizer import AsyncTokenizer, Tokenizer

CHAT = Conversation((ChatMessage("user", "x"),))
LONG = "the lazy dog " * 30
IDS = [65] * 300


class Place:
    """Answers everything with the thread that it was asked in, once it may."""

    bounded = True

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def prompt_ids(self, *_: object) -> str:
        assert self.go.wait(60)
        return threading.current_thread().name

    word_ids = prompt_text = decode = prompt_ids


@pytest.mark.parametrize(
    ("ask", "another"),
    [
        (lambda tokenizer: tokenizer.prompt_ids("the dog"), False),
        (lambda tokenizer: tokenizer.prompt_ids(LONG), True),
        (lambda tokenizer: tokenizer.prompt_ids(tuple(IDS)), False),
        (lambda tokenizer: tokenizer.prompt_ids(CHAT), True),
        (lambda tokenizer: tokenizer.word_ids([]), False),
        (lambda tokenizer: tokenizer.word_ids(["dog"] * 64), False),
        (lambda tokenizer: tokenizer.word_ids(["lazy dog"] * 64), True),
        (lambda tokenizer: tokenizer.prompt_text(LONG, IDS), False),
        (lambda tokenizer: tokenizer.prompt_text(tuple(IDS), IDS), True),
        (lambda tokenizer: tokenizer.prompt_text(CHAT, IDS[:2]), False),
        (lambda tokenizer: tokenizer.decode(IDS[:2]), False),
        (lambda tokenizer: tokenizer.decode(IDS), True),
    ],
)
async def test_only_what_is_long_goes_to_another_thread(
    ask: Callable[[AsyncTokenizer], Awaitable[Any]], another: bool
) -> None:
    place: Any = Place()
    assert (await ask(AsyncTokenizer(place))).startswith("tokenizer_") == another


async def test_what_was_taken_comes_to_its_end_and_nothing_long_is_taken_then() -> None:
    place: Any = Place()
    place.go.clear()
    tokenizer = AsyncTokenizer(place)
    asked = [asyncio.ensure_future(tokenizer.decode(IDS)) for _ in range(4)]  # more than there are threads
    await asyncio.sleep(0)
    tokenizer.close()
    place.go.set()
    assert len(await asyncio.gather(*asked)) == 4
    assert await tokenizer.decode(IDS[:2]) == threading.current_thread().name
    with pytest.raises(Unavailable, match="unloaded"):
        await tokenizer.decode(IDS)


async def test_it_says_what_the_tokenizer_says(checkpoint: Path) -> None:
    plain = Tokenizer.load(checkpoint)
    tokenizer = AsyncTokenizer(plain)
    ids = await tokenizer.prompt_ids(LONG, special=False)
    assert ids == plain.encode(LONG, special=False)
    assert (
        await tokenizer.decode(ids)
        == await tokenizer.prompt_text(tuple(ids), ids)
        == await tokenizer.prompt_text(LONG, [])
        == LONG
    )
    assert await tokenizer.word_ids([LONG]) == plain.word_ids([LONG])
