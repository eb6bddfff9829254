"""Repositories of Triton's TensorRT-LLM backend as people have them: all tensors, batching, and parameters, of
which some are placeholders that were never filled in."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LINES = ("The quick brown fox jumps over the lazy dog.\n", "Charon ferries tokens across the river.\n")

SAMPLING = {
    "end_id": "INT32",
    "pad_id": "INT32",
    "temperature": "FP32",
    "repetition_penalty": "FP32",
    "min_tokens": "INT32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "return_log_probs": "BOOL",
    "return_context_logits": "BOOL",
    "return_generation_logits": "BOOL",
    "return_perf_metrics": "BOOL",
    "exclude_input_in_output": "BOOL",
    "beam_width": "INT32",
    "num_return_sequences": "INT32",
    "lora_task_id": "UINT64",
    "lora_weights": "FP16 -1,-1",
    "lora_config": "INT32 -1,3",
    "prompt_embedding_table": "FP16 -1,-1",
    "prompt_vocab_size": "INT32",
    "guided_decoding_guide_type": "STRING",
    "guided_decoding_guide": "STRING",
}
"""Inputs that the ensemble hands to `tensorrt_llm` under the same name; dims are [ 1 ] where none are said."""

RENAMED = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty", "stream": "streaming"}
"""Inputs of the ensemble -> of `tensorrt_llm`."""

NUMBERS = {
    "batch_index": "INT32",
    "sequence_index": "INT32",
    "kv_cache_alloc_new_blocks": "INT32",
    "kv_cache_reused_blocks": "INT32",
    "kv_cache_alloc_total_blocks": "INT32",
    "arrival_time_ns": "INT64",
    "first_scheduled_time_ns": "INT64",
    "first_token_time_ns": "INT64",
    "last_token_time_ns": "INT64",
    "acceptance_rate": "FP32",
    "total_accepted_draft_tokens": "INT32",
    "total_draft_tokens": "INT32",
}
PROBABILITIES = {
    "cum_log_probs": "FP32 -1",
    "output_log_probs": "FP32 -1,-1",
    "context_logits": "FP32 -1,-1",
    "generation_logits": "FP32 -1,-1,-1",
}
TEXTS = {
    "text_input": ("QUERY", "STRING 1"),
    "max_tokens": ("REQUEST_OUTPUT_LEN", "INT32 1"),
    "bad_words": ("BAD_WORDS_DICT", "STRING -1"),
    "stop_words": ("STOP_WORDS_DICT", "STRING -1"),
    "decoder_text_input": ("DECODER_QUERY", "STRING 1"),
    "embedding_bias_words": ("EMBEDDING_BIAS_WORDS", "STRING -1"),
    "embedding_bias_weights": ("EMBEDDING_BIAS_WEIGHTS", "FP32 -1"),
}
"""Inputs of the ensemble -> of `preprocessing`."""

PREPROCESSED = {
    "INPUT_ID": ("input_ids", "INT32 -1"),
    "REQUEST_INPUT_LEN": ("input_lengths", "INT32 1"),
    "REQUEST_OUTPUT_LEN": ("request_output_len", "INT32 -1"),
    "DECODER_INPUT_ID": ("decoder_input_ids", "INT32 -1"),
    "REQUEST_DECODER_INPUT_LEN": ("decoder_input_lengths", "INT32 1"),
    "BAD_WORDS_IDS": ("bad_words_list", "INT32 2,-1"),
    "STOP_WORDS_IDS": ("stop_words_list", "INT32 2,-1"),
    "EMBEDDING_BIAS": ("embedding_bias", "FP32 -1"),
    "OUT_END_ID": ("end_id", "INT32 1"),
    "OUT_PAD_ID": ("pad_id", "INT32 1"),
}
"""Outputs of `preprocessing` -> inputs of `tensorrt_llm`."""

LLM_PARAMETERS = {
    "max_beam_width": "1",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "gpt_model_type": "inflight_fused_batching",
    "encoder_model_path": "${encoder_engine_dir}",
    "max_tokens_in_paged_kv_cache": "2048",
    "max_attention_window_size": "${max_attention_window_size}",
    "batch_scheduler_policy": "guaranteed_no_evict",
    "kv_cache_free_gpu_mem_fraction": "0.8",
    "kv_cache_host_memory_bytes": "${kv_cache_host_memory_bytes}",
    "kv_cache_onboard_blocks": "${kv_cache_onboard_blocks}",
    "exclude_input_in_output": "True",
    "cancellation_check_period_ms": "${cancellation_check_period_ms}",
    "enable_kv_cache_reuse": "True",
    "normalize_log_probs": "${normalize_log_probs}",
    "enable_chunked_context": "true",
    "gpu_device_ids": "${gpu_device_ids}",
    "lora_cache_max_adapter_size": "${lora_cache_max_adapter_size}",
    "decoding_mode": "${decoding_mode}",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    "medusa_choices": "${medusa_choices}",
    "guided_decoding_backend": "${guided_decoding_backend}",
}


def tensors(side: str, entries: Mapping[str, str], scalar: bool = False, required: tuple[str, ...] = ()) -> str:
    """`input` or `output` of a config, of entries name -> type and dims. `scalar`: one element is reshaped to none."""
    said = []
    for name, text in entries.items():
        kind, _, dims = text.partition(" ")
        more = " reshape: { shape: [ ] }" if scalar and dims in ("", "1") else ""
        more += " optional: true" if side == "input" and name not in required else ""
        said.append(f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims or 1} ]{more} }}')
    return f"{side} [\n  " + ",\n  ".join(said) + "\n]\n"


def parameters(given: Mapping[str, object]) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in given.items()
    )


def maps(side: str, pairs: Mapping[str, str]) -> str:
    return "".join(f'\n      {side}_map {{ key: "{key}" value: "{value}" }}' for key, value in pairs.items())


class TrtllmRepository:
    """Writes such models into `repository`. `size`: max_batch_size of all of them."""

    def __init__(self, repository: Path, size: int = 8) -> None:
        self.repository, self.size = repository, size

    def write(self, name: str, *parts: str) -> Path:
        """A model, and its version's directory without anything in it."""
        version = self.repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text("\n".join([f'name: "{name}"', *parts]))
        return version

    def write_llm(self, name: str, checkpoint: Path | str, decoupled: bool = True, **others: object) -> None:
        own = dict(PREPROCESSED.values())
        made = {"output_ids": "INT32 -1,-1", "sequence_length": "INT32 -1", **PROBABILITIES, **NUMBERS}
        switches = {"streaming": "BOOL", "stop": "BOOL", "len_penalty": "FP32"}
        sampled = {"runtime_top_k": "INT32", "runtime_top_p": "FP32", "retention_token_range_starts": "INT32 -1"}
        self.write(
            name,
            'backend: "tensorrtllm"',
            f"max_batch_size: {self.size}",
            f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}",
            f"dynamic_batching {{ preferred_batch_size: [ {self.size} ] max_queue_delay_microseconds: 0 }}",
            tensors(
                "input",
                own | switches | sampled | SAMPLING,
                scalar=True,
                required=("input_ids", "input_lengths", "request_output_len"),
            ),
            tensors("output", made),
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
            parameters({**LLM_PARAMETERS, "gpt_model_path": checkpoint, **others}),
        )

    def write_texts(self, tokenizer: Path) -> None:
        """`preprocessing` and `postprocessing`."""
        given = {**dict(TEXTS.values()), "END_ID": "INT32", "PAD_ID": "INT32", "IMAGE_URL": "STRING 1"}
        common = 'backend: "python"', f"max_batch_size: {self.size}", "instance_group [ { count: 1 kind: KIND_CPU } ]"
        self.write(
            "preprocessing",
            *common,
            tensors("input", given, required=("QUERY", "REQUEST_OUTPUT_LEN")),
            tensors("output", {name: kind for name, (_, kind) in PREPROCESSED.items()} | {"PIXEL_VALUES": "FP16 -1"}),
            parameters({"tokenizer_dir": tokenizer, "add_special_tokens": "${add_special_tokens}"}),
        )
        self.write(
            "postprocessing",
            *common,
            tensors(
                "input", {"TOKENS_BATCH": "INT32 -1,-1", "SEQUENCE_LENGTH": "INT32 -1"}, required=("TOKENS_BATCH",)
            ),
            tensors("output", {"OUTPUT": "STRING -1"}),
            parameters({"tokenizer_dir": tokenizer, "skip_special_tokens": "${skip_special_tokens}"}),
        )

    def inputs(self) -> dict[str, str]:
        """Those of `ensemble` and `tensorrt_llm_bls`."""
        renamed = {"top_k": "INT32", "top_p": "FP32", "length_penalty": "FP32", "stream": "BOOL"}
        return {name: kind for name, (_, kind) in TEXTS.items()} | renamed | SAMPLING

    def write_ensemble(self, name: str, llm: str) -> None:
        asked = {"TOKENS_BATCH": "_TOKENS", "SEQUENCE_LENGTH": "_LENGTHS"}
        made = {"output_ids": "_TOKENS", "sequence_length": "_LENGTHS"} | {
            each: each for each in PROBABILITIES | NUMBERS
        }
        given = {theirs: f"_{ours}" for ours, (theirs, _) in PREPROCESSED.items()}
        given |= {theirs: ours for ours, theirs in RENAMED.items()}
        given |= {each: each for each in SAMPLING if each not in ("end_id", "pad_id")}
        queried = {theirs: ours for ours, (theirs, _) in TEXTS.items()} | {"END_ID": "end_id", "PAD_ID": "pad_id"}
        steps = (
            ("preprocessing", queried, {name: f"_{name}" for name in PREPROCESSED}),
            (llm, given, made),
            ("postprocessing", asked, {"OUTPUT": "text_output"}),
        )
        said = ",\n".join(
            f'    {{ model_name: "{model}" model_version: -1{maps("input", taken)}{maps("output", left)} }}'
            for model, taken, left in steps
        )
        self.write(
            name,
            'platform: "ensemble"',
            f"max_batch_size: {self.size}",
            tensors("input", self.inputs(), required=("text_input", "max_tokens")),
            tensors("output", {"text_output": "STRING -1", **PROBABILITIES, **NUMBERS}),
            f"ensemble_scheduling {{\n  step [\n{said}\n  ]\n}}",
        )

    def write_bls(self, name: str, llm: str) -> None:
        self.write(
            name,
            'backend: "python"',
            f"max_batch_size: {self.size}",
            "model_transaction_policy { decoupled: true }",
            tensors(
                "input",
                self.inputs() | {"num_draft_tokens": "INT32", "use_draft_logits": "BOOL"},
                required=("text_input", "max_tokens"),
            ),
            tensors("output", {"text_output": "STRING -1", **PROBABILITIES, **NUMBERS}),
            parameters(
                {
                    "accumulate_tokens": "true",
                    "tensorrt_llm_model_name": llm,
                    "tensorrt_llm_draft_model_name": "${tensorrt_llm_draft_model_name}",
                }
            ),
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
        )

    def write_llmapi(self, name: str, checkpoint: Path) -> None:
        """The newer generation, with the code that its folder has and that is not run."""
        sampling = {"max_tokens": "INT32", "temperature": "FP32", "seed": "UINT64", "stop": "STRING -1"}
        version = self.write(
            name,
            'backend: "python"',
            tensors(
                "input",
                {"text_input": "STRING -1", "streaming": "BOOL", "stop": "BOOL"}
                | {f"sampling_param_{each}": kind for each, kind in sampling.items()},
                required=("text_input",),
            ),
            tensors("output", {"text_output": "STRING -1", "finish_reason": "STRING -1"}),
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
        )
        (version / "model.py").write_text("import tensorrt_llm\n")
        (version / "model.yaml").write_text(
            f"model: {checkpoint}\nbackend: pytorch\nmax_seq_len: 256\ncuda_graph_config: {{}}\n"
            "kv_cache_config: {enable_block_reuse: true, free_gpu_memory_fraction: 0.5, max_tokens: 1024}\n"
            "triton_config: {max_batch_size: 0, decoupled: true}\n"
        )


def write_ascii_tokenizer(directory: Path, checkpoint: Path) -> Path:
    """A copy of `checkpoint` with a tokenizer each of whose tokens is whole characters, so that each can be decoded
    alone."""
    shutil.copytree(checkpoint, directory)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter.isascii() or letter in "ĠĊ"]
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<|end|>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
