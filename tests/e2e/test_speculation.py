"""Speculation over a real server, whose model `tiny` drafts from its text: what clients ask for, and that no text
changes.

Which drafts a step verifies depends on measured time: no test counts them.
"""

import json
import queue
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton

from .models import HERMES
from .tensors import given

PROMPT = "one two one two one two one"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
OFF = {"speculative": False}
SAMPLINGS = [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.95, "frequency_penalty": 0.2}]
DRAFTS = [{"speculative": {"k": 3}}, OFF]


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as connected:
        yield connected


def chat(client: openai.OpenAI, extra: Any, **asked: Any) -> Any:
    values = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "extra_body": extra}
    return client.chat.completions.create(**values | asked)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn"])
def test_texts_are_those_without_drafts(client: openai.OpenAI, sampling: Any) -> None:
    """Whole and streamed, of several answers, with a stop string, log-probabilities, tools and a grammar."""
    tool: Any = {"type": "function", "function": {"name": "clock"}}
    for asked in (
        {},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"tools": [tool], "tool_choice": "required", "extra_body": {"chat_template": HERMES}},
        {"response_format": {"type": "json_object"}},
    ):
        found = []
        for drafts in DRAFTS:
            extra = drafts | asked.get("extra_body", {})
            answer = chat(client, None, **asked | sampling | {"extra_body": extra})
            found.append(
                [
                    choice.model_dump(exclude={"message": {"tool_calls": {"__all__": {"id"}}}})
                    for choice in answer.choices
                ]
            )
        assert found[0] == found[1], asked
    with_drafts, without = (
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, extra_body=extra, **sampling)
        for extra in ({}, OFF)
    )
    text = with_drafts.choices[0].text
    assert text == without.choices[0].text
    pieces = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stream=True, **sampling)
    assert "".join(piece.choices[0].text for piece in pieces) == text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stop=[stop], **sampling)
    assert cut.choices[0].text == text[: text.index(stop)]


def test_a_prediction_is_followed_and_counted(client: openai.OpenAI) -> None:
    plain = chat(client, OFF, temperature=0)
    text, tokens = plain.choices[0].message.content, plain.usage.completion_tokens
    right = {"type": "content", "content": text}
    wrong = {
        "type": "content",
        "content": [{"type": "text", "text": "nothing"}, {"type": "text", "text": " of it 123"}],
    }
    for prediction in (right, wrong):
        for extra in ({}, {"speculative": {"k": 9}}, OFF):
            answer = chat(client, extra, temperature=0, prediction=prediction)
            details = answer.usage.completion_tokens_details
            assert answer.choices[0].message.content == text
            assert answer.usage.completion_tokens == tokens
            if prediction is wrong:
                assert details.rejected_prediction_tokens > 0
        usage = {"include_usage": True}
        *_, last = chat(client, {}, temperature=0, prediction=prediction, stream=True, stream_options=usage)
        assert last.usage.completion_tokens_details == details


def test_an_answer_tells_of_its_drafts(client: openai.OpenAI) -> None:
    for extra, most in (({}, 5), ({"speculative": {"k": 2}}, 2), (OFF, 0)):
        drafts = chat(client, extra, temperature=0).metrics["speculative_decoding"]
        assert drafts["num_spec_tokens"] == 5
        assert sum(drafts["acceptance_histogram"]) == drafts["num_spec_steps"]
        assert max(map(int, drafts["acceptance_histogram_by_draft_length"]), default=0) <= most
        assert drafts["num_accepted_draft_tokens"] <= drafts["num_draft_tokens"]
    assert chat(client, {}, n=2).metrics == {"speculative_decoding": None}


def drafter_metrics(server: Any) -> dict[str, dict[str, float]]:
    """What model `tiny`'s metrics say, by drafter and name."""
    found: dict[str, dict[str, float]] = {}
    for line in httpx.get(server.metrics_url).text.splitlines():
        if line.startswith("charonia_") and 'model="tiny"' in line and (drafter := re.search(r'drafter="(\w+)"', line)):
            name, value = line.split("{")[0], float(line.split()[-1])
            series = found.setdefault(drafter[1], {})
            series[name] = series.get(name, 0) + value
    return found


def test_every_drafter_has_metrics_of_its_own(server: Any, client: openai.OpenAI) -> None:
    """What they count is shown in steps, by `test_metrics_tell_drafters_apart` of the step loop."""
    text = chat(client, {}, temperature=0).choices[0].message.content
    chat(client, {}, temperature=0, prediction={"type": "content", "content": text})
    drafters = drafter_metrics(server)
    assert drafters.keys() == {"ngram", "prediction", "grammar"}
    for series in drafters.values():
        accepted = series["charonia_accepted_tokens_total"]
        assert series["charonia_draft_tokens_total"] >= accepted
        assert series["charonia_accepted_tokens_per_position_total"] == accepted
        assert series["charonia_drafting_seconds_total"] >= 0


def test_numbers_out_of_range_are_refused_by_name(server: Any) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    for model, asked, says in (
        ("tiny", {"speculative": {"k": 6}}, "'speculative.k' must be at most 5, got 6"),
        ("fake", {"speculative": {"k": 1}}, "'speculative.k' must be at most 0, got 1: without a prediction"),
    ):
        error = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"model": model} | asked)
        assert (error.status_code, error.json()["error"]["param"]) == (400, "speculative.k")
        assert says in error.json()["error"]["message"]
    body = {"text_input": PROMPT, "speculative_k": 6}
    error = httpx.post(f"{server.url}/v2/models/tiny/generate", json=body)
    assert (error.status_code, "'speculative_k' must be at most 5, got 6" in error.text) == (400, True)


@contextmanager
def stream(server: Any) -> Iterator[tuple[Any, "queue.Queue[Any]"]]:
    heard: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.grpc_address) as connected:
        connected.start_stream(lambda result, error: heard.put(error or result))
        try:
            yield connected, heard
        finally:
            connected.stop_stream(cancel_requests=True)


def ask(connected: Any, **parameters: Any) -> None:
    inputs = [given(triton, "text_input", np.array([PROMPT.encode()], np.object_))]
    inputs.append(given(triton, "stream", np.array([True])))
    connected.async_stream_infer("tiny", inputs, parameters=parameters)


def test_v2_streams_are_those_without_drafts_and_may_be_cancelled_within(server: Any) -> None:
    asked = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    url = f"{server.url}/v2/models/tiny"
    whole = httpx.post(f"{url}/generate", json={"text_input": PROMPT, "speculative_k": 0} | asked).json()
    with httpx.stream("POST", f"{url}/generate_stream", json={"text_input": PROMPT} | asked) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    for k in (0, 3, 5):
        with stream(server) as (connected, heard):
            ask(connected, speculative_k=k, **asked)
            text = b""
            while True:
                result = heard.get(timeout=60)
                assert not isinstance(result, Exception)
                if result.get_response().outputs:
                    text += result.as_numpy("text_output")[0]
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
            assert text.decode() == whole["text_output"]
    for _ in range(3):
        with stream(server) as (connected, heard):
            ask(connected, **asked | {"max_tokens": 180})
            heard.get(timeout=60)
    again = httpx.post(f"{url}/generate", json={"text_input": PROMPT} | asked).json()
    assert again["text_output"] == whole["text_output"]
    running = re.compile(r'^charonia_requests_running{model="tiny"[^}]*} 0$', re.MULTILINE)
    server.until(lambda: running.search(httpx.get(server.metrics_url).text) is not None)
