"""Arguments of `LLM`: those that scripts for vLLM pass, and what is told of those that are not served."""

from pathlib import Path
from typing import Any

import pytest

import charonia
from charonia import SamplingParams
from charonia.bench.load.fake_model import VOCAB
from charonia.core.errors import QueueFull, RequestTimeout, ServerExiting
from charonia.inprocess.options import in_words_of_programs, read_options

FAKE: dict[str, Any] = {"executor": "fake", "fake_vocab_size": VOCAB, "fake_max_model_len": 4096}
MIGRATING: dict[str, Any] = {
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "seed": 0,
    "swap_space": 4,
    "cpu_offload_gb": 0,
    "enforce_eager": True,
    "disable_custom_all_reduce": True,
    "hf_token": None,
    "hf_overrides": {},
    "task": "auto",
    "runner": "generate",
    "convert": "auto",
    "load_format": "auto",
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2048,
    "max_model_len": 512,
    "disable_log_stats": True,
    "compilation_config": 0,
    "limit_mm_per_prompt": {"image": 2},
    "max_logprobs": 20,
    "generation_config": "auto",
    "guided_decoding_backend": "auto",
    "logits_processors": None,
    "use_tqdm_on_load": False,
    "model_impl": "auto",
}
"""What scripts that were written for vLLM pass, and what means the same or nothing here."""


def test_arguments_of_scripts_for_vllm_are_taken(words: Path) -> None:
    with charonia.LLM(model=str(words), **MIGRATING, **FAKE) as llm:
        assert llm.generate([[5]], SamplingParams(max_tokens=1))[0].outputs[0].token_ids == [6]


class Half:
    """As torch.float16 is written."""

    def __repr__(self) -> str:
        return "torch.float16"


Half.__module__ = "torch"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"nope": 1}, "unknown argument: nope"),
        ({"max_modl_len": 9}, "unknown argument: max_modl_len; did you mean 'max_model_len'?"),
        ({"trust_remote_code": True}, "trust_remote_code is vLLM's; here: not served: no code of a checkpoint is run"),
        ({"hf_overrides": {"a": 1}}, "hf_overrides is vLLM's; here: not served: change the checkpoint's config.json"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb is vLLM's; here: not served: weights are where they are computed with"),
        ({"task": "embed"}, "task is vLLM's; here: backend encoder"),
        ({"runner": "pooling"}, "runner is vLLM's; here: backend encoder"),
        ({"convert": "embed"}, "convert is vLLM's; here: backend encoder"),
        ({"kv_cache_memory_bytes": 1 << 20}, "kv_cache_memory_bytes is vLLM's; here: kv_cache_bytes"),
        ({"num_gpu_blocks_override": 9}, "here: kv_cache_blocks"),
        ({"load_format": "dummy"}, "load_format dummy is not served: safetensors, else torch's .bin"),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode slow is not served"),
        ({"max_seq_len_to_capture": 8192}, "max_seq_len_to_capture is vLLM's; here: leave it out"),
        ({"dtype": "float17"}, 'Invalid value "float17" for dtype'),
        ({"lora_modules": ["sql=/nowhere"], "enable_lora": True}, "lora_modules sql: there is no directory '/nowhere'"),
        ({"http_port": 1}, "'http_port' is about ports, processes or the log of `charonia serve`"),
    ],
)
def test_an_argument_that_is_not_served_is_refused_in_its_words(
    words: Path, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(charonia.CharoniaError) as refused:
        charonia.LLM(words, **FAKE, **arguments)
    assert says in str(refused.value)
    assert "--" not in str(refused.value)


def test_a_dtype_of_torch_is_its_name() -> None:
    assert read_options({"dtype": Half()}).engine.dtype == "float16"


@pytest.mark.parametrize(
    "arguments",
    [
        *({"task": task} for task in ("embed", "classify", "score", "reward")),
        *({"runner": "pooling", "convert": convert} for convert in ("auto", "none", "embed", "classify")),
    ],
)
def test_an_encoder_may_be_told_what_it_is(tmp_path: Path, words: Path, arguments: dict[str, Any]) -> None:
    (tmp_path / "modules.json").write_text("[]")
    assert read_options(arguments, str(tmp_path)) == read_options({})
    as_one = {"backend": "encoder"}
    assert read_options(arguments | as_one, str(words)) == read_options(as_one)
    for model in (str(words), "owner/name", None):
        with pytest.raises(charonia.InvalidArgument, match="here: --backend encoder"):
            read_options(arguments, model)


def test_an_error_keeps_what_it_has_when_its_words_change() -> None:
    for error in (QueueFull("see --max-num-seqs", retry_after=2.0), ServerExiting("--a-b"), RequestTimeout()):
        with pytest.raises(type(error)) as raised, in_words_of_programs():
            raise error
        assert raised.value is error
        assert "--" not in str(error)
    full = QueueFull("see --max-num-seqs", retry_after=2.0, limit="tokens")
    with pytest.raises(QueueFull, match="see max_num_seqs"), in_words_of_programs():
        raise full
    assert (full.message, full.retry_after, full.limit) == ("see max_num_seqs", 2.0, "tokens")
