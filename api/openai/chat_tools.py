"""The tools of a chat body, and which of them may be called, become a `ToolUse`.

Knows nothing of how a model is told of tools, nor how it writes calls.
"""

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal

import msgspec
import orjson

from ...core.errors import InvalidArgument
from ...core.request import Tool, ToolUse
from .custom_tools import custom_description, custom_parameters
from .json_body import convert_fields, field_error, shortened
from .known_fields import Shape, shape_of

MAX_TOOLS = 1024
"""Tools that a request may name: agents with several MCP servers have hundreds."""

_MAX_PARAMETERS_BYTES = 1 << 16
_MAX_PARAMETERS_DEPTH = 64
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_NAME_RULE = "1 to 128 letters, digits, underscores, dashes and dots"


class _ToolFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _CustomGrammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    syntax: Literal["lark", "regex"]
    definition: str


class _CustomFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "grammar"]
    grammar: _CustomGrammar | None = None


class _CustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    format: _CustomFormat | None = None


class _ToolName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class _AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


TOOL_SHAPE = Shape(
    frozenset(("type", "function", "custom", "strict")),
    {
        "function": Shape(shape_of(_ToolFunction).known | {"input_schema", "inputSchema", "schema"}),
        "custom": shape_of(_CustomTool),
    },
)
"""It also knows what would be meant and is refused: a true `strict` beside the function, others' `parameters`."""


def parse_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """The tools of a chat.

    Raises `InvalidArgument` for one that is no tool, for too many, and for two of one name; `field` is its path.
    """
    parsed: list[Tool] = []
    for index, members in enumerate(tools or ()):
        kind, tool = _typed_member(members, f"tools[{index}]")
        where = f"tools[{index}].{kind}"
        parsed.append(_custom_tool(tool, where) if kind == "custom" else _function_tool(tool, where))
    if len(parsed) > MAX_TOOLS:
        raise field_error("tools", f": {len(parsed)} are more than the {MAX_TOOLS} there may be")
    names: set[str] = set()
    for index, parsed_tool in enumerate(parsed):
        if parsed_tool.name in names:
            problem = f": another tool has the name '{parsed_tool.name}', too"
            raise field_error(f"tools[{index}].function.name", problem)
        names.add(parsed_tool.name)
    return tuple(parsed)


def _function_tool(members: Mapping[str, Any], where: str) -> Tool:
    function = convert_fields(members, _ToolFunction, where)
    schema = function.parameters or {"properties": {}}
    return _make_tool(where, function.name, function.description, schema, bool(function.strict), "parameters")


def _custom_tool(members: Mapping[str, Any], where: str) -> Tool:
    custom = convert_fields(members, _CustomTool, where)
    form = custom.format or _CustomFormat(type="text")
    if (form.type == "grammar") != (form.grammar is not None):
        raise field_error(f"{where}.format.grammar", "goes with the type 'grammar', and with no other")
    syntax, definition = ("", "") if form.grammar is None else (form.grammar.syntax, form.grammar.definition)
    description = custom_description(custom.description or "", syntax, definition)
    tool = _make_tool(where, custom.name, description, custom_parameters(syntax, definition), True, "format")
    return msgspec.structs.replace(tool, custom=True)


def _make_tool(
    where: str, name: str, description: str | None, schema: Mapping[str, Any], strict: bool, schema_field: str
) -> Tool:
    """A tool of a checked name, whose arguments have a checked `schema`: its path is `schema_field` below `where`."""
    if not _NAME.fullmatch(name):
        raise field_error(f"{where}.name", f"must be {_NAME_RULE}, got {shortened(name)}")
    field = f"{where}.{schema_field}"
    if schema.get("type", "object") != "object":
        raise field_error(field, f"must be the schema of an object, got the type {shortened(schema['type'])}")
    if _deeper_than(schema, _MAX_PARAMETERS_DEPTH):
        raise field_error(field, f"is nested deeper than {_MAX_PARAMETERS_DEPTH} levels")
    text = orjson.dumps({"type": "object", **schema})
    if len(text) > _MAX_PARAMETERS_BYTES:
        raise field_error(field, f"has {len(text)} bytes, more than the {_MAX_PARAMETERS_BYTES} there may be")
    return Tool(name, description or "", text.decode(), strict)


