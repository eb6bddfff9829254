"""Models whose blocks and states come from a directory: a core that was never asked says the same, bit for bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig, ParallelConfig
from charonia.engine.core import prefix_fetches
from charonia.engine.core.cache_directory import check_cache_directory
from charonia.engine.core.cache_facts import cache_facts
from charonia.engine.core.messages import AddRequest, FromCore, RequestUpdates, Shutdown
from charonia.engine.core.process import build_executor, start_core
from charonia.engine.worker.executor import Capacity, ImageLayout
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.sequence import SequenceSpec

SILENT: Any = SimpleNamespace(report=lambda *_: None)
PROMPTS = [np.random.default_rng(seed).integers(1, 384, 90, dtype=np.int32) for seed in range(2)]
SEEDED = ResolvedSampling(temperature=0.8, seed=5)
LAYERS = [*["sliding_attention"] * 3, "full_attention"] * 2
UNLIKE = {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "num_kv_shared_layers": 1, "global_head_dim": 48}
"""A block has one layer that sees all, or three of those that slide, whose heads are a third as wide."""


@pytest.fixture(autouse=True)
def files_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow a busy machine's files are: whether a fetch pays is test_prefix_fetches.py's."""
    monkeypatch.setattr(prefix_fetches, "_WORTH", 1e9)
    for name in ("_LEAST_PATIENCE", "STALLED_SECONDS", "LOOKUP_SECONDS"):
        monkeypatch.setattr(prefix_fetches, name, 60.0)


def config(checkpoint: Path, directory: str, tensor: int = 1, **cache: object) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint),
        device="cpu",
        threads=1,
        dtype="float32",
        cache=CacheConfig(bytes=1 << 24, directory=directory, **cache),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
        parallel=ParallelConfig(tensor=tensor),
        max_model_len=128,
    )


def answers(config: EngineConfig, prompts: Sequence[np.ndarray] = PROMPTS) -> tuple[list[list[int]], list[int]]:
    """The new tokens of each prompt, and how many of its own were cached, from a core of its own."""
    executor = build_executor(config)
    try:
        core, _ = start_core(config, executor, SILENT)
        tokens: dict[int, list[int]] = {key: [] for key in range(len(prompts))}
        cached: dict[int, int] = {}
        ended = set[int]()

        def send(message: FromCore) -> None:
            assert isinstance(message, RequestUpdates)
            updates = message.updates
            cached.update(updates.started)
            new = iter(updates.tokens)
            for key, count in zip(updates.keys, updates.counts, strict=True):
                tokens[key] += [next(new) for _ in range(count)]
            ended.update(key for key, _ in updates.finished)
            if len(ended) == len(prompts):
                core.inbox.accept(Shutdown())

        for key, prompt in enumerate(prompts):
            core.inbox.accept(AddRequest(SequenceSpec(key=key, prompt=prompt, max_tokens=12, sampling=SEEDED)))
        core.run(send)
        core.close()
    finally:
        executor.close()
    return [tokens[key] for key in sorted(tokens)], [cached[key] for key in sorted(cached)]


@pytest.mark.parametrize(
    ("name", "cache", "found"),
    [
        ("llama", {}, 80),
        ("llama", {"dtype": "int8"}, 80),
        ("gemma3", {}, 80),
        ("gemma4", {}, 80),
        ("unlike", {}, 80),
        ("unlike", {"dtype": "int8"}, 80),
        ("qwen3.5", {"state_fraction": 0.5}, 64),
    ],
)
def test_a_warm_start_says_the_same(
    checkpoint: Callable[..., Path], tmp_path: Path, name: str, cache: dict[str, object], found: int
) -> None:
    model = checkpoint("gemma4-small", **UNLIKE) if name == "unlike" else checkpoint(name)
    plain, _ = answers(config(model, "", **cache))
    shared = config(model, str(tmp_path / "kv"), **cache)
    cold, nothing = answers(shared)
    assert (cold, nothing) == (plain, [0, 0])
    warm, cached = answers(shared)
    assert (warm, cached) == (plain, [found, found])


@pytest.mark.proof
def test_ranks_have_their_shares(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    shared = config(checkpoint("llama"), str(tmp_path / "kv"), tensor=2)
    cold, nothing = answers(shared)
    warm, cached = answers(shared)
    assert (warm, nothing, cached) == (cold, [0, 0], [80, 80])
    assert len(list((tmp_path / "kv").iterdir())) == 2
    for path in sorted((tmp_path / "kv").glob("*-1of2/*/*")):
        path.unlink()  # of one rank alone
    again, cached = answers(shared)
    assert (again, cached) == (cold, [0, 0])


def test_a_fingerprint_is_of_what_is_computed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base = config(checkpoint("llama"), "kv")
    capacity = Capacity(384, 256, 1, 1, dtype="float32")

    def facts(
        config: EngineConfig = base, capacity: Capacity = capacity, layout: str = "layout"
    ) -> frozenset[tuple[str, str]]:
        executor: Any = SimpleNamespace(image_layouts=[ImageLayout(layout, 1, 1)])
        return frozenset(cache_facts(config, capacity, executor).items())

    own = facts()
    assert own == facts(msgspec.structs.replace(base, threads=2))
    assert own == facts(msgspec.structs.replace(base, dtype="float32")), "what auto is found to be counts alone"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint("llama").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    copied = msgspec.structs.replace(base, model=str(copy))
    assert own == facts(copied)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[4000] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    others = [
        facts(copied),
        facts(layout="other"),
        facts(base, capacity._replace(dtype="bfloat16")),
        facts(msgspec.structs.replace(base, parallel=ParallelConfig(tensor=2))),
        facts(base, capacity._replace(max_model_len=128)),
    ]
    assert len({own, *others}) == 6


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "kv"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InvalidArgument, match=r"kv_cache_dir: .* must belong to the server's user"):
        check_cache_directory(config(tmp_path, str(shared)))
    with pytest.raises(InvalidArgument, match="kv_cache_dir: what is in it is found by prefix caching, which is off"):
        check_cache_directory(config(tmp_path, str(shared), prefix_caching=False))
    with pytest.raises(InvalidArgument, match="kv_cache_dir_bytes needs kv_cache_dir"):
        check_cache_directory(config(tmp_path, "", directory_bytes=5))
