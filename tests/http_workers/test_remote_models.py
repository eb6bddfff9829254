"""A language model as a frontend has it."""

import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub import constants

from charonia.core.errors import InvalidArgument
from charonia.core.request import GenerateRequest
from charonia.core.request_context import RequestContext
from charonia.engine.client.engine import EngineSpec
from charonia.engine.client.llm import LlmModel
from charonia.engine.client.model_media import ModelMedia, PromptMedia
from charonia.engine.core.messages import CoreReady
from charonia.http_workers.remote_engine import RemoteEngine
from charonia.http_workers.remote_models import TextModelHere
from charonia.http_workers.snapshot import ServedModel
from charonia.tokenization.media_text import MediaText


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
