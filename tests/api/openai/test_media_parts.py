"""Images in the bodies of chats, of /v1/responses and of /v1/messages: what a model that sees gets of them, and what is
said to one that reads text alone."""

import base64
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from charonia.api.openai.media_parts import read_medium
from charonia.api.openai.request_parsing import parse_chat
from charonia.core.errors import InvalidArgument
from charonia.core.media import MediaSource
from charonia.core.request import ChatMessage, Conversation

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DATA = base64.b64encode(b"a picture").decode()
URL = f"data:image/png;base64,{DATA}"
LOOK = {"type": "text", "text": "look"}
CALL = {"type": "function", "id": "c", "function": {"name": "view", "arguments": "{}"}}


def image(field: str, offset: int = 0, url: str = URL, uuid: str = "") -> MediaSource:
    return MediaSource("image", url=url, uuid=uuid, field=field, offset=offset)


def message(gateway: Any, index: int = -1) -> ChatMessage:
    found = gateway.asked[-1].prompt.messages[index]
    assert isinstance(found, ChatMessage)
    return found


async def ask(client: httpx.AsyncClient, path: str, messages: list[Any], model: str = "seeing") -> httpx.Response:
    body = {"input": messages} if path == RESPONSES else {"messages": messages}
    return await client.post(path, json=body | {"model": model} | ({"max_tokens": 5} if path == MESSAGES else {}))


PART = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
ROWS = {"type": "image_embeds", "image_embeds": DATA}
SOUND = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        (PART, image("messages[0].content[1].image_url", 4)),
        ({"type": "image_url", "image_url": "https://x/y.png"},
         image("messages[0].content[1].image_url", 4, "https://x/y.png")),
        (PART | {"uuid": "u"}, image("messages[0].content[1].image_url", 4, uuid="u")),
        ({"type": "image_url", "image_url": None, "uuid": "u"},
         image("messages[0].content[1].image_url", 4, "", "u")),
        ({"type": "image_embeds", "image_embeds": DATA, "uuid": "u"},
         replace(image("messages[0].content[1].image_embeds", 4, f"data:;base64,{DATA}", "u"), encoded=True)),
        ({"type": "image_embeds", "image_embeds": {"image_embeds": DATA, "image_grid_thw": [1, 4, 6]}},
         replace(image("messages[0].content[1].image_embeds", 4, f"data:;base64,{DATA}"), encoded=True,
                 grid=(1, 4, 6))),
        ({"type": "image_embeds", "uuid": "u"},
         replace(image("messages[0].content[1].image_embeds", 4, "", "u"), encoded=True)),
        ({"image_url": {"url": URL}}, image("messages[0].content[1].image_url", 4)),
        ({"type": None, "image_url": URL, "text": None}, image("messages[0].content[1].image_url", 4)),
        ({"type": "input_image", "image_url": URL, "detail": "auto"}, image("messages[0].content[1].image_url", 4)),
    ],
)  # fmt: skip
async def test_a_chat_has_images_between_its_texts(
    client: httpx.AsyncClient, gateway: Any, part: Any, wanted: MediaSource
) -> None:
    answer = await ask(client, CHAT, [{"role": "user", "content": [LOOK, part, LOOK, LOOK]}])
    assert answer.status_code == 200
    assert "x-charonia-warning" not in answer.headers
    assert message(gateway) == ChatMessage("user", "looklook\nlook", media=(wanted,), breaks=(8,))


