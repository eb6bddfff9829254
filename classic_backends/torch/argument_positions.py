"""Which tensor of a config is which argument or result of a PyTorch model: Triton's naming conventions.

Names of forward's arguments; or `<name>__<index>`, such as INPUT__0; or else the order of the config. Imports no torch.
"""

import re
from collections.abc import Sequence

from ...core.errors import InvalidArgument

_INDEXED = re.compile(r".+__(\d+)")


def argument_positions(model: str, names: Sequence[str], arguments: Sequence[str]) -> tuple[int, ...]:
    """For each input of the config the place of its argument. `arguments`: the model's own names; empty: unknown.

    Raises:
        InvalidArgument: two inputs share an argument, or one has none.
    """
    if arguments and set(names) <= set(arguments):
        return tuple(arguments.index(name) for name in names)
    return _places(model, "input", names, len(arguments))


def result_positions(model: str, names: Sequence[str]) -> tuple[int, ...]:
    """The same for outputs, of which a model has as many as it makes."""
    return _places(model, "output", names, 0)


def _places(model: str, side: str, names: Sequence[str], known: int) -> tuple[int, ...]:
    found = [_INDEXED.fullmatch(name) for name in names]
    places = tuple(int(each[1]) for each in found if each) if all(found) else tuple(range(len(names)))
    if len(set(places)) != len(places):
        raise InvalidArgument(f"model '{model}': two {side}s have the same index: {', '.join(names)}", field=side)
    missing = side == "input" and sorted(places) != list(range(len(places)))
    if missing or (known and max(places, default=-1) >= known):
        count = f", which has {known}" if known else ""
        message = f"model '{model}': {side}s {', '.join(names)} are not the arguments of the model{count}"
        raise InvalidArgument(message, field=side)
    return places
