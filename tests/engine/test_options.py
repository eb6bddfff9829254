"""Flat names from config.pbtxt and the command line become an engine's configuration."""

from typing import Any, get_args

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.media_models import MediaConfig, MediaServices
from charonia.engine.checkpoint.quantization_config import STORED_AS
from charonia.engine.config import (
    CacheConfig,
    EngineConfig,
    FakeConfig,
    KVEventsConfig,
    LoraConfig,
    ParallelConfig,
    Quantization,
    SpeculationConfig,
    replica_endpoint,
)
from charonia.engine.media_options import MEDIA_FIELDS, options_without_effect
from charonia.engine.options import EngineOptions, engine_config, parse_settings
from charonia.scheduler.config import SchedulerConfig

ALL = {
    "dtype": "float32",
    "device": "cpu",
    "cpu_level": "avx2",
    "cache_dir": "kept",
    "cache_max_bytes": "1000",
    "quantization": "int8",
    "attention": "reference",
    "executor": "fake",
    "tensor_parallel_size": "2",
    "pipeline_parallel_size": "3",
    "pipeline_layers": "4,5,6",
    "enable_expert_parallel": "true",
    "distributed_executor_backend": "ray",
    "ray_address": "10.0.0.1:6379",
    "threads": "2",
    "data_parallel_size": "3",
    "max_model_len": "128",
    "max_queued_requests": "9",
    "max_queued_tokens": "5000",
    "default_request_timeout": "2.5",
    "max_num_seqs": "3",
    "max_num_batched_tokens": "64",
    "target_ttft_ms": "800",
    "target_itl_ms": "40",
    "target_tenants": "alpha, beta",
    "ahead": "1",
    "enforce_eager": "true",
    "batch_invariance": "true",
    "recurrence_chunks": "true",
    "few_row_kernel": "on",
    "dependent_launch": "true",
    "warm_up_graphs": "false",
    "graph_prompt_tokens": "512",
    "admission": "no_evict",
    "cache_hit_threshold": "0.5",
    "block_size": "8",
    "kv_cache_dtype": "int8",
    "kv_cache_memory_fraction": "0.25",
    "kv_cache_bytes": "1000000",
    "kv_cache_blocks": "77",
    "kv_cache_host_bytes": "5000000",
    "kv_cache_dir": "/kv",
    "kv_cache_dir_bytes": "7000000",
    "kv_cache_retention_bytes": "6000000",
    "state_cache_fraction": "0.1",
    "prefix_caching": "false",
    "tokenizer": "elsewhere",
    "chat_template": "{{ messages }}",
    "tool_call_parser": "hermes",
    "reasoning_parser": "deepseek_r1",
    "enable_lora": "true",
    "max_loras": "4",
    "max_lora_rank": "16",
    "max_lora_bytes": "1000",
    "per_request_spec_decode_metrics": "summary",
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}',
    "kv_events_config": "{}",
    "limit_mm_per_prompt": '{"image": 3, "video": 0}',
    "mm_processor_kwargs": '{"size": {"longest_edge": 56}, "max_pixels": 1000}',
    "media_path": "/pictures",
    "media_domains": "a.example, b.example",
    "media_max_bytes": "1000",
    "media_max_pixels": "2000",
    "media_max_seconds": "60",
    "media_processes": "3",
    "media_cache_bytes": "0",
    "share_media_cache": "true",
    "fake_step_seconds": "0.5",
    "fake_token_seconds": "0",
    "fake_vocab_size": "384",
    "fake_max_model_len": "256",
    "fake_state_bytes": "1000",
}


