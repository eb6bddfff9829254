"""Rows with adapters, and without, in one batch: each says what the model would with its adapter merged into it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from charonia.bench.inline_loop import LoopResult, run_to_end
from charonia.core.errors import InvalidArgument
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig, LoraConfig
from charonia.engine.cpu import library
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.speculation import DraftRequest, Speculation
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

from .transformers_choices import chosen_after

BLOCK, NEW, BLOCKS = 16, 20, 64
LENGTHS = (1, 9, 17, 40, 33, 5, 64, 21)
NATIVE = pytest.mark.skipif(library.level() is None, reason="torch's products promise no such thing")


@pytest.fixture(scope="module")
def adapters(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("adapters.py")


@pytest.fixture
def load() -> Iterator[Callable[..., InlineExecutor]]:
    """An executor over a checkpoint; `torch_only` is the machine without a compiler."""
    made: list[InlineExecutor] = []

    def build(checkpoint: Path, *, torch_only: bool = False, **changes: Any) -> InlineExecutor:
        lora = LoraConfig(max_rank=64, max_bytes=1 << 26)
        cache = CacheConfig(block_size=BLOCK)
        config = EngineConfig(model=str(checkpoint), device="cpu", cache=cache, lora=lora, **changes)
        made.append(InlineExecutor(config))
        with patch.object(library, "level", lambda: None) if torch_only else nullcontext():
            made[-1].load(lambda phase, fraction: None)
        return made[-1]

    yield build
    for each in made:
        each.close()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 384, (length,), generator=generator).tolist() for length in LENGTHS]


class FirstRight:
    """Of drafts the first tokens are what the sequences with these `answers` go on with, and the last is wrong."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers = {tuple(prompts()[key]): answer for key, answer in answers.items()}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = [
            (self._answers[tuple(request.prompt.tolist())], len(request.outputs), request.k) for request in requests
        ]
        return [[*answer[done : done + k - 1], 0] for answer, done, k in found]


def serve(
    executor: InlineExecutor,
    digests: Sequence[str],
    some: Sequence[int] = range(len(LENGTHS)),
    chunk: int = 4096,
    speculation: Speculation | None = None,
) -> LoopResult:
    """Prompt n goes to adapter n of `digests`, which are begun again at their end."""
    executor.allocate(BLOCKS)
    cache = KVCacheManager(BLOCKS, BLOCK, True)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=chunk, max_model_len=256, ahead=1)
    requests = []
    for key in some:
        tokens, digest = np.array(prompts()[key], np.int32), digests[key % len(digests)]
        request = SequenceSpec(
            key=key,
            prompt=tokens,
            max_tokens=NEW,
            hashes=cache.digest(tokens, (digest, "", "")),
            sampling=ResolvedSampling(logprobs=1),
            adapter=digest,
        )
        requests.append(request)
    return run_to_end(Scheduler(config, cache, speculation=speculation), executor, requests)


def chosen_by(checkpoint: Path, prompt: list[int], tokens: list[int]) -> list[int]:
    return chosen_after(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), prompt, tokens)


@pytest.mark.parametrize("name", ["qwen3.5", "granite-hybrid", "gemma4", "gemma4-small", "falcon-h1", "nemotron-h"])
def test_layers_with_states_and_gated_attention_take_adapters(
    name: str,
    checkpoint: Callable[..., Path],
    adapters: ModuleType,
    load: Callable[..., InlineExecutor],
    tmp_path: Path,
) -> None:
    """Qwen's queries and their gates are parts of one matrix; of Gemma 4's, one makes keys and values."""
    base = checkpoint(name)
    parts = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "in_proj_qkv",
        "in_proj_z",
        "mamba.in_proj",
        "mixer.in_proj",
        "out_proj",
        "down_proj",
    )
    written = adapters.write_adapter(tmp_path / "all", adapters.layers_of(base, parts), 1)
    merged = adapters.merge(base, written, 2.0, tmp_path / "merged")
    executor = load(base)
    outcome = serve(executor, ["", executor.load_adapter(str(written)).result(10).digest], chunk=29)
    for key, prompt in enumerate(prompts()):
        assert outcome.tokens[key] == chosen_by([base, merged][key % 2], prompt, outcome.tokens[key]), key


