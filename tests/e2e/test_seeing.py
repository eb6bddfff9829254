"""Models that see, over HTTP with images in the request: what they say is what transformers says by the checkpoint's
own processor, whole and streamed, and a second turn computes neither the images nor the prompt again."""

import base64
import io
import json
import queue
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import onnx
import openai
import pytest
import safetensors.numpy
import torch
import tritonclient.grpc
import tritonclient.http
from onnx import helper
from PIL import Image
from transformers import AutoModelForImageTextToText

from charonia.classic_backends.tower.tower import Tower
from charonia.classic_backends.tower.tower_files import read_tower_files
from charonia.core.media import MediaSource
from charonia.core.request import ChatMessage, Conversation
from charonia.media.processor import ImageProcessor
from charonia.telemetry.scrape import Interval, parse_scrape
from charonia.tokenization.media_text import MediaText
from charonia.tokenization.tokenizer import Tokenizer
from tests.onnx_models import write_model as write_onnx
from tests.quantised_files import STYLES, write_quantised
from tests.seeing_models import MODELS, picture, write_seeing

from .models import write_config, write_model
from .serving import Server, serving

NAME = "qwen3-vl"
"""The one whose images have positions of their own, and rows for several layers."""
OTHERS = [name for name in MODELS if name != NAME]
"""Whose towers and engines the suite compares with transformers itself; over HTTP they are served by `make proof`."""
HYBRIDS = ("qwen3.5", "lfm3-vl")
"""Whose prompts are too short for a snapshot of their states."""
TOKEN = MODELS[NAME].token
NEW = 12
IMAGES = picture(90, 50, 1), picture(60, 120, 2)


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def part(pixels: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


CHAT: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is "},
            part(IMAGES[0]),
            {"type": "text", "text": " beside "},
            part(IMAGES[1]),
            {"type": "text", "text": "?"},
        ],
    }
]


TEXT = f"<|user|>What is {TOKEN} beside {TOKEN}?<|end|>\n<|assistant|>"
"""The chat as its template renders it."""
PARAMETERS = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}


def tensors_of_chat() -> dict[str, Any]:
    """The same as a body of `generate`."""
    return {"text_input": TEXT, "image": [base64.b64encode(png(pixels)).decode() for pixels in IMAGES], **PARAMETERS}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Of the models that are asked in this run."""
    folder = tmp_path_factory.mktemp("seeing")
    items = [item for item in request.session.items if item.path == request.path]
    chosen = {
        item.callspec.params["name"]
        for item in items
        if isinstance(item, pytest.Function) and "name" in item.fixturenames
    }
    return {name: write_seeing(folder / name, name) for name in sorted({NAME, *chosen})}


def serve_one(
    folder: Path, name: str, checkpoint: Path, *flags: str, **parameters: str
) -> AbstractContextManager[Server]:
    write_model(folder / "models", name, checkpoint, max_num_seqs=4, dtype="float32", **parameters)
    return serving(folder / "t", "--model-repository", str(folder / "models"), *flags)


LOOK = f"""
platform: "ensemble"
input [ {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
        {{ name: "pixels" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }},
        {{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }} ]
output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }} ]
ensemble_scheduling {{ step [
  {{ model_name: "eye" model_version: -1
    input_map {{ key: "pixels" value: "pixels" }}
    output_map {{ key: "rows" value: "rows" }} output_map {{ key: "grid" value: "grid" }} }},
  {{ model_name: "{NAME}" model_version: -1
    input_map {{ key: "text_input" value: "text_input" }} input_map {{ key: "stream" value: "stream" }}
    input_map {{ key: "image_embeds" value: "rows" }} input_map {{ key: "image_grid_thw" value: "grid" }}
    output_map {{ key: "text_output" value: "text_output" }} }}
] }}
"""
"""Whose first step makes the rows that the model takes."""
EYE = """
backend: "onnxruntime"
input { name: "pixels" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }
output { name: "rows" data_type: TYPE_FP32 dims: [ -1, 192 ] }
output { name: "grid" data_type: TYPE_INT64 dims: [ 1, 3 ] }
"""
VIEW = picture(16, 8, 3)
"""Of which the eye makes eight rows."""


def write_eye(repository: Path) -> None:
    """An encoder on the classic path: 48 numbers in the order of the picture become a row of the model's."""
    float_, byte, whole = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8, onnx.TensorProto.INT64
    nodes = [
        helper.make_node("Cast", ["pixels"], ["floats"], to=float_),
        helper.make_node("Reshape", ["floats", "shape"], ["patches"]),
        helper.make_node("MatMul", ["patches", "weights"], ["rows"]),
        helper.make_node("Identity", ["places"], ["grid"]),
    ]
    weights = {
        "shape": np.array([-1, 48]),
        "weights": np.random.default_rng(1).standard_normal((48, 192), np.float32) / 2000,
        "places": np.array([[1, 4, 8]]),
    }
    outputs = {"rows": (float_, ("n", 192)), "grid": (whole, (1, 3))}
    file = write_config(repository, "eye", EYE) / "model.onnx"
    write_onnx(file, nodes, {"pixels": (byte, ("height", "width", 3))}, outputs, weights)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("s")
    write_eye(folder / "models")
    write_config(folder / "models", "look", LOOK)
    with serve_one(folder, NAME, checkpoints[NAME]) as running:
        yield running
        assert running.stop() == 0, running.said