def test_every_name_arrives() -> None:
    assert engine_config("somewhere", parse_settings(ALL, EngineOptions)) == EngineConfig(
        model="somewhere",
        tokenizer="elsewhere",
        chat_template="{{ messages }}",
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
        dtype="float32",
        device="cpu",
        cpu_level="avx2",
        cache_dir="kept",
        cache_max_bytes=1000,
        quantization="int8",
        attention="reference",
        executor="fake",
        parallel=ParallelConfig(
            tensor=2, pipeline=3, layers=(4, 5, 6), whole_experts=True, backend="ray", ray_address="10.0.0.1:6379"
        ),
        threads=2,
        enforce_eager=True,
        batch_invariance=True,
        recurrence_chunks=True,
        few_row_kernel="on",
        dependent_launch=True,
        warm_up_graphs=False,
        graph_prompt_tokens=512,
        ahead_given=True,
        data_parallel_size=3,
        max_model_len=128,
        max_queued_requests=9,
        max_queued_tokens=5000,
        default_request_timeout=2.5,
        target_tenants=("alpha", "beta"),
        cache=CacheConfig(
            block_size=8,
            dtype="int8",
            memory_fraction=0.25,
            bytes=1_000_000,
            blocks=77,
            prefix_caching=False,
            host_bytes=5_000_000,
            directory="/kv",
            directory_bytes=7_000_000,
            retention_bytes=6_000_000,
            state_fraction=0.1,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=3,
            max_num_batched_tokens=64,
            target_ttft_ms=800,
            target_itl_ms=40,
            ahead=1,
            admission="no_evict",
            cache_hit_threshold=0.5,
        ),
        fake=FakeConfig(vocab_size=384, max_model_len=256, step_seconds=0.5, state_bytes=1000),
        lora=LoraConfig(max_loras=4, max_rank=16, max_bytes=1000),
        speculation=SpeculationConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4),
        per_request_spec_decode_metrics="summary",
        media=MediaConfig(
            per_prompt={"image": 3, "audio": 16},
            path="/pictures",
            domains=("a.example", "b.example"),
            max_bytes=1000,
            max_pixels=2000,
            max_seconds=60.0,
            processes=3,
            cache_bytes=0,
            share_cache=True,
            processor_settings='{"max_pixels":1000,"size":{"longest_edge":56}}',
        ),
    )
    # One stands for another name, one for prefix caching.
    others = {"gpu_memory_utilization", "kv_transfer_config"}
    assert set(ALL) == set(EngineOptions.__dataclass_fields__) - others