def _deeper_than(value: Any, most: int) -> bool:
    """Whether lists and objects lie in each other more than `most` levels deep."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def unenforced_grammars(tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, ...]:
    """Warnings of custom tools, parsed already, to whose grammar the model is not held."""
    return tuple(
        f"tools[{index}].custom.format: not enforced: a lark grammar; the model is told of it"
        for index, members in enumerate(tools or ())
        if members.get("type") == "custom" and _syntax(members["custom"]) == "lark"
    )


def _syntax(custom: Mapping[str, Any]) -> str:
    grammar = (custom.get("format") or {}).get("grammar") or {}
    return str(grammar.get("syntax", ""))


def parse_tool_use(
    tools: tuple[Tool, ...], choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """Which tools may be called, by the fields `tool_choice` and `parallel_tool_calls`; None where there are no tools.

    Raises `InvalidArgument` for a choice of something else, of a tool that is not there, or without tools.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise field_error("tool_choice", "needs tools")
        return None
    use = ToolUse(tools, parallel=parallel is not False)
    if choice is None:
        return use
    if choice in ("none", "auto", "required"):
        return msgspec.structs.replace(use, choice=choice)
    if isinstance(choice, dict) and (kind := choice.get("type") or "function") in ("function", "custom"):
        name = _tool_name(choice, "tool_choice")
        _check_known({tool.name for tool in use.tools}, name, f"tool_choice.{kind}.name")
        return msgspec.structs.replace(use, choice="required", named=name)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed_use(use, choice)
    problem = f"must be none, auto, required, a function, a custom tool or allowed_tools, got {shortened(choice)}"
    raise field_error("tool_choice", problem)


def _allowed_use(use: ToolUse, choice: Mapping[str, Any]) -> ToolUse:
    """The use of some of the tools, by the JSON of `allowed_tools`."""
    where = "tool_choice.allowed_tools"
    allowed = convert_fields(_member(choice, "allowed_tools", "tool_choice"), _AllowedTools, where)
    if not allowed.tools:
        raise field_error(f"{where}.tools", "must not be empty")
    known = {tool.name for tool in use.tools}
    names = set()
    for index, members in enumerate(allowed.tools):
        name = _tool_name(members, f"{where}.tools[{index}]")
        _check_known(known, name, f"{where}.tools[{index}].function.name")
        names.add(name)
    tools = tuple(tool for tool in use.tools if tool.name in names)
    return msgspec.structs.replace(use, tools=tools, choice=allowed.mode)


def _check_known(known: Set[str], name: str, field: str) -> None:
    if name not in known:
        raise field_error(field, f": there is no tool {shortened(name)}")


def _tool_name(members: Mapping[str, Any], where: str) -> str:
    """The name of a function or a custom tool, from the object at `where` that says nothing else of it."""
    kind, named = _typed_member(members, where)
    return convert_fields(named, _ToolName, f"{where}.{kind}").name


def _typed_member(members: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """The type of the object at `where`, `function` or `custom`, and its one other member, which is called so."""
    kind = "function" if members.get("type") is None else members["type"]
    if kind not in ("function", "custom"):
        raise field_error(f"{where}.type", f"must be 'function', got {shortened(kind)}")
    return kind, _member(members, kind, where)


def _member(members: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """The object at `where` that is the only member beside the type, without its nulls. Others may be null, and
    `strict` false."""
    for other, value in members.items():
        asks = value is not None and not (other == "strict" and value is False)
        if asks and other not in ("type", name):
            raise InvalidArgument(f"unknown field: {where}.{other}", field=f"{where}.{other}")
    member = members.get(name)
    if not isinstance(member, dict):
        raise field_error(f"{where}.{name}", "must be an object")
    return {key: value for key, value in member.items() if value is not None}
