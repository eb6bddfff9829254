import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from charonia.core.errors import InvalidArgument
from charonia.core.request import ChatMessage, Conversation, Tool, ToolCall
from charonia.tokenization.chat_template import ChatTemplate, find_templates

HELLO = Conversation((ChatMessage("user", "<héllo>"),))


def render(source: str, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(HELLO)


def test_the_jinja_file_wins_over_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "configured"}')
    assert find_templates(tmp_path) == {"default": "configured"}
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert find_templates(tmp_path) == {"default": "from the file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("with tools")
    assert find_templates(tmp_path) == {"default": "from the file", "tool_use": "with tools"}


def test_of_several_templates_the_default_and_the_one_for_tools_are_taken(tmp_path: Path) -> None:
    names = ("tool_use", "tools"), ("rag", "documents"), ("default", "plain")
    several = json.dumps([{"name": name, "template": template} for name, template in names])
    (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {several}}}')
    assert find_templates(tmp_path) == {"default": "plain", "tool_use": "tools"}
    assert find_templates(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("file", ["processor_config.json", "chat_template.json"])
@pytest.mark.parametrize("processor", ["processor_config.json", "preprocessor_config.json"])
def test_a_processors_template_wins_over_the_tokenizers(tmp_path: Path, file: str, processor: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of the tokenizer"}')
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of a text"}')
    assert find_templates(tmp_path) == {"default": "of the tokenizer"}
    (tmp_path / processor).write_text("{}")
    (tmp_path / file).write_text('{"chat_template": "of the processor"}')
    assert find_templates(tmp_path) == {"default": "of the processor"}
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "with tools"}')
    assert find_templates(tmp_path) == {"default": "of the processor", "tool_use": "with tools"}
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert find_templates(tmp_path) == {"default": "from the file"}
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / file).write_text('{"chat_template": "of the processor, tools too"}')
    assert find_templates(tmp_path) == {"default": "of the processor, tools too"}


def test_a_tokenizers_template_serves_a_processor_without(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of the tokenizer"}')
    assert find_templates(tmp_path) == {"default": "of the tokenizer"}


def test_what_templates_of_the_field_lean_on() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s><héllo>"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<héllo>"}]'
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("{% for i in [1, 2] %}{% break %}{% endfor %}{% generation %}kept{% endgeneration %}") == "kept"
    assert render("{% if tools is none and add_generation_prompt %}\n  yes\n{% endif %}") == "  yes\n"


def test_participants_may_have_names() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.name | default(m.role) }}: {{ m.content }};{% endfor %}", {})
    chat = Conversation((ChatMessage("user", "a", "Ann"), ChatMessage("user", "b")))
    assert template.render(chat) == "Ann: a;user: b;"


QWEN_3 = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ bos_token }}"


def talking(**variables: Any) -> Conversation:
    return Conversation(HELLO.messages, variables)


def test_a_conversation_brings_variables_of_its_own() -> None:
    template = ChatTemplate(QWEN_3, {"bos_token": "<s>"})
    assert template.render(HELLO) == "<s>"
    assert template.render(talking(enable_thinking=True, other=[1, {"a": None}])) == "<s>"
    assert template.render(talking(enable_thinking=False)) == "<think></think><s>"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "chat_template", "self"]
)
def test_what_the_server_sets_is_no_variable_of_a_conversation(name: str) -> None:
    with pytest.raises(InvalidArgument, match="reserved") as refusal:
        ChatTemplate(QWEN_3, {"bos_token": "<s>"}).render(Conversation(HELLO.messages, {name: "<s>"}))
    assert refusal.value.field == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(("source", "value"), [("{{ thing | dictsort }}", 5), ("{{ thing.append(1) }}", [])])
def test_variables_that_a_template_cannot_use_are_the_requests_fault(source: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="chat template"):
        ChatTemplate(source, {}).render(talking(thing=value))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ cycler() }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_whatever_a_template_does_is_the_requests_fault(source: str) -> None:
    with pytest.raises(InvalidArgument, match="chat template") as refusal:
        render(source)
    assert refusal.value.field == "messages"


def test_a_template_that_does_not_compile_fails_the_load() -> None:
    with pytest.raises(InvalidArgument, match="does not compile"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja cannot be read"),
        ("tokenizer_config.json", b'{"chat_template": [1]}', "tokenizer_config.json: chat_template must be"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "tokenizer_config.json: chat_template"),
    ],
)
def test_a_file_that_holds_no_template_is_named(tmp_path: Path, file: str, content: bytes, says: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InvalidArgument, match=says):
        find_templates(tmp_path)