def test_a_gpus_share_is_of_all_its_memory_or_of_what_is_left() -> None:
    config = engine_config("x", parse_settings({"gpu_memory_utilization": "0.8"}, EngineOptions))
    assert config.cache == CacheConfig(gpu_utilization=0.8)
    with pytest.raises(InvalidArgument, match="gpu_memory_utilization and kv_cache_memory_fraction are two ways"):
        engine_config("x", EngineOptions(gpu_memory_utilization=0.8, kv_cache_memory_fraction=0.8))


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("image", "must be as image=4, or a JSON object of numbers, got 'image'"),
        ("image=4,", "must be as image=4"),
        ("{", "must be as image=4"),
        ('{"image": "four"}', "must be as image=4"),
        ('{"image": -1}', "must be at least 0"),
        ('{"image": {"count": -1}}', "must be at least 0"),
        ('{"image": {"count": "1"}}', "must be as image=4"),
        ("picture=4", "picture is not one of image, video, audio"),
    ],
)
def test_a_wrong_limit_of_images_is_refused(written: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as refusal:
        engine_config("x", EngineOptions(limit_mm_per_prompt=written))
    assert refusal.value.field == "limit_mm_per_prompt"


@pytest.mark.parametrize("written", ["", "{", "[]", "max_pixels=1000"])
def test_settings_of_a_processor_are_an_object(written: str) -> None:
    with pytest.raises(InvalidArgument, match="mm_processor_kwargs must be a JSON object, got") as refusal:
        engine_config("x", EngineOptions(mm_processor_kwargs=written))
    assert refusal.value.field == "mm_processor_kwargs"
    assert engine_config("x", EngineOptions(mm_processor_kwargs="{}")).media.processor_settings == ""


ALL_OF_MEDIA = {option: ALL[option] for option in MEDIA_FIELDS}


@pytest.mark.parametrize(
    ("kinds", "limit", "unused"),
    [
        (("image",), "image=4", ["media_max_seconds"]),
        (("audio",), "image=4", ["limit_mm_per_prompt", "mm_processor_kwargs", "media_max_pixels"]),
        (("audio",), "image=4,audio=2", ["mm_processor_kwargs", "media_max_pixels"]),
        (("audio",), "image=0", ["mm_processor_kwargs", "media_max_pixels"]),
        (("image", "audio"), "image=4", []),
        ((), "image=4", [*(set(ALL_OF_MEDIA) - {"media_cache_bytes", "share_media_cache"})]),
        (None, "image=4", [*ALL_OF_MEDIA]),
    ],
)
def test_options_of_media_are_of_use_to_models_with_such(kinds: Any, limit: str, unused: list[str]) -> None:
    given = ALL_OF_MEDIA | {"limit_mm_per_prompt": limit}
    config = engine_config("x", parse_settings(given, EngineOptions)).media
    encoder: Any = None
    services = None if kinds is None else MediaServices(None, encoder, kinds)
    assert sorted(options_without_effect(config, services)) == sorted(unused)
    assert options_without_effect(MediaConfig(), services) == []


def test_limits_of_media_are_by_kind() -> None:
    assert engine_config("x", EngineOptions(limit_mm_per_prompt="image=4, video=1")).media.per_prompt == {
        "image": 4,
        "audio": 16,
    }
    assert engine_config("x", EngineOptions(limit_mm_per_prompt="audio=0")).media.per_prompt["image"] == 16
    with_sizes = '{"image": {"count": 3, "width": 512, "height": 512}, "audio": {}, "video": {"count": 1}}'
    assert engine_config("x", EngineOptions(limit_mm_per_prompt=with_sizes)).media.per_prompt == {
        "image": 3,
        "audio": 16,
    }


def test_the_fake_executors_settings_are_for_it_alone() -> None:
    for executor in (None, "inline"):
        with pytest.raises(InvalidArgument, match="fake_vocab_size is for the executor fake alone"):
            engine_config("x", EngineOptions(executor=executor, fake_vocab_size=9))


def test_cache_events_are_configured_as_in_vllm() -> None:
    written = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5556", "topic": "kv@pod@model", "buffer_steps": 9}'
    config = engine_config("x", EngineOptions(kv_events_config=written))
    assert config.kv_events == KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://*:5556", topic="kv@pod@model", buffer_steps=9
    )
    for nothing in ("{}", '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert engine_config("x", EngineOptions(kv_events_config=nothing)).kv_events is None


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[]", "it must be an object"),
        ("{", "must be a JSON object"),
        ('{"enabled": true}', "enabled"),
        ('{"hwm": -1}', "hwm must be an integer >= 0"),
        ('{"publisher": "kafka"}', "publisher"),
        ('{"endpoint": "5556"}', "an endpoint is tcp://HOST:PORT"),
        ('{"replay_endpoint": "tcp://*:x"}', "an endpoint is tcp://HOST:PORT"),
    ],
)
def test_wrong_settings_of_cache_events_are_named(written: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match="kv_events_config") as refusal:
        engine_config("x", EngineOptions(kv_events_config=written))
    assert said in refusal.value.message
    assert refusal.value.field == "kv_events_config"


def test_events_of_a_cache_that_finds_nothing_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="prefix_caching is off"):
        engine_config("x", EngineOptions(kv_events_config='{"enable_kv_cache_events": true}', prefix_caching=False))


def test_a_replica_adds_its_number_to_an_endpoint() -> None:
    assert [replica_endpoint("tcp://*:5557", number) for number in (0, 3)] == ["tcp://*:5557", "tcp://*:5560"]
    assert [replica_endpoint("ipc:///tmp/x", number) for number in (0, 3)] == ["ipc:///tmp/x", "ipc:///tmp/x_dp3"]
    with pytest.raises(ValueError, match="an endpoint is"):
        replica_endpoint("tcp://*:65535", 1)


