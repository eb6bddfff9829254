"""Answers that are held to a form, as clients ask for them: the demo model on the real server, the real packages."""

import json
import os
import re
import signal
import threading
from typing import Any, Literal

import httpx
import numpy as np
import pydantic
import pytest
import tritonclient.grpc as triton_grpc
from openai import APIError, BadRequestError, OpenAI

from charonia.bench.server_process import ServerAddress

from ..proofs import schemas

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["crimson", "teal"]},
        "parts": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 255},
            "minItems": 3,
            "maxItems": 3,
        },
    },
    "required": ["name", "parts"],
    "additionalProperties": False,
}
CHAT: Any = {"model": "demo", "messages": [{"role": "user", "content": "A colour?"}], "max_tokens": 200, "seed": 3}
TEXT: Any = {"model": "demo", "prompt": "def f():", "max_tokens": 200, "seed": 3}
V2 = {"text_input": "def f():", "max_tokens": 200, "seed": 3}


class Colour(pydantic.BaseModel):
    name: Literal["crimson", "teal"]
    red: int = pydantic.Field(ge=0, le=255, description="how much of it")
    note: str | None = pydantic.Field(max_length=10)


@pytest.fixture(scope="module")
def client(demo: Any) -> OpenAI:
    return OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "parts"]
    assert value["name"] in ("crimson", "teal")
    assert len(value["parts"]) == 3
    assert all(0 <= part <= 255 for part in value["parts"])


def streamed(events: Any) -> str:
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


def as_format(schema: Any, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def test_a_chat_is_json_of_a_schema_streamed_and_not(client: OpenAI) -> None:
    asked = CHAT | {"response_format": as_format(SCHEMA, strict=True)}
    whole = client.chat.completions.create(**asked, n=3)
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 3
    for choice in whole.choices:
        check(choice.message.content or "")
    assert streamed(client.chat.completions.create(**asked, stream=True)) == whole.choices[0].message.content


def test_a_class_describes_the_answer(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(**CHAT, response_format=Colour).choices[0].message.parsed
    assert isinstance(parsed, Colour)
    with client.chat.completions.stream(**CHAT, response_format=Colour) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_json_object_is_an_object(client: OpenAI) -> None:
    asked = CHAT | {"max_tokens": 1000, "response_format": {"type": "json_object"}}
    for stream in (False, True):
        answer: Any = client.chat.completions.create(**asked, stream=stream)
        text = streamed(answer) if stream else answer.choices[0].message.content
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, '(yes|n"o)'),
        ({"structured_outputs": {"grammar": 'root ::= "a" root? "b"'}}, "a+b+"),
        ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
        ({"guided_regex": "(ab){2}"}, "abab"),
        ({"guided_choice": ["one"]}, "one"),
        ({"guided_json": {"const": [1, "ä"]}}, r'\s{0,8}\[\s{0,8}1\s{0,8},\s{0,8}"ä"\s{0,8}\]\s{0,8}'),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "z{4}"}, "zzzz"),
    ],
)
def test_completions_take_every_kind(client: OpenAI, constraint: Any, expected: str) -> None:
    whole = client.completions.create(**TEXT, extra_body=constraint)
    assert re.fullmatch(expected, whole.choices[0].text)
    assert whole.choices[0].finish_reason == "stop"
    events = client.completions.create(**TEXT, extra_body=constraint, stream=True)
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text


def test_tags_within_free_text_are_held_to_their_schemas(client: OpenAI) -> None:
    tag = {"begin": "<n>", "content": {"type": "json_schema", "json_schema": {"enum": [7, 8]}}, "end": "</n>"}
    form = {"type": "structural_tag", "format": {"type": "tag", **tag}}
    answer = client.chat.completions.create(**CHAT, response_format=form)  # type: ignore[call-overload]
    assert re.fullmatch(r"<n>\s*[78]\s*</n>", answer.choices[0].message.content or "")


GUIDES = [
    {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)},
    {"structured_outputs": json.dumps({"json": SCHEMA})},
    {"guided_decoding": json.dumps({"json": SCHEMA})},
]


@pytest.mark.parametrize("guide", GUIDES)
def test_v2_takes_a_guide(demo: Any, guide: Any) -> None:
    body = V2 | guide
    answer = httpx.post(f"{demo.url}/v2/models/demo/generate", json=body).json()
    check(answer["text_output"])
    with httpx.stream("POST", f"{demo.url}/v2/models/demo/generate_stream", json=body) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert "".join(event["text_output"] for event in events) == answer["text_output"]
    parameters = {name: value for name, value in body.items() if name != "text_input"}
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["def f():"]}
    infer = httpx.post(f"{demo.url}/v2/models/demo/infer", json={"inputs": [tensor], "parameters": parameters}).json()
    assert infer["outputs"][0]["data"] == [answer["text_output"]]


def grpc_answer(demo: Any, **parameters: Any) -> Any:
    tensor = triton_grpc.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"def f():"], np.object_))
    with triton_grpc.InferenceServerClient(demo.grpc_address) as client:
        return client.infer("demo", [tensor], parameters={"max_tokens": 200, **parameters})


