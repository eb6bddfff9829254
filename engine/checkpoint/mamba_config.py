"""What config.json says of Mamba's layers, whatever else a model has, and of models that have nothing else."""

import math
from collections.abc import Mapping
from typing import Any

from ...core.errors import shorten
from .config_fields import MOST_PARTS, MOST_REAL, ArchitectureDefaults, ConfigFields, HybridLayers
from .model_spec import ACTIVATIONS
from .recurrence import Mamba2Spec, MambaSpec, RecurrenceSpec


def convolves_with_silu(fields: ConfigFields) -> None:
    if fields.activation() != ACTIVATIONS["silu"]:
        raise fields.unknown(f"hidden_act {fields.config['hidden_act']!r} is not supported beside states, silu is")


_INFINITY = {"__float__": "Infinity"}
"""What transformers writes into config.json for it."""


def _step_limits(fields: ConfigFields) -> tuple[float, float]:
    limits = fields.config["time_step_limit"]
    if limits is None:
        return 0.0, math.inf
    ends = [math.inf if end == _INFINITY else end for end in limits] if isinstance(limits, list) else []
    numbers = len(ends) == 2 and all(type(end) in (int, float) for end in ends)
    if not numbers or not 0 <= ends[0] <= ends[1] or ends[0] > MOST_REAL or MOST_REAL < ends[1] < math.inf:
        message = "time_step_limit must be two numbers, 0 <= least <= most, of which the second may be infinite"
        raise fields.error(f"{message}, got {shorten(repr(limits))}")
    return float(ends[0]), float(ends[1])


def mamba2_layers(fields: ConfigFields) -> Mamba2Spec:
    """Mamba-2's layers, in the fields that Granite has for them."""
    convolves_with_silu(fields)
    heads, groups = (fields.number(f"mamba_n_{part}", most=MOST_PARTS) for part in ("heads", "groups"))
    if fields.config.get("mamba_d_ssm") is not None:
        inner = fields.number("mamba_d_ssm")
    elif fields.config.get("mamba_expand") is not None:
        inner = fields.number("mamba_expand", most=MOST_PARTS) * fields.number("hidden_size")
    else:
        inner = heads * fields.number("mamba_d_head", most=MOST_PARTS)
    if inner % heads or heads % groups:
        raise fields.error(f"mamba_n_heads {heads} must divide {inner} features, and be a multiple of {groups} groups")
    if fields.config["mamba_d_head"] != "auto" and (head_dim := fields.number("mamba_d_head")) != inner // heads:
        raise fields.error(f"mamba_d_head {head_dim} times {heads} heads is not {inner}")
    if inner // heads > MOST_PARTS:
        raise fields.error(f"mamba_expand makes {heads} heads of {inner // heads} features, more than {MOST_PARTS}")
    entering = fields.real("ssm_in_multiplier") or 1.0
    bias = fields.flag("mamba_proj_bias")
    return Mamba2Spec(
        heads,
        inner // heads,
        fields.number("mamba_d_state", most=MOST_PARTS),
        groups,
        fields.number("mamba_d_conv", most=MOST_PARTS),
        bias,
        fields.flag("mamba_conv_bias"),
        _step_limits(fields),
        fields.flag("projectors_bias", bias),
        fields.flag("mamba_rms_norm", True),
        not fields.flag("mamba_norm_before_gate"),
        tuple(entering * factor for factor in fields.reals("ssm_multipliers", 5)),
    )


def mixer_fields(fields: ConfigFields) -> dict[str, Any]:
    """What Mamba's own line and Nemotron call by other names than Granite."""
    return {
        "mamba_n_groups": fields.number("n_groups", most=MOST_PARTS),
        "mamba_d_conv": fields.number("conv_kernel", most=MOST_PARTS),
        "mamba_proj_bias": fields.flag("use_bias"),
        "mamba_conv_bias": fields.flag("use_conv_bias"),
        "rms_norm_eps": fields.real("layer_norm_epsilon"),
    }


def _only(recurrence: RecurrenceSpec, fields: ConfigFields) -> HybridLayers:
    """Every layer is this recurrence."""
    nowhere, everywhere = ((kind,) * len(fields.layers) for kind in (False, True))
    return HybridLayers(nowhere, everywhere, recurrence, feeds=nowhere)


_UNATTENDED = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
"""The heads of models none of whose layers attends."""


def _mamba(fields: ConfigFields) -> HybridLayers:
    convolves_with_silu(fields)
    hidden = fields.number("hidden_size")
    rank = -(-hidden // 16) if fields.config["time_step_rank"] == "auto" else fields.number("time_step_rank")
    eps = fields.real("mixer_rms_eps")
    parts = fields.number("state_size", most=MOST_PARTS), rank, fields.number("conv_kernel", most=MOST_PARTS)
    biases = fields.flag("use_bias"), fields.flag("use_conv_bias")
    return _only(MambaSpec(fields.number("intermediate_size"), *parts, *biases, eps), fields)


def _mamba_fields(fields: ConfigFields) -> Mapping[str, Any]:
    inner = fields.number("expand", most=MOST_PARTS) * fields.number("hidden_size")
    if fields.config.get("intermediate_size") is not None:
        inner = fields.number("intermediate_size")
    own = {"rms_norm_eps": fields.real("layer_norm_epsilon"), "intermediate_size": inner}
    return {**fields.config, **_UNATTENDED, **own}


def _mamba2_fields(fields: ConfigFields) -> Mapping[str, Any]:
    own = mixer_fields(fields) | {
        "mamba_n_heads": fields.number("num_heads", most=MOST_PARTS),
        "mamba_d_head": fields.number("head_dim", most=MOST_PARTS),
        "mamba_d_state": fields.number("state_size", most=MOST_PARTS),
        "mamba_expand": fields.number("expand", most=MOST_PARTS),
        "intermediate_size": fields.number("hidden_size"),
    }
    return {**fields.config, **_UNATTENDED, **own}


MIXER_DEFAULTS = {
    "n_groups": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": None,
}
_ALONE = {
    **MIXER_DEFAULTS,
    "expand": 2,
    "max_position_embeddings": 131_072,  # states have no end
}
_MAMBA = {**_ALONE, "state_size": 16, "time_step_rank": "auto", "tie_word_embeddings": True}
MAMBAS = {
    "FalconMambaForCausalLM": ArchitectureDefaults(
        absent={**_MAMBA, "mixer_rms_eps": 1e-6}, hybrid=_mamba, translate=_mamba_fields
    ),
    "MambaForCausalLM": ArchitectureDefaults(absent=_MAMBA, hybrid=_mamba, translate=_mamba_fields),
    "Mamba2ForCausalLM": ArchitectureDefaults(
        absent={**_ALONE, "num_heads": 128, "head_dim": 64, "state_size": 128},
        hybrid=lambda fields: _only(mamba2_layers(fields), fields),
        translate=_mamba2_fields,
    ),
}
"""Architecture -> what its config.json means by what it leaves out."""
