"""The formats of answers by the names of vLLM's parsers, and the choice of one by a chat template."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

from ...core.errors import InvalidArgument, did_you_mean
from ...core.request import ToolUse
from .answer_reader import AnswerReader
from .gemma_calls import GemmaCalls
from .grammar_parts import CallLayout, CallSection
from .harmony import ANALYSIS, END, FINAL, NEXT, HarmonyCalls, read_harmony
from .json_calls import JsonCalls
from .marked_answer import ReasoningFormat, ToolFormat, random_id, read_marked
from .named_calls import NamedCalls
from .python_calls import PythonCalls
from .tagged_calls import TaggedCalls

AUTO = "auto"
NONE = "none"

F = TypeVar("F")


def short_id() -> str:
    """The id of a call in Mistral's templates: exactly nine characters."""
    return secrets.token_hex(5)[:9]


HERMES = JsonCalls(
    ("<tool_call>",),
    end="</tool_call>",
    layout=CallLayout((CallSection("<tool_call>\n", "\n</tool_call>", "<tool_call>"),), "\n"),
)
QWEN_3_CODER = TaggedCalls()
SEED_OSS = TaggedCalls("<seed:tool_call>", "</seed:tool_call>", lines=False)
GLM_45 = TaggedCalls(
    end="",
    call_begin="",
    name_end="",
    call_end="</tool_call>",
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    lines=False,
    alone=False,
)
GLM_47 = replace(GLM_45, space="")
MINIMAX_M2 = TaggedCalls(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    call_begin='<invoke name="',
    name_end='">',
    call_end="</invoke>",
    key_begin='<parameter name="',
    key_end='">',
    lines=False,
    alone=False,
    several=True,
)
DEEPSEEK_V32 = TaggedCalls(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    call_begin='<｜DSML｜invoke name="',
    name_end='">',
    call_end="</｜DSML｜invoke>",
    key_begin='<｜DSML｜parameter name="',
    key_end='" string="true">',
    json_key_end='" string="false">',
    value_end="</｜DSML｜parameter>",
    lines=False,
    alone=False,
    several=True,
)
DEEPSEEK_V4 = replace(DEEPSEEK_V32, start="<｜DSML｜tool_calls>", end="</｜DSML｜tool_calls>")
LLAMA_3 = JsonCalls(
    ("<|python_tag|>",),
    ("{",),
    separator=";",
    layout=CallLayout((CallSection(""), CallSection("<|python_tag|>", "", "<|python_tag|>")), "; "),
    arguments="parameters",
)
PYTHONIC = PythonCalls((), ("[",), layout=CallLayout((CallSection("[", "]"),), ", ", several=True))
LLAMA_4 = PythonCalls(
    ("<|python_start|>",),
    ("[",),
    "<|python_end|>",
    layout=CallLayout(
        (CallSection("[", "]"), CallSection("<|python_start|>[", "]<|python_end|>", "<|python_start|>")),
        ", ",
        several=True,
    ),
)
TOOL_CODE = PythonCalls(
    ("```tool_code",),
    end="```",
    bare=True,
    layout=CallLayout((CallSection("```tool_code\n", "\n```", "```tool_code"),), "\n", several=True),
)
OLMO_3 = PythonCalls(
    ("<function_calls>",),
    end="</function_calls>",
    bare=True,
    layout=CallLayout((CallSection("<function_calls>", "</function_calls>", "<function_calls>"),), "\n", several=True),
)
_LFM_2 = CallSection("<|tool_call_start|>[", "]<|tool_call_end|>", "<|tool_call_start|>")
LFM_2 = PythonCalls(("<|tool_call_start|>",), end="<|tool_call_end|>", layout=CallLayout((_LFM_2,), ", ", several=True))
MISTRAL = NamedCalls(
    "[TOOL_CALLS]",
    before_id="[CALL_ID]",
    before_arguments="[ARGS]",
    lists=JsonCalls(),
    layout=CallLayout((CallSection("[TOOL_CALLS]", "", "[TOOL_CALLS]"),)),
    new_id=short_id,
)
MISTRAL_LISTS = replace(
    MISTRAL,
    writes_lists=True,
    layout=CallLayout((CallSection("[TOOL_CALLS] [", "]", "[TOOL_CALLS]"),), ", ", several=True),
)
FUNCTION_GEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTOOLS = CallSection("functools[", "]", "functools")
_PHI_4_TAGS = CallSection("<|tool_call|>[", "]<|/tool_call|>", "<|tool_call|>")
PHI_4_MINI = JsonCalls(
    ("functools", "<|tool_call|>"),
    end="<|/tool_call|>",
    layout=CallLayout((_FUNCTOOLS, _PHI_4_TAGS), ", ", several=True),
)
PHI_4_TAGS = replace(PHI_4_MINI, layout=PHI_4_MINI.layout._replace(sections=(_PHI_4_TAGS, _FUNCTOOLS)))
GRANITE = JsonCalls(
    ("<|tool_call|>", "<tool_call>"),
    layout=CallLayout(
        (CallSection("<|tool_call|>[", "]", "<|tool_call|>"), CallSection("<tool_call>[", "]", "<tool_call>")),
        ", ",
        several=True,
    ),
)
GRANITE_20B = JsonCalls(
    ("<function_call>",), layout=CallLayout((CallSection("<function_call> ", "", "<function_call>"),), "\n")
)
JAMBA = JsonCalls(
    ("<tool_calls>",),
    end="</tool_calls>",
    layout=CallLayout((CallSection("<tool_calls>[", "]</tool_calls>", "<tool_calls>"),), ", ", several=True),
)
_DEEPSEEK = CallSection("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>")
DEEPSEEK_V3 = NamedCalls(
    "<｜tool▁calls▁begin｜>",
    begin="<｜tool▁call▁begin｜>",
    prefix="function<｜tool▁sep｜>",
    before_arguments="\n```json\n",
    fence="\n```",
    end="<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
    layout=CallLayout((_DEEPSEEK,), "\n", several=True),
)
DEEPSEEK_V31 = NamedCalls(
    "<｜tool▁calls▁begin｜>",
    begin="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
    layout=CallLayout((_DEEPSEEK,), several=True),
)
_KIMI = CallSection("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_calls_section_begin|>")
KIMI_K2 = NamedCalls(
    "<|tool_calls_section_begin|>",
    begin="<|tool_call_begin|>",
    prefix="functions.",
    before_number=":",
    before_arguments="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    close="<|tool_calls_section_end|>",
    layout=CallLayout((_KIMI,), several=True),
)
NEMOTRON = JsonCalls(
    ("<TOOLCALL>",),
    end="</TOOLCALL>",
    layout=CallLayout((CallSection("<TOOLCALL>[", "]</TOOLCALL>", "<TOOLCALL>"),), ", ", several=True),
)
HARMONY = HarmonyCalls()

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN_3_CODER,
    "qwen3_xml": QWEN_3_CODER,
    "seed_oss": SEED_OSS,
    "glm45": GLM_45,
    "glm47": GLM_47,
    "minimax_m2": MINIMAX_M2,
    "ernie45": HERMES,
    "llama3_json": LLAMA_3,
    "llama4_json": LLAMA_3,
    "pythonic": PYTHONIC,
    "llama4_pythonic": LLAMA_4,
    "olmo3": OLMO_3,
    "lfm2": LFM_2,
    "mistral": MISTRAL,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA_4,
    "gemma_tool_code": TOOL_CODE,
    "phi4_mini_json": PHI_4_MINI,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "kimi_k2": KIMI_K2,
    "nemotron_json": NEMOTRON,
    "granite": GRANITE,
    "granite4": HERMES,
    "granite-20b-fc": GRANITE_20B,
    "jamba": JAMBA,
    "hunyuan_a13b": JAMBA,
    "openai": HARMONY,
}
"""The formats by their names for --tool-call-parser."""

