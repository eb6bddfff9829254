"""Renders conversations by a checkpoint's chat template, as transformers would, in a sandbox. Templates come from the
internet, so they see plain values only."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from msgspec.structs import replace

from ..core.errors import InvalidArgument
from ..core.regular_files import read_text
from ..core.request import ChatMessage, Conversation, Tool, ToolCall
from .checkpoint_files import read_json
from .gguf_file import GgufFile, read_gguf
from .media_text import MediaText, check_texts, message_parts, text_with_tokens
from .mistral_template import mistral_template
from .tekken_file import TEKKEN_FILE, read_tekken_file
from .template_sandbox import MAX_PYTHON, TemplateSandbox, metered
from .template_work import MAX_WORK, TIME_FUNCTION, TemplateLimitExceeded, WorkMeter

DEFAULT = "default"
TOOL_USE = "tool_use"
_FILES = {DEFAULT: "chat_template.jinja", TOOL_USE: "additional_chat_templates/tool_use.jinja"}
_PROCESSORS_TEMPLATES = ("processor_config.json", "chat_template.json")
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""The files one of which a checkpoint that sees or hears has."""
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
_PROBE = "charonia-probe"
_PART_MARKS = ("'type'", '"type"', ".type")
"""Texts one of which a template that looks for parts has."""
_TEST_OF_NONE = re.compile(r"""content['")\]]*\s+is\s+(not\s+)?none""")
"""What a template has that looks whether a message has content: an empty text counts as such there."""
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
        self._roles_of_texts: dict[str, bool] = {}
        self._tests_none = bool(_TEST_OF_NONE.search(source))
        try:
            self._template = template_environment().compiled(source, inf if field is None else MAX_PYTHON)
        except Exception as error:  # of jinja, and of Python, which has limits of its own for what jinja makes of it
            raise InvalidArgument(f"{self._name} does not compile: {error}", field=field) from error

    @cached_property
    def takes_text(self) -> bool:
        """Whether the content of a message may be a text."""
        return _PROBE in self._try(_PROBE)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the content of a message may be a list of parts, images among them. A template that does not know
        them writes the list as Python does, or fails."""
        text = {"type": "text", "text": _PROBE}
        alone, after_image = self._try([text]), self._try([{"type": "image"}, text])
        return all(_PROBE in prompt and "'type'" not in prompt for prompt in (alone, after_image)) and (
            alone != after_image
        )

    def _takes_texts(self, role: str) -> bool:
        """Whether the content of a message of that role may be a list of several texts, of which none is lost."""
        if role not in self._roles_of_texts:
            texts = f"{_PROBE}-1", f"{_PROBE}-2"
            prompt = self._try([{"type": "text", "text": text} for text in texts], role)
            is_listed = "'type'" in prompt or '"type"' in prompt
            self._roles_of_texts[role] = not is_listed and all(text in prompt for text in texts)
        return self._roles_of_texts[role]

    def _try(self, content: Any, role: str = "user") -> str:
        """The prompt of a message with such a content; empty if the template refuses it."""
        variables = self._tokens | {"tools": None, "documents": None, "add_generation_prompt": True}
        turns = [{"role": role, "content": content}]
        if role != "user":
            other = {"role": "user", "content": "x" if self.takes_text else [{"type": "text", "text": "x"}]}
            turns = [*turns, other] if role == "system" else [other, *turns]
        try:
            with metered(WorkMeter(MAX_WORK)):
                return self._template.render(variables, messages=turns)
        except (TemplateLimitExceeded, *ENVIRONMENT_FAULTS):
            return ""

    def render(self, conversation: Conversation, media: MediaText | None = None) -> str:
        """The prompt of a conversation, up to the assistant's next turn or within its last one, with the `media`'s one
        token for each of them.

        Raises `InvalidArgument` by `field`: messages that the template refuses or that can't be continued, the template
        itself for too much work, chat_template_kwargs.NAME for a reserved name.
        """
        if media is not None:
            check_texts(conversation, media)
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
            text = self._render_turns(conversation, {**conversation.variables, **variables}, media)
        except TemplateLimitExceeded as error:
            raise InvalidArgument(f"{self._name} does more than it may: {error}", field=self._field) from error
        except ENVIRONMENT_FAULTS as error:
            raise InvalidArgument(f"messages do not fit {self._name}: {error}", field="messages") from error
        return self._unfinished(text, conversation.messages[-1]) if conversation.continue_final_message else text

    def _render_turns(self, conversation: Conversation, variables: Mapping[str, Any], media: MediaText | None) -> str:
        messages = conversation.messages
        if conversation.continue_final_message:  # what is to be continued is one text
            messages = *messages[:-1], replace(messages[-1], breaks=())
            conversation = replace(conversation, messages=messages)
        has_parts, tests_none = self._has_parts(messages), self._tests_none
        turns = partial(_turns, conversation, has_parts=has_parts, media=media, tests_none=tests_none)
        size = sum(map(_message_size, messages)) + sum(map(_tool_size, conversation.tools))
        with metered(WorkMeter(MAX_WORK + _EACH * size)):
            try:
                return self._template.render(variables, messages=turns(dict))
            except TypeError:
                if not any(message.tool_calls for message in messages):
                    raise
                # DeepSeek's templates put the arguments of calls together with texts.
                return self._template.render(variables, messages=turns(str))

    def _has_parts(self, messages: Sequence[ChatMessage]) -> Callable[[ChatMessage], bool]:
        """Tells of a message whether its content goes to the template as a list of parts: those with media or several
        texts do, and all where the template takes no texts."""
        takes_media = any(message.media for message in messages) and self.takes_parts
        knows_parts = takes_media or any(mark in self.source for mark in _PART_MARKS)
        if knows_parts and not self.takes_text and self.takes_parts:
            return lambda _: True
        return lambda message: (
            takes_media if message.media else bool(message.breaks) and self._takes_texts(message.role)
        )

    def _unfinished(self, text: str, last: ChatMessage) -> str:
        """The text up to the end of its last message, without the final space if the template drops that."""
        beginning, end, _ = text.rpartition(_END.rstrip())
        if not end or last.content.strip() not in beginning:
            field = "continue_final_message"
            raise InvalidArgument(f"{field}: {self._name} does not write the last message as it is", field=field)
        return beginning if text.startswith(_END, len(beginning)) else beginning.rstrip()


def _turns(
    conversation: Conversation,
    arguments: type[dict[str, Any]] | type[str],
    has_parts: Callable[[ChatMessage], bool],
    media: MediaText | None,
    tests_none: bool,
) -> list[dict[str, Any]]:
    """The messages as templates expect them; the arguments of calls are objects or texts. `tests_none`: a message of
    calls alone has None for its content."""
    turns = [_turn(message, arguments, has_parts(message), media, tests_none) for message in conversation.messages]
    if conversation.continue_final_message:
        _mark_end(turns[-1])
    return turns


def _mark_end(turn: dict[str, Any]) -> None:
    content = turn["content"]
    if isinstance(content, str):
        turn["content"] += _END
    elif content and content[-1]["type"] == "text":
        content[-1]["text"] += _END
    else:
        content.append({"type": "text", "text": _END})


def _turn(
    message: ChatMessage,
    arguments: type[dict[str, Any]] | type[str],
    has_parts: bool,
    media: MediaText | None,
    tests_none: bool,
) -> dict[str, Any]:
    content: str | list[dict[str, Any]] | None = message.content
    if tests_none and message.tool_calls and not (message.content or message.media):
        content = None
    elif has_parts:
        content = message_parts(message)
    elif message.media:
        content = text_with_tokens(message, {} if media is None else media.tokens)
    turn: dict[str, Any] = {"role": message.role, "content": content}
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
    "tool_use". Template files come first, then the processor's, where there is one, then tokenizer_config.json, then
    chat_template.json; a GGUF file has them in its metadata, a tekken.json means one. Raises `InvalidArgument` for a
    wrong one."""
    if directory.is_file():
        return _gguf_templates(read_gguf(directory))
    sources = _configured_templates(directory / "tokenizer_config.json")
    files = [directory / name for name in _PROCESSORS_TEMPLATES]
    processors = next(filter(None, map(_configured_templates, files)), {})
    has_processor = any((directory / name).is_file() for name in _PROCESSORS)
    if processors and has_processor and not (directory / _FILES[DEFAULT]).is_file():
        # A tokenizer's template may know tools where a processor's knows media: it takes those as their tokens.
        own = sources.get(TOOL_USE) or sources.get(DEFAULT, "")
        tool_use = {TOOL_USE: own} if "tools" in own and "tools" not in processors.get(DEFAULT, "") else {}
        sources = processors | tool_use
    sources = sources or processors
    for name, file in _FILES.items():
        if (directory / file).is_file():
            try:
                sources[name] = read_text(directory / file)
            except (OSError, ValueError) as error:
                raise InvalidArgument(f"{directory / file} cannot be read: {error}") from error
    if not sources and (directory / TEKKEN_FILE).is_file() and not (directory / "tokenizer.json").is_file():
        tekken = read_tekken_file(directory)
        if source := mistral_template(tekken.config.version, tekken.special):
            sources = {DEFAULT: source}
    return {name: sources[name] for name in _FILES if name in sources}


def _configured_templates(file: Path) -> dict[str, str]:
    """The chat templates in a JSON file, by name."""
    configured = read_json(file).get("chat_template")
    if isinstance(configured, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in configured}
        except (TypeError, LookupError) as error:
            message = f"{file}: chat_template must be a text, or objects with name and template"
            raise InvalidArgument(message) from error
    return {DEFAULT: configured} if configured and isinstance(configured, str) else {}


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
