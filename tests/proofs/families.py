"""The decoders that are hardest on a cache, token for token, and every architecture that was ever right, built: `python
-m tests.proofs.families`.

Attention sinks, and keys and values of unequal size or number. A tiny model of each family with random weights
generates greedily, by transformers and by the engine with a cache that is too small: cut prompts, prefix hits,
preemption, a step ahead.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from cyclopts import App

from charonia.bench.checkpoint import write_random
from charonia.bench.inline_loop import LoopResult, run_to_end
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.torch_attention import ReferenceAttention
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.layers.recurrent_state import StateSlots
from charonia.engine.layers.step_context import StepContext
from charonia.engine.models.interfaces import BuiltDecoder, Decoder
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.step_batch import StepBatch
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig, SnapshotRule
from charonia.scheduler.plan import StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

LENGTHS, SHARED, NEW = (15, 30, 14, 29, 46, 60), 33, 24
"""Of prompts, of what half of them begin with, and of what is generated."""
CUTS, TOLERANCE = (29, 1, 28, 2), 0.01
"""Of the one prompt that every architecture computes."""
BLOCKS, BLOCK, CHUNK = 9, 16, 29
SNAPSHOTS = 12
SNAPSHOT_RULE = SnapshotRule(prompt_stride=32, generated_stride=16, least_gain=16)
"""Of models that keep states."""

_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "dtype": "float32",
}
_SLIDING: dict[str, Any] = {"sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_SHARED = _SLIDING | {
    "num_hidden_layers": 4,
    "layer_types": 2 * _SLIDING["layer_types"],
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 384,
    "hidden_size_per_layer_input": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT | _ROUTED,
    "deepseek_v2": _LATENT | _ROUTED | {"first_k_dense_replace": 1, "topk_method": "greedy"},
    "deepseek_v3": _LATENT | _ROUTED | {"first_k_dense_replace": 1},
    "flint": _SLIDING | _EXPERTS | {"num_experts": 4},
    "gemma4_text": _SHARED,
    "gemma4_unified_text": _SHARED,
    "glm4_moe_lite": _LATENT | _ROUTED,
    "gpt_oss": _SLIDING
    | {"num_local_experts": 4, "num_experts_per_tok": 2}
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 8,
            "truncate": False,
        }
    },
    "granite_swa": _SLIDING | {"attention_multiplier": 0.25},
    "granitemoe_swa": _SLIDING | {"attention_multiplier": 0.25, "num_local_experts": 4, "num_experts_per_tok": 2},
    "longcat_flash": _LATENT | _ROUTED | {"num_layers": 2, "num_hidden_layers": 4, "expert_ffn_hidden_size": 48},
    "mimo_v2_flash": _SLIDING | _ROUTED | {"head_dim": 32, "v_head_dim": 16, "mlp_layer_types": ["dense", "sparse"]},
    "minicpm3": _LATENT,
    "youtu": _LATENT,
}
"""transformers' model types, with what is theirs alone."""
_SIZES: dict[str, Any] = {
    name: size
    for size, names in {
        1: "bos_token_id cls_token_id first_k_dense_replace n_group topk_group",
        2: "eos_token_id sep_token_id num_hidden_layers num_layers n_layer n_layers decoder_layers num_experts_per_tok "
        "moe_topk",
        3: "pad_token_id",
        4: "num_attention_heads num_heads n_head n_heads decoder_attention_heads num_experts num_local_experts "
        "n_routed_experts",
        16: "head_dim global_head_dim rotary_dim qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "hidden_size_per_layer_input",
        19: "sliding_window",
        24: "q_lora_rank",
        32: "kv_lora_rank",
        48: "moe_intermediate_size shared_expert_intermediate_size",
        64: "hidden_size n_embd d_model word_embed_proj_dim embedding_size",
        96: "intermediate_size n_inner ffn_dim decoder_ffn_dim ffn_hidden_size",
        256: "max_position_embeddings n_positions n_ctx",
        384: "vocab_size vocab_size_per_layer_input",
    }.items()
    for name in names.split()
} | {"num_key_value_heads": 2, "num_kv_shared_layers": 0, "tie_word_embeddings": False}
"""By the names that configurations have for them."""
_UNUSUAL = "q_lora_rank", "sliding_window"
"""What a model is another kind of by having it."""
ARCHITECTURES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("architectures.json").read_bytes())
"""The other model types that were right at any time, with what their configurations need beside sizes."""

