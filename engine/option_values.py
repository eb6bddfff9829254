"""The values of options as command lines and config files write them."""

import re
from decimal import Decimal
from typing import Any, get_args

_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kmgtKMGT])")
_MULTIPLES = {letter: 10 ** (3 * place) for place, letter in enumerate("kmgt", 1)} | {
    letter: 2 ** (10 * place) for place, letter in enumerate("KMGT", 1)
}
_OTHER_VALUES = {("dtype", "half"): "float16", ("dtype", "float"): "float32"}


def plain_value(name: str, value: str) -> str:
    """A setting's value by our name, where vLLM has another one, too: `half` is float16. Any other is returned as it
    is."""
    return _OTHER_VALUES.get((name, value), value)


def plain_count(text: str) -> str:
    """A whole number that ends with a multiple, in digits alone: 2k is 2000, 2K 2048, 25.6k 25600. Any other text is
    returned as it is."""
    written = _COUNT.fullmatch(text)
    if written is None:
        return text
    number = Decimal(written[1]) * _MULTIPLES[written[2]]
    return str(int(number)) if number == int(number) else text


def takes_count(kind: Any) -> bool:
    """Whether a type is a whole number, or one among others, such as None."""
    return kind is int or any(takes_count(part) for part in get_args(kind))