THINK = ReasoningFormat("<think>", "</think>")
SEED_THINK = ReasoningFormat("<seed:think>", "</seed:think>")
ERNIE_THINK = THINK._replace(around_content=("<response>\n", "\n</response>"))
_THINKING = ("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "olmo3", "nemotron_v3")
HARMONY_ANALYSIS = ReasoningFormat(ANALYSIS, END, content=f"{NEXT}{FINAL}")

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    **dict.fromkeys(_THINKING, THINK),
    "seed_oss": SEED_THINK,
    "ernie45": ERNIE_THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", optional=True),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:", optional=True),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", optional=True),
    "openai_gptoss": HARMONY_ANALYSIS,
}
"""The formats by their names for --reasoning-parser."""


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """The names of a model's formats, from the flags.

    Raises:
        InvalidArgument: there is no format of a name.
    """

    tools: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        for name, formats, field in (
            (self.tools, TOOL_FORMATS, "tool_call_parser"),
            (self.reasoning, REASONING_FORMATS, "reasoning_parser"),
        ):
            if name not in (AUTO, NONE, *formats):
                names = ", ".join([AUTO, NONE, *formats])
                message = f"{field} must be one of {names}, got '{name}'{did_you_mean(name, formats)}"
                raise InvalidArgument(message, field=field)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers. `reasons`: each begins with reasoning, unless the prompt says otherwise."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    reasons: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of the format that may be special tokens."""
        reasoning = () if self.reasoning is None else (self.reasoning.start, self.reasoning.end)
        return (*(self.tools.markers if self.tools else ()), *reasoning)

    def reader(self, use: ToolUse | None, inside: bool = False) -> AnswerReader | None:
        """The reader of an answer that may call those tools; None if all of it is content. `inside`: the answer begins
        within the reasoning."""
        callable_ = None if use is None or use.choice == "none" or self.tools is None else use
        tools = None if callable_ is None else self.tools
        new_id = random_id if tools is None else tools.new_id
        if self.reasoning is HARMONY_ANALYSIS:
            return AnswerReader(partial(read_harmony, inside=inside), callable_, new_id)
        if tools is None and self.reasoning is None:
            return None
        format_reader = partial(read_marked, reasoning=self.reasoning, tools=tools, inside=inside)
        return AnswerReader(format_reader, callable_, new_id)


