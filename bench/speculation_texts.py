"""Texts to speculate on: prompts of several kinds, each with an answer of a few hundred tokens.

They lie in speculation_texts.jsonl, as text and as the demo model's token ids, and were written for this purpose. A
drafter of the laboratory takes the same file for its record.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec

from ..engine.drafters.laboratory import Record

TextKind: TypeAlias = Literal["edit", "quotes", "json", "chat", "code", "table", "names"]
TEXT_KINDS: tuple[TextKind, ...] = get_args(TextKind)
TEXTS = Path(__file__).with_name("speculation_texts.jsonl")


class RecordedText(Record, frozen=True, kw_only=True):
    """`prompt` asks to: edit this file, answer with quotes from the passage, extract JSON, chat, complete code, put a
    list into a table, or translate names."""

    kind: TextKind
    prompt: str
    output: str


def read_texts(kinds: Sequence[TextKind] = TEXT_KINDS, tokenizer: Path | None = None) -> list[RecordedText]:
    """The texts of these kinds, in the ids of the tokenizer.json at `tokenizer` in place of the demo model's."""
    texts = [msgspec.json.decode(line, type=RecordedText) for line in TEXTS.read_bytes().splitlines()]
    chosen = [text for text in texts if text.kind in kinds]
    return chosen if tokenizer is None else [_tokenized(text, tokenizer) for text in chosen]


def _tokenized(text: RecordedText, path: Path) -> RecordedText:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    prompt, output = (tokenizer.encode(each, add_special_tokens=False).ids for each in (text.prompt, text.output))
    return msgspec.structs.replace(text, prompt_tokens=prompt, output_tokens=output)


def write_records(path: Path, records: Sequence[Record]) -> None:
    """As `read_records` reads them."""
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