def test_adapters_are_taken_only_where_they_are_enabled() -> None:
    config = engine_config("x", EngineOptions(enable_lora=True), '{"sql": "/loras/sql"}')
    assert config.lora == LoraConfig(modules={"sql": "/loras/sql"})
    for name, options, modules in (
        ("max_loras", EngineOptions(max_loras=4), ""),
        ("max_lora_rank", EngineOptions(max_lora_rank=4, enable_lora=False), ""),
        ("max_lora_bytes", EngineOptions(max_lora_bytes=4), ""),
        ("lora_modules", EngineOptions(), "{}"),
    ):
        with pytest.raises(InvalidArgument, match=f"{name} needs enable_lora") as refusal:
            engine_config("x", options, modules)
        assert refusal.value.field == name
    for modules in ("[]", "{", '{"sql": 1}'):
        with pytest.raises(InvalidArgument, match="lora_modules must be a JSON object of names and directories"):
            engine_config("x", EngineOptions(enable_lora=True), modules)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("ngram", "must be a JSON object: "),
        ("[]", "it must be an object"),
        ("{}", "method must be one of ngram"),
        ('{"method": "medusa"}', "method must be one of ngram"),
        ('{"method": "eagle3"}', "it is wrong: model is missing: eagle3 needs a checkpoint"),
        (
            '{"method": "eagle3", "model": "d", "quantization": "int4"}',
            "it is wrong: quantization of a head is none or",
        ),
        ('{"method": "mtp", "model": "d"}', "it is wrong: model is for other methods"),
        ('{"method": "ngram", "model": "draft"}', "it is wrong: no model drafts with the method ngram"),
        ('{"method": "draft_model"}', "it is wrong: model is missing: draft_model needs a checkpoint"),
        (
            '{"method": "draft_model", "model": "d", "draft_tensor_parallel_size": 2}',
            "draft_tensor_parallel_size must be 1",
        ),
        (
            '{"method": "ngram", "use_heterogeneous_vocab": true}',
            "it is wrong: use_heterogeneous_vocab is for a draft_model alone",
        ),
        ('{"method": "draft_model", "model": "d", "parallel_drafting": true}', "parallel_drafting is not served"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens must be an integer >= 1"),
        ('{"method": "ngram", "num_tokens": 3}', "num_tokens is unknown"),
        (
            '{"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 5}',
            "it is wrong: prompt_lookup_min 6 exceeds prompt_lookup_max 5",
        ),
    ],
)
def test_a_speculative_config_that_means_nothing_is_refused_by_name(written: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^speculative_config:? {says}") as refusal:
        engine_config("x", EngineOptions(speculative_config=written))
    assert refusal.value.field == "speculative_config"


def test_ngrams_are_of_five_tokens_unless_said_otherwise() -> None:
    config = SpeculationConfig(method="ngram")
    assert config.lookup_range == (5, 5)
    assert SpeculationConfig(method="ngram", prompt_lookup_min=2).lookup_range == (2, 2)
    assert SpeculationConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=4).lookup_range == (2, 4)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cache_in_fp8_has_both_of_its_names(name: str) -> None:
    assert engine_config("x", parse_settings({"kv_cache_dtype": name}, EngineOptions)).cache.dtype == "fp8"


def test_nothing_given_is_the_engines_choice() -> None:
    assert engine_config("x", EngineOptions()) == EngineConfig(model="x")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("aheda", "1", "unknown parameter 'aheda'; known are dtype, device, "),
        ("ahead", "one", "parameter 'ahead' must be an integer, got 'one'"),
        ("ahead", "-1", "parameter 'ahead' must be an integer >= 0, got '-1'"),
        ("max_num_seqs", "0", "parameter 'max_num_seqs' must be an integer >= 1, got '0'"),
        ("max_num_seqs", "1.5", "parameter 'max_num_seqs' must be an integer, got '1.5'"),
        ("gpu_memory_utilization", "1.5", "parameter 'gpu_memory_utilization' must be a number <= 1"),
        ("kv_cache_memory_fraction", "1.5", "parameter 'kv_cache_memory_fraction' must be a number <= 1"),
        ("prefix_caching", "ja", "parameter 'prefix_caching' must be a boolean, got 'ja'"),
        ("kv_cache_dtype", "fp8_e5m2", "parameter 'kv_cache_dtype' must be one of auto, int8, fp8, fp8_e4m3, got"),
        ("dtype", "int8", "parameter 'dtype' must be one of auto, bfloat16, float16, float32, got 'int8'"),
    ],
)
def test_what_is_wrong_is_named(name: str, text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_settings({name: text}, EngineOptions)
    assert caught.value.message.startswith(says)
    assert caught.value.field == name


def test_every_name_of_a_stored_form_may_be_given() -> None:
    assert STORED_AS.keys() <= {*get_args(Quantization)}
