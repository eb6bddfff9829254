"""A tokenizer whose vocabulary has a served model's size, and whose tokens make text one behind the other: the fake
executor, which counts, then writes it. Words of one and of two bytes a letter, punctuation, line ends, and characters
that are cut in two."""

import string
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .plan import WORDS

VOCAB = 151_936
"""Qwen 2.5's."""
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A prompt ends with the last word of a message, behind which the text goes on."""
_LATIN = string.ascii_letters
_CYRILLIC = "абвгдежзийклмнопрстуфхцчшщъыьэюя"
_ENDS = (", ", ". ", '"', "\n")
_CYCLE = 16
"""Tokens of which one ends with the first two bytes of a character, and the next begins with its last."""
_CUT = "界"


def write_text_model(checkpoint: Path, vocab: int = VOCAB) -> None:
    """Write the tokenizer and chat template of a checkpoint."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    build_text_tokenizer(vocab).save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (checkpoint / "chat_template.jinja").write_text(_TEMPLATE)


def build_text_tokenizer(vocab: int) -> Tokenizer:
    """The words of prompts stand at even distances, so that streams write different texts."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def spelled(text: str) -> str:
        return "".join(piece for piece, _ in letters.pre_tokenize_str(text))

    prompt_words = [spelled(f" {word}") for word in dict.fromkeys(WORDS)]
    known = set(prompt_words)
    pieces = sorted(letters.alphabet())
    cut = spelled(_CUT)
    text = map(spelled, _words())
    single = len(pieces)
    distance = (vocab - single) // len(prompt_words) // _CYCLE * _CYCLE
    while len(pieces) < vocab:
        place = len(pieces) - single
        if place % distance == 0 and place // distance < len(prompt_words):
            pieces.append(prompt_words[place // distance])
            continue
        word = next(word for word in text if word not in known)
        pieces.append(word + cut[:2] if place % _CYCLE == 1 else cut[2:] + word if place % _CYCLE == 2 else word)
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _words() -> Iterator[str]:
    """Invented ones, each another."""
    for number in count():
        letters = _CYRILLIC if number % 5 == 4 else _LATIN
        rest, word = number + len(letters), ""
        while rest:
            rest, at = divmod(rest, len(letters))
            word += letters[at]
        yield f" {word}" + (_ENDS[number // 9 % len(_ENDS)] if number % 9 == 8 else "")
