"""The tables of docs/flags.md, made from the classes of options: `python -m tests.docs.flag_tables` writes them anew.

A row's default and its first words are those of the option. What stands behind `<br>`, the order of the rows, and what
a default of none amounts to are written by hand, and stay.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import msgspec
from cyclopts import Argument

from charonia.cli.app import app
from charonia.cli.options import BooleanFlag
from charonia.core.media_models import MediaConfig
from charonia.engine.options import EngineOptions, engine_config

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"
NOTE = "<br>"
ROW = re.compile(r"\| `(?P<flag>--[\w-]+)` \| (?P<default>.*?) \| (?P<meaning>.*) \|")
LITERAL = re.compile(
    r"(?<![\w`/*-])(--[a-z][\w-]*|(?:\w+,)?\w+[=:][A-Z]{2,}(?::[A-Z]{2,})?|[A-Z]+_(?:[A-Z_]+|<\w+>)|\*)(?![\w`])"
)
"""What a help text means literally and does not say so: another flag, the form of a value, a variable, a star."""


class FlagRow(NamedTuple):
    """A row as the options have it. `default`: as `written` has it."""

    flag: str
    default: str
    meaning: str

    def with_hand_written(self, default: str, note: str) -> str:
        """The row in Markdown. `default`: the cell as it was; `note`: what is said beside the option's own words."""
        meaning = f"{self.meaning}{NOTE}{note}" if note else self.meaning
        return f"| `{self.flag}` | {default if is_right(default, self.default) else self.default} | {meaning} |"


@cache
def arguments() -> Mapping[str, Argument]:
    """Every flag of `charonia serve`."""
    collection = app["serve"].assemble_argument_collection(parse_docstring=True)
    return {argument.names[0]: argument for argument in collection if argument.names[0].startswith("--")}


def option_rows() -> dict[str, FlagRow]:
    """The rows of all flags, by flag."""
    return {flag: FlagRow(flag, written(default), _meaning(flag)) for flag, default in defaults().items()}


def _meaning(flag: str) -> str:
    argument = arguments()[flag]
    text = " ".join((argument.parameter.help or "").split())
    text = LITERAL.sub(r"`\1`", text)
    choices = ", ".join(f"`{choice}`" for choice in choices_of(argument))
    others = ", ".join(f"`{name}`" for name in argument.names[1:] if name in argument.positives)
    return " ".join(filter(None, (text, choices and f"One of {choices}.", others and f"Also {others}.")))


def choices_of(argument: Argument) -> list[str]:
    """The texts that a flag takes, where it takes no others; none for a boolean."""
    choices = dict.fromkeys(_texts(argument.hint))
    if int in get_args(argument.hint):
        return []
    return [] if choices.keys() <= {*_texts(BooleanFlag)} else list(choices)


def _texts(hint: Any) -> Iterator[str]:
    for part in get_args(hint):
        if isinstance(part, str):
            yield part
        else:
            yield from _texts(part)


def defaults() -> dict[str, Any]:
    """Every flag, and its true default."""
    engine = {f"--{name.replace('_', '-')}": name for name in EngineOptions.__dataclass_fields__}
    return {
        name: _engine_default(engine[name]) if name in engine else argument.field_info.default
        for name, argument in arguments().items()
    }


def _engine_default(option: str) -> Any:
    """What the engine's configuration says at the place that the option changes."""
    if option == "enable_lora":
        return engine_config("m", EngineOptions()).lora is not None
    if option == "speculative_config":
        return engine_config("m", EngineOptions()).speculation
    if option == "kv_events_config":
        return engine_config("m", EngineOptions()).kv_events
    if option == "kv_transfer_config":
        return engine_config("m", EngineOptions()).kv_transfer
    if option == "ahead":
        return engine_config("m", EngineOptions()).scheduler.ahead
    if option == "limit_mm_per_prompt":
        return ",".join(f"{kind}={count}" for kind, count in MediaConfig().per_prompt.items())
    if option == "mm_processor_kwargs":
        return MediaConfig().processor_settings
    plain: dict[str, Any] = {"executor": "fake"} if option.startswith("fake_") else {}
    plain |= {"enable_lora": True} if option.startswith("max_lora") else {}
    untouched = dict(_leaves(engine_config("m", EngineOptions(**plain))))
    another = cast(Any, "99" if option in {"pipeline_layers", "target_tenants", "media_domains"} else 99)
    touched = dict(_leaves(engine_config("m", EngineOptions(**plain | {option: another}))))
    [place] = [place for place in untouched if touched[place] != untouched[place]]
    return untouched[place]


def _leaves(config: msgspec.Struct, place: str = "") -> Iterator[tuple[str, Any]]:
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            yield from _leaves(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def written(default: Any) -> str:
    """A default as the tables have it."""
    if default in (None, "", ()):
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def is_right(cell: str, default: str) -> bool:
    """Whether a cell says a default, as `written` has it; other words than none may say what holds then."""
    return cell == default or (default == "none" and "`" not in cell)


def renewed(page: str) -> str:
    """The page with its tables as the options are now. Flags that are gone lose their rows; a new one gets a row behind
    the last flag of its class of options, or where there is none, behind all."""
    rows = option_rows()
    lines = page.splitlines()
    listed = [match["flag"] for line in lines if (match := ROW.fullmatch(line))]
    for flag in sorted(rows.keys() - {*listed}):
        group = arguments()[flag].parameter.group
        places = [
            (match["flag"] in rows and arguments()[match["flag"]].parameter.group == group, place)
            for place, line in enumerate(lines)
            if (match := ROW.fullmatch(line))
        ]
        lines.insert(max(places)[1] + 1, rows[flag].with_hand_written("none", ""))
    renewed_lines = []
    for line in lines:
        match = ROW.fullmatch(line)
        if match is None:
            renewed_lines.append(line)
        elif match["flag"] in rows:
            note = match["meaning"].partition(NOTE)[2]
            renewed_lines.append(rows[match["flag"]].with_hand_written(match["default"], note))
    return "\n".join(renewed_lines) + "\n"


def main() -> int:
    PAGE.write_text(renewed(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