@lru_cache(64)
def choose_format(template: str, parsers: AnswerParsers) -> AnswerFormat:
    """The format of a model with this chat template, which may be empty."""
    tools = TOOL_FORMATS.get(parsers.tools)
    if parsers.tools == AUTO and "tools" in template:
        tools = _written(template, _TOOL_MARKS)
    reasoning = REASONING_FORMATS.get(parsers.reasoning)
    reasons = reasoning is not None and not reasoning.optional
    if parsers.reasoning == AUTO:
        reasoning = _written(template, _REASONING_MARKS)
        switches = _THINKING_SWITCHES.get(reasoning, ()) if reasoning else ()
        reasons = any(switch in template for switch in switches)
    if tools is HARMONY or reasoning is HARMONY_ANALYSIS:  # one format, whichever of the two was found
        return AnswerFormat(None if parsers.tools == NONE else HARMONY, HARMONY_ANALYSIS, True)
    return AnswerFormat(tools, reasoning, reasons)


_THINKING_SWITCHES: Mapping[ReasoningFormat, tuple[str, ...]] = {
    THINK: ("enable_thinking",),
    SEED_THINK: ("thinking_budget",),
}
"""The variables of a template by which reasoning is switched off that it otherwise begins with."""


def _written(template: str, marks: Sequence[tuple[tuple[str, ...], F]]) -> F | None:
    return next((form for texts, form in marks if all(text in template for text in texts)), None)


_TOOL_MARKS: Sequence[tuple[tuple[str, ...], ToolFormat]] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_LISTS),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|tool_call>",), GEMMA_4),
    (("｜DSML｜", "tool_calls>"), DEEPSEEK_V4),
    (("｜DSML｜",), DEEPSEEK_V32),
    (("<|tool_calls_section_begin|>",), KIMI_K2),
    (("</arg_key><arg_value>",), GLM_47),
    (("<arg_key>", "<arg_value>"), GLM_45),
    (("<minimax:tool_call>",), MINIMAX_M2),
    (("<seed:tool_call>",), SEED_OSS),
    (("<|tool_call_start|>",), LFM_2),
    (("List of tools: ",), LFM_2),
    (("<function_calls>",), OLMO_3),
    (("<TOOLCALL>",), NEMOTRON),
    (("<function=", "<parameter="), QWEN_3_CODER),
    (("functools",), PHI_4_MINI),
    (("<|tool_call|>", "<|/tool_call|>"), PHI_4_TAGS),
    (("<|tool_call|>",), GRANITE),
    (("<tool_call>",), HERMES),
    (("<|python_start|>",), LLAMA_4),
    (("[func_name1(",), PYTHONIC),
    (("<|python_tag|>",), LLAMA_3),
    (("ipython", '"parameters"'), LLAMA_3),
    (("```tool_code",), TOOL_CODE),
    (("<tool_calls>",), JAMBA),
)
"""The texts in a chat template that show its format, formats of few models first."""

_REASONING_MARKS: Sequence[tuple[tuple[str, ...], ReasoningFormat]] = (
    (("<|channel|>", "analysis"), HARMONY_ANALYSIS),
    (("<|channel>thought",), REASONING_FORMATS["gemma4"]),
    (("[THINK]",), REASONING_FORMATS["mistral"]),
    (("Here is my thought process",), REASONING_FORMATS["granite"]),
    (("</seed:think>",), SEED_THINK),
    (("<response>", "</think>"), ERNIE_THINK),
    (("</think>",), THINK),
)
