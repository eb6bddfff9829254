"""The openai client drives /v1/responses of a real server, whose model has several names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from .serving import Server, serving

NAMES = ("own", "gpt-5", "claude/sonnet", "third")
ASKED: dict[str, Any] = {"model": "gpt-5", "input": "Write a loop.", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Server]:
    """The demo model under four names."""
    model = str(root / "examples/model_repository/demo/1")
    flags = ("--served-model-name", "own", "gpt-5,claude/sonnet", "--served-model-name", "third", "--allow-grpc=false")
    with serving(tmp_path_factory.mktemp("n") / "t", model, *flags) as running:
        yield running


@pytest.fixture
def client(named: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{named.url}/v1", api_key="none", timeout=60, max_retries=0) as made:
        yield made


def test_every_name_is_served_and_the_first_one_shown(named: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == list(NAMES)
    assert client.models.retrieve("claude/sonnet").id == "claude/sonnet"
    for name in NAMES:
        message: Any = {"role": "user", "content": "hi"}
        assert client.chat.completions.create(model=name, messages=[message], max_tokens=1).model == "own"
        assert client.completions.create(model=name, prompt="hi", max_tokens=1).model == "own"
        assert client.responses.create(model=name, input="hi", max_output_tokens=16).model == "own"
        counted = httpx.post(f"{named.url}/tokenize", json={"model": name, "prompt": "hi"})
        assert counted.status_code == 200
    v2 = httpx.post(f"{named.url}/v2/models/gpt-5/generate", json={"text_input": "hi", "max_tokens": 1})
    assert v2.status_code == 200
    assert "gpt-5" not in httpx.get(named.metrics_url).text
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt", input="hi")


def test_a_response_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    with client.responses.stream(**ASKED) as stream:
        told = list(stream)
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert (told[0].type, told[-1].type) == ("response.created", "response.incomplete")
    assert "".join(event.delta for event in told if event.type == "response.output_text.delta") == whole.output_text
    last: Any = told[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == 12
    assert whole.incomplete_details
    assert whole.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_goes_on_without_state(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, instructions="be brief")
    history: list[Any] = [{"role": "user", "content": "Write a loop."}, *(item.to_dict() for item in first.output)]
    second = client.responses.create(**ASKED | {"input": [*history, {"role": "user", "content": "Another."}]})
    assert first.usage
    assert second.usage
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens - 8
    assert client.responses.input_tokens.count(model="own", input="Write a loop.").input_tokens == 7
    with pytest.raises(openai.BadRequestError, match="keeps no state: send the whole input"):
        client.responses.create(**ASKED, previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError, match="keeps no state"):
        client.responses.retrieve(first.id)


def test_logprobs_add_up_to_the_text(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=2)
    message: Any = whole.output[0]
    [part] = message.content
    assert "".join(logprob.token for logprob in part.logprobs) == whole.output_text
    assert {len(logprob.top_logprobs) for logprob in part.logprobs} == {2}


class Order(BaseModel):
    """What is to be sent where."""

    city: Literal["Rome", "Oslo"]
    count: int = Field(ge=1, le=9)


SEND: Any = openai.pydantic_function_tool(Order, name="send")
SEND_FUNCTION: Any = {"type": "function", **SEND["function"]}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
STATUS: Any = {"type": "function", "name": "status", "parameters": NOTHING}


def test_answers_are_parsed_into_models(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "own", "input": "Send three to Rome.", "temperature": 0, "max_output_tokens": 200}
    parsed = client.responses.parse(**asked, text_format=Order).output_parsed
    assert parsed
    assert parsed.count in range(1, 10)
    with client.responses.stream(**asked, text_format=Order) as stream:
        assert stream.get_final_response().output_parsed == parsed
    message: Any = {"role": "user", "content": "Send three to Rome."}
    chat = client.chat.completions.parse(model="own", messages=[message], temperature=0, response_format=Order)
    assert chat.choices[0].message.parsed == parsed


def test_an_agents_loop_over_responses(client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "Send three to Rome, and tell me when they are there."}]
    called: list[str] = []
    choices: list[Any] = [{"type": "function", "name": "send"}, {"type": "function", "name": "status"}, "none"]
    for choice in choices:
        asked: dict[str, Any] = {"model": "own", "input": history, "temperature": 0, "max_output_tokens": 80}
        asked |= {"tools": [SEND_FUNCTION, STATUS, {"type": "web_search"}], "tool_choice": choice}
        answer = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            last: Any = list(stream)[-1]
        assert said(last.response) == said(answer)
        history += answer.output
        for call in [each for each in answer.output if each.type == "function_call"]:
            called.append(call.name)
            if call.name == "send":
                Order.model_validate_json(call.arguments)
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
    assert called == ["send", "status"]
    assert answer.output_text


def said(response: Any) -> list[tuple[str, str]]:
    """The types of an answer's items, and what stands in them."""
    return [
        (each.type, each.arguments if each.type == "function_call" else response.output_text)
        for each in response.output
    ]


def test_an_agents_loop_over_chat(client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "Send three to Rome."}]
    status = {"type": "function", "function": {each: STATUS[each] for each in ("name", "parameters")}}
    called = []
    for choice in ("required", "required", "none"):
        answer = client.chat.completions.create(
            model="own",
            messages=history,
            tools=[SEND, status],
            tool_choice=choice,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
        )
        message = answer.choices[0].message
        history.append(message)
        for call in message.tool_calls or ():
            assert call.type == "function"
            called.append(call.function.name)
            history.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
        assert (answer.choices[0].finish_reason == "tool_calls") == bool(message.tool_calls)
    assert len(called) == 2
    assert set(called) <= {"send", "status"}


def test_refusals_name_the_field(client: openai.OpenAI) -> None:
    video: Any = [{"role": "user", "content": [{"type": "input_video", "video_url": "data:"}]}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASKED | {"input": video})
    assert refused.value.param == "input[0].content[0].type"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASKED | {"input": "x " * 3000})
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")


def test_who_leaves_frees_the_sequence(named: Server, client: openai.OpenAI) -> None:
    whole = ASKED | {"max_output_tokens": 1000, "extra_body": {"ignore_eos": True}}
    with client.responses.create(**whole, stream=True) as stream:
        next(iter(stream))
    named.until(lambda: "door=responses model=own version=1 outcome=cancelled" in named.said)
