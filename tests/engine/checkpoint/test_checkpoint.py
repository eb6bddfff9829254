"""Opening checkpoints, and what is said of broken ones."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from charonia.core.errors import InvalidArgument, NotFound
from charonia.core.model import MemoryNeed
from charonia.engine.build import memory_needed
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import find_weights, open_checkpoint, open_safetensors, text_config
from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import CheckpointError, LayerAttention, RopeSpec
from charonia.engine.checkpoint.weight_memory import WeightUse, count_weight_bytes
from charonia.engine.checkpoint.weights import CheckpointWeights, TensorSlice, WeightLoader
from charonia.engine.client.tokenizer_bundle import TokenizerBundle
from charonia.engine.models.registry import ARCHITECTURES, checkpoint_builder

WEIGHTS, BIN = "model.safetensors", "pytorch_model.bin"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9000\n"
Edit = Callable[[Path], None]


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint of one's own to break."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_tensors(directory: Path, **changes: Any) -> None:
    tensors = load_file(directory / WEIGHTS) | changes
    save_file({name: value for name, value in tensors.items() if value is not ...}, directory / WEIGHTS)


def build(directory: Path, progress: Callable[[float], None] = lambda _: None) -> Any:
    return checkpoint_builder(open_checkpoint(directory)).build(
        BuildContext(torch.float32, torch.device("cpu"), 64, progress=progress)
    )


def test_a_checkpoint_says_what_it_is(checkpoint: Callable[..., Path]) -> None:
    opened = open_checkpoint(checkpoint("llama-llama3-tied"))
    assert opened.spec.architecture == "LlamaForCausalLM"
    assert (opened.spec.heads, opened.spec.kv_heads, opened.spec.head_dim) == (4, 2, 16)
    assert opened.spec.rope == RopeSpec("llama3", 10000.0, 8.0, 1.0, 4.0, 64)
    assert opened.spec.tied_embeddings


def test_older_field_names_mean_the_same() -> None:
    common = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 10,
        "max_position_embeddings": 128,
    }
    rope = {"factor": 2.0, "rope_type": "linear"}
    new = read_spec(common | {"dtype": "bfloat16", "rope_parameters": rope | {"rope_theta": 5e5}}, "new")
    old = read_spec(
        common | {"torch_dtype": "bfloat16", "rope_scaling": {"factor": 2.0, "type": "linear"}, "rope_theta": 5e5},
        "old",
    )
    assert new == old
    assert new.rope.theta == 5e5
    assert new.kv_heads == 4


GEMMA3_OLD = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 10,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}


def test_what_gemma_leaves_unsaid() -> None:
    spec = read_spec(GEMMA3_OLD, "here")
    near, far = (LayerAttention(window, 256**-0.5, both_ways=True) for window in (512, None))
    assert spec.attention == (near, near, far, near, near, far)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.factor) == ("linear", 1e6, 8.0)
    assert (spec.local_rope.kind, spec.local_rope.theta) == ("default", 1e4)
    assert spec.tied_embeddings
    assert spec.head_dim == 256
    assert spec.activation == "gelu_tanh"
    two = read_spec(GEMMA3_OLD | {"architectures": ["Gemma2ForCausalLM"]}, "here")
    assert [view.window for view in two.attention] == [512, None] * 3
    assert (two.attention[0].softcap, two.logit_softcap) == (50.0, 30.0)


QWEN2_LONG = GEMMA3_OLD | {
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 32768,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}
PHI4_MINI = GEMMA3_OLD | {
    "architectures": ["Phi3ForCausalLM"],
    "rope_theta": 10000.0,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2] * 6},
}


def test_recipes_for_long_texts(copy: Path) -> None:
    """As they are published."""
    qwen, phi = (read_spec(config, "here") for config in (QWEN2_LONG, PHI4_MINI))
    assert (qwen.rope.kind, qwen.rope.attention_factor) == ("yarn", pytest.approx(0.1 * math.log(4) + 1))
    assert qwen.max_position == 131072
    assert (phi.rope.kind, phi.rope.rotary_dim(phi.head_dim), phi.rope.long_factor) == ("longrope", 12, (2.0,) * 6)
    assert phi.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    edit_config(copy, **PHI4_MINI, rope_parameters=...)
    found = checkpoint_builder(open_checkpoint(copy))
    assert (found.default_length, found.max_position) == (4096, 131072)


GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
QWEN2_VL = QWEN2_LONG | {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"depth": 32},
}


def test_language_parts_as_they_are_published(copy: Path) -> None:
    """With what they leave out, and with their fields among those of the whole."""
    (copy / "config.json").write_text(json.dumps(GEMMA3_4B))
    opened = open_checkpoint(copy)
    gemma, qwen = opened.spec, read_spec(text_config(QWEN2_VL) or {}, "here")
    assert opened.language_part
    assert (gemma.architecture, gemma.dtype, gemma.vocab_size) == ("Gemma3ForCausalLM", "bfloat16", 262208)
    assert (gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.max_position) == (8, 4, 256, 131072)
    assert (gemma.rope.factor, gemma.local_rope.theta, gemma.attention[5].window) == (8.0, 1e4, None)
    assert (qwen.architecture, qwen.rope.kind, qwen.max_position) == ("Qwen2ForCausalLM", "default", 32768)
    assert (qwen.rope.sections, qwen.rope.interleaved, qwen.shifts_positions) == ((2, 3, 3), False, True)


def test_sections_of_positions_are_those_of_the_model_unless_it_says_others() -> None:
    three = QWEN2_VL | {"architectures": ["Qwen3VLForConditionalGeneration"], "rope_scaling": None}
    deep = three | {"vision_config": {"deepstack_visual_indexes": [8, 16, 24]}}
    spec = read_spec(text_config(deep) or {}, "here")
    assert (spec.rope.sections, spec.rope.interleaved, spec.deepstack) == ((24, 20, 20), True, 3)
    for section, reason in (([4, 4], "three whole numbers"), ([2, 3, 4], "8 pairs of numbers in all")):
        rope = {"type": "mrope", "mrope_section": section}
        with pytest.raises(CheckpointError, match=f"mrope_section must .*{reason}"):
            read_spec(text_config(QWEN2_VL | {"rope_scaling": rope}) or {}, "here")


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {}, [4096] * 4),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 4),
        ("LlamaForCausalLM", {"sliding_window": 7}, [None] * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 7}, [None] * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 7, "max_window_layers": 3, "use_sliding_window": True},
            [None] * 3 + [7],
        ),
        ("Qwen3MoeForCausalLM", {"sliding_window": 7, "use_sliding_window": True}, [7] * 4),
        ("Phi3ForCausalLM", {"sliding_window": 2047}, [2047] * 4),
    ],
)
def test_which_layers_look_through_a_window(
    architecture: str, changes: dict[str, Any], windows: list[int | None]
) -> None:
    config = GEMMA3_OLD | {"architectures": [architecture], "num_hidden_layers": 4}
    del config["sliding_window"]
    assert [view.window for view in read_spec(config | changes, "here").attention] == windows


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("params.json", {"dim": 8}, "is in Mistral's own form"),
        ("config.json", {"model_type": "voxtral_realtime"}, "Voxtral Realtime is not served"),
    ],
)
def test_mistrals_forms_that_are_not_read_are_named(
    tmp_path: Path, file: str, content: dict[str, Any], complaint: str
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=complaint):
        open_checkpoint(tmp_path)


def test_names_of_ours_mean_nothing_in_a_config() -> None:
    ours = {"attention_sinks": True, "float32_router": True, "mlp_matrices": 2, "sigmoid_router": True}
    ours |= {"query_growth": 0.1, "rotates": [0, 0], "group_judges": 1, "least_weight_sum": 1.0}
    theirs = {"no_rope_layers": [0, 0]}
    assert read_spec(QWEN2_LONG | theirs, "here") == read_spec(QWEN2_LONG, "here")
    assert read_spec(QWEN2_LONG | ours, "here") == read_spec(QWEN2_LONG, "here")
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 1, "num_experts": 2}
    router = {"group_judges": 1, "least_weight_sum": 1.0, "n_group": 2, "topk_group": 1}
    assert read_spec(QWEN2_LONG | experts | router, "here") == read_spec(QWEN2_LONG | experts, "here")


STRANGE: dict[str, Any] = {
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 2.0),
    **dict.fromkeys(("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "ssm_in_multiplier"), 2.0),
    **dict.fromkeys(("attention_out_multiplier", "ssm_out_multiplier", "routed_scaling_factor"), 2.0),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), 2.0),
    **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias", "mlp_bias", "use_expert_bias"), 1),
    **{"mlp_multipliers": [2.0] * 2, "ssm_multipliers": [2.0] * 5, "mamba_d_ssm": 4096, "hidden_activation": "gelu"},
    **{"num_experts_per_tok": 1, "moe_intermediate_size": 7, "moe_latent_size": 7, "norm_topk_prob": False},
    **{"shared_expert_intermediate_size": 7, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    **{"n_group": 2, "topk_group": 2, "use_qk_norm": True, "attention_out_bias": True, "no_rope_layers": [0] * 8},
}
"""Fields by which some family or another computes something else."""


def test_fields_of_other_families_mean_nothing(making: ModuleType) -> None:
    """A family has those that its configuration has in transformers."""
    for name, config in making.CONFIGS.items():
        kind = CONFIG_MAPPING[config["model_type"]]
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
        if architecture not in ARCHITECTURES or "text_config" in config:
            continue
        known = {field for base in kind.__mro__ for field in getattr(base, "__annotations__", {})}
        others = {field: value for field, value in STRANGE.items() if field not in known}
        assert len(others) > len(STRANGE) / 2
        plain = config | {"architectures": [architecture]}
        assert read_spec(others | plain, "here") == read_spec(plain, "here"), name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"architectures": ...}, ["architectures"]),
        ({"hidden_size": ...}, ["config.json", "hidden_size"]),
        ({"hidden_size": "many"}, ["hidden_size", "'many'"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "no multiple of num_key_value_heads 3"]),
        ({"head_dim": 1 << 40}, ["head_dim 1099511627776", "more than 65536"]),
        ({"num_hidden_layers": 1 << 40}, ["num_hidden_layers 1099511627776", "more than 65536"]),
        ({"intermediate_size": 10**30}, ["intermediate_size", "more than 2147483647"]),
        ({"head_dim": 15}, ["heads of 15", "in pairs"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings must be true or false, got 'false'"]),
        ({"rope_parameters": {"rope_theta": -1.0}}, ["rope_theta must be a positive number", "-1.0"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_theta must be a positive number", "got 0"]),
        ({"rope_parameters": {"rope_theta": math.inf}}, ["rope_theta must be a positive number", "got inf"]),
        (
            {"rope_parameters": None, "rope_theta": 10**400},
            ["rope_theta must be a positive number", "(401 characters)"],
        ),
        ({"rms_norm_eps": 1e300}, ["rms_norm_eps must be a positive number"]),
        ({"hidden_size": 10**400}, ["hidden_size 1000", "is more than"]),
        ({"vocab_size": -(10**30)}, ["vocab_size must be a positive whole number", "-1000"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, ["factor must be a positive number", "0.0"]),
        ({"rope_parameters": ["llama3"]}, ["config.json", "rope_parameters must be an object", "['llama3']"]),
        ({"rope_parameters": {"factor": "twice"}}, ["config.json", "factor must be a positive number", "'twice'"]),
        (
            {"rope_parameters": {"original_max_position_embeddings": 1e400}},
            ["original_max_position_embeddings must be", "inf"],
        ),
        ({"quantization_config": "fp8"}, ["config.json", "must be an object", "'fp8'"]),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}}, ["short_factor", "8"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'", "llama3", "depends on the other"]),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 3, "num_local_experts": 2},
            ["num_experts_per_tok", "3", "2"],
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": -1},
            ["final_logit_softcapping", "-1"],
        ),
        ({"use_bidirectional_attention": True}, ["causal"]),
        ({"layer_types": ["full_attention"]}, ["layer_types"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["linear_attention"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["quantised weights (bitsandbytes)", "gptq"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "float32"]),
        ({"intermediate_size": 97}, [WEIGHTS, "gate_proj", "[96, 64]", "[97, 64]"]),
        ({"num_hidden_layers": 3}, ["model.layers.2", "missing"]),
        ({"attention_bias": True}, ["q_proj.bias", "missing"]),
    ],
)
def test_a_config_that_does_not_fit_is_refused(copy: Path, changes: dict[str, Any], says: list[str]) -> None:
    edit_config(copy, **changes)
    with pytest.raises(CheckpointError) as refusal:
        build(copy)
    assert all(word in refusal.value.message for word in says)
    assert str(copy) in refusal.value.message


class Trap:
    """What a safe loader refuses to make."""


def pickled(directory: Path, **how: Any) -> Path:
    """The same checkpoint as it was published before safetensors."""
    torch.save(load_file(directory / WEIGHTS), directory / BIN, **how)
    (directory / WEIGHTS).unlink()
    return directory


def into_adapter(directory: Path, keep: str = "") -> None:
    for name in {"config.json", WEIGHTS} - {keep}:
        (directory / name).unlink()
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "meta/Llama", "peft_type": "LORA"}')


def truncate(directory: Path, name: str = WEIGHTS) -> None:
    path = directory / name
    path.write_bytes(path.read_bytes()[:-100])


def garble(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(b"not safetensors at all")


def quantise(directory: Path) -> None:
    edit_tensors(directory, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, [WEIGHTS, "truncated"]),
        (garble, [WEIGHTS, "not a safetensors file"]),
        (quantise, [WEIGHTS, "model.norm.weight", "I8", "BF16"]),
        (lambda copy: (copy / WEIGHTS).unlink(), ["no model.safetensors", "no pytorch_model.bin"]),
        (lambda copy: (copy / WEIGHTS).write_text(POINTER), [WEIGHTS, "Git LFS pointer", "git lfs pull"]),
        (lambda copy: (copy / "config.json").write_text(POINTER), ["config.json", "Git LFS pointer"]),
        (lambda copy: (pickled(copy) / BIN).write_bytes(b"PK not at all"), [BIN, "truncated"]),
        (lambda copy: truncate(pickled(copy), BIN), [BIN, "truncated"]),
        (lambda copy: torch.save({"x": Trap()}, pickled(copy) / BIN), [BIN, "safely", "Trap"]),
        (lambda copy: torch.save([torch.ones(1)], pickled(copy) / BIN), [BIN, "by their names"]),
        (lambda copy: into_adapter(copy), ["PEFT adapter", "'meta/Llama'", "merge"]),
        (lambda copy: into_adapter(copy, keep="config.json"), ["PEFT adapter", "'meta/Llama'", "merge"]),
        (lambda copy: (copy / "config.json").unlink(), ["config.json", "missing"]),
        (lambda copy: (copy / "config.json").write_text("{"), ["config.json", "not JSON"]),
        (lambda copy: edit_tensors(copy, **{"lm_head.weight": ...}), ["lm_head.weight", "missing"]),
    ],
)
def test_damage_is_named(copy: Path, damage: Edit, says: list[str]) -> None:
    damage(copy)
    with pytest.raises(InvalidArgument) as refusal:
        build(copy)
    assert all(word in refusal.value.message for word in says)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda copy: edit_config(copy, num_hidden_layers=1), ["9 tensors", "model.layers.1.input_layernorm.weight"]),
        (
            lambda copy: edit_tensors(copy, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            ["1 tensors", "model.layers.0.self_attn.q_proj.bias"],
        ),
        (lambda copy: edit_tensors(copy, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}), []),
        (lambda copy: edit_config(copy, tie_word_embeddings=True), []),
        (lambda copy: None, []),
    ],
)
def test_weights_that_nobody_asked_for_are_told(
    copy: Path, spoil: Edit, says: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(copy)
    build(copy)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(says)
    assert all(word in told[0] for word in says)


def test_what_a_config_does_not_say_of_the_dtype_the_weights_do(copy: Path) -> None:
    stored = load_file(copy / WEIGHTS)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        edit_config(copy, dtype=..., torch_dtype=...)
        save_file({key: tensor.to(dtype) for key, tensor in stored.items()}, copy / WEIGHTS)
        assert open_checkpoint(copy).spec.dtype == name
        numbers = sum(tensor.numel() for tensor in stored.values())
        assert list(memory_needed(str(copy), {"device": "cpu"}, ())) == [MemoryNeed(numbers * dtype.itemsize)]
    truncate(copy)
    assert open_checkpoint(copy).spec.dtype == "float32"


def test_a_link_that_leads_nowhere_is_named(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    (copy / WEIGHTS).symlink_to(copy / "gone")
    assert list(memory_needed(str(copy), {"device": "cpu"}, ())) == [MemoryNeed(0)]
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: the file is missing"):
        build(copy)


def test_shards_read_like_one_file(making: Any, tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    sharded = making.write_checkpoint(tmp_path / "sharded", shard="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    piece = TensorSlice("model.layers.1.mlp.down_proj.weight", (64, 96), columns=slice(10, 20))
    whole = CheckpointWeights(checkpoint("llama")).read(piece)
    assert torch.equal(CheckpointWeights(sharded).read(piece), whole)
    assert whole.shape == (64, 10)
    assert build(sharded)


@pytest.mark.parametrize("modern", [True, False])
def test_pickled_weights_read_like_safetensors(copy: Path, checkpoint: Callable[..., Path], modern: bool) -> None:
    """Mapped, if they are of the form that can be."""
    pickled(copy, _use_new_zipfile_serialization=modern)
    piece = TensorSlice("model.layers.1.mlp.down_proj.weight", (64, 96), columns=slice(10, 20))
    found = CheckpointWeights(copy)
    assert torch.equal(found.read(piece), CheckpointWeights(checkpoint("llama")).read(piece))
    assert (str(copy / BIN) in Path("/proc/self/maps").read_text()) == modern
    assert list(memory_needed(str(copy), {"device": "cpu"}, ())) == [MemoryNeed(found.bytes)]
    assert build(copy)


def test_pickled_shards_read_like_one_file(copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS)
    (copy / WEIGHTS).unlink()
    files = {name: f"pytorch_model-{number % 2}.bin" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in files if files[name] == file}, copy / file)
    index = copy / f"{BIN}.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert build(copy)
    index.write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(CheckpointError, match="not an index of weights"):
        build(copy)


def test_safetensors_are_preferred_and_counted_once(copy: Path) -> None:
    before = memory_needed(str(copy), {"device": "cpu"}, ())
    (copy / BIN).write_text("never read")
    assert memory_needed(str(copy), {"device": "cpu"}, ()) == before
    assert build(copy)


def test_a_missing_shard_is_named(making: Any, tmp_path: Path) -> None:
    sharded = making.write_checkpoint(tmp_path / "sharded", shard="50KB")
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        CheckpointWeights(sharded)


def test_what_is_neither_directory_nor_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"^there is no directory .*nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(NotFound, match="neither a directory"):
        open_checkpoint("no hub id")


def test_a_hub_id_without_network_says_so() -> None:
    with pytest.raises(NotFound, match="nobody/nothing"):
        open_checkpoint("nobody/nothing")


def test_progress_ends_at_one(checkpoint: Callable[..., Path]) -> None:
    seen: list[float] = []
    build(checkpoint("llama"), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1, abs=0.05)


def test_a_mapped_table_takes_no_memory_of_its_own(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama")
    load = WeightLoader(CheckpointWeights(directory), BuildContext(torch.float32, torch.device("cpu"), 64))
    piece = TensorSlice("model.embed_tokens.weight", (384, 64))
    assert load.mapped(piece) is load.mapped(piece)
    maps = Path("/proc/self/maps").read_text().splitlines()
    address = load.mapped(piece).data_ptr()
    homes = [line for line in maps if WEIGHTS in line]
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in homes]
    assert any(low <= address < high for low, high in spans)


def test_reading_a_config_imports_no_torch(root: Path) -> None:
    import subprocess
    import sys

    code = "import charonia.engine.checkpoint.hf_checkpoint, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_layers_behind_the_last_one_take_no_memory_and_no_warning(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    needed = count_weight_bytes(copy, WeightUse())
    layers = open_checkpoint(copy).spec.layers
    behind = {f"model.layers.{layers}.eh_proj.weight": torch.zeros(64, 128)}
    save_file(load_file(copy / WEIGHTS) | behind, copy / WEIGHTS)
    assert build(copy)
    assert "knows nothing of 1 tensors" in caplog.text
    assert count_weight_bytes(copy, WeightUse()) > needed
    caplog.clear()
    edit_config(copy, num_nextn_predict_layers=1)
    assert build(copy)
    assert "knows nothing" not in caplog.text
    assert count_weight_bytes(copy, WeightUse()) == needed


def test_an_index_may_not_name_files_elsewhere(copy: Path) -> None:
    for name in ("../model.safetensors", "/etc/passwd"):
        (copy / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        with pytest.raises(CheckpointError, match=rf"'{name}' is not the name of a file in it"):
            find_weights(copy)


def test_a_pipe_among_the_files_is_refused_by_all_that_would_open_it(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    os.mkfifo(copy / WEIGHTS)
    for attempt in (open_checkpoint, lambda path: open_safetensors(path / WEIGHTS, "np"), TokenizerBundle.load):
        with pytest.raises(InvalidArgument, match=r"model\.safetensors is a named pipe, and no regular file"):
            attempt(copy)
    assert count_weight_bytes(copy, WeightUse()) == 0
