"""Which format a chat template shows, and that what it writes of calls is read again."""

import json

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import ChatMessage, Conversation, Tool, ToolCall, ToolUse
from charonia.tokenization.answers import answer_formats as formats
from charonia.tokenization.answers.answer_formats import AnswerParsers, choose_format
from charonia.tokenization.chat_template import ChatTemplate

AUTO = AnswerParsers()

ARGUMENTS = {"city": 'Zürich "x" <b>\nline', "days": 2, "at": [1.5, {"deep": None}], "fine": True}
SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "at": {"type": "array"},
        "fine": {"type": "boolean"},
    }
}
USE = ToolUse((Tool("weather", parameters=json.dumps(SCHEMA)),))

_EACH = "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
_END = "{% endfor %}{% endfor %}"
_JSON = '{"name": "{{ c.function.name }}", "%s": {{ c.function.arguments | tojson }}}'
TEMPLATES = {
    "hermes": _EACH + "<tool_call>\n" + _JSON % "arguments" + "\n</tool_call>" + _END,
    "qwen3_coder": _EACH
    + "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    + "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    + "</function>\n</tool_call>"
    + _END,
    "llama3_json": _EACH + "{# <|python_tag|> #}" + _JSON % "parameters" + _END,
    "mistral": _EACH + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}" + _END,
    "granite": _EACH + "<|tool_call|>[" + _JSON % "arguments" + "]" + _END,
    "phi4_mini_json": _EACH + "<|tool_call|>[" + _JSON % "arguments" + "]<|/tool_call|>" + _END,
    "deepseek_v3": _EACH
    + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    + "{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    + _END,
    "deepseek_v31": _EACH
    + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    + "{{ c.function.arguments | tojson }}"
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    + _END,
    "glm45": _EACH
    + "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    + "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    + _END,
    "glm47": _EACH
    + "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>"
    + "{# </arg_key><arg_value> #}<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>"
    + _END,
    "minimax_m2": _EACH
    + "{% set begin = '<minimax:tool_call>' %}{{ begin }}\n"
    + '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments | items %}<parameter name="{{ k }}">'
    + "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>"
    + _END,
    "seed_oss": _EACH
    + "<seed:tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    + "<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}"
    + "</function>\n</seed:tool_call>"
    + _END,
    "kimi_k2": _EACH
    + "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.function.name }}:0<|tool_call_argument_begin|>"
    + "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
    + _END,
    "olmo3": _EACH
    + "<function_calls>{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}"
    + "{{ '' if loop.last else ', ' }}{% endfor %})</function_calls>"
    + _END,
    "openai": _EACH
    + "<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>"
    + "{{ c.function.arguments | tojson }}<|call|>"
    + _END,
}


@pytest.mark.parametrize("parser", TEMPLATES)
def test_a_call_that_a_template_writes_is_read_as_the_same_call(parser: str) -> None:
    call = ToolCall("c", "weather", json.dumps(ARGUMENTS))
    source = TEMPLATES[parser]
    text = ChatTemplate(source, {}).render(Conversation((ChatMessage("assistant", "", tool_calls=(call,)),)))
    chosen = choose_format(source, AUTO)
    assert chosen.tools is formats.TOOL_FORMATS[parser] or chosen.tools is formats.PHI_4_TAGS
    reader = chosen.reader(USE)
    assert reader is not None
    delta = reader.push(text, last=True)
    [read] = delta.tool_calls
    assert (read.name, json.loads(read.arguments), delta.text) == ("weather", ARGUMENTS, "")


def test_the_template_s_markers_choose() -> None:
    assert choose_format("", AUTO) == formats.AnswerFormat()
    assert choose_format("<tool_call>", AUTO).tools is None
    assert choose_format("tools <tool_call>", AUTO).tools is formats.HERMES
    assert choose_format("tools [TOOL_CALLS]", AUTO).tools is formats.MISTRAL_LISTS
    assert choose_format("tools [func_name1(params", AUTO).tools is formats.PYTHONIC
    assert choose_format("tools <|python_start|> [func_name1(", AUTO).tools is formats.LLAMA_4
    assert choose_format("tools <|tool_call>", AUTO).tools is formats.GEMMA_4
    assert choose_format("tools List of tools: [", AUTO).tools is formats.LFM_2
    assert choose_format("tools ｜DSML｜", AUTO).tools is formats.DEEPSEEK_V32
    assert choose_format("tools <TOOLCALL>", AUTO).tools is formats.NEMOTRON
    assert choose_format("</think>", AUTO).reasoning is formats.THINK
    assert choose_format("</think> <response>", AUTO).reasoning is formats.ERNIE_THINK


def test_a_model_reasons_by_default_if_its_template_can_switch_that_off_or_a_flag_says_so() -> None:
    assert not choose_format("</think>", AUTO).reasons
    assert choose_format("</think> enable_thinking", AUTO).reasons
    assert choose_format("</seed:think> thinking_budget", AUTO).reasons
    assert choose_format("", AnswerParsers(reasoning="deepseek_r1")).reasons
    assert not choose_format("", AnswerParsers(reasoning="granite")).reasons
    assert choose_format("<|channel|> analysis", AUTO).reasons


def test_gpt_oss_has_one_format_for_both() -> None:
    both = formats.AnswerFormat(formats.HARMONY, formats.HARMONY_ANALYSIS, True)
    for parsers in (AnswerParsers("openai"), AnswerParsers("openai", "none"), AnswerParsers(reasoning="openai_gptoss")):
        assert choose_format("", parsers) == both
    deaf = choose_format("", AnswerParsers("none", "openai_gptoss")).reader(USE)
    assert deaf is not None
    call = "<|channel|>commentary to=functions.weather<|message|>{}<|call|>"
    assert deaf.push(call, last=True).text == "{}"


def test_a_name_decides_and_an_unknown_one_is_refused() -> None:
    chosen = choose_format("tools <tool_call> </think>", AnswerParsers("mistral", "none"))
    assert (chosen.tools, chosen.reasoning) == (formats.MISTRAL, None)
    assert choose_format("tools <tool_call>", AnswerParsers("none")).tools is None
    with pytest.raises(InvalidArgument, match=r"must be one of auto, none, hermes.*did you mean 'hermes'"):
        AnswerParsers("hermse")
    with pytest.raises(InvalidArgument, match="reasoning_parser must be one of"):
        AnswerParsers(reasoning="qwen4000")


def test_no_marker_contains_another() -> None:
    for form in formats.TOOL_FORMATS.values():
        for reasoning in formats.REASONING_FORMATS.values():
            markers = [*form.starts, reasoning.end]
            assert not [(a, b) for a in markers for b in markers if a is not b and a in b]
