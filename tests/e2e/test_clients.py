"""Frameworks that speak OpenAI's API drive a real server. Each test runs where its package is installed, as the extra
`clients` does; calls and answers are constrained, so the demo model gives them."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from .serving import Server, serving

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::UserWarning"
    ),
    pytest.mark.timeout(300),  # some of them take half a minute to import
]


class Order(BaseModel):
    """What is to be sent where. Without more: a model that knows little would go on and on."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    count: int = Field(ge=1, le=9)


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Server]:
    model = str(root / "examples/model_repository/demo/1")
    flags = ("--served-model-name", "demo", "gpt-4o", "--allow-grpc=false")
    with serving(tmp_path_factory.mktemp("c") / "t", model, *flags) as running:
        yield running


def is_order(found: Any) -> bool:
    return Order.model_validate(found if isinstance(found, dict) else found.model_dump()).count > 0


@needs("langchain_openai")
@pytest.mark.parametrize("responses", [False, True])
def test_langchain(served: Server, responses: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(
        model="gpt-4o",
        base_url=f"{served.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=64,
        use_responses_api=responses,
    )
    question = HumanMessage("Send three of them to Rome.")
    assert model.invoke([question]).text
    assert "".join(chunk.text for chunk in model.stream([question])) == model.invoke([question]).text
    bound = model.bind_tools([Order], tool_choice="any")
    answer = bound.invoke([question])
    [call] = answer.tool_calls[:1]
    assert call["name"] == "Order"
    assert is_order(call["args"])
    results = [ToolMessage("sent", tool_call_id=each["id"]) for each in answer.tool_calls]
    assert model.invoke([question, answer, *results]).text
    streamed = None
    for chunk in bound.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == call["args"]
    for method in ("json_schema", "function_calling"):
        assert is_order(model.with_structured_output(Order, method=method).invoke([question]))


@needs("litellm")
def test_litellm(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    function = {"name": "send", "parameters": Order.model_json_schema(), "strict": True}
    asked: dict[str, Any] = {
        "model": "openai/demo",
        "api_base": f"{served.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "Send three of them to Rome."}],
        "temperature": 0,
        "max_tokens": 200,
    }
    whole: Any = litellm.completion(**asked)
    pieces: Any = litellm.completion(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    calls = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    called: Any = litellm.completion(**asked, **calls)
    assert called.choices[0].finish_reason == "tool_calls"
    assert Order.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)
    formed: Any = litellm.completion(**asked, response_format=Order)
    assert Order.model_validate_json(formed.choices[0].message.content)
    through: Any = litellm.responses(
        model="openai/demo", input="hi", api_base=asked["api_base"], api_key="none", max_output_tokens=16
    )
    assert through.output[0].content[0].text


@needs("instructor")
@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(served: Server, mode: str) -> None:
    import instructor

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as plain:
        client: Any = instructor.from_openai(plain, mode=instructor.Mode[mode])
        question: Any = {"role": "user", "content": "Send three of them to Rome."}
        found = client.chat.completions.create(
            model="demo", messages=[question], response_model=Order, temperature=0, max_retries=0
        )
    assert is_order(found)


@needs("pydantic_ai")
@pytest.mark.parametrize("responses", [False, True])
async def test_pydantic_ai(served: Server, responses: bool) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    made: Any = OpenAIResponsesModel if responses else OpenAIChatModel
    model = made("demo", provider=provider)
    settings: Any = {"temperature": 0, "max_tokens": 64}
    said = await Agent(model, model_settings=settings).run("Send three of them to Rome.")
    assert isinstance(said.output, str)
    for output in (Order, NativeOutput(Order)):
        agent: Any = Agent(model, output_type=output, model_settings=settings, retries=0)
        assert is_order((await agent.run("Send three of them to Rome.")).output)
    async with Agent(model, model_settings=settings).run_stream("Send three of them to Rome.") as stream:
        assert [piece async for piece in stream.stream_text(delta=True)]
