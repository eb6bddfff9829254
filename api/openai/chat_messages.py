"""The messages of a chat body become a `Conversation`; its tools, and which of them may be called, a `ToolUse`.

Knows nothing of chat templates, of how a model is told of tools, nor how it writes calls.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from ...core.errors import InvalidArgument
from ...core.request import ChatMessage, Conversation, Tool, ToolCall, ToolUse
from .custom_tools import custom_arguments, custom_description, custom_parameters
from .json_body import NoOpValues, convert_fields, reject_unsupported, shortened
from .known_fields import Shape, ShapeByType, shape_of
from .schemas import ChatBody, TokenizeBody

MAX_TOOLS = 128
"""Tools that a request may name."""

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


class _NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class _AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


def parse_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """The tools of a chat. Raises `InvalidArgument` for one that is no function, or as `make_tool` and `check_tools`
    do."""
    found = []
    for index, members in enumerate(tools or ()):
        where = f"tools[{index}]"
        if members.get("type") == "custom":
            found.append(
                _custom_tool(convert_fields(_member(members, "custom", where), _CustomTool, f"{where}.custom"), where)
            )
            continue
        where = f"{where}.function"
        function = convert_fields(_function_of(members, f"tools[{index}]"), _ToolFunction, where)
        found.append(make_tool(where, function.name, function.description, function.parameters, function.strict))
    return check_tools(found, "tools[{}].function.name")


def _custom_tool(custom: _CustomTool, where: str) -> Tool:
    given = custom.format or _CustomFormat(type="text")
    if (given.type == "grammar") != (given.grammar is not None):
        field = f"{where}.custom.format.grammar"
        raise InvalidArgument(f"{field} goes with the type 'grammar', and with no other", field=field)
    syntax, definition = ("", "") if given.grammar is None else (given.grammar.syntax, given.grammar.definition)
    description = custom_description(custom.description or "", syntax, definition)
    parameters = custom_parameters(syntax, definition)
    tool = make_tool(f"{where}.custom", custom.name, description, parameters, True, "format")
    return msgspec.structs.replace(tool, custom=True)


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


def make_tool(
    where: str,
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
    schema_field: str = "parameters",
) -> Tool:
    """A tool from what a protocol calls it; without `parameters` it takes no arguments.

    Raises `InvalidArgument` for a name with other characters, or parameters that are not an object's schema, too long
    or too deep; `field` is its path below `where`, where the parameters are called `schema_field`.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{where}.name must be {_NAME_RULE}, got {shortened(name)}", field=f"{where}.name")
    field, schema = f"{where}.{schema_field}", parameters or {"properties": {}}
    if schema.get("type", "object") != "object":
        message = f"{field} must be the schema of an object, got the type {shortened(schema['type'])}"
        raise InvalidArgument(message, field=field)
    if _deeper_than(schema, _MAX_PARAMETERS_DEPTH):
        raise InvalidArgument(f"{field} is nested deeper than {_MAX_PARAMETERS_DEPTH} levels", field=field)
    text = orjson.dumps({"type": "object", **schema})
    if len(text) > _MAX_PARAMETERS_BYTES:
        message = f"{field} has {len(text)} bytes, more than the {_MAX_PARAMETERS_BYTES} there may be"
        raise InvalidArgument(message, field=field)
    return Tool(name, description or "", text.decode(), bool(strict))


def check_tools(tools: Sequence[Tool], name_field: str) -> tuple[Tool, ...]:
    """The tools, if they are not too many and no two have one name. Raises `InvalidArgument`; `name_field` has a place
    for the index of a tool."""
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument(f"tools: {len(tools)} are more than the {MAX_TOOLS} there may be", field="tools")
    first: dict[str, int] = {}
    for index, tool in enumerate(tools):
        if (before := first.setdefault(tool.name, index)) != index:
            field = name_field.format(index)
            raise InvalidArgument(f"{field}: tools[{before}] has the name '{tool.name}', too", field=field)
    return tuple(tools)


