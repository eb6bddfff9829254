"""The way to a model of TensorRT-LLM: model repositories, the command line, and the gateway."""

import shutil
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from charonia.cli.app import app, check
from charonia.cli.model_selection import select_models
from charonia.cli.options import RepositoryOptions
from charonia.cli.repository_check import print_check_report
from charonia.core.errors import InvalidArgument
from charonia.core.request import GenerateRequest
from charonia.core.sampling import SamplingParams
from charonia.repository.builder import ModelBuilder, parse_backend_config
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.config_options import ConfigOptions
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_source import checkpoint_source

TRITONS = """
backend: "{backend}"
max_batch_size: 64
model_transaction_policy {{ decoupled: true }}
dynamic_batching {{ max_queue_delay_microseconds: 100 }}
input {{ name: "input_ids" data_type: TYPE_INT32 dims: -1 }}
output {{ name: "output_ids" data_type: TYPE_INT32 dims: [-1, -1] }}
instance_group {{ count: 1 }}
parameters {{ key: "gpt_model_type" value {{ string_value: "inflight_fused_batching" }} }}
parameters {{ key: "kv_cache_free_gpu_mem_fraction" value {{ string_value: "0.5" }} }}
parameters {{ key: "tokenizer_dir" value {{ string_value: "${{tokenizer_dir}}" }} }}
"""


@pytest.fixture
def repository(words: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(config: str) -> Path:
        shutil.copytree(words, tmp_path / "tensorrt_llm" / "1")
        (tmp_path / "tensorrt_llm" / "config.pbtxt").write_text(config)
        return tmp_path

    return make


@pytest.mark.parametrize("backend", ["tensorrtllm", "tensorrt-llm"])
async def test_a_repository_of_tritons_backend_is_served(
    repository: Callable[[str], Path], install: Callable[..., Any], backend: str
) -> None:
    package = install()
    source = RepositoryCatalog([repository(TRITONS.format(backend=backend))]).read("tensorrt_llm")
    settings = parse_backend_config(["tensorrtllm,max_num_seqs=3"])
    hub = InProcessGateway(builder=ModelBuilder(settings))
    await hub.lifecycle.load(source)
    try:
        request = GenerateRequest(id="1", prompt="w1", sampling=SamplingParams(max_tokens=2))
        with hub.open_request("test") as context:
            async with aclosing((await hub.acquire(context, "tensorrt_llm")).generate(request)) as chunks:
                assert "".join([chunk.text async for chunk in chunks]) == " w2 w3"
        config = hub.model_config("tensorrt_llm").raw
        assert (config["backend"], config["max_batch_size"]) == ("tensorrtllm", 0)
        assert config["output"][0]["name"] == "text_output"
        [llm] = package.made
        assert (llm.max_batch_size, llm.kv_cache_config.free_gpu_memory_fraction) == (3, 0.5)
    finally:
        await hub.lifecycle.close()
    assert llm.down


def test_a_repository_is_checked_without_the_package(
    repository: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = repository(
        'backend: "tensorrtllm" parameters { key: "decoding_mode" value { string_value: "medusa" } }'
    )
    assert print_check_report([str(directory)], ConfigOptions()) == 1
    assert "config.pbtxt:1: parameter 'decoding_mode': 'medusa' is not served here" in capsys.readouterr().out
    (directory / "tensorrt_llm" / "config.pbtxt").write_text(TRITONS.format(backend="tensorrt-llm"))
    assert print_check_report([str(directory)], ConfigOptions()) == 0
    assert "tensorrt_llm: good: tensorrtllm, version 1" in capsys.readouterr().out


def test_a_checkpoint_by_flag(words: Path, tmp_path: Path) -> None:
    assert checkpoint_source(str(words)).backend == "charonia"
    selection = select_models(str(words), RepositoryOptions(backend="tensorrt-llm"), {"max_num_seqs": "2"})
    [name] = selection.catalog.model_names()
    source = selection.catalog.read(name)
    assert (source.backend, source.parameters) == ("tensorrtllm", {"max_num_seqs": "2"})
    with pytest.raises(InvalidArgument, match="serves no checkpoint; charonia, tensorrtllm and encoder do"):
        select_models(str(words), RepositoryOptions(backend="llmapi"), {})
    with pytest.raises(InvalidArgument, match="--backend is for a single checkpoint"):
        select_models(None, RepositoryOptions(backend="tensorrtllm", model_repository=(tmp_path,)), {})


def test_the_command_checks_the_package_or_a_repository(
    install: Callable[..., Any],
    words: Path,
    repository: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    install()
    assert check(str(words), tensorrt_llm=True) == 0
    assert "tensorrt_llm 1.2.0, held against what the adapter expects of 1.1 to before" in capsys.readouterr().out
    assert check(str(repository(TRITONS.format(backend="tensorrtllm")))) == 0
    assert "good: tensorrtllm" in capsys.readouterr().out
    assert app(["check"]) == 1
    assert "name a model repository" in capsys.readouterr().err