@pytest.fixture(scope="module")
def right(checkpoints: dict[str, Path]) -> Callable[..., str]:
    """What transformers generates greedily for the chat, through the checkpoint's processor."""

    def generate(name: str, weights: Path | None = None, settings: Mapping[str, Any] = {}) -> str:
        model: Any = AutoModelForImageTextToText.from_pretrained(weights or checkpoints[name], dtype=torch.float32)
        model.generation_config.eos_token_id = None
        processor = ImageProcessor(checkpoints[name])
        processor._processor.tokenizer.pad_token = "<|end|>"
        tokenizer = Tokenizer.load(checkpoints[name])
        media = MediaSource("image", offset=8), MediaSource("image", offset=16)
        chat = Conversation((ChatMessage("user", "What is  beside ?", media=media),))
        text = tokenizer._render(chat, MediaText({"image": processor.token}, (("image", ""), ("image", ""))))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # GLM's makes an array of a tensor
            images = [*map(Image.fromarray, IMAGES)]
            features = processor._processor(images=images, text=[text], return_tensors="pt", images_kwargs=settings)
        out = model.generate(**features, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        return tokenizer.decode(out[0, features["input_ids"].shape[1] :].tolist())

    return generate


def said(server: Server, name: str, messages: list[Any] = CHAT, stream: bool = False) -> Any:
    """The answer, or the text of all chunks of a stream."""
    extra = {"ignore_eos": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        answer: Any = client.chat.completions.create(
            model=name, messages=messages, max_tokens=NEW, temperature=0, extra_body=extra, stream=stream
        )
        if not stream:
            return answer
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def check_answers(server: Server, name: str, expected: str) -> None:
    before = parse_scrape(httpx.get(server.metrics_url).text, "the server")
    first = said(server, name)
    assert first.choices[0].message.content == expected
    again = [{"role": "assistant", "content": expected}, {"role": "user", "content": "And now?"}]
    second = said(server, name, [*CHAT, *again])
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert name in HYBRIDS or cached >= first.usage.prompt_tokens // 16 * 16
    grown = Interval(before, parse_scrape(httpx.get(server.metrics_url).text, "the server"))
    assert grown.grown("charonia_tower_images_total", name) == 2
    assert grown.grown("charonia_tower_cache_hits_total", name) == 2
    assert said(server, name, stream=True) == expected


def test_it_says_what_transformers_says(seeing: Server, right: Callable[[str], str]) -> None:
    check_answers(seeing, NAME, right(NAME))


@pytest.mark.proof
@pytest.mark.parametrize("name", OTHERS)
def test_others_say_what_transformers_says(
    checkpoints: dict[str, Path], right: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    with serve_one(tmp_path, name, checkpoints[name]) as running:
        check_answers(running, name, right(name))
        if name in ("idefics3", "lfm2-vl", "mistral3", "smolvlm"):
            check_rows(running, name, checkpoints[name])
        assert running.stop() == 0, running.said


@pytest.mark.proof
@pytest.mark.parametrize("name", ["gemma3"])
def test_crops_beside_an_image(
    checkpoints: dict[str, Path], right: Callable[..., str], tmp_path: Path, name: str
) -> None:
    """As the operator asks for them."""
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 3}
    told = json.dumps(crops).replace('"', r"\"")
    with serve_one(tmp_path, name, checkpoints[name], mm_processor_kwargs=told) as running:
        check_answers(running, name, right(name, settings=crops))
        assert running.stop() == 0, running.said


def check_rows(server: Server, name: str, checkpoint: Path) -> None:
    """Of a model with texts between an image's rows, that come with the image's grid instead of the image."""
    side = 14
    seen = [np.pad(pixels, ((0, -pixels.shape[0] % side), (0, -pixels.shape[1] % side), (0, 0))) for pixels in IMAGES]
    processor = ImageProcessor(checkpoint)
    inputs = [processor.process(Image.fromarray(pixels)).inputs for pixels in seen]
    made = Tower(read_tower_files(checkpoint, "auto"), "cpu", together=False).encode(inputs)
    files = [base64_of(np.save, medium.rows.numpy()) for medium in made]
    what, _, beside, _, end = CHAT[0]["content"]

    def chat(*images: dict[str, Any]) -> list[Any]:
        return [{"role": "user", "content": [what, images[0], beside, images[1], end]}]

    grids = [[1, pixels.shape[0] // side, pixels.shape[1] // side] for pixels in seen]
    rows = [
        {"type": "image_embeds", "image_embeds": {"image_embeds": file, "image_grid_thw": grid}}
        for file, grid in zip(files, grids, strict=True)
    ]
    wanted = said(server, name, chat(*map(part, seen)))
    answer = said(server, name, chat(*rows))
    assert answer.choices[0].message.content == wanted.choices[0].message.content
    assert answer.usage.prompt_tokens == wanted.usage.prompt_tokens
    plain = {"type": "image_embeds", "image_embeds": files[0]}
    with pytest.raises(openai.BadRequestError, match="rows of an image need the image_grid_thw"):
        said(server, name, chat(plain, plain))


def test_what_is_no_image_is_named(seeing: Server) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for messages, complaint in (
        ([{"role": "user", "content": [broken]}], r"messages\[0\].content\[0\].image_url"),
        ([{"role": "user", "content": f"an {TOKEN} of words"}], "tokens that stand for parts of images"),
        ([{"role": "user", "content": [part(IMAGES[0]), {"type": "text", "text": TOKEN}]}], "stands for a medium"),
    ):
        with pytest.raises(openai.BadRequestError, match=complaint):
            said(seeing, NAME, messages)
    assert said(seeing, NAME, [{"role": "user", "content": "no image"}]).usage.prompt_tokens < 20


def test_a_request_says_how_large_its_images_become(seeing: Server, checkpoints: dict[str, Path]) -> None:
    """What is cached of the image as the checkpoint has it is not found for another size, nor the other way."""
    processor = ImageProcessor(checkpoints[NAME])
    chat = [{"role": "user", "content": [part(IMAGES[1])]}]
    usual, small = said(seeing, NAME, chat), {"max_pixels": 2048}
    asked = {"model": NAME, "messages": chat, "max_tokens": NEW, "temperature": 0, "mm_processor_kwargs": small}
    asked["ignore_eos"] = True
    answer = httpx.post(f"{seeing.url}/v1/chat/completions", json=asked, timeout=60).json()
    settings = {}, processor.options.settings(small)
    sizes = [processor.process(Image.fromarray(IMAGES[1]), own).placeholder.count(TOKEN) for own in settings]
    assert usual.usage.prompt_tokens - answer["usage"]["prompt_tokens"] == sizes[0] - sizes[1] > 0
    counted = httpx.post(f"{seeing.url}/tokenize", json={key: asked[key] for key in ("model", "messages")}, timeout=60)
    assert counted.json()["count"] == usual.usage.prompt_tokens
    fewer = {key: asked[key] for key in ("model", "messages", "mm_processor_kwargs")}
    counted = httpx.post(f"{seeing.url}/tokenize", json=fewer, timeout=60)
    assert counted.json()["count"] == answer["usage"]["prompt_tokens"]
    again = said(seeing, NAME, chat)
    assert again.choices[0].message.content == usual.choices[0].message.content
    strange = asked | {"mm_processor_kwargs": {"num_crops": 4}}
    error = httpx.post(f"{seeing.url}/v1/chat/completions", json=strange, timeout=60).json()["error"]
    assert error["param"] == "mm_processor_kwargs"
    assert "mm_processor_kwargs.num_crops is none of this model's: min_pixels, max_pixels, size" in error["message"]


@pytest.mark.proof
def test_several_frontends_see(checkpoints: dict[str, Path], right: Callable[[str], str], tmp_path: Path) -> None:
    with serve_one(tmp_path, NAME, checkpoints[NAME], "--frontends", "2") as running:
        answers = [said(running, NAME) for _ in range(4)]
        assert [answer.choices[0].message.content for answer in answers] == [right(NAME)] * 4
        assert said(running, NAME, stream=True) == right(NAME)
        asked: dict[str, Any] = {"model": NAME, "messages": CHAT, "max_tokens": NEW, "logprobs": True, "temperature": 0}
        [choice] = httpx.post(f"{running.url}/v1/chat/completions", json=asked, timeout=60).json()["choices"]
        tokens = "".join(token["token"] for token in choice["logprobs"]["content"])
        assert tokens.startswith(choice["message"]["content"])
        asked = {"model": NAME, "messages": CHAT, "return_token_strs": True}
        counted = httpx.post(f"{running.url}/tokenize", json=asked, timeout=60).json()
        assert len(counted["tokens"]) == len(counted["token_strs"]) == answers[0].usage.prompt_tokens
        for _ in range(4):
            answer = httpx.post(f"{running.url}/v2/models/{NAME}/generate", json=tensors_of_chat(), timeout=60)
            assert answer.json().get("text_output") == right(NAME), answer.text
        assert said(running, NAME, [{"role": "user", "content": "no image"}]).usage.prompt_tokens < 20
        with pytest.raises(openai.BadRequestError, match="tokens that stand for parts of images"):
            said(running, NAME, [{"role": "user", "content": f"an {TOKEN} of words"}])
        assert running.stop() == 0, running.said


def shown_by_a_tool(source: dict[str, Any]) -> list[Any]:
    """An agent's turns of Anthropic's: a tool has taken a screenshot."""
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "here"}, image]}
    return [
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


def test_the_other_protocols_see_the_same(seeing: Server) -> None:
    """Through the packages of both vendors: an image in a tool's result is seen as it is in a chat."""
    data = base64.b64encode(png(IMAGES[0])).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    turns: Any = shown_by_a_tool(source)
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    chat = [
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "here"}, part(IMAGES[0])]},
    ]
    expected = said(seeing, NAME, chat)
    with anthropic.Anthropic(base_url=seeing.url, api_key="none", timeout=60, max_retries=0) as client:
        options: Any = {"model": NAME, "max_tokens": NEW, "extra_body": {"ignore_eos": True, "temperature": 0}}
        answer = client.messages.create(messages=turns, **options)
        assert answer.content[0].text == expected.choices[0].message.content
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == expected.usage.prompt_tokens
        with client.messages.stream(messages=turns, **options) as stream:
            assert stream.get_final_text() == expected.choices[0].message.content
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[2\].content\[0\].content\[1\].source"):
            client.messages.create(messages=shown_by_a_tool(source | {"data": data[:40]}), **options)
    items: Any = [
        {"role": "user", "content": "What is there?"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [
                {"type": "input_text", "text": "here"},
                {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"},
            ],
        },
    ]
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        response = client.responses.create(
            model=NAME, input=items, max_output_tokens=NEW, temperature=0, extra_body={"ignore_eos": True}
        )
    assert response.output_text == expected.choices[0].message.content


def test_tensors_are_seen_as_parts_of_a_chat_are(seeing: Server) -> None:
    """By `generate` as base64, by `infer` as a file or as pixels; the model's config names both inputs."""
    expected = said(seeing, NAME).choices[0].message.content
    model = f"{seeing.url}/v2/models/{NAME}"
    asked = tensors_of_chat()
    files = asked["image"]
    answer = httpx.post(f"{model}/generate", json=asked, timeout=60)
    assert answer.json().get("text_output") == expected, answer.text
    inputs = [tritonclient.http.InferInput("text_input", [1], "BYTES")]
    inputs[0].set_data_from_numpy(np.array([TEXT.encode()], object))
    inputs.append(tritonclient.http.InferInput("image", [1], "BYTES"))
    inputs[1].set_data_from_numpy(np.array([png(IMAGES[0])], object))
    inputs.append(tritonclient.http.InferInput("image_pixels", [1, *IMAGES[1].shape], "UINT8"))
    inputs[2].set_data_from_numpy(IMAGES[1][None])
    with closing(tritonclient.http.InferenceServerClient(seeing.url.removeprefix("http://"))) as client:
        result = client.infer(NAME, inputs, parameters=PARAMETERS)
    assert result.as_numpy("text_output")[0].decode() == expected
    declared = httpx.get(f"{model}/config").json()["input"]
    assert {"image", "image_pixels"} <= {tensor["name"] for tensor in declared}
    refused = httpx.post(f"{model}/generate", json={**asked, "image": files[:1]}, timeout=60)
    assert refused.status_code == 400
    assert "2 places" in refused.json()["error"]
    broken = httpx.post(f"{model}/generate", json={**asked, "image": ["AAAA", files[1]]}, timeout=60)
    assert (broken.status_code, broken.json()["error"][:8]) == (400, "image[0]")


@pytest.fixture(scope="module")
def rows(checkpoints: dict[str, Path]) -> list[tuple[Any, Any]]:
    """What the model's own tower makes of the pictures, with what its first layers take beside it, and their grids."""
    processor = ImageProcessor(checkpoints[NAME])
    inputs = [processor.process(Image.fromarray(pixels)).inputs for pixels in IMAGES]
    made = Tower(read_tower_files(checkpoints[NAME], "auto"), "cpu", together=False).encode(inputs)
    whole = [torch.cat((medium.rows, *medium.deepstack), 1).numpy() for medium in made]
    return [*zip(whole, (each["image_grid_thw"] for each in inputs), strict=True)]


def base64_of(write: Callable[[Any, Any], None], values: Any) -> str:
    file = io.BytesIO()
    write(file, values)
    return base64.b64encode(file.getvalue()).decode()


def test_rows_of_an_encoder_elsewhere_are_seen_as_pictures_are(seeing: Server, rows: list[tuple[Any, Any]]) -> None:
    """In chats as a file of numpy's or of safetensors, as tensors of several images; no pickle is read."""
    expected = said(seeing, NAME).choices[0].message.content
    (first, first_grid), (second, second_grid) = rows
    saved = base64.b64encode(safetensors.numpy.save({"image_embeds": second, "image_grid_thw": second_grid})).decode()
    given = {"image_embeds": base64_of(np.save, first), "image_grid_thw": first_grid[0].tolist()}
    parts = [{"type": "image_embeds", "image_embeds": given}, {"type": "image_embeds", "image_embeds": saved}]
    what, _, beside, _, end = CHAT[0]["content"]
    chat = [{"role": "user", "content": [what, parts[0], beside, parts[1], end]}]
    assert said(seeing, NAME, chat).choices[0].message.content == expected
    again = said(seeing, NAME, chat)
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens // 16 * 16
    values = {
        "image_embeds": np.concatenate((first, second)),
        "image_grid_thw": np.concatenate((first_grid, second_grid)),
    }
    inputs = [tritonclient.http.InferInput("text_input", [1], "BYTES").set_data_from_numpy(np.array([TEXT], object))]
    for name, datatype in (("image_embeds", "FP32"), ("image_grid_thw", "INT64")):
        tensor = tritonclient.http.InferInput(name, [*values[name].shape], datatype)
        inputs.append(tensor.set_data_from_numpy(values[name]))
    with closing(tritonclient.http.InferenceServerClient(seeing.url.removeprefix("http://"))) as client:
        result = client.infer(NAME, inputs, parameters=PARAMETERS)
    assert result.as_numpy("text_output")[0].decode() == expected
    for part, complaint in (
        (base64_of(lambda file, tensor: torch.save(tensor, file), torch.tensor(first)), "it is a pickle"),
        (base64_of(np.save, first), "it needs image_grid_thw"),
        ({"image_embeds": base64_of(np.save, first[:, :64]), "image_grid_thw": first_grid[0].tolist()}, "have 192"),
    ):
        one = [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": part}]}]
        with pytest.raises(openai.BadRequestError, match=rf"messages\[0\].content\[0\].image_embeds.*{complaint}"):
            said(seeing, NAME, one)


def test_an_ensembles_step_encodes(seeing: Server) -> None:
    """A picture goes through an encoder on the classic path into the model, whose text comes in pieces by both
    protocols."""
    text = f"What is {TOKEN}?"
    parameters = PARAMETERS | {"max_tokens": 100}  # a few may come in one piece where the machine is busy
    asked = {"text_input": text, "pixels": VIEW.ravel().tolist(), "stream": True, **parameters}
    with httpx.stream("POST", f"{seeing.url}/v2/models/look/generate_stream", json=asked, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines]
    assert len(pieces) > 1, lines
    inputs: list[Any] = []
    for name, datatype, value in (
        ("text_input", "BYTES", np.array([text.encode()], object)),
        ("pixels", "UINT8", VIEW),
        ("stream", "BOOL", np.array([True])),
    ):
        inputs.append(tritonclient.grpc.InferInput(name, [*value.shape], datatype))
        inputs[-1].set_data_from_numpy(value)
    results: queue.Queue[Any] = queue.Queue()
    with closing(tritonclient.grpc.InferenceServerClient(seeing.grpc_address)) as client:
        client.start_stream(lambda result, error: results.put(error or result))
        client.async_stream_infer("look", inputs, parameters=parameters)
        client.stop_stream()
    streamed = [results.get_nowait().as_numpy("text_output")[0].decode() for _ in range(results.qsize())]
    assert "".join(streamed) == "".join(pieces)
    view = httpx.post(f"{seeing.url}/v2/models/eye/infer", json=_v2(pixels=("UINT8", VIEW)), timeout=60).json()
    made = {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in view["outputs"]}
    direct = {"text_input": text, "image_embeds": made["rows"].ravel().tolist(), "image_grid_thw": [1, 4, 8]}
    whole = httpx.post(f"{seeing.url}/v2/models/{NAME}/generate", json={**direct, **parameters}, timeout=60)
    assert whole.json().get("text_output") == "".join(pieces), whole.text
    narrow = {**direct, "image_embeds": made["rows"][:, :64].ravel().tolist()}
    assert httpx.post(f"{seeing.url}/v2/models/{NAME}/generate", json=narrow, timeout=60).status_code == 400
    unlike = httpx.post(f"{seeing.url}/v2/models/look/generate", json={**asked, "text_input": 3 * TOKEN}, timeout=60)
    assert (unlike.status_code, "3 places" in unlike.text) == (400, True), unlike.text


def _v2(**inputs: tuple[str, Any]) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": name, "datatype": datatype, "shape": value.shape, "data": value.ravel().tolist()}
            for name, (datatype, value) in inputs.items()
        ]
    }


