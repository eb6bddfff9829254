"""Renders conversations by a checkpoint's chat template, as transformers would, in a sandbox. Templates come from the
internet, so they see plain values only."""

import json
from collections.abc import Mapping
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from ..core.errors import InvalidArgument
from ..core.regular_files import read_text
from ..core.request import ChatMessage, Conversation, Tool, ToolCall
from .checkpoint_files import read_json
from .gguf_file import GgufFile, read_gguf
from .template_sandbox import MAX_PYTHON, TemplateSandbox, metered
from .template_work import MAX_WORK, TIME_FUNCTION, TemplateLimitExceeded, WorkMeter

DEFAULT = "default"
TOOL_USE = "tool_use"
_FILES = {DEFAULT: "chat_template.jinja", TOOL_USE: "additional_chat_templates/tool_use.jinja"}
_RESERVED = frozenset({"chat_template", "continue_final_message", "conversation", "self", "tokenize"})
"""Names of variables with another meaning in transformers or jinja2."""
ENVIRONMENT_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,  # of `cycler()`, and recursion
)
"""The errors of a template with messages that it was not made for."""
_EACH = 4
"""The work for each character of the messages, on top of a fixed allowance."""
_END = "CHARONIA-FINAL-MESSAGE-ENDS "
"""Appended to a message that is to be continued, to find its end in the text. A template that trims messages removes
the space."""


class ChatTemplate:
    """A compiled template with the special tokens that it may name, such as `bos_token`. `whose` names it in errors;
    `field` is that of a request that brought it. Raises `InvalidArgument` if it does not compile."""

    def __init__(
        self, source: str, tokens: Mapping[str, str], whose: str = "the model's", field: str | None = None
    ) -> None:
        self.source = source
        self._tokens = dict(tokens)
        self._name = f"{whose} chat template"
        self._field = field or "messages"
        try:
            self._template = template_environment().compiled(source, inf if field is None else MAX_PYTHON)
        except Exception as error:  # of jinja, and of Python, which has limits of its own for what jinja makes of it
            raise InvalidArgument(f"{self._name} does not compile: {error}", field=field) from error

    def render(self, conversation: Conversation) -> str:
        """The prompt of a conversation, up to the assistant's next turn or within its last one.

        Raises `InvalidArgument` by `field`: messages that the template refuses or that can't be continued, the template
        itself for too much work, chat_template_kwargs.NAME for a reserved name.
        """
        variables = self._tokens | {
            "messages": [],
            "tools": [_declaration(tool) for tool in conversation.tools] or None,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        for name in conversation.variables:
            if name in _RESERVED or name in variables:
                field = f"chat_template_kwargs.{name}"
                raise InvalidArgument(f"{field}: the name is reserved", field=field)
        try:
            text = self._render_turns(conversation, {**conversation.variables, **variables})
        except TemplateLimitExceeded as error:
            raise InvalidArgument(f"{self._name} does more than it may: {error}", field=self._field) from error
        except ENVIRONMENT_FAULTS as error:
            raise InvalidArgument(f"messages do not fit {self._name}: {error}", field="messages") from error
        return self._unfinished(text, conversation.messages[-1]) if conversation.continue_final_message else text

    def _render_turns(self, conversation: Conversation, variables: Mapping[str, Any]) -> str:
        messages = conversation.messages
        size = sum(map(_message_size, messages)) + sum(map(_tool_size, conversation.tools))
        with metered(WorkMeter(MAX_WORK + _EACH * size)):
            try:
                return self._template.render(variables, messages=_turns(conversation, dict))
            except TypeError:
                if not any(message.tool_calls for message in messages):
                    raise
                # DeepSeek's templates put the arguments of calls together with texts.
                return self._template.render(variables, messages=_turns(conversation, str))

    def _unfinished(self, text: str, last: ChatMessage) -> str:
        """The text up to the end of its last message, without the final space if the template drops that."""
        beginning, end, _ = text.rpartition(_END.rstrip())
        if not end or last.content.strip() not in beginning:
            field = "continue_final_message"
            raise InvalidArgument(f"{field}: {self._name} does not write the last message as it is", field=field)
        return beginning if text.startswith(_END, len(beginning)) else beginning.rstrip()


def _turns(conversation: Conversation, arguments: type[dict[str, Any]] | type[str]) -> list[dict[str, Any]]:
    """The messages as templates expect them; the arguments of calls are objects or texts."""
    turns = [_turn(message, arguments) for message in conversation.messages]
    if conversation.continue_final_message:
        turns[-1]["content"] += _END
    return turns


def _turn(message: ChatMessage, arguments: type[dict[str, Any]] | type[str]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        turn["name"] = message.name
    if message.reasoning:  # Qwen's and DeepSeek's name, and gpt-oss's
        turn |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, arguments)},
            }
            for call in message.tool_calls
        ]
    return turn | {"tool_call_id": message.tool_call_id} if message.tool_call_id else turn


