"""What config.json says of decoders that attend to an encoder's output."""

from collections.abc import Mapping
from typing import Any

from .config_fields import ArchitectureDefaults, ConfigFields
from .encoder_shape import EncoderShape


def _whisper_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """The decoder's fields by the names that other decoders' have. What scales embeddings is published for none."""
    config = fields.config
    layers = fields.number("decoder_layers")
    return {
        **config,
        "hidden_size": fields.number("d_model"),
        "num_hidden_layers": layers,
        "num_attention_heads": fields.number("decoder_attention_heads"),
        "num_key_value_heads": fields.number("decoder_attention_heads"),
        "head_dim": fields.number("d_model") // fields.number("decoder_attention_heads"),
        "intermediate_size": fields.number("decoder_ffn_dim"),
        "max_position_embeddings": fields.number("max_target_positions"),
        "hidden_act": config.get("activation_function"),
        "rotates": [False] * layers,
        "mlp_matrices": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


def _whisper_encoder(fields: ConfigFields) -> EncoderShape:
    return EncoderShape(fields.number("max_source_positions"), fields.number("d_model"))


SEQ2SEQ: dict[str, ArchitectureDefaults] = {
    "WhisperForConditionalGeneration": ArchitectureDefaults(
        absent={
            "activation_function": "gelu",
            "d_model": 384,
            "decoder_attention_heads": 6,
            "decoder_ffn_dim": 1536,
            "decoder_layers": 4,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "scale_embedding": False,
            "vocab_size": 51865,
        },
        translate=_whisper_fields,
        only={"scale_embedding": False},
        encoder=_whisper_encoder,
    ),
}
"""Architecture -> what its config.json means by what it leaves out."""
