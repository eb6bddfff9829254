"""Opens a Hugging Face checkpoint: its config.json and the files of its weights; or a model in GGUF, a file with both.

The text part of a model that takes images too is one of our architectures, with a config of its own. Imports no torch:
`weights.py` reads tensors, `tokenization/` the files about text.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ...core.errors import CharoniaError, InvalidArgument
from ...core.media_models import has_plain_wrapper
from ...core.native_calls import NativeCall
from ...core.published_form import flat_config, flat_name
from ...tokenization.checkpoint_files import SMALL_FILES, locate_checkpoint, read_json, refuse_adapter
from ...tokenization.gguf_file import GgufFile, read_gguf
from ...tokenization.weight_files import read_weight_index, refuse_long_header
from .gguf_config import read_gguf_config
from .hf_config import read_spec
from .model_spec import CheckpointError, ModelSpec
from .quantization_config import stored_method
from .seq2seq_config import SEQ2SEQ

_SAFETENSORS_FILES, _TORCH_FILES = "*.safetensors", "pytorch_model*.bin"

_WHOLE_MODELS = ("model.safetensors", "pytorch_model.bin")
"""Names of a whole model in one file, in order of preference. An index of shards has such a name and .index.json."""

_SEVEN_BILLION = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208, "max_position_embeddings": 131_072}
_MINISTRAL3 = {
    "hidden_size": 4096,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
    "vocab_size": 131072,
}
_GLM4V = {
    "head_dim": None,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 1.0,
    "attention_bias": True,
}
_GLM_OCR = _GLM4V | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "attention_bias": False}
_TEXT_PARTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", _GEMMA),
    "gemma3n_text": ("Gemma3nForCausalLM", {}),
    "gemma4_text": ("Gemma4ForCausalLM", {}),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", {}),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", {"attention_bias": True, "max_position_embeddings": 65536}),
    "glm4v_text": ("Glm4ForCausalLM", _GLM4V),
    "glm_ocr_text": ("Glm4ForCausalLM", _GLM_OCR),
    "kimi_k2": ("DeepseekV3ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "exaone4_5_text": ("Exaone4ForCausalLM", {}),
    "lfm2": ("Lfm2ForCausalLM", {}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {}),
    "llama": ("LlamaForCausalLM", _SEVEN_BILLION | {"intermediate_size": 11008}),
    "ministral3": ("Ministral3ForCausalLM", _MINISTRAL3),
    "mistral": ("MistralForCausalLM", _SEVEN_BILLION | {"intermediate_size": 14336, "num_key_value_heads": 8}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
}
"""The `model_type` of a text_config -> our architecture, and the usual values that such a config leaves out."""

_USUAL_TEXT_PART = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Glm46VForConditionalGeneration": "glm4v_text",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "GlmOcrForConditionalGeneration": "glm_ocr_text",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "KimiK25ForConditionalGeneration": "kimi_k2",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3ASRForConditionalGeneration": "qwen3",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "SmolVLMForConditionalGeneration": "llama",
    "VoxtralForConditionalGeneration": "llama",
}
"""Architecture -> the `model_type` of a text_config that leaves it out."""

_CHUNKED, _INTERLEAVED = ({"mrope_section": [16, 24, 24]}, {"mrope_interleaved": True})
_GLM_SECTIONS = {"mrope_section": [8, 12, 12]}
_IMAGE_POSITIONS: dict[str, Mapping[str, Any]] = {
    "Glm46VForConditionalGeneration": _GLM_SECTIONS,
    "Glm4vForConditionalGeneration": _GLM_SECTIONS,
    "Glm4vMoeForConditionalGeneration": _GLM_SECTIONS,
    "GlmOcrForConditionalGeneration": _GLM_SECTIONS,
    "Qwen2VLForConditionalGeneration": _CHUNKED,
    "Qwen2_5_VLForConditionalGeneration": _CHUNKED,
    "Qwen3VLForConditionalGeneration": _INTERLEAVED | {"mrope_section": [24, 20, 20]},
    "Qwen3VLMoeForConditionalGeneration": _INTERLEAVED | {"mrope_section": [24, 20, 20]},
    "Qwen3_5ForConditionalGeneration": _INTERLEAVED | {"mrope_section": [11, 11, 10]},
    "Qwen3_5MoeForConditionalGeneration": _INTERLEAVED | {"mrope_section": [11, 11, 10]},
}
"""Architecture -> how its text part turns heads at places of images, and the sections where it names none."""

_SHARED_FIELDS = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields that stand outside of text_config, for all parts."""