@pytest.mark.parametrize(
    ("name", "torch_only"),
    [
        ("llama-linear-biased", False),
        ("llama", True),
        ("qwen2", False),
        ("phi3", False),
        pytest.param("phi3", True, marks=pytest.mark.proof),
        ("gemma3", False),
        ("qwen3-moe", False),
        pytest.param("qwen3-moe", True, marks=pytest.mark.proof),
        ("mixtral", False),
        *(pytest.param(name, False, marks=pytest.mark.proof) for name in ("glm4", "glm4-moe", "minimax-m2", "olmo3")),
    ],
)
def test_several_adapters_in_one_batch_say_what_merged_models_do(
    name: str,
    torch_only: bool,
    checkpoint: Callable[..., Path],
    adapters: ModuleType,
    load: Callable[..., InlineExecutor],
    tmp_path: Path,
) -> None:
    """Of different ranks and layers, and one of rsLoRA with patterns; in chunks, so that rows have several tokens."""
    base = checkpoint(name)
    layers = adapters.layers_of(base, ("proj", "w1", "w2", "w3"))
    few = {
        path: shape for path, shape in layers.items() if path.endswith(("q_proj", "v_proj", "qkv_proj", "down_proj"))
    }
    special = next(iter(layers))
    ranks = {special: 5}
    written = [
        adapters.write_adapter(tmp_path / "all", layers, 1),
        adapters.write_adapter(tmp_path / "few", few, 2, r=3, lora_alpha=3),
        adapters.write_adapter(
            tmp_path / "rs",
            layers,
            3,
            ranks=ranks,
            r=4,
            use_rslora=True,
            rank_pattern=ranks,
            alpha_pattern={special: 2},
        ),
    ]
    scales = [2.0, 1.0, dict.fromkeys(layers, 16 / 4**0.5) | {special: 2 / 5**0.5}]
    merged = [
        adapters.merge(base, each, scale, tmp_path / f"merged {each.name}")
        for each, scale in zip(written, scales, strict=True)
    ]
    executor = load(base, torch_only=torch_only)
    digests = ["", *(executor.load_adapter(str(each)).result(10).digest for each in written)]
    outcome = serve(executor, digests, chunk=29)
    drafting = Speculation({"right": FirstRight(outcome.tokens)}, 4, 384)
    drafted = serve(executor, digests, chunk=29, speculation=drafting)
    assert drafted.tokens == outcome.tokens
    assert drafting.totals["right"].draft_tokens > drafting.totals["right"].accepted_tokens > 20
    for key, prompt in enumerate(prompts()):
        model = [base, *merged][key % 4]
        assert outcome.tokens[key] == chosen_by(model, prompt, outcome.tokens[key]), (key, model.name)


def test_a_model_in_gguf_takes_the_adapters_of_the_checkpoint_that_it_was_made_from(
    checkpoint: Callable[..., Path],
    adapters: ModuleType,
    sibling: Callable[[str], ModuleType],
    load: Callable[..., InlineExecutor],
    tmp_path: Path,
) -> None:
    """Though rows of queries and keys come in another order in such a file."""
    base = checkpoint("llama")
    adapter = adapters.write_adapter(tmp_path / "all", adapters.layers_of(base), 1)
    merged = adapters.merge(base, adapter, 2.0, tmp_path / "merged")
    executor = load(sibling("gguf_models.py").write_gguf(base, tmp_path / "model.gguf"))
    outcome = serve(executor, [executor.load_adapter(str(adapter)).result(10).digest], range(3))
    for key in range(3):
        assert outcome.tokens[key] == chosen_by(merged, prompts()[key], outcome.tokens[key])


@pytest.mark.parametrize(
    ("path", "why"),
    [("mlp.gate", "routers of mixtures take none"), ("mlp.experts.8.gate_proj", "matches no layer")],
)
def test_what_of_a_mixture_takes_no_adapter_is_refused_by_name(
    path: str,
    why: str,
    checkpoint: Callable[..., Path],
    adapters: ModuleType,
    load: Callable[..., InlineExecutor],
    tmp_path: Path,
) -> None:
    """Its router, and an expert behind the last."""
    written = adapters.write_adapter(tmp_path, {f"model.layers.0.{path}": (8, 64)})
    loading = load(checkpoint("qwen3-moe")).load_adapter(str(written))
    with pytest.raises(InvalidArgument, match=rf"model\.layers\.0\.{path}\.lora_A.*{why}"):
        loading.result(10)


@pytest.mark.parametrize(("side", "value", "dtype"), [("A", torch.nan, "float32"), ("B", 1e6, "float16")])
def test_what_is_no_number_is_refused_by_name(
    side: str,
    value: float,
    dtype: str,
    checkpoint: Callable[..., Path],
    adapters: ModuleType,
    load: Callable[..., InlineExecutor],
    tmp_path: Path,
) -> None:
    """Its rows would say nothing, and nobody why."""
    path = "model.layers.1.self_attn.q_proj"
    written = adapters.write_adapter(tmp_path, {path: (64, 64)})
    tensors = load_file(written / "adapter_model.safetensors")
    tensors[f"base_model.model.{path}.lora_{side}.weight"][3, 2] = value
    save_file(tensors, written / "adapter_model.safetensors")
    loading = load(checkpoint("llama"), dtype=dtype).load_adapter(str(written))
    with pytest.raises(InvalidArgument, match=rf"{path}\.lora_A.* or its lora_B .* no number in {dtype}"):
        loading.result(10)


@NATIVE
@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_a_row_with_an_adapter_gets_the_same_bits_in_any_company(
    changes: dict[str, str],
    checkpoint: Callable[..., Path],
    adapters: ModuleType,
    load: Callable[..., InlineExecutor],
    tmp_path: Path,
) -> None:
    base = checkpoint("llama")
    executor, layers = load(base, **changes), adapters.layers_of(base)
    paths = [adapters.write_adapter(tmp_path / str(seed), layers, seed) for seed in range(3)]
    digests = ["", *(executor.load_adapter(str(path)).result(10).digest for path in paths)]
    together = serve(executor, digests, chunk=31)
    for key in range(len(LENGTHS)):
        alone = serve(executor, digests, [key])
        assert alone.logprobs[key] == together.logprobs[key]
    plain = serve(executor, [""])
    assert plain.logprobs[0] == together.logprobs[0]
    assert plain.logprobs[1] != together.logprobs[1]
