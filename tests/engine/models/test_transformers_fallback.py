"""Decoders of transformers over our cache: what is refused, by name and reason. Equality is in test_equality.py."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.model_spec import CheckpointError, LayerAttention
from charonia.engine.layers.step_context import StepContext
from charonia.engine.models.interfaces import BuiltDecoder
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.models.transformers_attention import ATTENTION_NAME, probe_layers, register_attention
from charonia.engine.models.transformers_caches import SequenceCaches
from charonia.engine.models.transformers_fallback import TransformersDecoder
from charonia.engine.models.transformers_sequences import SequenceDecoder
from charonia.engine.step_batch import StepBatch

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 384,
    "max_position_embeddings": 256,
}


def build(directory: Path, dtype: torch.dtype = torch.float32) -> BuiltDecoder:
    return checkpoint_builder(open_checkpoint(directory)).build(BuildContext(dtype, torch.device("cpu"), 256))


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes", "says"),
    [
        ("umt5", "UMT5ForConditionalGeneration", {}, "an encoder and a decoder"),
        ("paligemma", "PaliGemmaForConditionalGeneration", {}, "told apart by token_type_ids"),
        ("emu3", "Emu3ForCausalLM", {}, "more than text"),
        ("bert", "BertForMaskedLM", {}, "of type bert is BertLMHeadModel"),
        ("vit", "ViTForImageClassification", {}, "no causal language model of type vit"),
        ("gpt_neox", "GPTNeoXForSequenceClassification", {}, "is GPTNeoXForCausalLM"),
        ("rwkv", "RwkvForCausalLM", {}, "attention interface"),
        ("rwkv", "RwkvForCausalLM", {}, "its class takes no cache of transformers"),
        ("deepseek_v4", "DeepseekV4ForCausalLM", {}, "layers of its own kind (DeepseekV4CSACache"),
        (
            "gpt_neox",
            "GPTNeoXForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
        ("lfm2", "Lfm2ForCausalLM", {"rope_parameters": {"rope_type": [1]}, **SIZES}, "rope type [1] must be a name"),
        ("llama", "LlamaForCausalLM", {"rope_parameters": {"rope_type": "x"}, **SIZES}, "knows no rope type 'x'"),
        ("deepseek_v4", "DeepseekV4ForCausalLM", {}, "served are full_attention, sliding_attention"),
        ("cohere", "CohereForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "are quantised (mxfp4)"),
    ],
)
def test_what_config_json_rules_out(
    model_type: str, architecture: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, **changes).to_dict() | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    refused(tmp_path, architecture, says)


def test_what_transformers_does_not_know_either(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Nobody"], "model_type": "nobody"}))
    refused(tmp_path, "Nobody", "does not know it either")


def test_code_of_a_checkpoint_is_not_run_and_nobody_is_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = {"architectures": ["Own"], "model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('it ran')")
    refused(tmp_path, "Own", "contains custom code which must be executed")
    assert not capfd.readouterr().out


def refused(directory: Path, architecture: str, says: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        build(directory)
    assert str(directory) in refusal.value.message
    assert f"architecture {architecture} is not supported" in refusal.value.message
    assert says in refusal.value.message


def test_what_our_attention_cannot_do_is_computed_by_sequence(
    making: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    making.write_random(tmp_path, {"model_type": "diffllama", "dtype": "float32", **SIZES})
    with caplog.at_level(logging.INFO):
        built = build(tmp_path)
    assert isinstance(built.decoder, SequenceDecoder)
    assert "attends more than once in a layer" in caplog.text
    assert "one sequence after the other" in caplog.text
    assert built.shape.attends_itself


def test_a_cache_of_another_kind_is_refused(making: Any, tmp_path: Path) -> None:
    making.write_random(tmp_path, {"model_type": "minimax", "dtype": "float32", **SIZES})
    refused(tmp_path, "MiniMaxForCausalLM", "MiniMax uses cache of its own")


class Layers:
    """A model of nothing but attention, through transformers' interface: for each layer the heads and the size of
    queries, keys and values."""

    def __init__(self, *layers: tuple[tuple[int, int], tuple[int, int], tuple[int, int]], **said: Any) -> None:
        self.config, self.device = PreTrainedConfig(num_hidden_layers=len(layers)), "cpu"
        self._layers, self._said = layers, said

    def __call__(self, input_ids: torch.Tensor, attend: Any, **_: Any) -> None:
        for index, shapes in enumerate(self._layers):
            module = SimpleNamespace(layer_idx=index)
            packed = (torch.ones(1, heads, input_ids.shape[1], size) for heads, size in shapes)
            ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](module, *packed, None, attend=attend, **self._said)


def test_a_cache_holds_the_largest_heads_of_all_layers() -> None:
    register_attention()
    sinks = torch.zeros(8, dtype=torch.bfloat16)
    first, second = probe_layers(Layers(((8, 24), (2, 24), (2, 16)), ((8, 16), (4, 16), (4, 32)), s_aux=sinks))
    assert first == (LayerAttention(None, 24**-0.5, sinks=True), 8, 4, 32)
    assert second == (LayerAttention(None, 16**-0.5, sinks=True), 8, 4, 32)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ((((8, 16), (2, 16), (2, 16)), ((4, 16), (2, 16), (2, 16))), "heads of different numbers"),
        ((((6, 16), (2, 16), (2, 16)), ((6, 16), (3, 16), (3, 16))), "heads of different numbers"),
        ((((4, 16), (4, 16), (2, 32)),), "layer 0 has 4 heads of keys and 2 of values"),
    ],
)
def test_heads_that_no_cache_holds(layers: Any, says: str) -> None:
    register_attention()
    with pytest.raises(CheckpointError, match=says):
        probe_layers(Layers(*layers))


def test_a_module_that_computes_something_else_is_found_out(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = TransformersDecoder.compute_logits

    def without_positions(self: TransformersDecoder, context: StepContext, selections: Any) -> Any:
        context.batch.positions.zero_()
        return honest(self, context, selections)

    monkeypatch.setattr(TransformersDecoder, "compute_logits", without_positions)
    with caplog.at_level(logging.INFO):
        assert isinstance(build(checkpoint("granite")).decoder, SequenceDecoder)
    assert "differ from its own" in caplog.text


def test_a_sequence_that_is_not_resumed_is_found_out(
    making: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write_random(tmp_path, {"model_type": "diffllama", "dtype": "float32", **SIZES})
    monkeypatch.setattr(SequenceCaches, "filled", lambda self, tokens, state: self.empty())
    refused(tmp_path, "DiffLlamaForCausalLM", "over a cache")


def test_a_head_that_computes_what_nobody_asked_for_is_found_out(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GraniteForCausalLM

    honest = GraniteForCausalLM.forward

    def all_tokens(self: Any, *args: Any, logits_to_keep: Any = 0, **others: Any) -> Any:
        return honest(self, *args, **others)

    monkeypatch.setattr(GraniteForCausalLM, "forward", all_tokens)
    refused(checkpoint("granite"), "GraniteForCausalLM", "over a cache that holds several sequences in blocks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt-neox", "granite", "starcoder2", "cohere2", "opt"])
def test_what_works_is_served(checkpoint: Callable[..., Path], name: str, dtype: torch.dtype) -> None:
    assert build(checkpoint(name), dtype).shape.vocab_size == 384


def test_the_layers_say_how_they_attend(checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        shape = build(checkpoint("cohere2")).shape
    assert shape.attention == (LayerAttention(19, 0.25), LayerAttention(None, 0.25), LayerAttention(19, 0.25))
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 2, 16)
    assert "Cohere2ForCausalLM" in caplog.text
    assert "slower" in caplog.text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_a_variant_that_our_own_file_does_not_know(
    checkpoint: Callable[..., Path], changes: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers turns whole heads of a Llama, whatever its config says."""
    with caplog.at_level(logging.WARNING):
        built = build(checkpoint("llama", **changes))
    assert isinstance(built.decoder, TransformersDecoder)
    assert says in caplog.records[0].message
    assert "transformers computes it" in caplog.records[0].message


