"""Quantised checkpoints, and the plain ones that they stand for.

A style turns a matrix into the tensors of its format, as the format is specified, number by number and without our
code; `compressed-tensors` by the package that defines it. The plain twin has what those numbers mean, in float32.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts: TypeAlias = tuple[dict[str, Tensor], Tensor]
"""The tensors that a matrix [outputs, inputs] becomes, by the ends of their names; and its meaning in float32."""

GROUP = 32


class Style(NamedTuple):
    """`quantise` is given a matrix and its name."""

    config: Mapping[str, Any]
    quantise: Callable[[Tensor, str], Parts]


_PLAIN = ("mlp.gate.", "block_sparse_moe.gate.", "moe_statics.", "vision", "visual")
"""What is left as it is: routers, and what sees images."""


class Groups(NamedTuple):
    """Numbers [outputs, inputs] from 0 on; scales and zero points [outputs, groups]; the group of each input."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    of_input: Tensor

    @property
    def meaning(self) -> Tensor:
        scales, zeros = self.scales.float()[:, self.of_input], self.zeros[:, self.of_input]
        return (self.numbers - zeros) * scales


def into_groups(weight: Tensor, bits: int, size: int, *, symmetric: bool = False, shuffled: bool = False) -> Groups:
    inputs = weight.shape[1]
    size = size if size > 0 else inputs
    of_input = torch.arange(inputs) // size
    if shuffled:
        of_input = of_input[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    groups, most = int(of_input.max()) + 1, (1 << bits) - 1
    parts = [weight[:, of_input == group].float() for group in range(groups)]
    if symmetric:
        scales = torch.stack([part.abs().amax(1) for part in parts], 1) / (most // 2)
        zeros = torch.full(scales.shape, (most + 1) // 2)
    else:
        low, high = (torch.stack([one(part, 1).clamp(*at) for part in parts], 1) for one, at in _ENDS)
        scales = (high - low) / most
        zeros = (-low / scales).round().long().clamp(1, most)
    scales = scales.half()
    wide = scales.float()[:, of_input]
    numbers = ((weight.float() / wide).round().long() + zeros[:, of_input]).clamp(0, most)
    return Groups(numbers, scales, zeros, of_input)


_ENDS = ((torch.amin, (None, -1e-4)), (torch.amax, (1e-4, None)))


def packed(numbers: Tensor, bits: int) -> Tensor:
    """[n, count] -> int32 [n, words]: one stream of bits for each row, the first number in the lowest."""
    columns = []
    total = numbers.shape[1] * bits
    for word in range(-(-total // 32)):
        value = torch.zeros(len(numbers), dtype=torch.int64)
        for at in range(word * 32, min(word * 32 + 32, total)):
            value |= (numbers[:, at // bits] >> at % bits & 1) << at % 32
        columns.append(torch.where(value >= 1 << 31, value - (1 << 32), value))
    return torch.stack(columns, 1).int()


def gptq(
    bits: int, size: int = GROUP, *, second: bool = False, shuffled: bool = False, symmetric: bool = True
) -> Style:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": shuffled, "sym": symmetric}
    if second:
        config["checkpoint_format"] = "gptq_v2"

    def quantise(weight: Tensor, name: str) -> Parts:
        found = into_groups(weight, bits, size, symmetric=symmetric, shuffled=shuffled)
        parts = {
            "qweight": packed(found.numbers, bits).t(),
            "qzeros": packed((found.zeros - (0 if second else 1)).t(), bits),
            "scales": found.scales.t(),
            "g_idx": found.of_input.int(),
        }
        return parts, found.meaning

    return Style(config, quantise)


def gptq_with_others() -> Style:
    """Some matrices have eight bits, and one group."""
    few, more = gptq(4), gptq(8, -1)
    config = dict(few.config) | {"dynamic": {r"+:.*down_proj": {"bits": 8, "group_size": -1}}}
    return Style(config, lambda weight, name: (more if "down_proj" in name else few).quantise(weight, name))


def awq(size: int = GROUP) -> Style:
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}

    def words(numbers: Tensor) -> Tensor:
        """[n, outputs] -> int32 [n, outputs / 8]"""
        order = [8 * word + each for word in range(numbers.shape[1] // 8) for each in (0, 2, 4, 6, 1, 3, 5, 7)]
        return packed(numbers[:, order], 4)

    def quantise(weight: Tensor, name: str) -> Parts:
        found = into_groups(weight, 4, size)
        parts = {"qweight": words(found.numbers.t()), "qzeros": words(found.zeros.t()), "scales": found.scales.t()}
        return parts, found.meaning

    return Style(config, quantise)


def fp8(block: int | None = GROUP) -> Style:
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if block is not None:
        config["weight_block_size"] = [block, block]

    def quantise(weight: Tensor, name: str) -> Parts:
        wide = weight.float()
        size = max(wide.shape) if block is None else block
        scales = torch.stack(
            [torch.stack([part.abs().max() / 448 for part in rows.split(size, 1)]) for rows in wide.split(size, 0)]
        )
        spread = scales.repeat_interleave(size, 0)[: len(wide)].repeat_interleave(size, 1)[:, : wide.shape[1]]
        small = (wide / spread).to(torch.float8_e4m3fn)
        scale = {"weight_scale": scales.reshape(())} if block is None else {"weight_scale_inv": scales}
        return {"weight": small, **scale}, small.float() * spread

    return Style(config, quantise)


def compressed(*forms: tuple[str, dict[str, Any]], activations: dict[str, Any] | None = None) -> Style:
    """Each form is the end of a pattern of names, and its `weights`; the package packs and unpacks."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    schemes = {}
    for at, (pattern, weights) in enumerate(forms):
        kind = "float-quantized" if weights.get("type") == "float" else "pack-quantized"
        kind = "int-quantized" if activations is not None and kind == "pack-quantized" else kind
        schemes[f"group_{at}"] = QuantizationScheme(
            targets=["Linear" if pattern == "" else f"re:.*{pattern}$"],
            weights=QuantizationArgs(**weights),
            input_activations=None if activations is None else QuantizationArgs(**activations),
            format=kind,
        )
    kinds = {scheme.format for scheme in schemes.values()}
    config = QuantizationConfig(
        config_groups=schemes,
        ignore=["lm_head"],
        format=kinds.pop() if len(kinds) == 1 else "mixed-precision",
        quantization_status="compressed",
    ).model_dump()
    config.pop("moe_sparsity_config", None)

    def quantise(weight: Tensor, name: str) -> Parts:
        module = name.removesuffix(".weight")
        at = next(number for number, (pattern, _) in enumerate(forms) if module.endswith(pattern))
        scheme = schemes[f"group_{at}"]
        args, wide = scheme.weights, weight.float()
        size = args.group_size or wide.shape[1]
        parts = wide.unflatten(1, (-1, size)) if args.strategy == "group" else wide.unsqueeze(1)
        low, high = (parts.amin(-1), parts.amax(-1)) if args.strategy != "tensor" else (wide.min(), wide.max())
        scale, zero = calculate_qparams(
            low.reshape(-1, low.shape[-1] if low.dim() > 1 else 1),
            high.reshape(-1, high.shape[-1] if high.dim() > 1 else 1),
            args,
        )
        scale = (scale if args.strategy != "tensor" else scale.reshape(1)).half().float()
        zero = zero.reshape(scale.shape)
        given = {"weight": wide, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        small = compressor.compress(given, scheme)
        meaning = compressor.decompress(small, scheme)["weight"].float()
        small["weight_scale"] = small["weight_scale"].half()
        return small, meaning

    return Style(config, quantise)


TOKENWISE = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
SMALL_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
STYLES: dict[str, Callable[[], Style]] = {
    "gptq": lambda: gptq(4),
    "gptq v2 asymmetric": lambda: gptq(4, second=True, symmetric=False),
    "gptq in another order": lambda: gptq(4, shuffled=True),
    "gptq 8 bits": lambda: gptq(8, -1),
    "gptq 3 bits": lambda: gptq(3, 16),
    "gptq 2 bits": lambda: gptq(2),
    "gptq of several": gptq_with_others,
    "awq": awq,
    "awq whole": lambda: awq(-1),
    "fp8 blocks": fp8,
    "fp8": lambda: fp8(None),
    "w4a16": lambda: compressed(("", FOUR)),
    "w4a16 asymmetric": lambda: compressed(("", FOUR | {"symmetric": False})),
    "w4a16 channel": lambda: compressed(("", FOUR | {"strategy": "channel", "group_size": None})),
    "w5a16": lambda: compressed(("", FOUR | {"num_bits": 5})),
    "w8a16": lambda: compressed(("", CHANNEL)),
    "w8a8": lambda: compressed(("", CHANNEL), activations=TOKENWISE),
    "w8a8 tensor": lambda: compressed(("", CHANNEL | {"strategy": "tensor"}), activations=TOKENWISE),
    "w8a8 asymmetric": lambda: compressed(("", CHANNEL | {"symmetric": False}), activations=TOKENWISE),
    "fp8 channel": lambda: compressed(("", SMALL_FLOATS | {"strategy": "channel"})),
    "w8a8 fp8": lambda: compressed(
        ("", SMALL_FLOATS | {"strategy": "channel"}),
        activations=SMALL_FLOATS | {"strategy": "token", "dynamic": True},
    ),
    "w8a8 fp8 tensor": lambda: compressed(
        ("", SMALL_FLOATS | {"strategy": "tensor"}),
        activations=SMALL_FLOATS | {"strategy": "tensor", "dynamic": False},
    ),
    "several of them": lambda: compressed(("down_proj", CHANNEL), ("", FOUR)),
}


def write_quantised(source: Path, where: Path, style: Style) -> tuple[Path, Path]:
    """The checkpoint `source` quantised, and its plain twin."""
    small, plain = where / "quantised", where / "plain"
    for target in (small, plain):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((source / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"quantization_config": dict(style.config)}))
    quantised, meanings = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or "layers." not in name or any(part in name for part in _PLAIN):
            quantised[name] = meanings[name] = tensor
            continue
        parts, meanings[name] = style.quantise(tensor, name)
        quantised |= {f"{name.removesuffix('weight')}{part}": each.contiguous() for part, each in parts.items()}
    save_file(quantised, small / "model.safetensors", {"format": "pt"})
    save_file(meanings, plain / "model.safetensors", {"format": "pt"})
    return small, plain