_TEXT_PREFIXES = {
    "model.decoder.": "model.",
    "model.encoder.": "encoder.",
    "model.shared.": "model.embed_tokens.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.encoder.": "model.",  # Qianfan-OCR's, as transformers writes them
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "decoder.final_layer_norm.": "model.layer_norm.",
    "shared.": "model.embed_tokens.",
}
"""Beginnings of tensor names in newer and older checkpoints -> in a checkpoint of the text part alone."""


_T5_PARTS = {
    **{f"0.SelfAttention.{letter}": f"self_attn.{letter}_proj" for letter in "qkvo"},
    "0.SelfAttention.relative_attention_bias": "self_attn.relative_attention_bias",
    "0.layer_norm": "self_attn_layer_norm",
    **{f"1.EncDecAttention.{letter}": f"encoder_attn.{letter}_proj" for letter in "qkvo"},
    "1.layer_norm": "encoder_attn_layer_norm",
    "2.DenseReluDense.wi_0": "gate_proj",
    "2.DenseReluDense.wi_1": "up_proj",
    "2.DenseReluDense.wi": "up_proj",
    "2.DenseReluDense.wo": "down_proj",
    "2.layer_norm": "final_layer_norm",
}
"""Parts of a layer of T5's decoder, which its checkpoints number -> as others call them."""
_T5_WEIGHT = re.compile(r"decoder\.block\.(\d{1,9})\.layer\.(.+)\.weight")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint."""

    directory: Path
    """The checkpoint's directory; of GGUF the file."""
    config: Mapping[str, Any]
    """Its config.json, or that of its text part."""
    language_part: bool = False
    """Whether it has other parts beside text."""
    tried_wrapper: str = ""
    """The architecture of the whole, if it is none of those that are described: it is tried before it is served."""
    gguf: GgufFile | None = None

    @property
    def where(self) -> str:
        return str(self.directory / "config.json" if self.gguf is None else self.directory)

    @property
    def stored_as(self) -> str:
        """The method by which its weights are quantised, as in `STORED_AS`; empty for plain floats."""
        return stored_method(self.config) if self.gguf is None else "gguf"

    @property
    def spec(self) -> ModelSpec:
        return read_spec(self.config, self.where)


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a checkpoint directory, a file in GGUF, or a hub id, which is downloaded to the hub's cache.

    Raises:
        NotFound: no such checkpoint.
        CheckpointError: config.json is missing.
        InvalidArgument: it is not JSON, or the file is no GGUF that we read.
    """
    directory = locate_checkpoint(str(model), (*SMALL_FILES, _SAFETENSORS_FILES))
    if directory.is_file():
        file = read_gguf(directory)
        return Checkpoint(file.path, read_gguf_config(file), gguf=file)
    if not Path(model).expanduser().is_dir() and not any(directory.glob(_SAFETENSORS_FILES)):
        directory = locate_checkpoint(str(model), (*SMALL_FILES, _TORCH_FILES))
    config = read_json(directory / "config.json")
    if not config:
        if (directory / "params.json").is_file():
            raise CheckpointError(f"{directory} is in Mistral's own form (params.json); that of transformers is read")
        hint = "" if Path(model).is_dir() else " (of a model in GGUF, name the file's kind: owner/name:Q4_K_M)"
        raise CheckpointError(f"{directory / 'config.json'}: missing; a checkpoint needs it beside its weights{hint}")
    if config.get("model_type") == "voxtral_realtime":
        raise CheckpointError(f"{directory}: Voxtral Realtime is not served: its sounds are added to its texts")
    part = text_config(config)
    wrapper = str(config["architectures"][0]) if part is not None and has_plain_wrapper(config) else ""
    own = with_stored_dtype(config if part is None else part, directory)
    return Checkpoint(directory, own, part is not None, wrapper)


_STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def with_stored_dtype(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """The config, with the dtype of the first stored floats if it names none, as in transformers."""
    if config.get("dtype") or config.get("torch_dtype"):
        return config
    with suppress(CharoniaError, OSError, SafetensorError):  # reading the weights will raise these
        first = find_weights(directory).files[0]
        if first.suffix == ".safetensors":
            with open_safetensors(first, "np") as opened:
                dtypes = (_STORED_DTYPES.get(opened.get_slice(name).get_dtype()) for name in sorted(opened.keys()))
                return {**config, "dtype": next(filter(None, dtypes), "float32")}
    return config


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text part of the model that `config` describes, if it has one that we serve."""
    config = flat_config(config)
    names = config.get("architectures")
    outer = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    if outer in SEQ2SEQ:  # their config.json is that of both parts, of which the decoder is ours
        return dict(config)
    text = config.get("text_config", config)  # Qwen's older ones have its fields among the others
    if not isinstance(text, dict) or not (outer in _USUAL_TEXT_PART or has_plain_wrapper(config)):
        return None
    usual = _USUAL_TEXT_PART.get(outer, "")
    kind = usual if text is config else str(text.get("model_type") or usual)
    if kind not in _TEXT_PARTS:
        return None
    architecture, absent = _TEXT_PARTS[kind]
    shared = {name: config[name] for name in _SHARED_FIELDS if config.get(name) is not None}
    own = {**_IMAGE_POSITIONS.get(outer, {}), "deepstack_layers": _deepstack_layers(config)}
    return {**absent, **text, **shared, **own, "architectures": [architecture]}


