"""What config.json says of decoders that attend to an encoder's output."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from .config_fields import MOST_PARTS, ArchitectureDefaults, ConfigFields
from .encoder_shape import EncoderShape


def _decoder_fields(fields: ConfigFields, longest: str) -> Mapping[str, Any]:
    """The decoder's fields by the names that other decoders' have; `longest` is that of its positions."""
    config = fields.config
    width, heads, layers = (fields.number(name) for name in ("d_model", "decoder_attention_heads", "decoder_layers"))
    return {
        **config,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": fields.number("decoder_ffn_dim"),
        "max_position_embeddings": fields.number(longest),
        "source_vocab_size": fields.number("vocab_size"),
        "vocab_size": fields.number("decoder_vocab_size", fields.number("vocab_size")),
        "hidden_act": config.get("activation_function"),
        "embedding_multiplier": sqrt(width) if fields.flag("scale_embedding") else None,
        "rotates": [False] * layers,
        "mlp_matrices": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


def _whisper_fields(fields: ConfigFields) -> Mapping[str, Any]:
    return _decoder_fields(fields, "max_target_positions")


def _whisper_encoder(fields: ConfigFields) -> EncoderShape:
    rows, width, bins = (fields.number(name) for name in ("max_source_positions", "d_model", "num_mel_bins"))
    return EncoderShape(rows, width, bins=bins)


def _text_fields(fields: ConfigFields) -> Mapping[str, Any]:
    return _decoder_fields(fields, "max_position_embeddings")


def _text_encoder(fields: ConfigFields) -> EncoderShape:
    names = "max_position_embeddings", "d_model", "source_vocab_size"
    return EncoderShape(*(fields.number(name) for name in names))


def _t5_fields(fields: ConfigFields) -> Mapping[str, Any]:
    config = fields.config
    width, heads = fields.number("d_model"), fields.number("num_heads")
    layers = fields.number("num_decoder_layers", fields.number("num_layers"))
    parts = ("num_buckets", "max_distance")
    buckets, farthest = (fields.number(f"relative_attention_{part}", most=MOST_PARTS) for part in parts)
    if buckets < 2 or farthest <= buckets // 2:
        ends = f"relative_attention_num_buckets {buckets} and relative_attention_max_distance {farthest}"
        raise fields.error(f"{ends}: there must be 2 or more, half of them for less than that distance")
    gated, _, activation = str(config.get("feed_forward_proj")).rpartition("-")
    if gated not in ("", "gated"):
        raise fields.unknown(f"feed_forward_proj {config.get('feed_forward_proj')!r} is not supported")
    scaled = config.get("scale_decoder_outputs")
    if scaled is None:  # as transformers tells version 1.1, whose configs say that nothing is tied
        scaled = config.get("model_type") != "mt5" and config.get("tie_word_embeddings") is not False
    return {
        **config,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": fields.number("d_kv"),
        "intermediate_size": fields.number("d_ff"),
        "max_position_embeddings": fields.number("n_positions"),
        "source_vocab_size": fields.number("vocab_size"),
        "hidden_act": "gelu_new" if gated and activation == "gelu" else activation,
        "attention_multiplier": 1.0,
        "score_distances": farthest + 1,
        "logits_scaling": sqrt(width) if scaled else None,
        "rotates": [False] * layers,
        "mlp_matrices": 3 if gated else 2,
        "rms_norm_eps": fields.real("layer_norm_epsilon"),
        "tie_word_embeddings": True,
    }


def _t5_encoder(fields: ConfigFields) -> EncoderShape:
    return EncoderShape(*(fields.number(name) for name in ("n_positions", "d_model", "source_vocab_size")))


def _of_t5(**absent: Any) -> ArchitectureDefaults:
    """`absent`: what differs from T5."""
    usual = {
        "d_ff": 2048,
        "d_kv": 64,
        "d_model": 512,
        "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6,
        "n_positions": 512,
        "num_heads": 8,
        "num_layers": 6,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "vocab_size": 32128,
    }
    return ArchitectureDefaults(absent=usual | absent, translate=_t5_fields, encoder=_t5_encoder)


def _of_text(**absent: Any) -> ArchitectureDefaults:
    """A model whose encoder reads text; `absent`: what differs from BART."""
    usual = {
        "activation_function": "gelu",
        "d_model": 1024,
        "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4096,
        "decoder_layers": 12,
        "max_position_embeddings": 1024,
        "scale_embedding": False,
        "vocab_size": 50265,
    }
    return ArchitectureDefaults(absent=usual | absent, translate=_text_fields, encoder=_text_encoder)


SEQ2SEQ: dict[str, ArchitectureDefaults] = {
    "BartForConditionalGeneration": _of_text(),
    "M2M100ForConditionalGeneration": _of_text(activation_function="relu", scale_embedding=True, vocab_size=128112),
    "MBartForConditionalGeneration": _of_text(),
    "MT5ForConditionalGeneration": _of_t5(
        d_ff=1024, feed_forward_proj="gated-gelu", num_heads=6, num_layers=8, vocab_size=250112
    ),
    "MarianMTModel": _of_text(vocab_size=58101),
    "PegasusForConditionalGeneration": _of_text(),
    "T5ForConditionalGeneration": _of_t5(),
    "WhisperForConditionalGeneration": ArchitectureDefaults(
        absent={
            "activation_function": "gelu",
            "d_model": 384,
            "decoder_attention_heads": 6,
            "decoder_ffn_dim": 1536,
            "decoder_layers": 4,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "num_mel_bins": 80,
            "vocab_size": 51865,
        },
        translate=_whisper_fields,
        only={"scale_embedding": False},
        encoder=_whisper_encoder,
    ),
}
"""Architecture -> what its config.json means by what it leaves out."""
