"""The repositories of Triton's TensorRT-LLM backends, by our names."""

from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument
from charonia.engine.options import parse_settings
from charonia.extras.trtllm.options import TrtllmOptions, read_model_source

OLDER = {
    "gpt_model_type": "inflight_fused_batching",
    "gpt_model_path": "/engine",
    "encoder_model_path": "${encoder_engine_dir}",
    "tokenizer_dir": "/tokenizer",
    "max_beam_width": "1",
    "batch_scheduler_policy": "max_utilization",
    "max_tokens_in_paged_kv_cache": "${max_tokens_in_paged_kv_cache}",
    "kv_cache_free_gpu_mem_fraction": "0.8",
    "kv_cache_host_memory_bytes": "45000000",
    "enable_kv_cache_reuse": "True",
    "enable_chunked_context": "",
    "cancellation_check_period_ms": "100",
    "decoding_mode": "top_k_top_p",
}
NEWER = """
model: owner/name
backend: pytorch
tensor_parallel_size: 2
max_batch_size: 16
max_seq_len: 4096
kv_cache_config:
  enable_block_reuse: false
  free_gpu_memory_fraction: 0.7
speculative_config: {decoding_type: NGram, max_draft_len: 3}
enable_chunked_prefill: false
tokenizer: null
triton_config: {decoupled: true, max_batch_size: 0}
"""


def test_the_older_backend() -> None:
    model, settings, idle = read_model_source("/here", OLDER)
    assert model == "/engine"
    assert parse_settings(settings, TrtllmOptions) == TrtllmOptions(
        tokenizer="/tokenizer",
        admission="optimistic",
        kv_cache_memory_fraction=0.8,
        kv_cache_host_bytes=45_000_000,
        prefix_caching=True,
    )
    assert idle == ("cancellation_check_period_ms", "max_beam_width")


def test_the_newer_backend(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(NEWER)
    model, settings, idle = read_model_source(str(tmp_path), {"max_num_seqs": "8"})
    assert (model, idle) == ("owner/name", ())
    options = parse_settings(settings, TrtllmOptions)
    assert options.speculation == {"decoding_type": "NGram", "max_draft_len": 3}
    assert options == TrtllmOptions(
        tensor_parallel_size=2,
        max_num_seqs=8,
        max_model_len=4096,
        prefix_caching=False,
        kv_cache_memory_fraction=0.7,
        chunked_prefill=False,
        speculative_config=options.speculative_config,
    )


def test_our_own_names_and_no_names(tmp_path: Path) -> None:
    assert read_model_source(str(tmp_path), {}) == (str(tmp_path), {}, ())
    given = {"model": "/m", "admission": "no_evict"}
    assert read_model_source(str(tmp_path), given) == ("/m", {"admission": "no_evict"}, ())


def test_another_yaml_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.yaml").write_text(NEWER)
    (tmp_path / "other.yaml").write_text("model: other/name")
    monkeypatch.setenv("LLM_CONFIG_PATH", str(tmp_path / "other.yaml"))
    assert read_model_source(str(tmp_path), {}) == ("other/name", {}, ())


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"gpt_model_type": "enc_dec"}, "gpt_model_type"),
        ({"decoding_mode": "medusa"}, "decoding_mode"),
        ({"encoder_model_path": "/e"}, "encoder_model_path"),
    ],
)
def test_what_would_change_answers_is_refused(parameters: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field) as refusal:
        read_model_source("/here", parameters)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("backend: tensorrt", "'backend': 'tensorrt' is not served"),
        ("- a", "must hold the arguments"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_yaml_that_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match=says):
        read_model_source(str(tmp_path), {})


@pytest.mark.parametrize(
    ("text", "name"), [("backend_name: x", "backend_name"), ("kv_cache_config: {sinks: 3}", "kv_cache_config.sinks")]
)
def test_what_nobody_knows_is_refused_with_what_is_known(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "model.yaml").write_text(text)
    settings = read_model_source(str(tmp_path), {}).settings
    with pytest.raises(InvalidArgument, match=f"unknown parameter '{name}'; known are tokenizer"):
        parse_settings(settings, TrtllmOptions)
