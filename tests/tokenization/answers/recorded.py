"""Answers of models in each format, written after the formats' specifications, and what is to be read of them.

Of each: the parser's name, the text, then content, reasoning and calls. Those of `WELL_FORMED` a grammar accepts, too.
"""

from typing import NamedTuple

from charonia.core.request import Tool, ToolUse

WEATHER = """{"type": "object", "properties": {
  "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]},
  "precise": {"type": "boolean"}, "at": {"type": "array", "items": {"type": "number"}},
  "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "extra": {"$ref": "#/$defs/extra"}},
  "required": ["city"], "$defs": {"extra": {"type": "object", "properties": {"deep": {"type": "string"}}}}}"""
USE = ToolUse((Tool("get_weather", "Weather of a city.", WEATHER), Tool("now"), Tool("now_utc")))


class Call(NamedTuple):
    name: str
    arguments: str


class Answer(NamedTuple):
    """An answer by the format's name, and what is in it. `reasoning_parser`, `inside`: see `AnswerFormat`."""

    parser: str
    text: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    reasoning_parser: str = "none"
    inside: bool = False


def weather(arguments: str) -> Call:
    return Call("get_weather", arguments)


ZURICH = weather('{"city": "Zürich", "days": 2}')
NOW = Call("now", "{}")
ESCAPED = weather(r'{"city": "a\"b\\c\u00e9\nd", "at": [1, -2.5e3, []], "extra": {"deep": null}}')

WELL_FORMED = (
    Answer(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>',
        "",
        (ZURICH,),
    ),
    Answer(
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>',
        "",
        (NOW, ZURICH),
    ),
    Answer(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<pa"
        "rameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        (ZURICH,),
    ),
    Answer("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", (NOW,)),
    Answer("llama3_json", '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}', "", (ZURICH,)),
    Answer("pythonic", '[get_weather(city="Zürich", days=2), now()]', "", (ZURICH, NOW)),
    Answer("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 2}', "", (ZURICH,)),
    Answer(
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 2}[TOOL_CALLS]now[ARGS]{}',
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:2}<end_function_call>",
        "",
        (weather('{"city":"Zürich","days":2}'),),
    ),
    Answer(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,at:[1,2],extra:{deep:<|"|>a{b"c<|"|>}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "",
        (weather('{"city":"Zürich","at":[1,2],"extra":{"deep":"a{b\\"c"}}'), NOW),
    ),
    Answer(
        "phi4_mini_json",
        'functools[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}, {'
        '"name": "now", "arguments": {}}]',
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}'
        '}, {"name": "now", "arguments": {}}]',
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Zürich", "days": 2}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich",'
        ' "days": 2}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        "",
        (ZURICH,),
    ),
    Answer(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Zü</b>\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "",
        (weather('{"city": "Zü</b>\\n", "days": 2}'), NOW),
    ),
    Answer(
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "",
        (NOW,),
    ),
    Answer(
        "kimi_k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": '
        '"Zürich", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "olmo3",
        '<function_calls>get_weather(city="Zürich", days=2, precise=true)\nnow()</function_calls>',
        "",
        (weather('{"city": "Zürich", "days": 2, "precise": true}'), NOW),
    ),
    Answer(
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Zürich", days=2), now()]<|tool_call_end|>',
        "",
        (ZURICH, NOW),
    ),
    Answer(
        "nemotron_json",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]</TOOLCALL>',
        "",
        (ZURICH,),
    ),
    Answer(
        "openai",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Zürich", "days": 2}<|call|>',
        "",
        (ZURICH,),
        reasoning_parser="openai_gptoss",
    ),
)

