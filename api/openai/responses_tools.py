"""The tools of a /v1/responses body, and its choice among them, in the form of a chat's. Knows nothing of models."""

from collections.abc import Sequence
from typing import Any

from .chat_tools import MAX_TOOLS
from .json_body import field_error, shortened
from .known_fields import Shape, ShapeByType
from .responses_input import LOCAL_SHELL, JsonObject, model_name
from .responses_output import CalledTool

_CALLED_TYPES = ("function", "custom", "local_shell")
"""Types of tools that a client runs."""

_UNREAD_OF_TOOLS = ("allowed_callers", "defer_loading", "output_schema", "async")
"""Members of tools that change nothing, where the client alone calls them and all are in the prompt."""

_FUNCTION_SHAPE = Shape(frozenset(("type", "name", "description", "parameters", "strict", *_UNREAD_OF_TOOLS)))
_NAMESPACE_SHAPE = Shape(
    frozenset(("type", "name", "description", "tools")),
    {"tools": ShapeByType({"function": _FUNCTION_SHAPE}, default="function")},
)
TOOLS_SHAPE = ShapeByType({"function": _FUNCTION_SHAPE, "namespace": _NAMESPACE_SHAPE}, default="function")

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
        self.origins: list[str] = []
        """By the place of a tool in `tools`, its path in the body."""
        self.echo: list[JsonObject] = []
        """The tools as the answer repeats them."""
        self.called: dict[str, CalledTool] = {}
        """By the model's names of tools that are no functions, or are in a namespace, how their calls are shown."""
        self._namespaces: dict[str, list[str]] = {}
        """By the names of namespaces, the model's names of their tools."""
        self._skipped: dict[str, str] = {}
        if len(tools) > MAX_TOOLS:
            raise field_error("tools", f": {len(tools)} are more than the {MAX_TOOLS} there may be")
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]")
        self.choice = self._read_choice(choice)
        self.parallel_calls = parallel_calls if self.tools else None

    @property
    def warnings(self) -> list[str]:
        """The types that were left out since the client does not run them, with the first place of each."""
        skipped = self._skipped.items()
        return [f"{where}: tools of type {kind} are not served, and left out" for kind, where in skipped]

    @property
    def field_names(self) -> dict[str, str]:
        """The fields of the chat's tools that are called otherwise in the body."""
        names = {"tool_choice.function": "tool_choice", "tool_choice.custom": "tool_choice"}
        names["tool_choice.allowed_tools"] = "tool_choice"
        for index, origin in enumerate(self.origins):
            names[f"tools[{index}].custom.format.grammar"] = f"{origin}.format"
            for member in (".function", ".custom", ""):
                names[f"tools[{index}]{member}"] = origin
        return names

    def _add(self, tool: JsonObject, where: str) -> None:
        kind = tool.get("type") or "function"
        match kind:
            case "function":
                unset = {"type": "function", "parameters": None, "strict": False, "description": None}
                self.echo.append(unset | _function_tool(tool))
                self._add_called(kind, tool, where)
            case "custom":
                self._add_called(kind, tool, where)
                self.echo.append(tool)
            case "namespace":
                self._add_namespace(tool, where)
            case "local_shell":
                self.tools.append({"type": "function", "function": _LOCAL_SHELL_TOOL})
                self.origins.append(where)
                self.echo.append(tool)
                self.called[LOCAL_SHELL] = CalledTool("local_shell_call", LOCAL_SHELL)
            case _:
                self._skipped.setdefault(shortened(kind), where)

    def _add_called(self, kind: str, tool: JsonObject, where: str, namespace: str = "") -> None:
        """Add a tool of the type `function` or `custom`."""
        members = _custom_tool(tool, where) if kind == "custom" else _function_tool(tool)
        name = tool.get("name")
        if isinstance(name, str) and (namespace or kind == "custom"):
            members["name"] = model_name(namespace, name)
            call = CalledTool("custom_tool_call" if kind == "custom" else "function_call", name, namespace)
            self.called[members["name"]] = call
            if namespace:
                self._namespaces.setdefault(namespace, []).append(members["name"])
        self.tools.append({"type": kind, kind: members})
        self.origins.append(where)

    def _add_namespace(self, namespace: JsonObject, where: str) -> None:
        """Add the tools of a namespace. What it says of all of them, the first one's description tells the model."""
        name, tools, description = (namespace.get(key) for key in ("name", "tools", "description"))
        if not isinstance(name, str) or not name:
            raise field_error(f"{where}.name", "must be a string, and not empty")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise field_error(f"{where}.tools", "must be a list of tools")
        if not isinstance(description, str | None):
            raise field_error(f"{where}.description", "must be a string")
        shown: list[JsonObject] = []
        self.echo.append(namespace | {"description": description or "", "tools": shown})
        of_all = f"Of all tools whose names begin with {model_name(name, '')}: {description}" if description else ""
        for index, tool in enumerate(tools):
            kind, place = tool.get("type") or "function", f"{where}.tools[{index}]"
            if kind not in ("function", "custom"):
                self._skipped.setdefault(shortened(kind), place)
                continue
            shown.append(tool | {"type": kind})
            if of_all and isinstance(tool.get("description"), str | None):
                tool = tool | {"description": f"{of_all}\n\n{tool.get('description') or ''}".strip()}
                of_all = ""
            self._add_called(kind, tool, place, name)

    def _read_choice(self, choice: str | JsonObject | None) -> str | JsonObject | None:
        if isinstance(choice, str) or choice is None:
            return choice if self.tools or choice not in ("auto", "none") else None
        kind = choice.get("type")
        if kind == "allowed_tools":
            allowed: Any = choice.get("tools")
            entries = [tool for tool in (allowed if isinstance(allowed, list) else []) if isinstance(tool, dict)]
            return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": self._allowed_names(entries)}}
        if kind in _CALLED_TYPES:
            return _tool_name(choice)
        problem = f"must be {', '.join(_CALLED_TYPES)} or allowed_tools, got {shortened(kind)}"
        raise field_error("tool_choice.type", problem)

    def _allowed_names(self, entries: Sequence[JsonObject]) -> list[JsonObject]:
        """A chat's ways to name the tools that the entries of `allowed_tools` allow."""
        names: list[JsonObject] = []
        seen: set[str] = set()
        for tool in entries:
            kind: Any = tool.get("type")
            name: Any = tool.get("name")
            if kind in _CALLED_TYPES:
                names.append(_tool_name({key: tool[key] for key in ("type", "name", "namespace") if key in tool}))
            elif kind == "namespace" and not (isinstance(name, str) and name in self._namespaces):
                names.append({"type": "function", "function": {"name": name}})
            elif kind == "namespace" and name not in seen:
                seen.add(name)
                names += [{"type": "function", "function": {"name": called}} for called in self._namespaces[name]]
        return names


