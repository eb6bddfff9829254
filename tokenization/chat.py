"""Renders conversations by a checkpoint's chat template, as transformers would, in a sandbox.

Knows nothing of token ids: messages in, text out. Templates come from the internet: they see plain strings only.
"""

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..core.errors import InvalidArgument
from ..core.request import Conversation, Message
from .files import read_json

_RESERVED = frozenset({"chat_template", "continue_final_message", "conversation", "self", "tokenize"})
"""Names besides those a template is given that mean something else to transformers or jinja2."""
_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What a template may raise that meets words it was not made for."""


class ChatTemplate:
    """A compiled template. `tokens` are the special tokens it may name, `bos_token` and so on."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise InvalidArgument(f"the model's chat template does not compile: {error}") from error

    def render(self, conversation: Conversation, add_generation_prompt: bool = True) -> str:
        """The prompt these messages make, ready for the assistant's next turn.

        Raises:
            InvalidArgument: the template refuses them (`field` is messages), or a variable has a name that is taken
                (`field` is chat_template_kwargs and the name).
        """
        given = self._tokens | {
            "messages": [_turn(message) for message in conversation.messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        _refuse_taken(conversation.variables, _RESERVED | given.keys())
        try:
            return self._template.render({**conversation.variables, **given})
        except _FAULTS as error:
            raise InvalidArgument(
                f"messages do not fit the model's chat template: {error}", field="messages"
            ) from error


def _refuse_taken(variables: Mapping[str, Any], taken: AbstractSet[str]) -> None:
    for name in variables:
        if name in taken:
            field = f"chat_template_kwargs.{name}"
            raise InvalidArgument(f"{field}: the name is reserved", field=field)


def _turn(message: Message) -> dict[str, str]:
    turn = {"role": message.role, "content": message.content}
    return turn | {"name": message.name} if message.name else turn


def find_template(directory: Path) -> str | None:
    """The source of a checkpoint's default chat template: the .jinja file, else tokenizer_config.json's, else that of
    models which take images too."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    files = (read_json(directory / name) for name in ("tokenizer_config.json", "chat_template.json"))
    configured = next(filter(None, (file.get("chat_template") for file in files)), None)
    if isinstance(configured, list):
        return {entry["name"]: str(entry["template"]) for entry in configured}.get("default")
    return configured if isinstance(configured, str) else None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
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


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
