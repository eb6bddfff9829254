"""gpt-oss over HTTP: its channels in chats of the openai client, whole and streamed. The weights are random, so nothing
but a constraint makes this model open a channel: where one holds it does, however the analysis ends."""

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .models import write_model
from .serving import serving

MARKERS = ("<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
END = MARKERS.index("<|end|>")
TEMPLATE = (
    "{% for tool in tools or [] %}<|start|>developer<|message|>{{ tool.function.name }}<|end|>{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|>analysis<|message|> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
BUDGET = {"extra_body": {"thinking_token_budget": 5}}
ENDS = {"logit_bias": {str(END): 100}}
"""The model ends its analysis itself; it would go on with more of these ends."""


@pytest.fixture(scope="module")
def client(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    checkpoint, repository = tmp_path_factory.mktemp("oss"), tmp_path_factory.mktemp("repository")
    making.write_random(checkpoint, making.CONFIGS["gpt-oss"] | {"eos_token_id": [0, MARKERS.index("<|call|>")]})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [*MARKERS]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["assistant analysis final commentary"], trainer)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"eos_token": MARKERS[0]}))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    write_model(repository, "oss", checkpoint, max_num_seqs=2)
    with (
        serving(tmp_path_factory.mktemp("s") / "t", "--model-repository", str(repository)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=60, max_retries=0) as connected,
    ):
        yield connected
        assert running.stop() == 0, running.said


def ask(client: openai.OpenAI, **others: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Content, reasoning, calls and the reason for the end, which streamed are the same."""
    request: dict[str, Any] = {
        "model": "oss",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 140,
        "temperature": 0,
        **others,
    }
    [choice] = client.chat.completions.create(**request).choices
    message: Any = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    whole = message.content or "", getattr(message, "reasoning_content", None) or "", calls, choice.finish_reason
    content, reasoning, pieces, finish = "", "", dict[int, list[str]](), ""
    for chunk in client.chat.completions.create(**request, stream=True):
        for part in chunk.choices:
            delta: Any = part.delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                written = pieces.setdefault(call.index, ["", ""])
                written[0] += call.function.name or ""
                written[1] += call.function.arguments or ""
            finish = part.finish_reason or finish
    assert (content, reasoning, [(name, arguments) for name, arguments in pieces.values()], finish) == whole
    return whole


@pytest.mark.parametrize("ending", [BUDGET, ENDS], ids=["budget", "its own end"])
def test_content_of_a_format_comes_in_the_final_channel(client: openai.OpenAI, ending: dict[str, Any]) -> None:
    content, reasoning, calls, finish = ask(client, response_format=FORMAT, **ending)
    assert json.loads(content)["city"] in ("Oslo", "Rome")
    assert (bool(reasoning), calls, finish) == (ending is BUDGET, [], "stop")


@pytest.mark.parametrize("ending", [BUDGET, ENDS], ids=["budget", "its own end"])
def test_a_required_call_is_made_behind_the_analysis(client: openai.OpenAI, ending: dict[str, Any]) -> None:
    content, reasoning, [call], finish = ask(client, tools=TOOLS, tool_choice="required", **ending)
    assert (content, call[0], finish) == ("", "get_weather", "tool_calls")
    assert json.loads(call[1])["city"] in ("Oslo", "Rome")
    assert bool(reasoning) == (ending is BUDGET)


def test_a_format_beside_tools_is_content_or_a_call(client: openai.OpenAI) -> None:
    content, _, calls, _ = ask(client, tools=TOOLS, response_format=FORMAT, **BUDGET)
    [text] = [content, *(arguments for _, arguments in calls)] if content else [arguments for _, arguments in calls]
    assert json.loads(text)["city"] in ("Oslo", "Rome")


def test_an_analysis_that_never_ends_is_no_content(client: openai.OpenAI) -> None:
    content, reasoning, calls, finish = ask(client, response_format=FORMAT)
    assert (content, calls, finish) == ("", [], "length")
    assert reasoning
    assert ask(client)[2] == []