async def test_a_request_says_how_its_images_are_processed(client: httpx.AsyncClient, gateway: Any) -> None:
    """As vLLM's do; where there are none the client is told so."""
    unused = "mm_processor_kwargs: without effect, for there is no image"
    body = {"model": "seeing", "mm_processor_kwargs": {"max_pixels": 784, "crop_to_patches": True}}
    for content, options in ([LOOK, PART], '{"crop_to_patches":true,"max_pixels":784}'), ([LOOK], ""):
        answer = await client.post(CHAT, json=body | {"messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 200
        assert all(medium.options == options for medium in message(gateway).media)
        assert answer.headers.get("x-charonia-warning") == (None if options else unused)
        counted = await client.post("/tokenize", json=body | {"messages": [{"role": "user", "content": content}]})
        assert (counted.status_code, counted.headers.get("x-charonia-warning")) == (200, None if options else unused)


def test_media_beside_an_image_are_as_without_its_options() -> None:
    """A sound, and rows of an image in the chat's history, which may come by their uuid alone."""
    history = [ROWS, {"type": "image_embeds", "uuid": "u"}]
    turns = [{"role": "user", "content": history}, {"role": "user", "content": [SOUND, PART]}]
    parsed = parse_chat({"model": "any", "messages": turns, "mm_processor_kwargs": {"max_pixels": 784}}, "id")
    prompt = parsed.requests[0].prompt
    assert isinstance(prompt, Conversation)
    got = [[medium.options for medium in message.media] for message in prompt.messages]
    assert got == [["", ""], ["", '{"max_pixels":784}']]


def test_a_part_without_a_type_is_what_its_member_is_called() -> None:
    parts: list[dict[str, Any]] = [
        PART,
        ROWS,
        SOUND,
        {"type": "audio_url", "audio_url": URL},
        LOOK,
        {"type": "refusal", "refusal": "no"},
    ]
    untyped = [{name: value for name, value in part.items() if name != "type"} for part in parts]
    typed, read = (
        parse_chat({"model": "any", "messages": [{"role": "user", "content": content}]}, "id").requests[0].prompt
        for content in (parts, untyped)
    )
    assert read == typed


async def test_other_protocols_say_how_their_images_are_processed(client: httpx.AsyncClient, gateway: Any) -> None:
    options = {"mm_processor_kwargs": {"max_pixels": 784}}
    picture = {"type": "input_image", "image_url": URL}
    for path, body in (
        (RESPONSES, {"input": [{"role": "user", "content": [picture]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [BLOCK]}], "max_tokens": 5}),
    ):
        answer = await client.post(path, json={"model": "seeing"} | body | options)
        assert (answer.status_code, "x-charonia-warning" in answer.headers) == (200, False), answer.text
        assert [medium.options for medium in message(gateway).media] == ['{"max_pixels":784}']


@pytest.mark.parametrize(
    ("part", "options", "problem"),
    [
        (PART, {"size": "9" * 1000}, "may have at most 1000 characters"),
        (PART, [1], "must be"),
        (
            ROWS,
            {"max_pixels": 784},
            "mm_processor_kwargs: it is about files of images, and the messages have none: they have an image that was "
            "encoded elsewhere",
        ),
        (
            SOUND,
            {"max_pixels": 784},
            "mm_processor_kwargs: it is about files of images, and the messages have none: they have a sound",
        ),
    ],
)
async def test_what_is_no_option_of_images_is_refused(
    client: httpx.AsyncClient, part: Any, options: Any, problem: str
) -> None:
    body = {"model": "seeing", "messages": [{"role": "user", "content": [part]}], "mm_processor_kwargs": options}
    error = (await client.post(CHAT, json=body)).json()["error"]
    assert (error["param"], problem in error["message"]) == ("mm_processor_kwargs", True), error


async def test_a_tool_of_a_chat_shows_an_image(client: httpx.AsyncClient, gateway: Any) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [PART, PART]},
    ]
    assert (await ask(client, CHAT, turns)).status_code == 200
    places = [f"messages[2].content[{index}].image_url" for index in range(2)]
    assert message(gateway).media == tuple(image(place) for place in places)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": ""}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": URL, "uuid": 5}, "messages[0].content[0].uuid"),
        ({"type": "image_url", "uuid": "u" * 257}, "messages[0].content[0].uuid"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].input_audio.data"),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "a/b"}},
            "messages[0].content[0].input_audio.format",
        ),
        ({"type": "input_audio"}, "messages[0].content[0].input_audio"),
        ({"type": "audio_url", "audio_url": {"url": 5}}, "messages[0].content[0].audio_url.url"),
        ({"type": "video_url", "video_url": {"url": URL}}, "messages[0].content[0].type"),
        ({"video_url": {"url": URL}}, "messages[0].content[0].type"),
    ],
)
async def test_a_part_that_is_no_medium_is_refused(client: httpx.AsyncClient, part: Any, field: str) -> None:
    answer = await ask(client, CHAT, [{"role": "user", "content": [part]}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_a_chat_of_a_model_that_does_not_see_is_refused(client: httpx.AsyncClient) -> None:
    for path, messages in ((CHAT, [{"role": "user", "content": [LOOK, PART]}]),
                           ("/tokenize", [{"role": "user", "content": [LOOK, PART]}])):  # fmt: skip
        answer = await ask(client, path, messages, "llm")
        place = "messages[0].content[1].image_url"
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, place)
        assert error["message"] == f"{place}: model 'llm' takes no image: it reads text alone"


async def test_a_file_by_its_id_is_told_of_as_what_is_not_served(client: httpx.AsyncClient) -> None:
    turn = {"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}
    answer = await ask(client, RESPONSES, [turn])
    said = "input[0].content[0]: file_id is not served; the text says that there was one: image"
    assert (answer.status_code, answer.headers["x-charonia-warning"]) == (200, said)


async def test_a_kind_that_a_model_refuses_has_its_reason(client: httpx.AsyncClient) -> None:
    answer = await ask(client, CHAT, [{"role": "user", "content": [LOOK, PART]}], "blind")
    assert answer.status_code == 400
    complaint = "model 'blind' takes no image: it reads text alone (no tower)"
    assert answer.json()["error"]["message"].endswith(complaint)


@pytest.mark.parametrize("kind", ["video_url", "input_video", "video"])
async def test_videos_are_refused_by_name(client: httpx.AsyncClient, kind: str) -> None:
    clip = {"type": kind, kind: {"url": "data:video/mp4;base64,AAAA"}}
    for path, field in ((CHAT, "messages[0].content[1].type"), (RESPONSES, "input[0].content[1].type")):
        error = (await ask(client, path, [{"role": "user", "content": [LOOK, clip]}])).json()["error"]
        assert (error["param"], "no model here takes videos" in error["message"]) == (field, True), error


async def test_a_sound_need_not_name_its_format(client: httpx.AsyncClient, gateway: Any) -> None:
    for sound in ({"data": DATA}, {"data": DATA, "format": None}):
        part = {"type": "input_audio", "input_audio": sound}
        assert read_medium("messages[0].content[0]", part, 0).url == f"data:;base64,{DATA}"
        assert (await ask(client, RESPONSES, [{"role": "user", "content": [part]}])).status_code == 200
        assert message(gateway).content == "[audio: it is here, but this model cannot read it]"


async def test_what_is_no_part_that_may_be_here_is_told(client: httpx.AsyncClient) -> None:
    error = (await ask(client, RESPONSES, [{"role": "user", "content": [5]}])).json()["error"]
    assert error["message"] == "input[0].content[0] must be an object"
    nothing = {"type": "input_image", "detail": "auto"}
    error = (await ask(client, RESPONSES, [{"role": "user", "content": [nothing]}])).json()["error"]
    assert error["message"] == "input[0].content[0].image_url must be a URL"
    said = [{"role": "user", "content": "a"}]
    body: dict[str, Any] = {"model": "llm", "messages": said, "prediction": {"type": "content", "content": [PART]}}
    error = (await client.post(CHAT, json=body)).json()["error"]
    allowed = "text, input_text, output_text, refusal"
    assert error["message"] == f'prediction.content[0].type must be one of {allowed}, got "image_url"'


async def test_inputs_of_responses(client: httpx.AsyncClient, gateway: Any) -> None:
    picture = {"type": "input_image", "image_url": URL, "detail": "auto"}
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "look"}, picture]},
        {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [picture, {"type": "input_text", "text": "so"}]},
    ]
    answer = await ask(client, RESPONSES, given)
    assert answer.status_code == 200
    assert "x-charonia-warning" not in answer.headers
    assert message(gateway, 1) == ChatMessage("user", "look", media=(image("messages[1].content[1].image_url", 4),))
    assert message(gateway) == ChatMessage(
        "tool", "so", tool_call_id="c", media=(image("messages[3].content[0].image_url"),)
    )