@pytest.mark.proof
def test_triton_s_vllm_repositories_see(
    checkpoints: dict[str, Path], right: Callable[[str], str], tmp_path: Path
) -> None:
    """As clients of that backend send it: base64, beside a text with the model's tokens."""
    (tmp_path / "models" / NAME / "1").mkdir(parents=True)
    (tmp_path / "models" / NAME / "config.pbtxt").write_text('backend: "vllm"')
    arguments = {"model": str(checkpoints[NAME]), "dtype": "float32", "max_num_seqs": 4}
    (tmp_path / "models" / NAME / "1" / "model.json").write_text(json.dumps(arguments))
    asked = {
        "text_input": TEXT,
        "image": tensors_of_chat()["image"],
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(PARAMETERS),
    }
    with serving(tmp_path / "t", "--model-repository", str(tmp_path / "models")) as running:
        answer = httpx.post(f"{running.url}/v2/models/{NAME}/generate", json=asked, timeout=60)
        assert answer.json().get("text_output") == right(NAME), answer.text
        assert running.stop() == 0, running.said


@pytest.mark.proof
@pytest.mark.parametrize("style", ["awq", "gptq"])
def test_a_quantised_checkpoint_sees(
    checkpoints: dict[str, Path], right: Callable[..., str], tmp_path: Path, style: str
) -> None:
    """It says what its numbers mean: its plain twin is asked."""
    small, plain = write_quantised(checkpoints[NAME], tmp_path, STYLES[style]())
    with serve_one(tmp_path, NAME, small) as running:
        check_answers(running, NAME, right(NAME, plain))
        assert running.stop() == 0, running.said
