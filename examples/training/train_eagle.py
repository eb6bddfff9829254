"""Trains an EAGLE-3 head for the demo model, and writes it in the speculators format.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025): the head
reads three layers of the target and learns from steps that go on from its own output, as drafts do. The target's own
probabilities are what it learns, over the part of the vocabulary that the target chooses most.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prepare import SCRATCH
from safetensors.torch import save_file
from tokenize_corpus import encode, read_documents
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train import batches, optimizers, update
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

LAYERS = (1, 2, 3)
"""Hidden states as they enter these layers of the target are what the head reads."""
STEP_WEIGHT = 0.8


@dataclass(frozen=True)
class Plan:
    """As `train.Plan`; `steps_ahead`: from so many of its own outputs the head goes on while it learns."""

    steps: int
    minutes: float
    tokens: int
    steps_ahead: int
    window: int = 256
    matrix_rate: float = 4e-3
    other_rate: float = 2e-3

    def rate(self, progress: float) -> float:
        return min(1.0, (progress + 1e-3) / 0.03, max(0.0, 1.0 - progress) / 0.5)


class Attention(nn.Module):
    """Over the target's positions, and over the chain of drafts that begins at each of them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        for name, heads in (("q_proj", self.heads), ("k_proj", self.kv_heads), ("v_proj", self.kv_heads)):
            setattr(self, name, nn.Linear(2 * config.hidden_size, heads * self.size, bias=False))
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`x` [B, T, 2 * hidden]: at place t the draft t + len(chain). `chain`: keys and values of the steps before, to
        which this one's are added."""
        rows, length, _ = x.shape
        query, key, value = (
            project(x).view(rows, length, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *turns)
        groups = self.heads // self.kv_heads
        chain.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        (keys, values), *later = chain
        scores = query @ keys.transpose(2, 3)
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
        own = [(query * each).sum(-1, keepdim=True) for each, _ in later]
        weights = torch.cat([scores, *own], -1).mul(self.size**-0.5).float().softmax(-1).to(x.dtype)
        out = weights[..., :length] @ values
        for number, (_, each) in enumerate(later):
            out = out + weights[..., length + number, None] * each
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )

    def forward(self, embedded: Tensor, hidden: Tensor, turns: tuple[Tensor, Tensor], chain: list[Any]) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, turns, chain)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):
    """The names are those of the speculators format."""

    def __init__(self, config: LlamaConfig, target_hidden: int, draft_vocabulary: int) -> None:
        super().__init__()
        self.fc = nn.Linear(len(LAYERS) * target_hidden, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocabulary, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Logits of each step [B, T, draft vocabulary]. `embedded`: of the tokens after those that `features` are of;
        step j is compared with what the target says j places later."""
        hidden, chain, found = self.fc(features), list[Any](), list[Tensor]()
        places = torch.arange(embedded.shape[1], device=embedded.device)[None]
        for ahead in range(steps):
            turns = self.rotary(hidden, places + ahead)
            hidden = self.layers[0](functional.pad(embedded, (0, 0, 0, ahead))[:, ahead:], hidden, turns, chain)
            found.append(self.lm_head(self.norm(hidden)))
        return found


@torch.no_grad()
def read_target(target: LlamaForCausalLM, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The features of each token of `rows` [B, T], and the logits after it."""
    found = target(input_ids=rows, use_cache=False, output_hidden_states=True)
    return torch.cat([found.hidden_states[layer] for layer in LAYERS], -1), found.logits


def chosen_tokens(target: LlamaForCausalLM, ids: np.ndarray, most: int) -> Tensor:
    """The tokens that the target would choose most, in order, over a sample of the text."""
    counts = torch.zeros(target.config.vocab_size, dtype=torch.long)
    for rows, _ in zip(batches(ids, 4096, 256, seed=1), range(24), strict=False):
        counts += torch.bincount(read_target(target, rows[:, :-1])[1].argmax(-1).flatten(), minlength=len(counts))
    return counts.argsort(descending=True, stable=True)[:most].sort().values


def losses(logits: list[Tensor], wanted: Tensor, kept: Tensor) -> tuple[Tensor, list[float]]:
    """The weighted loss of all steps, and how often each chose what the target does. `wanted` [B, T, vocabulary]: the
    target's logits after the token that each place was given; those beyond `kept` count as wrong."""
    total, right = torch.zeros(()), list[float]()
    choices, told = wanted.argmax(-1), wanted[..., kept].float().log_softmax(-1)
    for ahead, each in enumerate(logits):
        length = each.shape[1] - ahead
        said = each[:, :length].float().log_softmax(-1)
        known = torch.isin(choices[:, ahead:], kept)
        cross = -(told[:, ahead:].exp() * said).sum(-1)
        total = total + STEP_WEIGHT**ahead * (cross * known).sum() / known.sum()
        right.append(float((kept[said.argmax(-1)] == choices[:, ahead:]).float().mean()))
    return total, right


def one_step(
    target: LlamaForCausalLM, head: Head, rows: Tensor, kept: Tensor, ahead: int
) -> tuple[Tensor, list[float]]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features, logits = read_target(target, rows)
        embedded = target.model.embed_tokens(rows[:, 1:])
        return losses(head(embedded, features[:, :-1], ahead), logits[:, 1:], kept)


def train(target: LlamaForCausalLM, head: Head, ids: np.ndarray, kept: Tensor, plan: Plan, seed: int) -> int:
    tools = optimizers(head, plan)
    begun, steps, seen = time.monotonic(), 0, torch.zeros(plan.steps_ahead)
    for rows in batches(ids, plan.tokens, plan.window, seed):
        progress = max(steps / plan.steps, (time.monotonic() - begun) / 60 / plan.minutes)
        if progress >= 1:
            return steps
        value, right = one_step(target, head, rows, kept, plan.steps_ahead)
        value.backward()
        update(tools, plan.rate(progress))
        steps, seen = steps + 1, seen + 0.05 * (torch.tensor(right) - seen) if steps else torch.tensor(right)
        if steps % 50 == 0:
            told = " ".join(f"{each:.3f}" for each in seen)
            print(f"step {steps} {progress:.1%} loss {float(value.detach()):.3f} right {told}", flush=True)
    raise AssertionError("batches do not end")


def save(head: Head, kept: Tensor, target: LlamaForCausalLM, name: str, folder: Path, k: int) -> None:
    """`d2t`: what is added to a draft token's number; `t2d`: the target's tokens that the head knows."""
    vocabulary = target.config.vocab_size
    state = {key: value.to(torch.bfloat16).contiguous() for key, value in head.state_dict().items()}
    state["d2t"] = kept - torch.arange(len(kept))
    state["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).scatter_(0, kept, value=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    layer = head_config(target).to_dict()
    proposal = {"proposal_type": "greedy", "speculative_tokens": k, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": len(kept),
        "target_hidden_size": target.config.hidden_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "transformer_layer_config": {key: layer[key] for key in sorted(layer) if not key.startswith("_")},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": ["LlamaForCausalLM"]},
        },
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def head_config(target: LlamaForCausalLM) -> LlamaConfig:
    own = target.config
    return LlamaConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        num_hidden_layers=1,
        intermediate_size=own.intermediate_size,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        max_position_embeddings=own.max_position_embeddings,
        rms_norm_eps=own.rms_norm_eps,
        rope_parameters=own.rope_parameters,
        tie_word_embeddings=False,
    )


def token_ids(scratch: Path, target: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The training text and what was held out, by the target's own tokenizer; kept in the scratch folder."""
    tokenizer, found = Tokenizer.from_file(str(target / "tokenizer.json")), list[np.ndarray]()
    for split in ("train", "held_out"):
        path = scratch / f"eagle_{split}.bin"
        if not path.exists():
            encode(
                tokenizer, [document for document in read_documents(scratch) if document["split"] == split], seed
            ).tofile(path)
        found.append(np.fromfile(path, dtype=np.uint16))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="folder of the checkpoint that the head drafts for")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--draft-vocabulary", type=int, default=2048)
    parser.add_argument("--steps-ahead", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=20261123)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.float32).requires_grad_(False)
    ids, held_out = token_ids(options.scratch, options.target, options.seed)
    kept = chosen_tokens(target, ids, options.draft_vocabulary)
    head = Head(head_config(target), target.config.hidden_size, len(kept))
    plan = Plan(options.steps, options.minutes, options.tokens, options.steps_ahead)
    steps = train(target, head, ids, kept, plan, options.seed)
    save(head, kept, target, options.target.name, options.out, options.steps_ahead)
    head.bfloat16().float()
    with torch.no_grad():
        sample = zip(batches(held_out, 4096, 256, seed=2), range(24), strict=False)
        seen = [one_step(target, head, rows, kept, options.steps_ahead)[1] for rows, _ in sample]
    parameters = sum(parameter.numel() for parameter in head.parameters())
    shares = np.mean(seen, 0).round(4).tolist()
    print(json.dumps({"parameters": parameters, "steps": steps, "right_on_held_out": shares}))


if __name__ == "__main__":
    main()
