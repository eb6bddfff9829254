"""Trains the demo model, its draft or the small hybrid on the packed token files, within a time budget.

Ends annealed whatever the machine's speed: the learning rate follows the larger of steps done and
minutes spent. A usable checkpoint is written every few minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from prepare import SCRATCH
from tokenize_corpus import CONTEXT, END_OF_TEXT, SPECIAL, VOCABULARY
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

HELD_OUT = ("module", "docs", "chat")
KEEP_SECONDS = 300
BF16_IS_FAST = torch.cpu._is_avx512_bf16_supported()
"""Elsewhere products in bf16 are slower than in float32."""
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    state_heads: int = 0
    """Value heads of a gated delta rule, in three of four layers; 0: every layer has attention."""


SHAPES = {
    "demo": Shape(hidden=384, layers=4, inner=1152, heads=6, kv_heads=2, head_dim=64),
    "draft": Shape(hidden=128, layers=2, inner=288, heads=4, kv_heads=2, head_dim=32),
    "hybrid": Shape(hidden=192, layers=4, inner=576, heads=3, kv_heads=1, head_dim=64, state_heads=6),
}


@dataclass(frozen=True)
class Plan:
    steps: int
    minutes: float
    tokens: int
    matrix_rate: float
    other_rate: float
    short: int = 512
    short_until: float = 0.88
    warm_up: float = 0.02
    decay: float = 0.4

    def window(self, progress: float) -> int:
        """Short windows are cheaper on a CPU; the last stretch sees the whole context."""
        return self.short if progress < self.short_until else CONTEXT

    def rate(self, progress: float) -> float:
        """Warm-up, a stable stretch, then a linear decay to nothing."""
        rising = min(1.0, (progress + 1e-3) / self.warm_up)
        falling = min(1.0, max(0.0, 1.0 - progress) / self.decay)
        return min(rising, falling)


def new_model(shape: Shape, end_ids: list[int]) -> PreTrainedModel:
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_ids,
        "pad_token_id": end_ids[0],
    }
    if not shape.state_heads:
        return LlamaForCausalLM(LlamaConfig(**common))
    state_head_dim = shape.hidden // shape.state_heads
    config = Qwen3_5TextConfig(
        **common,
        linear_num_key_heads=shape.state_heads // 2,
        linear_num_value_heads=shape.state_heads,
        linear_key_head_dim=state_head_dim,
        linear_value_head_dim=state_head_dim,
    )
    return Qwen3_5ForCausalLM(config)


def read_ids(scratch: Path, name: str) -> np.ndarray:
    return np.fromfile(scratch / f"{name}.bin", dtype=np.uint16)


def batches(ids: np.ndarray, tokens: int, window: int, seed: int) -> Iterator[Tensor]:
    """Every window of an epoch once, in a new order and from a new offset each epoch."""
    rng = np.random.default_rng([seed, window])
    rows = tokens // window
    while True:
        offset = int(rng.integers(window))
        count = (len(ids) - offset - 1) // window
        order = rng.permutation(count)
        for start in range(0, count - rows + 1, rows):
            firsts = offset + order[start : start + rows] * window
            stacked = np.stack([ids[first : first + window + 1] for first in firsts])
            yield torch.from_numpy(stacked.astype(np.int64))


def loss_of(model: PreTrainedModel) -> Loss:
    def loss(rows: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=BF16_IS_FAST):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    return loss


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) with updates matched to AdamW's in size, as torch.optim.Muon has it, but in float32:
    torch's own goes to bf16, which takes three times the step on processors without it."""

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = nearly_orthogonal(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def nearly_orthogonal(gradient: Tensor) -> Tensor:
    """The gradient with singular values near 1, by five Newton-Schulz steps of Muon's coefficients."""
    wide = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if gradient.shape[0] <= gradient.shape[1] else wide.T


def optimizers(model: PreTrainedModel, plan: Plan) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named.items() if p.ndim != 2 or "embed" in n]
    if BF16_IS_FAST:
        muon = torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    else:
        muon = Muon(matrices, lr=plan.matrix_rate)
    adam = torch.optim.AdamW(others, lr=plan.other_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def step(loss: Loss, rows: Tensor, tools: list[torch.optim.Optimizer], scale: float) -> float:
    value = loss(rows)
    value.backward()
    update(tools, scale)
    return float(value.detach())


def update(tools: list[torch.optim.Optimizer], scale: float) -> None:
    """Change the weights by their gradients, at so much of the highest learning rate."""
    for optimizer in tools:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def held_out_loss(loss: Loss, ids: np.ndarray, most_windows: int | None = None) -> float:
    """Nats per token over windows of the context's length, the last one shorter."""
    firsts = range(0, len(ids) - 1, CONTEXT)
    total, tokens = 0.0, 0
    for first in list(firsts)[:most_windows]:
        row = torch.from_numpy(ids[first : first + CONTEXT + 1].astype(np.int64))[None]
        total += float(loss(row)) * (row.shape[1] - 1)
        tokens += row.shape[1] - 1
    return total / tokens


def save(model: PreTrainedModel, scratch: Path, folder: Path, end_ids: list[int]) -> None:
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    state.pop("lm_head.weight")
    rounded = type(model)(model.config)
    rounded.bfloat16()
    rounded.load_state_dict(state, strict=False)
    rounded.generation_config = GenerationConfig(eos_token_id=end_ids, pad_token_id=end_ids[0])
    rounded.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    for path in (scratch / "tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


@dataclass(frozen=True)
class Outcome:
    parameters: int
    steps: int
    tokens: int
    seconds: float
    held_out: dict[str, float]


def held_out_losses(folder: Path, scratch: Path) -> dict[str, float]:
    """Of the checkpoint as written, so after its rounding to bf16."""
    loss = loss_of(AutoModelForCausalLM.from_pretrained(folder))
    return {kind: round(held_out_loss(loss, read_ids(scratch, f"held_out_{kind}")), 4) for kind in HELD_OUT}


class Course:
    """One training run: what is learnt from, with what, and how far it has come."""

    def __init__(self, model: PreTrainedModel, scratch: Path, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.plain = loss_of(model)
        # A delta rule's loops are unrolled by the compiler for many minutes.
        compiles = isinstance(model, LlamaForCausalLM)
        self.loss: Loss = torch.compile(self.plain, dynamic=False) if compiles else self.plain
        self.tools = optimizers(model, plan)
        ids = read_ids(scratch, "train")
        self.sources = {window: batches(ids, plan.tokens, window, seed) for window in (plan.short, CONTEXT)}
        self.watched = read_ids(scratch, "held_out_module")
        self.steps = 0
        self.mean = math.log(VOCABULARY)
        self.begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    @property
    def progress(self) -> float:
        return max(self.steps / self.plan.steps, self.seconds / 60 / self.plan.minutes)

    def advance(self) -> None:
        progress = self.progress
        rows = next(self.sources[self.plan.window(progress)])
        value = step(self.loss, rows, self.tools, self.plan.rate(progress))
        self.steps += 1
        self.mean += 0.05 * (value - self.mean)

    def describe(self, watch: bool = False) -> None:
        pace = self.steps * self.plan.tokens / self.seconds
        text = f"step {self.steps} {self.progress:.1%} loss {self.mean:.3f} {pace:.0f} tokens/s"
        if watch:
            text += f", held out {held_out_loss(self.plain, self.watched, 24):.3f}"
        print(text, flush=True)


def train(course: Course, keep: Callable[[], None]) -> None:
    """`keep` writes a checkpoint; it is called every few minutes and at the end."""
    kept = course.seconds
    while course.progress < 1:
        course.advance()
        if course.steps % 50 == 0:
            course.describe()
        if course.seconds - kept > KEEP_SECONDS:
            keep()
            course.describe(watch=True)
            kept = course.seconds
    keep()


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    add_run_options(parser, minutes=48.0, matrix_rate=8e-3, other_rate=5e-3, seed=20261120)
    return parser.parse_args()


def add_run_options(
    parser: argparse.ArgumentParser, *, minutes: float, matrix_rate: float, other_rate: float, seed: int
) -> None:
    """The options that every run by these optimizers has."""
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--matrix-rate", type=float, default=matrix_rate)
    parser.add_argument("--other-rate", type=float, default=other_rate)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=seed)


def main() -> None:
    options = options_of()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    end_ids = [SPECIAL.index(END_OF_TEXT), SPECIAL.index("<|end|>")]
    model = new_model(SHAPES[options.shape], end_ids)
    plan = Plan(options.steps, options.minutes, options.tokens, options.matrix_rate, options.other_rate)
    course = Course(model, options.scratch, plan, options.seed)
    train(course, lambda: save(model, options.scratch, options.out, end_ids))
    outcome = Outcome(
        parameters=sum(p.numel() for p in model.parameters()),
        steps=course.steps,
        tokens=course.steps * plan.tokens,
        seconds=round(course.seconds, 1),
        held_out=held_out_losses(options.out, options.scratch),
    )
    print(json.dumps(asdict(outcome), indent=2))


if __name__ == "__main__":
    main()
