"""The tools of a /v1/responses body, and its choice among them, in the form of a chat's. Knows nothing of models."""

from collections.abc import Sequence
from typing import Any

from .json_body import field_error, shortened
from .known_fields import Shape
from .responses_input import LOCAL_SHELL, JsonObject
from .responses_output import CallKind

_MAX_LISTED_TOOLS = 1024
"""Tools of all types; of functions there may be fewer."""

_CALLED_TYPES = ("function", "custom", "local_shell")
"""Types of tools that a client runs."""

_UNREAD_OF_TOOLS = ("allowed_callers", "defer_loading", "output_schema", "async")
"""Members of tools that change nothing, where the client alone calls them and all are in the prompt."""

FUNCTION_SHAPE = Shape(frozenset(("type", "name", "description", "parameters", "strict", *_UNREAD_OF_TOOLS)))

_LOCAL_SHELL_TOOL: JsonObject = {
    "name": LOCAL_SHELL,
    "description": "Runs a command on the user's machine, and returns what it writes.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    "strict": True,
}


class ToolList:
    """The tools of a body in the form of a chat. Raises `InvalidArgument` for one that cannot be read."""

    def __init__(
        self, tools: Sequence[JsonObject], choice: str | JsonObject | None, parallel_calls: bool | None
    ) -> None:
        self.tools: list[JsonObject] = []
        self.positions: list[int] = []
        """By the place of a tool in `tools`, its place in the body."""
        self.echo: list[JsonObject] = []
        """The tools as the answer repeats them."""
        self.calls: dict[str, CallKind] = {}
        """By the names of tools that are no functions, the types of their calls."""
        self._skipped: dict[str, int] = {}
        if len(tools) > _MAX_LISTED_TOOLS:
            raise field_error("tools", f": {len(tools)} are more than the {_MAX_LISTED_TOOLS} there may be")
        for index, tool in enumerate(tools):
            self._add(tool, index)
        self.choice = self._read_choice(choice)
        self.parallel_calls = parallel_calls if self.tools else None

    @property
    def warnings(self) -> list[str]:
        """The types that were left out since the client does not run them, with the first place of each."""
        skipped = self._skipped.items()
        return [f"tools[{index}]: tools of type {kind} are not served, and left out" for kind, index in skipped]

    @property
    def field_names(self) -> dict[str, str]:
        """The fields of the chat's tools that are called otherwise in the body."""
        names = {"tool_choice.function": "tool_choice", "tool_choice.custom": "tool_choice"}
        names["tool_choice.allowed_tools"] = "tool_choice"
        for index, position in enumerate(self.positions):
            names[f"tools[{index}].custom.format.grammar"] = f"tools[{position}].format"
            for member in (".function", ".custom", ""):
                names[f"tools[{index}]{member}"] = f"tools[{position}]"
        return names

    def _add(self, tool: JsonObject, index: int) -> None:
        kind = tool.get("type", "function")
        match kind:
            case "function":
                unread = ("type", *_UNREAD_OF_TOOLS)
                function = {key: value for key, value in tool.items() if key not in unread and value is not None}
                self.tools.append({"type": "function", "function": function})
                unset = {"type": "function", "parameters": None, "strict": False, "description": None}
                self.echo.append(unset | function)
            case "custom":
                self.tools.append({"type": "custom", "custom": _custom_tool(tool, f"tools[{index}]")})
                self.echo.append(tool)
                if isinstance(tool.get("name"), str):
                    self.calls[tool["name"]] = "custom_tool_call"
            case "local_shell":
                self.tools.append({"type": "function", "function": _LOCAL_SHELL_TOOL})
                self.echo.append(tool)
                self.calls[LOCAL_SHELL] = "local_shell_call"
            case _:
                self._skipped.setdefault(shortened(kind), index)
                return
        self.positions.append(index)

    def _read_choice(self, choice: str | JsonObject | None) -> str | JsonObject | None:
        if isinstance(choice, str) or choice is None:
            return choice if self.tools or choice not in ("auto", "none") else None
        kind = choice.get("type")
        if kind == "allowed_tools":
            allowed: Any = choice.get("tools")
            names = [
                _tool_name({"type": tool["type"], "name": tool.get("name")})
                for tool in (allowed if isinstance(allowed, list) else [])
                if isinstance(tool, dict) and tool.get("type") in _CALLED_TYPES
            ]
            return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": names}}
        if kind in _CALLED_TYPES:
            return _tool_name(choice)
        problem = f"must be {', '.join(_CALLED_TYPES)} or allowed_tools, got {shortened(kind)}"
        raise field_error("tool_choice.type", problem)


def _tool_name(named: JsonObject) -> JsonObject:
    """A chat's way to name a tool."""
    if named["type"] == "local_shell":
        return {"type": "function", "function": {"name": LOCAL_SHELL}}
    return {"type": named["type"], named["type"]: {key: value for key, value in named.items() if key != "type"}}


def _custom_tool(tool: JsonObject, where: str) -> JsonObject:
    """A custom tool as a chat has it: there, what belongs to the grammar stands in a member of its own."""
    custom = {key: tool[key] for key in ("name", "description", "format") if tool.get(key) is not None}
    form = custom.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        custom["format"] = {"type": "grammar", "grammar": {key: text for key, text in form.items() if key != "type"}}
    elif form is not None and not isinstance(form, dict):
        raise field_error(f"{where}.format", "must be an object")
    return custom
