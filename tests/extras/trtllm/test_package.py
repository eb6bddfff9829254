"""The installed package, its version, and the check that compares it with the stubs."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import Unsupported
from charonia.extras.trtllm.check import report
from charonia.extras.trtllm.package import differences, import_tensorrt_llm, read_stubs


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64}))
    return tmp_path


@pytest.mark.parametrize("version", ["1.1", "1.1.0", "1.1.0.post1", "1.2.0rc6.post3", "1.2.0", "1.2.1"])
def test_the_versions_that_the_stubs_describe_are_known(install: Callable[..., Any], version: str) -> None:
    install(version)
    assert import_tensorrt_llm() == version


@pytest.mark.parametrize(
    "version", ["0.21.0", "1.0.0", "1.1.0rc5", "1.3.0rc1", "1.3.0", "1.10.0", "1.20", "2.1", "unknown"]
)
def test_any_other_version_is_refused(install: Callable[..., Any], version: str) -> None:
    install(version)
    with pytest.raises(Unsupported, match=rf"tensorrt_llm {version} is installed, .* it knows 1.1 to before 1.3"):
        import_tensorrt_llm()


def test_the_stubs_are_read_as_they_stand() -> None:
    stubs = read_stubs()
    generate = stubs["tensorrt_llm.LLM"].methods["generate_async"]
    assert str(generate) == "(inputs, sampling_params=None, lora_request=None, streaming=False, cache_salt=None)"
    output = stubs["tensorrt_llm.llmapi.RequestOutput"]
    assert (output.attributes, output.methods.keys()) == (
        {"outputs", "finished", "cached_tokens"},
        {"abort", "__aiter__"},
    )
    init = stubs["tensorrt_llm._tensorrt_engine.LLM"].methods["__init__"].parameters
    assert init["model"].default is init["model"].empty
    assert init["max_beam_width"].default is ...


def test_the_fake_takes_what_the_stubs_have_and_nothing_else(package: Any) -> None:
    params = package.modules["tensorrt_llm"].SamplingParams
    assert params(max_tokens=3).detokenize is True
    with pytest.raises(TypeError, match="max_new_tokens"):
        params(max_new_tokens=3)
    llm = package.modules["tensorrt_llm"].LLM(model="m")
    with pytest.raises(TypeError, match="stream"):
        llm.generate_async(inputs=[1], stream=True)


def test_without_the_package_the_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unsupported, match=r"pip install '\.\[tensorrt-llm\]'"):
        import_tensorrt_llm()
    assert report(None) == 1
    assert "'.[tensorrt-llm]'" in capsys.readouterr().err


def test_a_package_that_does_not_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt_llm.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unsupported, match="installed and cannot be imported: libcuda"):
        import_tensorrt_llm()


@pytest.mark.parametrize(("asked", "kept"), [(None, "1"), ("0", "0")])
def test_it_reports_its_use_to_nobody_unless_asked_to(
    install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, asked: str | None, kept: str
) -> None:
    install()
    monkeypatch.delenv("TRTLLM_NO_USAGE_STATS")
    if asked is not None:
        monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", asked)
    import_tensorrt_llm()
    assert os.environ["TRTLLM_NO_USAGE_STATS"] == kept


# The check


def test_what_is_as_expected_is_good(package: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(None) == 0
    assert "signatures only" in capsys.readouterr().out
    assert report(str(checkpoint)) == 0
    out = capsys.readouterr().out
    assert "generated 8 tokens" in out
    assert "aborted after the first item" in out
    assert out.endswith("good: nothing differs\n")


def test_a_signature_that_differs_is_found(package: Any) -> None:
    def other(json: str, *, regex: str = "", json_object: bool = False, mode: int) -> None: ...

    def open_ended(*args: Any, **kwargs: Any) -> None: ...

    llmapi, llm = package.modules["tensorrt_llm.llmapi"], package.modules["tensorrt_llm"].LLM
    llmapi.GuidedDecodingParams = other
    llm.shutdown = open_ended
    del llmapi.LoRARequest
    del llmapi.TorchLlmArgs.model_fields["enable_iter_perf_stats"]
    llm.__signature__ = llm.__signature__.replace(
        parameters=[value for value in llm.__signature__.parameters.values() if value.name != "enable_iter_perf_stats"]
    )
    assert {said.partition(" (")[0] for said in differences()} == {
        "tensorrt_llm.LLM: has no argument enable_iter_perf_stats",
        "tensorrt_llm.llmapi.GuidedDecodingParams: regex is '' by default, expected None",
        "tensorrt_llm.llmapi.GuidedDecodingParams: has no argument grammar",
        "tensorrt_llm.llmapi.GuidedDecodingParams: needs mode, which the adapter does not know",
        "tensorrt_llm.llmapi.LoRARequest is not there",
    }


def test_a_generation_that_differs_is_found(
    install: Callable[..., Any],
    fake: Any,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install()

    def note_nothing(llm: Any) -> None:
        llm.records.append({"kvCacheStats": {}})

    monkeypatch.setattr(fake.Llm, "note_step", note_nothing)
    monkeypatch.setattr(fake.Result, "abort", lambda result: None)
    assert report(str(checkpoint)) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIFFERS: ")]
    assert "DIFFERS: an abort changes nothing" in found
    assert "DIFFERS: statistics have no kvCacheStats.usedNumBlocks" in found
    assert "DIFFERS: statistics have no iterLatencyMS" in found


def test_a_model_that_does_not_load_is_a_difference(
    package: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(str(tmp_path)) == 1
    assert "DIFFERS: " in (out := capsys.readouterr().out)
    assert "has no vocab_size" in out