def test_grpc_takes_a_guide(demo: Any) -> None:
    answer = grpc_answer(demo, **GUIDES[0])
    check(answer.as_numpy("text_output")[0].decode())
    assert "charonia_warning" not in answer.get_response().parameters
    loose = json.dumps({"type": "string", "maxLength": 3, "not": {"const": "a"}})
    told = grpc_answer(demo, guided_decoding_guide_type="json_schema", guided_decoding_guide=loose).get_response()
    assert told.parameters["charonia_warning"].string_param == "guided_decoding_guide_type: not enforced: not (#/not)"


def test_answers_under_the_corpus_are_valid(demo: Any) -> None:
    """The short version of `tests/proofs/schemas.py`."""
    corpus = schemas.read_corpus()
    assert len(corpus) >= 150
    place = ServerAddress(demo.address[0], demo.address[1], 0)
    result = schemas.prove(place, corpus[::5], answers=33, max_tokens=150)
    assert result.faults == []
    assert result.ends["ended"] > result.ends["cut"] > 0


LOOSE = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2, "uniqueItems": True}


def test_what_is_not_enforced_is_named_in_a_header(client: OpenAI, demo: Any) -> None:
    told = "response_format: not enforced: uniqueItems (#/uniqueItems)"
    for stream in (False, True):
        body = CHAT | {"response_format": as_format(LOOSE), "stream": stream}
        answer = httpx.post(f"{demo.url}/v1/chat/completions", json=body)
        assert (answer.status_code, answer.headers["x-charonia-warning"]) == (200, told)
    body = V2 | {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(LOOSE)}
    for path in ("generate", "generate_stream"):
        answer = httpx.post(f"{demo.url}/v2/models/demo/{path}", json=body)
        assert answer.headers["x-charonia-warning"].endswith("not enforced: uniqueItems (#/uniqueItems)")
    fine = httpx.post(f"{demo.url}/v1/chat/completions", json=CHAT | {"response_format": as_format(SCHEMA)})
    assert "x-charonia-warning" not in fine.headers
    with pytest.raises(BadRequestError, match=r"strict is true, and these cannot be enforced: uniqueItems") as refusal:
        client.chat.completions.create(**CHAT, response_format=as_format(LOOSE, strict=True))
    assert refusal.value.param == "response_format"


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


HOSTILE = {
    "deep": ({"guided_json": nested(120)}, "nested more than 100 deep"),
    "deeper": ({"guided_json": '{"items":' * 20_000}, "nested too deeply|not JSON|Expecting"),
    "wide": ({"guided_json": {"enum": [f"v{n}" for n in range(40_000)]}}, "may have 262144|more than 32768 values"),
    "ten megabytes": ({"guided_json": json.dumps({"const": "x" * 10_000_000})}, "characters"),
    "loop": ({"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text can satisfy it"),
    "regex": ({"guided_regex": "(" * 300 + "x" + ")*" * 300}, "invalid regex"),
    "look-around": ({"guided_regex": "(?=a)"}, "look-around"),
    "grammar": ({"guided_grammar": "root ::= missing"}, "missing"),
    "contradiction": ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "minimum"),
    "no type": ({"guided_json": {"type": "strng"}}, "Invalid type: strng"),
    "pattern": ({"guided_json": {"pattern": "["}}, "unclosed character class"),
}


def test_hostile_constraints_are_refused_while_a_stream_goes_on(client: OpenAI, demo: Any) -> None:
    seen, enough, left = [], threading.Event(), threading.Event()

    def read() -> None:
        while not left.is_set():
            asked = TEXT | {"max_tokens": 1000, "stream": True, "extra_body": {"ignore_eos": True}}
            with client.completions.create(**asked) as events:
                for event in events:
                    seen.append(event)
                    enough.set()
                    if left.is_set():
                        return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert enough.wait(30)
        before = len(seen)
        for name, (constraint, words) in HOSTILE.items():
            answer = httpx.post(f"{demo.url}/v1/completions", json=TEXT | constraint, timeout=30)
            assert answer.status_code == 400, name
            assert re.search(words, answer.json()["error"]["message"]), (name, answer.text)
            assert answer.json()["error"]["param"] in constraint, name
        assert len(seen) > before
    finally:
        left.set()
        reader.join(30)
    assert not reader.is_alive()


def test_a_lost_core_ends_a_constrained_stream_and_the_next_one_serves_the_constraint(
    client: OpenAI, demo: Any
) -> None:
    """The last of the tests that share this server: its cores die."""
    endless = TEXT | {"max_tokens": 1000, "extra_body": {"guided_regex": "[a-z]{2000}"}, "stream": True}
    with client.completions.create(**endless) as events:
        text = next(events).choices[0].text
        lost = demo.cores()
        for core in lost:
            os.kill(core, signal.SIGKILL)
        with pytest.raises(APIError, match="the engine core died"):
            text += "".join(event.choices[0].text for event in events)
    assert re.fullmatch("[a-z]+", text)
    demo.until(lambda: demo.status("/v2/models/demo/ready") == 200 and len({*demo.cores()} - {*lost}) == len(lost))
    asked = CHAT | {"response_format": as_format(SCHEMA, strict=True)}
    check(client.chat.completions.create(**asked).choices[0].message.content or "")
    again = client.completions.create(**endless | {"stream": False, "max_tokens": 9})
    assert re.fullmatch("[a-z]+", again.choices[0].text)