def serves_text_alone(config: Mapping[str, Any]) -> bool:
    """Whether it is of a family whose text part is described here, without its images."""
    return text_config(config) is not None and not has_plain_wrapper(config)


def _deepstack_layers(config: Mapping[str, Any]) -> int:
    """Layers of the text part that take something of the tower's, too."""
    indexes = (config.get("vision_config") or {}).get("deepstack_visual_indexes")
    return len(indexes) if isinstance(indexes, list) else 0


def text_tensor_name(stored: str) -> str:
    """The name of a text part's tensor in a checkpoint of text alone; other tensors keep their names."""
    if (weight := _T5_WEIGHT.fullmatch(stored)) is not None and weight[2] in _T5_PARTS:
        return f"model.layers.{weight[1]}.{_T5_PARTS[weight[2]]}.weight"
    stored = flat_name(stored)
    for prefix, own in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


_BACKBONE = "backbone."
_BACKBONE_NAMES = {"embeddings.": "embed_tokens.", "embedding.": "embed_tokens.", "norm_f.": "norm."}


def own_tensor_name(stored: str) -> str:
    """The name that we give a tensor of Mamba's line, whose checkpoints call the model a backbone; other tensors keep
    their names."""
    if not stored.startswith(_BACKBONE):
        return stored
    inner = stored.removeprefix(_BACKBONE)
    part = next((part for part in _BACKBONE_NAMES if inner.startswith(part)), "")
    return f"model.{_BACKBONE_NAMES.get(part, '')}{inner.removeprefix(part)}"


_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,9})\.")


def is_drafting_layer(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is of a layer behind the last one, for multi-token prediction, which nothing reads."""
    layer = _LAYER_NAME.match(name)
    layers = config.get("num_hidden_layers")
    if layer is None or type(layers) is not int or not config.get("num_nextn_predict_layers"):
        return False
    return int(layer[1]) >= layers


def open_safetensors(path: Path, framework: str) -> Any:
    """Open a file by `safe_open`, which holds Python's lock while it reads the header.

    Raises:
        InvalidArgument: it is no regular file, or its header is too long.
        SafetensorError, OSError: it cannot be read.
    """
    refuse_long_header(path)
    with NativeCall(f"{path}: the library failed"):
        return safe_open(path, framework=framework)


class WeightFiles(NamedTuple):
    files: tuple[Path, ...]
    by_tensor: Mapping[str, Path] | None = None
    """The file of each tensor, by an index; None for a single file."""


def find_weights(directory: Path) -> WeightFiles:
    """The files of a checkpoint's weights, whether they exist or not.

    Raises:
        CheckpointError: the directory has neither such a file nor a valid index.
        InvalidArgument: it is an adapter's.
    """
    for name in _WHOLE_MODELS:
        single, index = directory / name, directory / f"{name}.index.json"
        if index.exists():
            try:
                by_tensor = read_weight_index(index)
            except InvalidArgument as error:
                raise CheckpointError(error.message) from None
            return WeightFiles(tuple(sorted(set(by_tensor.values()))), by_tensor)
        if single.exists() or single.is_symlink():
            return WeightFiles((single,))
    refuse_adapter(directory)
    missing = f"{directory}: no {' and no '.join(_WHOLE_MODELS)}, nor an index of either; only these are supported"
    raise CheckpointError(missing)
