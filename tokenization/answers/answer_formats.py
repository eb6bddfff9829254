"""The formats of answers by the names that vLLM's parsers have, and the choice of one from a chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from ...core.errors import InvalidArgument, did_you_mean
from ...core.request import ToolUse
from .answer_reader import AnswerReader
from .json_calls import JsonCalls
from .marked_answer import ReasoningFormat, ToolFormat, random_id, read_marked

AUTO = "auto"
NONE = "none"

HERMES = JsonCalls(("<tool_call>",), end="</tool_call>")

TOOL_FORMATS: Mapping[str, ToolFormat] = {"hermes": HERMES}
"""By the name for --tool-call-parser."""

THINK = ReasoningFormat("<think>", "</think>")

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {"qwen3": THINK, "deepseek_r1": THINK}
"""By the name for --reasoning-parser."""


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """The names of a model's formats, as the flags have them.

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
                known = ", ".join([AUTO, NONE, *formats])
                message = f"{field} must be one of {known}, got '{name}'{did_you_mean(name, formats)}"
                raise InvalidArgument(message, field=field)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers. `reasons`: it does so before each one, unless the prompt says otherwise."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    reasons: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts of it that may be special tokens."""
        reasoning = () if self.reasoning is None else (self.reasoning.start, self.reasoning.end)
        return (*(self.tools.markers if self.tools else ()), *reasoning)

    def reader(self, use: ToolUse | None, inside: bool = False) -> AnswerReader | None:
        """The reader of an answer, in which those tools may be called; None if all of it is content. `inside`: it
        begins within the reasoning."""
        tools = None if use is None or use.choice == "none" else self.tools
        if tools is None and self.reasoning is None:
            return None
        read = partial(read_marked, reasoning=self.reasoning, tools=tools, inside=inside)
        return AnswerReader(read, use, random_id if tools is None else tools.new_id)


@lru_cache(64)
def choose_format(template: str, parsers: AnswerParsers) -> AnswerFormat:
    """The format of a model with this chat template, which is empty if it has none."""
    tools = _tools_of(template) if parsers.tools == AUTO else TOOL_FORMATS.get(parsers.tools)
    if parsers.reasoning == AUTO:
        return AnswerFormat(tools, _reasoning_of(template), "enable_thinking" in template)
    reasoning = REASONING_FORMATS.get(parsers.reasoning)
    return AnswerFormat(tools, reasoning, reasoning is not None and not reasoning.optional)


def _tools_of(template: str) -> ToolFormat | None:
    if "tools" not in template:
        return None
    return HERMES if "<tool_call>" in template else None


def _reasoning_of(template: str) -> ReasoningFormat | None:
    return THINK if "</think>" in template else None
