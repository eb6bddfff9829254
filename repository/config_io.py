"""A model's config as people write it and as the protocols show it: text, YAML or JSON; the message; plain JSON.

The message is the published `ModelConfig` of tritonclient. Knows its form, and nothing of what its fields mean.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..core.errors import InvalidArgument

CONFIG_FILE_NAMES = ("config.pbtxt", "config.yaml", "config.yml", "config.json")
"""Names that a model's config may have; of these it has one."""

ConfigMessage: TypeAlias = Any
"""An `inference.ModelConfig` message; protobuf's modules have no types."""


def find_config(directory: Path, name: str = "") -> Path | None:
    """The config file of a model's directory; with a `name`, `configs/<name>.*` if that is there.

    Raises:
        InvalidArgument: there are two.
    """
    custom = [directory / "configs" / f"{name}{Path(file).suffix}" for file in CONFIG_FILE_NAMES] if name else []
    for files in (custom, [directory / file for file in CONFIG_FILE_NAMES]):
        found = [file for file in files if file.is_file()]
        if len(found) > 1:
            raise InvalidArgument(f"{found[0]} and {found[1].name} are both there: a model has one config")
        if found:
            return found[0]
    return None


def new_config() -> ConfigMessage:
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2.ModelConfig()


def parse_config_file(file: Path) -> ConfigMessage:
    """Read one config.

    Raises:
        InvalidArgument: it cannot be read; the message names file, line and field.
    """
    try:
        text = file.read_text()
    except (UnicodeDecodeError, OSError) as error:
        raise InvalidArgument(f"failed to read {_format_name(file)} from {file}: {error}") from None
    if file.suffix == ".pbtxt":
        return _parse_text(text, file)
    fields = _yaml(text, file) if file.suffix in (".yaml", ".yml") else _json(text, file)
    try:
        return config_from_json(fields)
    except InvalidArgument as error:
        line = line_of(text, error.field or "")
        where = f":{line}" if line else ""
        raise InvalidArgument(f"failed to read {_format_name(file)} from {file}{where}: {error.message}") from None


def parse_config_override(text: str) -> ConfigMessage:
    """Read the `config` of a load request.

    Raises:
        InvalidArgument: it is no config.
    """
    try:
        return config_from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"Invalid config override: {error}", field="config") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"Invalid config override: {error.message}", field="config") from None


def config_from_json(fields: Any) -> ConfigMessage:
    """The message of protobuf's JSON mapping.

    Raises:
        InvalidArgument: a field is unknown or wrong; `field` names it where that can be told.
    """
    from google.protobuf import json_format  # type: ignore[import-untyped]

    if fields is None:
        return new_config()
    if not isinstance(fields, Mapping):
        raise InvalidArgument(f"a config is a mapping of fields to values, not {type(fields).__name__}")
    try:
        return json_format.ParseDict(fields, new_config())
    except json_format.ParseError as error:
        raise _parse_error(str(error)) from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"a field has a value of the wrong kind: {error}") from None


def config_to_json(message: Any) -> dict[str, Any]:
    """The message in protobuf's JSON mapping as Triton shows it: names and order of the .proto, values at their
    defaults too, messages only where they are set, 64-bit integers as numbers."""
    return {
        field.name: _field_to_json(message, field) for field in message.DESCRIPTOR.fields if _is_shown(message, field)
    }


def line_of(text: str, path: str) -> int:
    """The line of a field, 0 if it is not found. `path`: words apart by dots, of which each is looked for after the one
    before, as far as they are found."""
    position, found = 0, 0
    for word in path.split(".") if path else ():
        match = re.compile(rf"\b{re.escape(word)}\b").search(text, position)
        if match is None:
            break
        position = match.end()
        found = text.count("\n", 0, match.start()) + 1
    return found


def _format_name(file: Path) -> str:
    return {".pbtxt": "text proto", ".json": "JSON"}.get(file.suffix, "YAML")


def _parse_text(text: str, file: Path) -> ConfigMessage:
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, new_config())
    except text_format.ParseError as error:
        raise InvalidArgument(f"failed to read text proto from {file}:{error}") from None


def _yaml(text: str, file: Path) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or error
        raise InvalidArgument(f"failed to read YAML from {file}{where}: {reason}") from None
    except (ValueError, RecursionError) as error:  # a date that is none, a number without end, no end of brackets
        raise InvalidArgument(f"failed to read YAML from {file}: {error}") from None


def _json(text: str, file: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"failed to read JSON from {file}:{error.lineno}:{error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"failed to read JSON from {file}: {error}") from None


def _parse_error(text: str) -> InvalidArgument:
    """What protobuf's parser complains of, and the field: from the outermost to the one that is wrong."""
    path = re.findall(r"Failed to parse (\w+) field: ", text)
    reason = re.sub(r"Failed to parse \w+ field: |\s*Available Fields.*|\.+$", "", text, flags=re.DOTALL)
    unknown = re.search(r'no field named "([^"]+)"', reason)
    field = ".".join([*path, unknown[1]] if unknown else path)
    return InvalidArgument(f"{field}: {reason}" if field else reason, field=field or None)


def _is_shown(message: Any, field: Any) -> bool:
    return not field.has_presence or message.HasField(field.name)


def _field_to_json(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if not field.is_repeated:
        return _scalar_to_json(value, field)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of = field.message_type.fields_by_name["value"]
        return {str(key): _scalar_to_json(value[key], of) for key in sorted(value)}
    return [_scalar_to_json(item, field) for item in value]


def _scalar_to_json(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return config_to_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.type == field.TYPE_FLOAT:
        return float(str(np.float32(value)))  # the shortest decimal that is this number
    return value


def v2_datatype(message: Any) -> str:
    """v2's name of a field `data_type`: FP32 for TYPE_FP32, BYTES for TYPE_STRING."""
    values = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    name = str(values[message.data_type].name).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name
