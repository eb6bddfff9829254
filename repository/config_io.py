"""A model's config as text, YAML or JSON in a file, and as the `RawConfig` that all else knows.

What comes from outside goes through the published `ModelConfig` of tritonclient, a message that says which fields there
are. Knows nothing of what they mean.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import InvalidArgument
from ..core.model import RawConfig
from ..core.regular_files import read_text

CONFIG_FILE_NAMES = ("config.pbtxt", "config.yaml", "config.yml", "config.json")
"""File names of a model's config; a model has one of them."""

CONFIGS_FOLDER = "configs"
"""The folder of a model's other configs, one of which may be chosen by its name."""

_FORMATS = {".pbtxt": "text proto", ".yaml": "YAML", ".yml": "YAML", ".json": "JSON"}


def find_config(directory: Path, name: str = "") -> Path | None:
    """The config file of a model's directory; with a `name`, `configs/<name>.*` if that is there. What has its name and
    is no file, such as the directory that a bind mount makes, is returned too: reading it says so. Raises
    `InvalidArgument` if there are two."""
    custom = [directory / CONFIGS_FOLDER / f"{name}{Path(file).suffix}" for file in CONFIG_FILE_NAMES] if name else []
    for files in (custom, [directory / file for file in CONFIG_FILE_NAMES]):
        present = [file for file in files if file.is_file()] or [file for file in files if os.path.lexists(file)]
        if len(present) > 1:
            raise InvalidArgument(f"{present[0]} and {present[1].name} are both there: a model has one config")
        if present:
            return present[0]
    return None


def parse_config_file(file: Path) -> RawConfig:
    """Read one config. Raises `InvalidArgument` if it cannot be read; the message names file, line and field."""
    from google.protobuf import text_format  # type: ignore[import-untyped]

    failed = f"failed to read {_FORMATS[file.suffix]} from {file}"
    try:
        text = read_text(file)
        if file.suffix == ".pbtxt":
            return parse_config_text(text)
        raw = json.loads(text) if file.suffix == ".json" else parse_yaml(text, failed)
    except text_format.ParseError as error:
        raise InvalidArgument(f"{failed}:{error}") from None
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{failed}:{error.lineno}:{error.colno}: {error.msg}") from None
    except OSError as error:
        raise InvalidArgument(f"{failed}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # an impossible date, endless digits or brackets
        raise InvalidArgument(f"{failed}: {error}") from None
    try:
        return complete_fields(raw)
    except InvalidArgument as error:
        line = line_of(text, error.field or "")
        raise InvalidArgument(f"{failed}{f':{line}' if line else ''}: {error.message}") from None


def parse_config_text(text: str) -> RawConfig:
    """The config of a text as config.pbtxt has it. Raises protobuf's `text_format.ParseError`."""
    from google.protobuf import text_format

    return _to_raw(text_format.Parse(text, _to_message(None)))


def parse_yaml(text: str, failed: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise InvalidArgument(f"{failed}{where}: {getattr(error, 'problem', None) or error}") from None


def parse_config_override(text: str) -> RawConfig:
    """Parse the `config` of a load request. Raises `InvalidArgument` if it is none."""
    try:
        fields = json.loads(text)
        if fields is None:
            raise InvalidArgument("a config is a mapping of fields to values, not null")
        return complete_fields(fields)
    except (ValueError, RecursionError, InvalidArgument) as error:
        raise InvalidArgument(f"Invalid config override: {error}", field="config") from None


def complete_fields(fields: Any) -> RawConfig:
    """The config of protobuf's JSON mapping that comes from outside, or lacks fields. Raises `InvalidArgument` if a
    field is unknown or wrong; `field` names it where it is known."""
    return _to_raw(_to_message(fields))


def config_to_text(config: RawConfig) -> str:
    from google.protobuf import text_format

    return str(text_format.MessageToString(_to_message(config)))


def _to_message(fields: Any) -> Any:
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2

    message = model_config_pb2.ModelConfig()
    if fields is None:
        return message
    if not isinstance(fields, Mapping):
        raise InvalidArgument(f"a config is a mapping of fields to values, not {type(fields).__name__}")
    try:
        return json_format.ParseDict(fields, message)
    except json_format.ParseError as error:
        raise _parse_error(str(error)) from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"a field has a value of the wrong kind: {error}") from None


def _parse_error(text: str) -> InvalidArgument:
    """The complaint of protobuf's parser, and the path of the field that is wrong."""
    path = re.findall(r"Failed to parse (\w+) field: ", text)
    reason = re.sub(r"Failed to parse \w+ field: |\s*Available Fields.*|\.+$", "", text, flags=re.DOTALL)
    unknown = re.search(r'no field named "([^"]+)"', reason)
    field = ".".join([*path, unknown[1]] if unknown else path)
    return InvalidArgument(f"{field}: {reason}" if field else reason, field=field or None)


def _to_raw(message: Any) -> dict[str, Any]:
    """The message in protobuf's JSON mapping as Triton shows it: names and order of the .proto, values at their
    defaults too, messages only where they are set, 64-bit integers as numbers."""
    shown = [field for field in message.DESCRIPTOR.fields if not field.has_presence or message.HasField(field.name)]
    return {field.name: _field_to_json(getattr(message, field.name), field) for field in shown}


def _field_to_json(value: Any, field: Any) -> Any:
    if not field.is_repeated:
        return _scalar_to_json(value, field)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of = field.message_type.fields_by_name["value"]
        return {str(key): _scalar_to_json(value[key], of) for key in sorted(value)}
    return [_scalar_to_json(item, field) for item in value]


def _scalar_to_json(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _to_raw(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.type == field.TYPE_FLOAT:
        return float(str(np.float32(value)))  # the shortest decimal that is this number
    return value


def line_of(text: str, path: str) -> int:
    """The line of a field, 0 if it is not found. Each of the words that dots separate in `path` is searched after the
    one before, as far as they are found."""
    position, line = 0, 0
    for word in path.split(".") if path else ():
        match = re.compile(rf"\b{re.escape(word)}\b").search(text, position)
        if match is None:
            break
        position = match.end()
        line = text.count("\n", 0, match.start()) + 1
    return line


def v2_datatype(tensor: RawConfig) -> str:
    """v2's name of a field `data_type`: FP32 for TYPE_FP32, BYTES for TYPE_STRING."""
    name = str(tensor["data_type"]).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name