def _tool_name(named: JsonObject) -> JsonObject:
    """A chat's way to name a tool."""
    kind: str = named["type"]
    if kind == "local_shell":
        return {"type": "function", "function": {"name": LOCAL_SHELL}}
    namespace, name = named.get("namespace"), named.get("name")
    members = {key: value for key, value in named.items() if key not in ("type", "namespace")}
    if namespace is not None:
        if not isinstance(namespace, str):
            raise field_error("tool_choice.namespace", "must be a string")
        members["name"] = model_name(namespace, name) if isinstance(name, str) else name
    return {"type": kind, kind: members}


def _function_tool(tool: JsonObject) -> JsonObject:
    unread = ("type", *_UNREAD_OF_TOOLS)
    return {key: value for key, value in tool.items() if key not in unread and value is not None}


def _custom_tool(tool: JsonObject, where: str) -> JsonObject:
    """A custom tool as a chat has it: there, what belongs to the grammar stands in a member of its own."""
    custom = {key: tool[key] for key in ("name", "description", "format") if tool.get(key) is not None}
    form = custom.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        custom["format"] = {"type": "grammar", "grammar": {key: text for key, text in form.items() if key != "type"}}
    elif form is not None and not isinstance(form, dict):
        raise field_error(f"{where}.format", "must be an object")
    return custom