async def test_images_of_responses_are_seen_whoever_says_them(client: httpx.AsyncClient, gateway: Any) -> None:
    picture = {"type": "input_image", "image_url": URL}
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": [{"type": "input_text", "text": "so it looks"}, picture]},
        {"role": "user", "content": "which?"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [picture]},
        {"role": "user", "content": "more"},
        {"role": "developer", "content": [picture]},
    ]
    answer = await ask(client, RESPONSES, given)
    assert answer.status_code == 200
    assert "x-charonia-warning" not in answer.headers
    assert [(said.role, said.content, len(said.media)) for said in gateway.asked[-1].prompt.messages] == [
        ("system", "be brief\n\nso it looks", 1),
        ("user", "which?", 0),
        ("assistant", "", 1),
        ("user", "more", 0),
        ("system", "", 1),
    ]
    blind = await ask(client, RESPONSES, given, model="llm")
    assert "input[1].content[1]: this model takes none" in blind.headers["x-charonia-warning"]
    for index in (1, 4, 6):
        wrong = [*given]
        wrong[index] = wrong[index] | {"content": [{"type": "input_image", "image_url": 5}]}
        refused = (await ask(client, RESPONSES, wrong)).json()["error"]
        assert refused["param"] == f"input[{index}].content[0].image_url"


