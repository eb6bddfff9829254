"""A language model as a frontend has it."""

import asyncio
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub import constants

from charonia.core.errors import InvalidArgument
from charonia.core.media import MediaSource
from charonia.core.request import ChatMessage, Conversation, GenerateRequest, TokenizedPrompt, TokenizeRequest
from charonia.core.request_context import RequestContext
from charonia.engine.client.engine import EngineSpec
from charonia.engine.client.llm import LlmModel
from charonia.engine.client.model_media import ModelMedia, PromptMedia
from charonia.engine.core.messages import CoreReady
from charonia.http_workers.messages import ResponsesEnded, TextAnswer, TextCall
from charonia.http_workers.open_requests import text_chunks
from charonia.http_workers.remote_engine import RemoteEngine
from charonia.http_workers.remote_gateway import RemoteGateway
from charonia.http_workers.remote_models import RemoteTextHandle, TextModelHere
from charonia.http_workers.snapshot import ServedModel
from charonia.processes.shared_arena import new_arena_file
from charonia.telemetry.loop_lag import LoopLag
from charonia.telemetry.shared_state import SharedState
from charonia.tokenization.media_text import MediaText

from ..waiting import until


async def test_a_model_of_the_hub_is_read_from_the_files_that_it_was_loaded_from(
    tmp_path: Path, making: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights may come later than its tokenizer, and the hub may have another revision by then."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot, refs = (tmp_path / "models--owner--net" / each for each in ("snapshots/0a1b", "refs"))
    for directory in (snapshot, refs):
        directory.mkdir(parents=True)
    making.write_tokenizer(snapshot)
    (snapshot / "config.json").write_text("{}")
    (refs / "main").write_text("0a1b")
    nobody: Any = None
    engine = RemoteEngine(nobody, 1, CoreReady(384, 64, 16, 4))
    plain = PromptMedia(MediaText({"image": "<i>"}, (), True), {"image": 5})
    spec = EngineSpec("charonia", "owner/net", lambda on_progress, metrics: engine)
    model = LlmModel("net", "1", spec, media=ModelMedia(plain=plain))
    await model.load()
    (snapshot / "model.safetensors").write_bytes(b"x")
    (refs / "main").write_text("0a1c")
    parts = pickle.loads(pickle.dumps(model.export_spec()))
    here = TextModelHere(ServedModel(1, model.config, True, ("net",), parts, False), engine)
    await here.building
    assert here.model.config.fingerprint == model.config.fingerprint
    assert await here.model.detokenize([1]) == await model.detokenize([1])
    for each in (model, here.model):
        with pytest.raises(InvalidArgument, match="it has 1 tokens that stand for parts of images"):
            await anext(aiter(each.generate(GenerateRequest(id="", prompt=(3, 5)), RequestContext("completions"))))
        await each.unload()


async def test_the_hub_counts_prompts_with_media_and_a_frontend_names_their_tokens(
    tmp_path: Path, making: ModuleType
) -> None:
    """What `/tokenize` asks: the frontend has no processor, and the hub tells the ids alone."""
    making.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    files = new_arena_file(1 << 20), new_arena_file(1 << 20)
    hub = RemoteGateway(SharedState(), files, 1.0, LoopLag(1.0)).connection
    sent: list[Any] = []
    hub.send = sent.append  # type: ignore[method-assign]
    engine = RemoteEngine(hub, 1, CoreReady(384, 64, 16, 4))
    model = LlmModel("net", "1", EngineSpec("charonia", str(tmp_path), lambda on_progress, metrics: engine))
    await model.load()
    nobody: Any = None
    handle = RemoteTextHandle(hub, nobody, model.config, RequestContext("tokenize"), model, model.stats())

    seen: list[TokenizeRequest] = []

    class InHub:
        async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
            seen.append(request)
            return TokenizedPrompt([7, 5, 5, 9])

    image = MediaSource("image", data=b"x", field="messages[0].content[0]")
    chat = TokenizeRequest(prompt=Conversation((ChatMessage("user", "", media=(image,)),)), with_strings=True)
    counted = asyncio.create_task(handle.tokenize(chat))
    await until(lambda: sent)
    [call] = sent
    assert isinstance(call, TextCall)
    in_hub: Any = InHub()
    async for chunk in text_chunks(in_hub, call):
        hub._on_text(TextAnswer(call.key, chunk))
    hub._on_responses_ended(ResponsesEnded(call.key))
    tokens = await counted
    assert seen == [chat]
    assert tokens.ids == [7, 5, 5, 9]
    assert tokens.strings == (await model.tokenize(TokenizeRequest(prompt=(7, 5, 5, 9), with_strings=True))).strings
    assert handle.context.end is not None, "the request has ended"

    plain = await handle.tokenize(TokenizeRequest(prompt="a text"))
    assert plain.ids == (await model.tokenize(TokenizeRequest(prompt="a text"))).ids
    assert sent == [call], "a text is counted here"
    await model.unload()