BY_SEQUENCE = "bloom", "jamba"
"""Model types that transformers computes one sequence after the other: ALiBi, and states beside keys and values."""

app = App(name="python -m tests.proofs.families", help=__doc__)


def is_known(family: str) -> bool:
    """Whether the transformers that is installed has the model type."""
    from transformers import CONFIG_MAPPING

    return family in CONFIG_MAPPING


def tiny_config(model_type: str, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration of a tiny model: of the usual sizes those that its own has, and two layers of its kinds.
    `others`: what it needs beside sizes; None: as in the tables."""
    if model_type in FAMILIES:
        return _TINY | FAMILIES[model_type] | {"model_type": model_type}
    from transformers import CONFIG_MAPPING

    usual = CONFIG_MAPPING[model_type]()
    known = usual.to_dict()
    fields = {
        name: size
        for name, size in _SIZES.items()
        if hasattr(usual, name) and not (name in _UNUSUAL and known.get(name) is None) and not _is_derived(usual, name)
    }
    if not _is_derived(usual, "layer_types") and (kinds := [*dict.fromkeys(getattr(usual, "layer_types", None) or ())]):
        fields["layer_types"] = (2 * kinds)[:2]
    more = ARCHITECTURES[model_type] if others is None else others
    return fields | dict(more) | {"model_type": model_type, "dtype": "float32"}


def _is_derived(config: Any, name: str) -> bool:
    """Whether a configuration computes a field from others."""
    kind = getattr(type(config), type(config).attribute_map.get(name, name), None)
    return isinstance(kind, property) and kind.fset is None


def refusal(model_type: str, directory: Path) -> str:
    """Why a tiny model of an architecture, made in `directory`, is not served; "" if it is, and right: then its logits
    are transformers' own, also those of a prompt that is cut and longer than its windows."""
    write_random(directory, tiny_config(model_type))
    try:
        _, error = build_and_compare(directory)
    except CheckpointError as refused:
        return refused.message
    return f"its logits for a longer prompt are wrong by {error:.1%}" if not error < TOLERANCE else ""


def build_and_compare(directory: Path) -> tuple[Decoder, float]:
    """The decoder of a checkpoint, and how far its logits of a longer prompt are from transformers' own, relative to
    their spread.

    Raises:
        CheckpointError: it is refused.
    """
    built = checkpoint_builder(open_checkpoint(directory)).build(BuildContext(torch.float32, torch.device("cpu"), 128))
    return built.decoder, _error_of_cut_prompt(directory, built)


@torch.inference_mode()
def _error_of_cut_prompt(directory: Path, built: BuiltDecoder) -> float:
    """The largest difference from transformers' logits for one prompt in `CUTS`, relative to their spread."""
    from transformers import AutoModelForCausalLM

    shape, device = built.shape, torch.device("cpu")
    heads = shape.heads, shape.kv_heads, shape.head_dim
    cache = ReferenceAttention(CacheSpec(shape.cached_attention, *heads, BLOCK, torch.float32, device))
    cache.allocate(-(-sum(CUTS) // BLOCK))
    states = StateSlots(shape.states, 1, torch.float32, device)
    states.allocate(0)
    tokens = torch.randint(1, 384, (sum(CUTS),), generator=torch.Generator().manual_seed(6))
    tables = torch.arange(-(-len(tokens) // BLOCK)).view(1, -1)
    parts = []
    for start, piece in zip(np.cumsum((0, *CUTS)).tolist(), tokens.split(CUTS), strict=False):
        batch = StepBatch.from_tokens(piece, (start,), (len(piece),), tables, BLOCK)
        slots = states.begin_step(batch) if any(shape.states) else None
        context = StepContext(batch, cache.begin_step(batch), states=slots)
        logits = built.decoder.compute_logits(context, (torch.arange(len(piece)),))
        assert logits is not None
        parts.append(next(logits).float().clone())
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(directory, dtype=torch.float32)
    right = model(tokens.unsqueeze(0), use_cache=False).logits[0]
    return float((torch.cat(parts) - right).abs().max() / right.std())


def faults(family: str, directory: Path, device: str = "cpu") -> Iterator[str]:
    """The differences of one family, whose checkpoint is made in `directory`."""
    write_random(directory, tiny_config(family))
    prompts = _prompts()
    outcome, plans = _served(directory, device, prompts)
    for number, (prompt, right) in enumerate(zip(prompts, _generated(directory, device, prompts), strict=True)):
        if outcome.tokens[number] != right:
            yield f"a prompt of {len(prompt)}: {outcome.tokens[number]}, not {right}"
    if not any((~plan.samples).any() for plan in plans):
        yield "no prompt was cut"
    if not sum(outcome.cached.values()):
        yield "nothing came out of the prefix cache"
    if sum(len(plan.new) for plan in plans) == len(prompts):
        yield "nobody was preempted"


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(1, 384, (length,), generator=generator).tolist() for length in LENGTHS]
    return [drawn[-1][:SHARED] + each if number % 2 else each for number, each in enumerate(drawn)]


def _served(directory: Path, device: str, prompts: list[list[int]]) -> tuple[LoopResult, list[StepPlan]]:
    snapshots = SNAPSHOTS if checkpoint_builder(open_checkpoint(directory)).keeps_states else 0
    cache, plans = KVCacheManager(BLOCKS, BLOCK, snapshots=snapshots), list[StepPlan]()
    executor = InlineExecutor(EngineConfig(model=str(directory), device=device, cache=CacheConfig(block_size=BLOCK)))
    try:
        executor.load(lambda phase, fraction: None)
        executor.allocate(BLOCKS, 0, snapshots)
        requests = []
        for key, prompt in enumerate(prompts):
            tokens = np.array(prompt, np.int32)
            hashes = cache.digest(tokens)
            requests.append(
                SequenceSpec(key=key, prompt=tokens, max_tokens=NEW, hashes=hashes, sampling=ResolvedSampling())
            )
        config = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=CHUNK, max_model_len=256, ahead=1, snapshots=SNAPSHOT_RULE
        )
        return run_to_end(Scheduler(config, cache), executor, requests, observe=plans.append), plans
    finally:
        executor.close()


@torch.inference_mode()
def _generated(directory: Path, device: str, prompts: list[list[int]]) -> Iterator[list[int]]:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").to(device)
    model.generation_config.eos_token_id = None
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        yield out[0, len(prompt) :].tolist()


@app.default
def main(device: str = "cpu") -> None:
    """Compare all families on `device`, and build every architecture; the exit code is 0 if all are right."""
    broken = 0
    for family in (*FAMILIES, *BY_SEQUENCE):
        if not is_known(family):
            print(f"{family}: left out, transformers {version('transformers')} has no such model type")
            continue
        with TemporaryDirectory() as scratch:
            found = list(faults(family, Path(scratch), device))
        broken += bool(found)
        print(f"{family}: {'; '.join(found) or 'the same tokens'}")
    for model_type in ARCHITECTURES:
        if not is_known(model_type):
            print(f"{model_type}: left out, transformers {version('transformers')} has no such model type")
            continue
        with TemporaryDirectory() as scratch:
            told = refusal(model_type, Path(scratch))
        broken += bool(told)
        print(f"{model_type}: {told or 'served'}")
    sys.exit(broken > 0)


if __name__ == "__main__":
    app()
