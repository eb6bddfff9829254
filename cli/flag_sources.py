"""Flags of `charonia serve` that are not on its command line: of the environment, and of a file.

The command line wins over `CHARONIA_<FLAG>`, which wins over the file that `--config` names. Also what of all three is
written in another way than the options have it: capitals in choices, 2k for 2000, vLLM's names of values.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from cyclopts import UNSET, App, Argument, ArgumentCollection, Token
from cyclopts.exceptions import CycloptsError

from ..api.api_keys import ENVIRONMENT as KEYS_VARIABLE
from ..core.errors import InvalidArgument, did_you_mean
from ..engine.kernel_choice import LEVEL_VARIABLE
from ..engine.option_values import plain_count, plain_value, takes_count
from .foreign_flags import unknown_flag
from .frontend_count import VARIABLE as GROWTH_VARIABLE

PREFIX = "CHARONIA_"
_NO_FLAGS = {KEYS_VARIABLE, LEVEL_VARIABLE, GROWTH_VARIABLE}
_OF_KUBERNETES = re.compile(r"(?:\w+_)?SERVICE_(?:HOST|PORT\w*)|\w*PORT_\d+_(?:TCP|UDP|SCTP)\w*")
"""The ends of variables that Kubernetes sets in containers beside a Service whose name begins with charonia. Another
one ends with PORT, as flags do, and has a URL."""
_SPREAD = {"--host": ("--http-address", "--grpc-address")}

Flags = Mapping[str, Argument]
"""The arguments of a command by their names on a command line; one may have several."""


class FlagValue(NamedTuple):
    """What the environment or a file says of a flag. `words`: as on a command line, one for each time that the flag
    would be given there. `origin`: the variable, or the file and its key."""

    flag: str
    words: tuple[str, ...]
    origin: str

    def __str__(self) -> str:
        secret = "restricted" in self.flag or self.flag.startswith("--api-key")
        return f"{self.flag} {'...' if secret else ' '.join(self.words)} ({self.origin})"


def command_flags(arguments: ArgumentCollection) -> Flags:
    return {name: argument for argument in arguments for name in argument.positives if name.startswith("--")}


def complete_arguments(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Add what the environment and the file say to what the command line says; cyclopts calls it before it converts.

    Raises `CycloptsError` for a file that cannot be read, or whose keys are no flags, all of which are named.
    """
    flags = command_flags(arguments)
    model, _, _ = arguments.match(0)
    _spread(flags)
    _add(flags, model, environment_values(flags, os.environ), "environment")
    named = flags["--config"].tokens
    if named:
        _add(flags, model, file_values(flags, Path(named[-1].value)), "file")
    for argument in arguments:
        argument.tokens[:] = [_plain_token(argument, token) for token in argument.tokens]


def environment_values(flags: Flags, environment: Mapping[str, str]) -> list[FlagValue]:
    """What variables say of flags. Of a flag that may be given several times the value is a JSON list, or words with
    blanks between them. An empty variable says nothing."""
    values = []
    for flag, argument in flags.items():
        text = environment.get(_variable(flag), "").strip()
        if text and not _is_of_kubernetes(_variable(flag), text):
            values.append(FlagValue(flag, _words(argument, text), _variable(flag)))
    return values


def strays(flags: Flags, environment: Mapping[str, str]) -> list[str]:
    """What is to be said of variables that look as if they set a flag, and set none."""
    known = {_variable(flag) for flag in flags} | _NO_FLAGS
    names = sorted(
        name
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in known and not _is_of_kubernetes(name, value)
    )
    return [f"{name} sets no flag{did_you_mean(_flag(name.removeprefix(PREFIX)), flags)}" for name in names]


def file_values(flags: Flags, path: Path) -> list[FlagValue]:
    """What a YAML file says of flags: a mapping of their names, without the dashes in front, to a value, or to a list
    of those that would be given one after the other. A mapping is JSON on the command line.

    Raises `CycloptsError` as `complete_arguments`.
    """
    from ..repository.config_io import parse_yaml

    try:
        content = parse_yaml(path.read_text(), f"cannot read --config {path}")
    except OSError as error:
        raise CycloptsError(msg=f"cannot read --config {path}: {error.strerror}") from None
    except (InvalidArgument, ValueError, RecursionError) as error:
        raise CycloptsError(msg=str(error) or f"cannot read --config {path}") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise CycloptsError(msg=f"{path} must be a mapping of flags to values")
    values, unknown = [], []
    for key, value in content.items():
        flag = _flag(str(key))
        if flag not in flags or flag == "--config":
            unknown.append(f"{path}: {key}: {unknown_flag(flag, flags)}")
        elif value is not None:
            words = [_word(part) for part in (value if isinstance(value, list) else [value])]
            if len(words) != 1 and not _is_repeatable(flags[flag]):
                unknown.append(f"{path}: {key} takes one value, and has a list")
            values.append(FlagValue(flag, tuple(words), f"{path}: {key}"))
    if unknown:
        raise CycloptsError(msg="\n".join(unknown))
    return values


def _add(flags: Flags, model: Argument, values: Sequence[FlagValue], source: str) -> None:
    """Give these values to arguments that have none yet. `model`: the one without a flag, which stands for --model."""
    origins: dict[int, str] = {}
    for flag, words, origin in values:
        argument = flags[flag]
        other = origins.setdefault(id(argument), origin)
        if other != origin:
            raise CycloptsError(msg=f"{other} and {origin} are of the same flag, {argument.name}: set one of them")
        if argument.tokens or (flag == "--model" and model.tokens):
            continue
        for index, word in enumerate(words):
            argument.append(Token(keyword=origin, value=word, source=source, index=index))
    _spread(flags)


def _spread(flags: Flags) -> None:
    """Give what was said of a flag that stands for several to those of which nothing was said."""
    for name, others in _SPREAD.items():
        for other in others:
            if not flags[other].tokens:
                flags[other].tokens[:] = flags[name].tokens


def _plain_token(argument: Argument, token: Token) -> Token:
    """A token whose value is written as the option has it."""
    value = token.value
    if not value or token.implicit_value is not UNSET:
        return token
    if takes_count(argument.hint):
        value = plain_count(value)
    if argument.parameter.converter is None and (choices := list(_choices(argument.hint))):
        value = plain_value(argument.name.lstrip("-").replace("-", "_"), value)
        alike = [choice for choice in choices if choice.lower() == value.lower()]
        value = alike[0] if len(alike) == 1 else value
    return token.evolve(value=value)


def _choices(hint: Any) -> Iterator[str]:
    for part in get_args(hint):
        if isinstance(part, str):
            yield part
        else:
            yield from _choices(part)


def _variable(flag: str) -> str:
    return PREFIX + flag.lstrip("-").replace("-", "_").upper()


def _flag(name: str) -> str:
    return f"--{name.lower().lstrip('-').replace('_', '-')}"


def _is_of_kubernetes(variable: str, value: str) -> bool:
    end = variable.removeprefix(PREFIX)
    return bool(_OF_KUBERNETES.fullmatch(end)) or (end.endswith("PORT") and "://" in value)


def _is_repeatable(argument: Argument) -> bool:
    return get_origin(argument.hint) is tuple


def _words(argument: Argument, text: str) -> tuple[str, ...]:
    if not _is_repeatable(argument) or text.startswith("{"):
        return (text,)
    if text.startswith("["):
        try:
            return tuple(map(_word, msgspec.json.decode(text, type=list[Any])))
        except msgspec.MsgspecError:
            return (text,)
    return tuple(text.split())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list) else str(value)
