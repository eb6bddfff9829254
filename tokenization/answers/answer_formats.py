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
from .harmony import ANALYSIS, END, FINAL, HarmonyCalls, read_harmony
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
HARMONY = HarmonyCalls()

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN_3_CODER,
    "qwen3_xml": QWEN_3_CODER,
    "llama3_json": LLAMA_3,
    "llama4_json": LLAMA_3,
    "pythonic": PYTHONIC,
    "llama4_pythonic": LLAMA_4,
    "mistral": MISTRAL,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA_4,
    "gemma_tool_code": TOOL_CODE,
    "phi4_mini_json": PHI_4_MINI,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "granite": GRANITE,
    "granite4": HERMES,
    "granite-20b-fc": GRANITE_20B,
    "jamba": JAMBA,
    "openai": HARMONY,
}
"""The formats by their names for --tool-call-parser."""

THINK = ReasoningFormat("<think>", "</think>")
HARMONY_ANALYSIS = ReasoningFormat(ANALYSIS, END, content=FINAL)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "olmo3"), THINK),
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
        """All texts of the format that may be special tokens."""
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
        reasons = reasoning is THINK and "enable_thinking" in template
    if tools is HARMONY or reasoning is HARMONY_ANALYSIS:  # one format, whichever of the two was found
        return AnswerFormat(None if parsers.tools == NONE else HARMONY, HARMONY_ANALYSIS, True)
    return AnswerFormat(tools, reasoning, reasons)


def _written(template: str, marks: Sequence[tuple[tuple[str, ...], F]]) -> F | None:
    """The first format whose marks are all in a template."""
    return next((form for texts, form in marks if all(text in template for text in texts)), None)


_TOOL_MARKS: Sequence[tuple[tuple[str, ...], ToolFormat]] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_LISTS),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|tool_call>",), GEMMA_4),
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
)
"""The texts in a chat template that show its format, formats of few models first."""

_REASONING_MARKS: Sequence[tuple[tuple[str, ...], ReasoningFormat]] = (
    (("<|channel|>", "analysis"), HARMONY_ANALYSIS),
    (("<|channel>thought",), REASONING_FORMATS["gemma4"]),
    (("[THINK]",), REASONING_FORMATS["mistral"]),
    (("Here is my thought process",), REASONING_FORMATS["granite"]),
    (("</think>",), THINK),
)