def _arguments(call: ToolCall, kind: type[dict[str, Any]] | type[str]) -> Any:
    return call.arguments if kind is str else _parsed(call.arguments, call.arguments)


def _declaration(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI declares it."""
    function = {"name": tool.name, "description": tool.description, "parameters": _parsed(tool.parameters, {})}
    return {"type": "function", "function": function}


def _parsed(text: str, otherwise: Any) -> Any:
    """The JSON object in `text`, or `otherwise`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
    return value if isinstance(value, dict) else otherwise


def _message_size(message: ChatMessage) -> int:
    calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning) + calls


def _tool_size(tool: Tool) -> int:
    return len(tool.name) + len(tool.description) + len(tool.parameters)


def read_template(template: str) -> str:
    """The source of a template that is given as such or as the name of a file. Raises `InvalidArgument` if the file
    can't be read."""
    if set("{}\n") & set(template):
        return template
    try:
        return read_text(Path(template).expanduser())
    except (OSError, ValueError, InvalidArgument) as error:
        field = "chat_template"
        message = f"{field}: {template!r} is neither a template nor a file that can be read: {error}"
        raise InvalidArgument(message, field=field) from None


def find_templates(directory: Path) -> dict[str, str]:
    """The sources of a checkpoint's chat templates by name: "default" and, if conversations with tools have their own,
    "tool_use". Template files come first, then tokenizer_config.json, then chat_template.json; a GGUF file has them in
    its metadata. Raises `InvalidArgument` for a wrong one."""
    if directory.is_file():
        return _gguf_templates(read_gguf(directory))
    files = (read_json(directory / name) for name in ("tokenizer_config.json", "chat_template.json"))
    configured = next(filter(None, (file.get("chat_template") for file in files)), None)
    sources: dict[str, str] = {}
    if isinstance(configured, list):
        try:
            sources = {str(entry["name"]): str(entry["template"]) for entry in configured}
        except (TypeError, LookupError) as error:
            where = directory / "tokenizer_config.json"
            message = f"{where}: chat_template must be a text, or objects with name and template"
            raise InvalidArgument(message) from error
    elif isinstance(configured, str):
        sources = {DEFAULT: configured}
    for name, file in _FILES.items():
        if (directory / file).is_file():
            try:
                sources[name] = read_text(directory / file)
            except (OSError, ValueError) as error:
                raise InvalidArgument(f"{directory / file} cannot be read: {error}") from error
    return {name: sources[name] for name in _FILES if name in sources}


def _gguf_templates(file: GgufFile) -> dict[str, str]:
    keys = {DEFAULT: "tokenizer.chat_template", TOOL_USE: f"tokenizer.chat_template.{TOOL_USE}"}
    return {name: file.text(key) for name, key in keys.items() if key in file.metadata}


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def template_environment() -> TemplateSandbox:
    environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals[TIME_FUNCTION] = strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter would escape HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