def parse_tool_use(
    tools: tuple[Tool, ...], choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """Which tools may be called, by the fields `tool_choice` and `parallel_tool_calls`; None where there are no tools.

    Raises `InvalidArgument` for a choice of something else, of a tool that is not there, or without tools.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidArgument("tool_choice needs tools", field="tool_choice")
        return None
    use = ToolUse(tools, parallel=parallel is not False)
    match choice:
        case None:
            return use
        case "none" | "auto" | "required":
            return msgspec.structs.replace(use, choice=choice)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind in ("function", "custom"):
        return named_use(use, _named_function(choice, "tool_choice"), f"tool_choice.{kind}.name")
    if isinstance(choice, dict) and kind == "allowed_tools":
        return _allowed_use(use, choice)
    message = "tool_choice must be none, auto, required, a function, a custom tool or allowed_tools"
    raise InvalidArgument(f"{message}, got {shortened(choice)}", field="tool_choice")


def named_use(use: ToolUse, name: str, field: str) -> ToolUse:
    """The use in which exactly the tool `name` is called. Raises `InvalidArgument`, naming `field`, if none has it."""
    if all(tool.name != name for tool in use.tools):
        raise InvalidArgument(f"{field}: there is no tool {shortened(name)}", field=field)
    return msgspec.structs.replace(use, choice="required", named=name)


def _allowed_use(use: ToolUse, choice: Mapping[str, Any]) -> ToolUse:
    """The use of some of the tools, by the JSON of `allowed_tools`."""
    where = "tool_choice.allowed_tools"
    allowed = convert_fields(_member(choice, "allowed_tools", "tool_choice"), _AllowedTools, where)
    if not allowed.tools:
        raise InvalidArgument(f"{where}.tools must not be empty", field=f"{where}.tools")
    known, names = {tool.name for tool in use.tools}, set()
    for index, members in enumerate(allowed.tools):
        place = f"{where}.tools[{index}]"
        name = _named_function(members, place)
        if name not in known:
            field = f"{place}.function.name"
            raise InvalidArgument(f"{field}: there is no tool {shortened(name)}", field=field)
        names.add(name)
    tools = tuple(tool for tool in use.tools if tool.name in names)
    return msgspec.structs.replace(use, tools=tools, choice=allowed.mode)


def _named_function(members: Mapping[str, Any], where: str) -> str:
    """The name of a function, or of a custom tool."""
    if members.get("type") == "custom":
        return convert_fields(_member(members, "custom", where), _NamedFunction, f"{where}.custom").name
    return convert_fields(_function_of(members, where), _NamedFunction, f"{where}.function").name


def _function_of(members: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The member `function` of an object whose type is that, and which has nothing else."""
    if members.get("type") != "function":
        message = f"{where}.type must be 'function', got {shortened(members.get('type'))}"
        raise InvalidArgument(message, field=f"{where}.type")
    return _member(members, "function", where)


def _member(members: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    for other in members.keys() - {"type", name}:
        raise InvalidArgument(f"unknown field: {where}.{other}", field=f"{where}.{other}")
    found = members.get(name)
    if not isinstance(found, dict):
        raise InvalidArgument(f"{where}.{name} must be an object", field=f"{where}.{name}")
    return found


def _deeper_than(value: Any, most: int) -> bool:
    """Whether lists and objects lie in each other more than `most` levels deep."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


MESSAGE_NO_OP_VALUES: NoOpValues = {
    "type": ("text", "message"),
    "audio": (),
    "function_call": (),
}
"""By the name of an unsupported field of a message: its values that ask for nothing."""

MAX_MESSAGES = 8192
"""Messages that a conversation may have."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ONE_ROLE_ALONE = {
    "tool_calls": "assistant",
    "reasoning": "assistant",
    "reasoning_content": "assistant",
    "refusal": "assistant",
    "tool_call_id": "tool",
}
"""The role whose messages may have a field."""


class _TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str


class _RefusalPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    refusal: str


class _CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class _CustomInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    input: str


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call as answers have it, of a function or of a custom tool; the `index` is that of streamed ones."""

    id: str
    function: _CalledFunction | None = None
    custom: _CustomInput | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


_FIELDS = frozenset(_Message.__struct_fields__)
_PARTS = ShapeByType({"text": shape_of(_TextPart), "refusal": shape_of(_RefusalPart)}, default="text")
MESSAGE_SHAPE = Shape(
    frozenset((*_FIELDS, *MESSAGE_NO_OP_VALUES)),
    {
        "content": _PARTS,
        "tool_calls": shape_of(_Call, {"function": shape_of(_CalledFunction), "custom": shape_of(_CustomInput)}),
    },
)
TOOL_SHAPE = Shape(
    frozenset(("type", "function", "custom", "strict")),
    {
        "function": Shape(shape_of(_ToolFunction).known | {"input_schema", "inputSchema", "schema"}),
        "custom": shape_of(_CustomTool),
    },
)
"""What is known and refused would be meant: `strict` beside the function, and other services' names of `parameters`."""


def parse_messages(
    messages: list[dict[str, Any]], fields: ChatBody | TokenizeBody, tools: tuple[Tool, ...] = ()
) -> Conversation:
    """Check the messages of a body, and how its `fields` want them rendered.

    The prompt ends with the opening of the assistant's turn, unless they say otherwise or let the last message go on.
    Raises `InvalidArgument` for a message that is none, or has what is not supported; `field` is its path.
    """
    if not messages:
        raise InvalidArgument("messages must not be empty", field="messages")
    if len(messages) > MAX_MESSAGES:
        message = f"messages: {len(messages)} are more than the {MAX_MESSAGES} there may be"
        raise InvalidArgument(message, field="messages")
    parsed = tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    check_results(parsed, "messages[{}].tool_call_id")
    continues, opens = bool(fields.continue_final_message), fields.add_generation_prompt
    opens = not continues if opens is None else opens
    variables = fields.template_variables
    return Conversation(parsed, variables, fields.chat_template or "", opens, continues, tools)


def check_results(messages: tuple[ChatMessage, ...], field: str) -> None:
    """Raises `InvalidArgument` for a result of no call that was made before it; `field` has a place for the index of
    its message."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in called:
            where = field.format(index)
            text = f"{where}: no message of the assistant before it has a call {shortened(message.tool_call_id)}"
            raise InvalidArgument(text, field=where)


def _message(where: str, members: Mapping[str, Any]) -> ChatMessage:
    reject_unsupported(members, _FIELDS, MESSAGE_NO_OP_VALUES, f"{where}.")
    role = members.get("role")
    if role not in _ROLES:
        raise InvalidArgument(f"{where}.role must be one of {', '.join(_ROLES)}", field=f"{where}.role")
    for name, owner in _ONE_ROLE_ALONE.items():
        if members.get(name) and role != owner:
            message = f"{where}.{name}: only messages of the role {owner} have one"
            raise InvalidArgument(message, field=f"{where}.{name}")
    given = convert_fields(members, _Message, where)
    if role == "tool" and not given.tool_call_id:
        message = f"{where}.tool_call_id must be the id of the call that this is the result of"
        raise InvalidArgument(message, field=f"{where}.tool_call_id")
    calls, reasoning = _calls(where, given.tool_calls or ()), _reasoning(where, given)
    content = given.refusal if given.content is None else given.content
    content = "" if content is None and (calls or reasoning) else content_text(where, content)
    # Templates know "system"; "developer" is OpenAI's newer word for it.
    role = "system" if role == "developer" else role
    return ChatMessage(role, content, given.name or "", reasoning, calls, given.tool_call_id or "")


def content_text(where: str, content: Any, between: str = "\n") -> str:
    """The text of the `content` of what is at `where`; of its parts with `between`, by default lines as vLLM makes of
    them. Raises `InvalidArgument` if it is none, nor parts of one."""
    if isinstance(content, list):
        return between.join(_part_text(f"{where}.content[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        message = f"{where}.content must be a string or a list of text parts"
        raise InvalidArgument(message, field=f"{where}.content")
    return content


def _calls(where: str, calls: list[_Call] | tuple[()]) -> tuple[ToolCall, ...]:
    return tuple(_called(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls))


def _called(call: _Call, where: str) -> ToolCall:
    if not call.id:
        raise InvalidArgument(f"{where}.id must not be empty", field=f"{where}.id")
    function, custom = call.function, call.custom
    if call.type == "function" and function is not None and custom is None:
        return ToolCall(call.id, function.name, function.arguments)
    if call.type == "custom" and custom is not None and function is None:
        return ToolCall(call.id, custom.name, custom_arguments(custom.input, f"{where}.custom.input"))
    message = f"{where}.{call.type} is missing, or there is the member of another type"
    raise InvalidArgument(message, field=f"{where}.{call.type}")


def _reasoning(where: str, given: _Message) -> str:
    """The reasoning, which vLLM and others call differently; answers have it under both names."""
    one, other = given.reasoning or "", given.reasoning_content or ""
    if one and other and one != other:
        field = f"{where}.reasoning_content"
        raise InvalidArgument(f"{field} is another text than reasoning: give one", field=field)
    return one or other


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return convert_fields(part, _RefusalPart, where).refusal
    if isinstance(part, dict) and part.get("type") not in (None, "text"):
        raise InvalidArgument(f"{where}.type must be 'text', got {shortened(part['type'])}", field=f"{where}.type")
    return convert_fields(part, _TextPart, where).text