TOOLS = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}
{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}{{ m.thinking }}{{ m.tool_call_id }}
{% for call in m.tool_calls or [] %}{{ call.id }} {{ call.type }} {{ call.function.name }}
{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}{% endfor %}
{% endfor %}"""


def test_tools_calls_and_their_results_are_given_as_templates_expect_them() -> None:
    calls = ToolCall("c1", "weather", '{"city": "Zürich"}'), ToolCall("c2", "weather", "oops")
    messages = (
        ChatMessage("assistant", "", reasoning="hm", tool_calls=calls),
        ChatMessage("tool", "rain", tool_call_id="c1"),
    )
    tool = Tool("weather", "Looks out.", '{"type": "object"}')
    text = ChatTemplate(TOOLS, {}).render(Conversation(messages, tools=(tool, Tool("now", parameters="[1"))))
    assert text == (
        '{"type": "function", "function": {"name": "weather", "description": "Looks out.", '
        '"parameters": {"type": "object"}}}'
        '{"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}'
        'assistant:hmhm\nc1 function weather\n{"city": "Zürich"}c2 function weather\noopstool:rainc1\n'
    )


CALLED = ChatMessage("assistant", "", tool_calls=(ToolCall("c1", "look", "{}"),))


@pytest.mark.parametrize(
    "name", ["message['content']", 'message["content"]', "message.content", "message.get('content')"]
)
@pytest.mark.parametrize("test", ["is not none", "is not  none"])
def test_a_template_that_looks_for_content_finds_none_beside_calls(name: str, test: str) -> None:
    """As that of DeepSeek-R1-Distill."""
    source = f"""{{% for message in messages %}}{{% if {name} {test} %}}[{{{{ {name} }}}}]{{% endif %}}
{{% if {name} is none %}}{{{{ message.tool_calls[0].function.name }}}}{{% endif %}}{{% endfor %}}"""
    asked = ChatMessage("user", "Look."), CALLED
    assert ChatTemplate(source, {}).render(Conversation(asked)) == "[Look.]look"
    said = ChatMessage("user", ""), replace(CALLED, content="I look.")
    assert ChatTemplate(source, {}).render(Conversation(said)) == "[][I look.]"


def test_a_template_that_puts_content_together_with_texts_gets_a_text() -> None:
    source = "{% if tools is none %}{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}{% endif %}"
    assert ChatTemplate(source, {}).render(Conversation((*HELLO.messages, CALLED))) == "user:<héllo>;assistant:;"


LISTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ '<' + part.text + '>' }}{% endif %}{% endfor %}"
    "{% endif %};{% endfor %}"
)
FIRST_OF_SYSTEM = (
    "{% if messages[0].role == 'system' and messages[0].content is not string %}{{ messages[0].content[0].text }};"
    "{% set messages = messages[1:] %}{% endif %}"
) + LISTS
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
IN_JSON = (
    "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is string else m.content | tojson }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        (LISTS, "system:<a><b>;user:<c><d>;assistant:e;"),
        (FIRST_OF_SYSTEM, "system:a\nb;user:<c><d>;assistant:e;"),
        (PLAIN, "system:a\nb;user:c\nd;assistant:e;"),
        (IN_JSON, "system:a\nb;user:c\nd;assistant:e;"),
    ],
)
def test_texts_come_by_themselves_where_a_template_writes_all_of_them(source: str, rendered: str) -> None:
    several = ChatMessage("system", "a\nb", breaks=(1,)), ChatMessage("user", "c\nd", breaks=(1,))
    chat = Conversation((*several, ChatMessage("assistant", "e")))
    assert ChatTemplate(source, {}).render(chat) == rendered


def test_the_message_that_is_continued_is_one_text() -> None:
    messages = ChatMessage("user", "a\nb", breaks=(1,)), ChatMessage("assistant", "c\nd", breaks=(1,))
    chat = Conversation(messages, add_generation_prompt=False, continue_final_message=True)
    assert ChatTemplate(LISTS, {}).render(chat) == "user:<a><b>;assistant:c\nd"


def test_a_template_that_wants_arguments_as_text_gets_them_so() -> None:
    adding = ChatTemplate("{{ '<' + messages[0].tool_calls[0].function.arguments + '>' }}", {})
    calls = (ToolCall("c", "weather", '{"city": "Zürich"}'),)
    assert adding.render(Conversation((ChatMessage("assistant", "", tool_calls=calls),))) == '<{"city": "Zürich"}>'
    with pytest.raises(InvalidArgument, match="do not fit"):
        ChatTemplate("{{ '<' + messages[0].role + 1 }}", {}).render(HELLO)


def test_what_a_request_declares_counts_as_what_a_template_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.tokenization.chat_template.MAX_WORK", 3000)
    long = "x" * 1500
    call = ToolCall("c", "f", json.dumps({"a": long}))
    for message, tools, read in (
        (HELLO.messages[0], (Tool("large", long),), "tools[0].function.description"),
        (ChatMessage("assistant", "", reasoning=long), (), "messages[0].thinking"),
        (ChatMessage("assistant", "", tool_calls=(call,)), (), "messages[0].tool_calls[0].function.arguments.a"),
    ):
        for times, may in ((5, True), (9, False)):
            template = ChatTemplate(f"{{{{ {read} }}}}" * times, {})
            with nullcontext() if may else pytest.raises(InvalidArgument, match="does more than it may"):
                assert len(template.render(Conversation((message,), tools=tools))) == times * len(long)


@pytest.mark.parametrize("levels", [200, 5000])
def test_parameters_that_are_nested_too_deeply_end_no_server(levels: int) -> None:
    deep = Tool("deep", parameters='{"a":' * levels + "1" + "}" * levels)
    template = ChatTemplate("{{ tools | tojson }}", {})
    with nullcontext() if levels > 1000 else pytest.raises(InvalidArgument, match="nests lists more than 100 deep"):
        template.render(Conversation(HELLO.messages, tools=(deep,)))
