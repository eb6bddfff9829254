"""The data about TensorRT-LLM's API, the door to the package, and the check that holds one against the other."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import Internal, Unsupported
from charonia.engine.trtllm.api_versions import ApiVersion, api_version_of, api_versions, parse_version
from charonia.engine.trtllm.check import differences, report
from charonia.engine.trtllm.package import TrtllmPackage, resolve


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64}))
    return tmp_path


@pytest.mark.parametrize(
    ("version", "since"),
    [("1.1.0", "1.1"), ("1.1", "1.1"), ("1.2.0rc6.post3", "1.1"), ("1.2.1", "1.1"), ("1.3.0rc24", "1.3.0rc24"),
     ("1.3.0", "1.3.0rc24"), ("1.4.0rc1", "1.3.0rc24"), ("2.0", "1.3.0rc24")],
)  # fmt: skip
def test_a_version_has_its_world(version: str, since: str) -> None:
    assert api_version_of(version).since == since


@pytest.mark.parametrize("version", ["0.21.0", "1.0.0", "1.1.0rc5", "1.3.0rc1", "1.3.0rc23"])
def test_a_version_between_or_before_is_refused(version: str) -> None:
    with pytest.raises(Unsupported, match=rf"tensorrt_llm {version} .* it knows 1.1 to before 1.3.0rc1; 1.3.0rc24 and"):
        api_version_of(version)


def test_versions_are_ordered() -> None:
    assert (
        parse_version("1.3.0rc7")
        < parse_version("1.3.0rc24")
        < parse_version("1.3.0")
        < parse_version("1.3.1rc0")
        < parse_version("1.10")
    )
    with pytest.raises(Unsupported, match="'unknown'"):
        parse_version("unknown")


@pytest.mark.parametrize("world", api_versions(), ids=str)
def test_the_data_agree_with_themselves(world: ApiVersion) -> None:
    assert set(world.speculation.values()) <= world.calls.keys()
    for call in world.calls.values():
        assert all(not (each.required and each.default is None) for each in call.arguments.values())


def test_no_call_is_made_that_is_not_in_the_data(package: TrtllmPackage) -> None:
    assert package.make("KvCacheConfig", max_tokens=5).max_tokens == 5
    for call, arguments, says in [
        ("KvCacheConfig", {"max_token": 5}, "KvCacheConfig of .* has no max_token that"),
        ("LLM", {}, "LLM of .* needs model"),
        ("AsyncLLM", {}, "has no AsyncLLM"),
    ]:
        with pytest.raises(Internal, match=says):
            package.make(call, **arguments)


def test_the_fake_takes_what_the_data_have_and_nothing_else(package: TrtllmPackage) -> None:
    params = resolve(package.world.calls["SamplingParams"].path)
    assert params(max_tokens=3).detokenize is True
    with pytest.raises(TypeError, match="max_new_tokens"):
        params(max_new_tokens=3)
    llm = package.make("LLM", model="m")
    with pytest.raises(TypeError, match="stream"):
        llm.generate_async(inputs=[1], stream=True)


def test_without_the_package_the_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unsupported, match=r"pip install 'charonia\[tensorrt-llm\]'"):
        TrtllmPackage.find()
    assert report(None) == 1
    assert "charonia[tensorrt-llm]" in capsys.readouterr().err


def test_a_package_that_does_not_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt_llm.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unsupported, match="installed and cannot be imported: libcuda"):
        TrtllmPackage.find()


@pytest.mark.parametrize(("asked", "kept"), [(None, "1"), ("0", "0")])
def test_it_reports_its_use_to_nobody_unless_asked_to(
    install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, asked: str | None, kept: str
) -> None:
    install()
    monkeypatch.delenv("TRTLLM_NO_USAGE_STATS")
    if asked is not None:
        monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", asked)
    TrtllmPackage.find()
    assert os.environ["TRTLLM_NO_USAGE_STATS"] == kept


# The check


def test_what_is_as_expected_is_good(
    package: TrtllmPackage, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(None) == 0
    assert "signatures only" in capsys.readouterr().out
    assert report(str(checkpoint)) == 0
    out = capsys.readouterr().out
    assert "generated 8 tokens" in out
    assert "aborted after the first item" in out
    assert out.endswith("good: nothing differs\n")


def test_a_signature_that_differs_is_found(install: Callable[..., Any]) -> None:
    package = install("1.2.0")
    path = package.world.calls["GuidedDecodingParams"].path

    def other(json: str, *, regex: str = "", json_object: bool = False, mode: int) -> None: ...

    def open_ended(*args: Any, **kwargs: Any) -> None: ...

    package.place(path, other)
    resolve("tensorrt_llm.LLM").shutdown = open_ended
    del sys.modules["tensorrt_llm.llmapi"].LoRARequest
    [args] = {call.fields for name, call in package.world.calls.items() if name == "LLM"}
    del resolve(args).model_fields["enable_iter_perf_stats"]
    llm = resolve("tensorrt_llm.LLM")
    llm.__signature__ = llm.__signature__.replace(
        parameters=[each for each in llm.__signature__.parameters.values() if each.name != "enable_iter_perf_stats"]
    )
    assert [said.partition(" (")[0] for said in differences(package.world)] == [
        "LLM: has no argument enable_iter_perf_stats",
        "GuidedDecodingParams: regex is '' by default, expected None",
        "GuidedDecodingParams: has no argument grammar",
        "GuidedDecodingParams: needs mode, which the adapter does not know",
        "LoRARequest: tensorrt_llm.llmapi.LoRARequest is not there",
    ]


def test_a_generation_that_differs_is_found(
    install: Callable[..., Any],
    fake: Any,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install("1.3.0")

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
    package: TrtllmPackage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(str(tmp_path)) == 1
    assert "DIFFERS: " in (out := capsys.readouterr().out)
    assert "has no vocab_size" in out
