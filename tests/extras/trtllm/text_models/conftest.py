"""A text model over TensorRT-LLM: a fake `tensorrt_llm` with the signatures of its contract."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.engine.client.llm import LlmModel
from charonia.extras.trtllm.build import trtllm_engine_spec
from charonia.extras.trtllm.options import TrtllmOptions

from ....engine.text_models.conftest import load
from ..conftest import VERSION

__all__ = ["load"]


@pytest.fixture
def engine() -> str:
    return VERSION


@pytest.fixture
def make_model(words: Path, install: Callable[..., Any]) -> Callable[..., LlmModel]:
    def make(step_seconds: float, max_num_seqs: int, **limits: float) -> LlmModel:
        install().step_seconds = step_seconds
        options = TrtllmOptions(max_num_seqs=max_num_seqs, **limits)
        return LlmModel("words", "1", trtllm_engine_spec(str(words), options))

    return make