async def test_what_the_system_says_first_is_one_message(client: httpx.AsyncClient, gateway: Any) -> None:
    """Templates may refuse a second one, and so no answer came of a model that sees nothing either."""
    picture, text = {"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "so it looks"}
    given = [
        {"role": "developer", "content": [text, picture]},
        {"role": "system", "content": "in French"},
        {"role": "developer", "content": [picture, text]},
        {"role": "user", "content": "which?"},
    ]
    body = {"model": "seeing", "input": given, "instructions": "be brief"}
    assert (await client.post(RESPONSES, json=body)).status_code == 200
    opening, user = gateway.asked[-1].prompt.messages
    assert (opening.role, user.role) == ("system", "user")
    assert opening.content == "be brief\n\nso it looks\nin French\nso it looks"
    assert [medium.offset for medium in opening.media] == [21, 32]
    blind = await client.post(RESPONSES, json=body | {"model": "llm"})
    assert "input[0].content[1]: this model takes none" in blind.headers["x-charonia-warning"]
    unseen = "[image, image/png: it is here, but this model cannot read it]"
    opening, _ = gateway.asked[-1].prompt.messages
    assert opening == ChatMessage("system", f"be brief\n\nso it looks\n{unseen}\n\nin French\n\n{unseen}\nso it looks")
    for index, place in ((0, 1), (2, 0)):
        wrong = [*given]
        wrong[index] = {"role": "system", "content": [text, text]}
        wrong[index]["content"][place] = picture | {"image_url": 5}
        refused = (await client.post(RESPONSES, json=body | {"input": wrong})).json()["error"]
        assert refused["param"] == f"input[{index}].content[{place}].image_url"


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


async def test_blocks_of_messages(client: httpx.AsyncClient, gateway: Any) -> None:
    linked = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [LOOK, BLOCK], "is_error": True}
    turns = [
        {"role": "user", "content": [LOOK, BLOCK, LOOK, linked]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "view", "input": {}}]},
        {"role": "user", "content": [result, LOOK]},
    ]
    answer = await ask(client, MESSAGES, turns)
    assert answer.status_code == 200
    assert "x-charonia-warning" not in answer.headers
    first, second = image("messages[0].content[1].image_url", 4), "messages[0].content[3].image_url"
    assert message(gateway, 0) == ChatMessage("user", "looklook", media=(first, image(second, 8, "https://x/y.png")))
    shown = image("messages[2].content[1].image_url", len("Error: look"))
    assert message(gateway, 2) == ChatMessage("tool", "Error: look", tool_call_id="c1", media=(shown,))


@pytest.mark.parametrize(
    ("path", "messages", "inner", "field"),
    [
        (CHAT, [{"role": "user", "content": [LOOK, PART]}], "messages[0].content[1].image_url", None),
        (
            RESPONSES,
            [
                {"role": "system", "content": "x"},
                {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c",
                 "output": [{"type": "input_image", "image_url": URL}]},
            ],
            "messages[2].content[0].image_url",
            "input[2].output[0].image_url",
        ),
        (
            MESSAGES,
            [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": ""}, BLOCK]}],
            "messages[0].content[1].image_url",
            "messages[1].content[1].source",
        ),
    ],
)  # fmt: skip
async def test_errors_name_the_place_in_the_body(
    client: httpx.AsyncClient, gateway: Any, path: str, messages: list[Any], inner: str, field: str | None
) -> None:
    gateway.error, gateway.texts = InvalidArgument(f"{inner}: the image is broken", field=inner), []
    answer = await ask(client, path, messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{field or inner}: the image is broken"


async def test_an_agent_goes_on_with_a_model_that_does_not_see(client: httpx.AsyncClient, gateway: Any) -> None:
    unseen = "[image, image/png: it is here, but this model cannot read it]"
    warning = "this model takes none; the text says that there was one: image"
    await ask(client, RESPONSES, [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}], "llm")
    assert message(gateway) == ChatMessage("user", unseen)
    answer = await ask(client, MESSAGES, [{"role": "user", "content": [LOOK, BLOCK, LOOK, BLOCK]}], "llm")
    assert message(gateway) == ChatMessage("user", f"look\n{unseen}\nlook\n{unseen}")
    assert answer.headers["x-charonia-warning"] == f"messages[0].content[1]: {warning}"
    counted = await ask(client, f"{MESSAGES}/count_tokens", [{"role": "user", "content": [BLOCK]}], "llm")
    assert counted.headers["x-charonia-warning"] == f"messages[0].content[0]: {warning}"


async def test_what_a_model_sees_stays_beside_what_it_does_not_hear(client: httpx.AsyncClient, gateway: Any) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
    picture, text = {"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "so"}
    unheard = "[audio, audio/wav: it is here, but this model cannot read it]"
    warning = "this model takes none; the text says that there was one:"
    given = [{"role": "user", "content": [text, sound, picture, text, picture]}]
    answer = await ask(client, RESPONSES, given)
    places = [f"messages[0].content[{index}].image_url" for index in (2, 4)]
    begins = len(f"so\n{unheard}"), len(f"so\n{unheard}\nso")
    media = tuple(image(place, begin) for place, begin in zip(places, begins, strict=True))
    assert message(gateway) == ChatMessage("user", f"so\n{unheard}\nso", media=media)
    assert answer.headers["x-charonia-warning"] == f"input[0].content[1]: {warning} audio"
    blind = await ask(client, RESPONSES, given, "llm")
    assert all(f"{warning} {kind}" in blind.headers["x-charonia-warning"] for kind in ("audio", "image"))