def test_what_transformers_cannot_build_either_is_named(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    config = json.loads((directory / "config.json").read_text()) | {"hidden_act": "swoosh"}
    (directory / "config.json").write_text(json.dumps(config))
    refused(directory, "LlamaForCausalLM", "could not load it: KeyError 'swoosh'")


def test_a_missing_tensor_is_named(making: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    making.write_random(tmp_path, making.FOREIGN["granite"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refused(tmp_path, "GraniteForCausalLM", "model.norm.weight is missing")


def test_the_head_computes_one_piece_at_a_time(checkpoint: Callable[..., Path]) -> None:
    """And the layers the step's tokens once; for each further piece one token, whose states are not used."""
    from transformers import AutoModelForCausalLM

    directory = checkpoint("granite")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    layers: list[int] = []
    heads: list[int] = []
    model.base_model.layers[0].register_forward_hook(lambda module, args, out: layers.append(args[0].shape[1]))
    model.lm_head.register_forward_hook(lambda module, args, out: heads.append(out.shape[1]))
    tokens, pieces = torch.arange(7), [torch.tensor([1]), torch.tensor([0, 2, 3]), torch.tensor([4, 6])]
    with torch.inference_mode():
        right = model(input_ids=tokens.unsqueeze(0)).logits[0]
        layers.clear()
        heads.clear()
        batch = StepBatch.from_tokens(tokens, [0], [len(tokens)], torch.zeros((1, 1), dtype=torch.int64), 16)
        context = StepContext(batch, lambda *_: torch.empty(0))  # type: ignore[arg-type]
        found = list(TransformersDecoder(model, 2, 16).compute_logits(context, pieces))
    assert (layers, heads) == ([7, 1, 1], [1, 3, 2])
    torch.testing.assert_close(torch.cat(found), right[torch.cat(pieces)])


def test_a_config_that_contradicts_itself_is_refused_by_what_fails(making: Any, tmp_path: Path) -> None:
    """Heads of keys that its latent attention does not have: transformers' own code fails, and the server does not."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    making.write_random(tmp_path, {"model_type": "minicpm3", "dtype": "float32", **SIZES, **latent, "head_dim": 16})
    refused(tmp_path, "MiniCPM3ForCausalLM", "transformers' own code for it fails over a cache of its own")
    refused(tmp_path, "MiniCPM3ForCausalLM", "(RuntimeError: The size of tensor a (4) must match")