OTHERS = (
    # Content around calls, reasoning before them, and calls whose parts stand close.
    Answer(
        "hermes",
        'Let me see.\n<tool_call>{"name":"now"}</tool_call><tool_call>{"name": "now", "ar'
        'guments": null}</tool_call>\n Bye.',
        "Let me see.\nBye.",
        (NOW, NOW),
    ),
    Answer(
        "hermes",
        '<think>\nHm <b>?\n</think>\n\nYes.<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Yes.",
        (NOW,),
        "Hm <b>?\n",
        "qwen3",
    ),
    Answer("hermes", 'why</think><tool_call>{"name": "now"}</tool_call>', "", (NOW,), "why", "qwen3", True),
    Answer("hermes", 'why<tool_call>{"name": "now"}</tool_call>so', "so", (NOW,), "why", "qwen3", True),
    Answer("hermes", "why <tool_call> not</think>ok", "ok", (), "why <tool_call> not", "qwen3", True),
    Answer("hermes", "\n\n<think>a</think>b<think>c</think>", "b<think>c</think>", (), "a", "qwen3"),
    Answer("hermes", "\n<think>\nwhy</think>so", "so", (), "why", "qwen3", True),
    Answer("hermes", "a </thin", "", (), "a </thin", "deepseek_r1", True),
    Answer("none", "\n\nplain <think> text", "\n\nplain <think> text", (), "", "qwen3"),
    # What is no call is content.
    Answer(
        "hermes",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    ),
    Answer("hermes", '<tool_call>{"name": "no', '<tool_call>{"name": "no'),
    Answer("hermes", '<tool_call>{"name": "nowhere", "a": 1}', '<tool_call>{"name": "nowhere", "a": 1}'),
    Answer("hermes", "<tool_call>now()</tool_call> <tool_", "<tool_call>now()</tool_call> <tool_"),
    Answer("hermes", '<tool_call> <tool_call>{"name":"now"}</tool_call>', "<tool_call> ", (NOW,)),
    Answer("hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>"),
    Answer(
        "hermes",
        '<tool_call>{"name":"now","arguments":[]}</tool_call>',
        '<tool_call>{"name":"now","arguments":[]}</tool_call>',
    ),
    Answer("hermes", '<tool_call>{"name": {"a": 1}}</tool_call>', '<tool_call>{"name": {"a": 1}}</tool_call>'),
    # What breaks off, or is nearly right.
    Answer(
        "hermes",
        '<tool_call>{"name":"now","arguments":{"a":tru}}</tool_call>',
        "tru}}</tool_call>",
        (Call("now", '{"a":'),),
    ),
    Answer("hermes", '<tool_call>{"name":"now","arguments":{"a":"b\\', "", (Call("now", '{"a":"b\\\\'),)),
    Answer(
        "hermes",
        '<tool_call>{"arguments": {"x": [1, {}]}, "id": 7, "name": "now"}</tool_call>',
        "",
        (Call("now", '{"x": [1, {}]}'),),
    ),
    Answer(
        "hermes", '<tool_call>{"name":"now","arguments":{"a":"x\ny\t\\d"}}', "", (Call("now", '{"a":"x\\ny\\t\\\\d"}'),)
    ),
    Answer("hermes", '<tool_call>{"name":"now","arguments":{}} and</tool_call>', "and</tool_call>", (NOW,)),
    Answer(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": ' + ESCAPED.arguments + "}</tool_call>",
        "",
        (ESCAPED,),
    ),
    Answer(
        "hermes", '<tool_call>[{"name": "now"}, {"name": "rm"}]</tool_call>', ', {"name": "rm"}]</tool_call>', (NOW,)
    ),
    Answer("hermes", '<tool_call>{"name": "\\u006eow"}</tool_call>', "", (NOW,)),
    # Values without types, by the tool's schema.
    Answer(
        "qwen3_coder",
        "I do.<function=get_weather><parameter=city>\n12\n\n</parameter><parameter=days>1"
        ".5</parameter><parameter=precise>True"
        '</parameter><parameter=note>null</parameter><parameter=extra>\n{"deep": 1}\n</parameter><parameter=odd>x"y'
        "</parameter></function>",
        "I do.",
        (
            weather(
                '{"city": "12\\n", "days": "1.5", "precise": true, "note": null, "extra": {"deep": 1}, "odd": "x\\"y"}'
            ),
        ),
    ),
    Answer(
        "qwen3_xml",
        "<tool_call><function=now></function><function=now>\n</function></tool_call>\n<tool_call>\n<function=rm>",
        "<tool_call>\n<function=rm>",
        (NOW, NOW),
    ),
    Answer("qwen3_coder", "<tool_call><function=get_weather><parameter=city>a<", "", (weather('{"city": "a<"}'),)),
    Answer("qwen3_coder", "<tool_call><function=now><parameter=a>1</parameter>", "", (Call("now", '{"a": 1}'),)),
    Answer("qwen3_coder", "<function=now><parameter=a>1</parameter>so", "so", (Call("now", '{"a": 1'),)),
    Answer("qwen3_coder", "<tool_call><function=now> what", "<tool_call><function=now> what"),
    # Values that are not on lines of their own keep their line breaks.
    Answer(
        "minimax_m2",
        '<think>I\n</think>\n\nSo:\n<minimax:tool_call><invoke name="get_weather"><parameter name="city">\n1\n'
        '</parameter><parameter name="at">[1,\n2]</parameter><parameter name="note">null</parameter></invoke>'
        "</minimax:tool_call> ok",
        "So:\nok",
        (weather('{"city": "\\n1\\n", "at": [1,\n2], "note": null}'),),
        "I\n",
        "minimax_m2",
    ),
    Answer("minimax_m2", '<invoke name="now"></invoke>', '<invoke name="now"></invoke>'),
    Answer(
        "minimax_m2",
        '<minimax:tool_call><invoke name="rm"></invoke>',
        '<minimax:tool_call><invoke name="rm"></invoke>',
    ),
    Answer("glm45", "<tool_call>rm</tool_call>", "<tool_call>rm</tool_call>"),
    Answer("glm45", '<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>'),
    Answer(
        "glm47",
        "<tool_call>now<arg_key>a</arg_key><arg_value>[1]</arg_value>",
        "",
        (Call("now", '{"a": [1]}'),),
    ),
    # Tags that are left out: a value ends before the next tag that begins a line.
    Answer(
        "qwen3_coder",
        "<tool_call><function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n5\n</parameter></function></tool_call>",
        "",
        (weather('{"city": "Paris", "days": 5}'),),
    ),
    Answer(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n5\n<parameter=city>\nParis\n\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\nok",
        "ok",
        (weather('{"days": 5, "city": "Paris\\n"}'), NOW),
    ),
    Answer(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=note>\n<parameter=city>\nParis\n</tool_call>ok",
        "ok",
        (weather('{"note": "", "city": "Paris"}'),),
    ),
    Answer(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nlike <parameter=a>\n </function> </tool_call>"
        "\n</parameter>\n</function>",
        "",
        (weather('{"city": "like <parameter=a>\\n </function> </tool_call>"}'),),
    ),
    Answer(
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris\n<parameter=days>5\n</function>\n</seed:tool_call>",
        "",
        (weather('{"city": "Paris", "days": 5}'),),
    ),
    Answer(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris\n'
        '<parameter name="days">5\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        (weather('{"city": "Paris", "days": 5}'), NOW),
    ),
    Answer(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">P'
        'aris\n<｜DSML｜parameter name="days" string="false">5\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "",
        (weather('{"city": "Paris", "days": 5}'),),
    ),
    Answer(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n<arg_key>days</arg_key>\n5\n</tool_call>",
        "",
        (weather('{"city": "Paris", "days": 5}'),),
    ),
    Answer(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key>Paris</arg_value></tool_call>",
        "",
        (weather('{"city": "Paris"}'),),
    ),
    Answer("glm45", "<tool_call>now\n<arg_key>a</arg_key>so<arg_key>b", "", (Call("now", '{"a": "so<arg_key>b"}'),)),
    Answer("glm45", "<tool_call>now\n<arg_key>b<", "<arg_key>b<", (Call("now", "{"),)),
    Answer(
        "seed_oss",
        "<seed:think>hm</seed:think>\n<seed:tool_call><function=now></function></seed:tool_call>",
        "",
        (NOW,),
        "hm",
        "seed_oss",
    ),
    Answer(
        "ernie45",
        "hm\n</think>\n\n<response>\nI look.\n</response>\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "I look.",
        (NOW,),
        "hm\n",
        "ernie45",
        True,
    ),
    Answer("ernie45", "a\n</response", "a\n</response", (), "", "ernie45"),
    Answer(
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="now">{"a": 1}</｜DSML｜invoke>',
        "",
        (Call("now", '{"a": 1}'),),
    ),
    Answer(
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="now"><｜DSML｜parameter name="a">1',
        '<｜DSML｜parameter name="a">1',
        (Call("now", "{"),),
    ),
    Answer("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now:0 {}<|tool_call_end|>", "", (NOW,)),
    Answer("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now{}", "", (NOW,)),
    Answer(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|",
    ),
    Answer("olmo3", "Hm.<function_calls>\nnow()\n</function_calls>", "Hm.", (NOW,)),
    Answer("hunyuan_a13b", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', "", (NOW,)),
    # JSON that no marker calls a call.
    Answer("llama3_json", '{"title": "now", "name": "now"}', '{"title": "now", "name": "now"}'),
    Answer("llama3_json", ' {"type": "function", "name": "now", "parameters": {}}; {"name": "now"}', "", (NOW, NOW)),
    Answer("llama3_json", 'See {"name": "now"}', 'See {"name": "now"}'),
    Answer(
        "llama3_json", '{"name": "now", "parameters": {}}\n{"name": "now"}\n\n {"name": "now"} so', "so", (NOW,) * 3
    ),
    Answer("llama3_json", '{"name": "now"}\n{"name": "rm"}\n{"name": "now"}', '{"name": "rm"}\n', (NOW, NOW)),
    Answer("llama3_json", '{"name": "now", "parameters": {}}; {"name": "rm"}', '; {"name": "rm"}', (NOW,)),
    Answer("llama3_json", '<|python_tag|>{"name": "now"}\n{"name": "now"}', "", (NOW, NOW)),
    Answer("llama3_json", 'Sure!\n\n{"type": "function", "name": "now"}\nDone.', "Sure!\n\nDone.", (NOW,)),
    Answer("llama3_json", 'if (a)\n{\n  "name": 1;\n}', 'if (a)\n{\n  "name": 1;\n}'),
    Answer("llama3_json", 'So:\n{"name": "no', 'So:\n{"name": "no'),
    Answer("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", (NOW,)),
    Answer("llama3_json", "{", "{"),
    Answer("pythonic", "[1] says so", "[1] says so"),
    Answer("pythonic", "See\n[now](x)\n[now(), now()]\n[now()]", "See\n[now](x)\n", (NOW,) * 3),
    Answer("pythonic", "[now(), rm()]", ", rm()]", (NOW,)),
    Answer(
        "pythonic",
        "[get_weather(city='it\\'s \"x\"\\x41\\u00e9', precise=True, note=None, at=[1, 2."
        "5], extra={'deep': 'a', \"b\": False},)]",
        "",
        (
            weather(
                '{"city": "it\'s \\"x\\"A\\u00e9", "precise": true, "note": null, "at": [1, 2.5], '
                '"extra": {"deep": "a", "b": false}}'
            ),
        ),
    ),
    Answer("pythonic", "[now(1)]", "[now(1)]"),
    Answer("pythonic", "[now(a=f(1))]", "f(1))]", (Call("now", '{"a": '),)),
    Answer("llama4_pythonic", "<|python_start|>[now()]<|python_end|>", "", (NOW,)),
    Answer(
        "gemma_tool_code",
        "Sure:\n```tool_code\nget_weather(city='Zürich', days=2)\nnow()\n```\nok",
        "Sure:\nok",
        (ZURICH, NOW),
    ),
    Answer("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now"}]', "", (NOW, NOW)),
    Answer("mistral", "Hi[TOOL_CALLS]now[CALL_ID]abc123DEF[ARGS]{}", "Hi", (NOW,)),
    Answer("mistral", "[TOOL_CALLS]now{}", "", (NOW,)),
    Answer("mistral", "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}"),
    Answer("mistral", "[THINK]so[/THINK]ok[TOOL_CALLS]now[ARGS]{}", "ok", (NOW,), "so", "mistral"),
    Answer("functiongemma", "<start_function_call>call:now{a:}", "}", (Call("now", '{"a":'),)),
    Answer("functiongemma", "<start_function_call>call: rm{}", "<start_function_call>call: rm{}"),
    Answer("gemma4", "<|channel>thought\nhm<channel|>ok", "ok", (), "hm", "gemma4"),
    Answer("phi4_mini_json", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", (NOW,)),
    Answer("granite4", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", (NOW,)),
    Answer("granite-20b-fc", '<function_call> {"name": "now", "arguments": {}}', "", (NOW,)),
    Answer("jamba", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', "", (NOW,)),
    Answer("none", "Here is my thought process: a Here is my response: b", "b", (), "a ", "granite"),
    Answer("deepseek_v3", "a<｜tool▁calls▁begin｜>b", "a<｜tool▁calls▁begin｜>b"),
    Answer(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rm<｜tool▁sep｜>{}",
    ),
    # gpt-oss's messages.
    Answer(
        "openai",
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>comment"
        "ary<|message|>One moment.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>',
        "One moment.",
        (Call("now", '{"a": 1}'),),
        "I look.",
        "openai_gptoss",
    ),
    Answer(
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        "Yes",
        (),
        "Hm.",
        "openai_gptoss",
    ),
    Answer("openai", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", (NOW,)),
    Answer("openai", "<|channel|>commentary to=functions.rm<|message|>{}<|call|>", "{}"),
    Answer("openai", "<|channel|>commentary to=functions.now<|message|><|call|>", "", (NOW,)),
    Answer("openai", "<|channel|>commentary to=functions.now<|message|>", ""),
    Answer("openai", "plain<|channel|>final<|message|>x", "plainx"),
    Answer(
        "openai",
        "more</b><|end|><|start|>assistant<|channel|>final<|message|>x",
        "x",
        (),
        "more</b>",
        "openai_gptoss",
        True,
    ),
    Answer("openai", "<|channel|>analysis<|end|>x", "<|channel|>analysis<|end|>x"),
)

ANSWERS = (*WELL_FORMED, *OTHERS)
