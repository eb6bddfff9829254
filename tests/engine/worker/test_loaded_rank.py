"""What bounds decoding: bytes a token, counted against a real checkpoint, and the memory's speed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from msgspec.structs import replace as replace_fields
from safetensors import safe_open

from charonia.core.errors import InvalidArgument
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.model_spec import ExpertsSpec
from charonia.engine.config import CacheConfig, EngineConfig, SpeculationConfig
from charonia.engine.cpu import library
from charonia.engine.options import EngineOptions
from charonia.engine.worker.devices import assign_device
from charonia.engine.worker.loaded_rank import check_rank_config, load_rank
from charonia.engine.worker.roofline import (
    CACHED,
    Roofline,
    describe_checkpoint,
    measure_roofline,
    read_bandwidth,
    token_weights,
)

DEMO = Path(__file__).parents[3] / "examples/model_repository/demo/1"
DRAFT = Path(__file__).parents[3] / "examples/draft"


def test_a_rank_computes_on_the_gpu_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its kernels, streams and events would be the first one's, whose tensors they do not get."""
    chosen: list[torch.device] = []

    def choose(device: torch.device) -> None:
        chosen.append(device)
        raise RuntimeError("nothing to compute on")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    second = replace_fields(EngineConfig(model=str(DEMO), device="cuda", data_parallel_size=2), replica=1)
    with pytest.raises(RuntimeError, match="nothing to compute on"):
        load_rank(replace_fields(second, device=assign_device(second)))
    with pytest.raises(RuntimeError, match="nothing to compute on"):
        load_rank(EngineConfig(model=str(DEMO), device="cuda"))
    assert chosen == [torch.device("cuda", 1), torch.device("cuda", 0)]
    with pytest.raises(InvalidArgument, match="device 'cuda:2' is not on this machine, which has 2 of them"):
        load_rank(EngineConfig(model=str(DEMO), device="cuda:2"))


def test_the_matrices_of_a_checkpoint_are_counted_once() -> None:
    with safe_open(DEMO / "model.safetensors", framework="pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a mapping
    spec = open_checkpoint(DEMO).spec
    matrices = sum(shape[0] * shape[1] for name, shape in sizes.items() if len(shape) == 2)
    assert spec.tied_embeddings, "else the embeddings, of which a token reads one row, would have to be left out"
    assert token_weights(spec) == matrices


def test_a_model_with_states_does_not_draft(checkpoint: Callable[..., Path]) -> None:
    drafts = SpeculationConfig(method="draft_model", model=str(checkpoint("lfm2")))
    config = EngineConfig(model=str(checkpoint("llama")), device="cpu", speculation=drafts)
    for refusing in (load_rank, check_rank_config):
        with pytest.raises(InvalidArgument, match="states, from which no proposal can be taken back") as refusal:
            refusing(config)
        assert refusal.value.field == "speculative_config"


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "granite-hybrid", "nemotron-h", "falcon-h1", "mamba2"])
def test_the_matrices_of_layers_with_states_are_counted(checkpoint: Callable[..., Path], name: str) -> None:
    """All but those that are gathered from."""
    found = open_checkpoint(checkpoint(name))
    with safe_open(found.directory / "model.safetensors", framework="pt") as file:
        shapes = {tensor: file.get_slice(tensor).get_shape() for tensor in file.keys()}  # noqa: SIM118 - no mapping
    matrices = {tensor: shape[0] * shape[1] for tensor, shape in shapes.items() if len(shape) == 2}
    assert token_weights(found.spec) == sum(matrices.values()) - next(
        size for tensor, size in matrices.items() if "embed" in tensor
    )


def test_of_a_mixture_only_the_chosen_experts_count() -> None:
    spec = open_checkpoint(DEMO).spec
    layers = tuple(layer % 2 == 0 for layer in range(spec.layers))
    mixture = replace(spec, experts=ExpertsSpec(64, 2, spec.intermediate_size, True, layers))
    more = sum(layers) * 3 * spec.hidden_size * spec.intermediate_size
    assert token_weights(mixture) == token_weights(spec) + more


def test_weights_that_fit_the_caches_are_not_bound_by_memory() -> None:
    spec = open_checkpoint(DEMO).spec
    assert token_weights(spec) < CACHED
    assert measure_roofline(spec, "int8") is None


@pytest.mark.parametrize(("kind", "bytes_each"), [("int4", 1), ("int8", 1), ("bfloat16", 2)])
def test_a_larger_model_has_a_bound(kind: str, bytes_each: int) -> None:
    spec = replace(open_checkpoint(DEMO).spec, vocab_size=1_000_000)
    found = measure_roofline(spec, kind)
    assert found is not None
    layers = token_weights(spec) - spec.vocab_size * spec.hidden_size
    saved = layers * 2 // 5 if kind == "int4" else 0  # the head, by far the larger part here, is int8
    assert found.weights == pytest.approx(token_weights(spec) * bytes_each - saved, rel=1e-3)
    assert found.kind == kind


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
def test_a_rank_computes_at_the_level_that_was_forced() -> None:
    config = EngineConfig(model=str(DEMO), device="cpu", cpu_level="portable", cache=CacheConfig(blocks=8))
    before = library.level()
    assert before is not None
    try:
        assert "C kernels at level portable" in load_rank(config).capacity().machine
    finally:
        library.use_level(before)
    assert library.level() == before


@pytest.mark.skipif(library.level() in (None, library.LEVELS[-1]), reason="no C extension, or nothing above here")
def test_a_level_that_the_machine_has_not_got_is_refused() -> None:
    """Nor one of another kind of processor."""
    before = library.level()
    for level in ("amx", "bfmmla"):
        with pytest.raises(InvalidArgument, match=f"cpu_level {level}: the best here is {before}") as refusal:
            load_rank(EngineConfig(model=str(DEMO), device="cpu", cpu_level=level))
        assert refusal.value.field == "cpu_level"
        assert library.level() == before


def test_every_level_is_an_option() -> None:
    expected = get_type_hints(EngineOptions)["cpu_level"]
    levels = {name for own in library.LEVELS_OF.values() for name in own}
    assert {name for kind in get_args(expected) for name in get_args(kind)} == {"auto", "portable", *levels}


def test_the_bound_is_said() -> None:
    said = str(Roofline(500_000_000, "int8", 36e9))
    bound = "one sequence decodes at most 72 tokens/s"
    assert said == f"memory read at 36 GB/s now, 500 MB of int8 weights a token: {bound}"


def test_memory_has_a_speed() -> None:
    assert 1e8 < read_bandwidth() < 1e13


def test_a_block_of_the_cache_has_the_draft_models_part_too() -> None:
    alone = EngineConfig(model=str(DEMO), device="cpu")
    drafted = replace_fields(alone, speculation=SpeculationConfig(method="draft_model", model=str(DRAFT)))
    ranks = [load_rank(config) for config in (alone, drafted)]
    plain, both = (rank.capacity().block_bytes for rank in ranks)
    assert both - plain == 2 * 2 * 16 * 2 * 32 * 2, "keys and values of two layers, in bfloat16"
    for rank in ranks:
        rank.close()


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Where most of its tokens are no tokens of the model, and where nobody can know."""
    for file in DRAFT.iterdir():
        (tmp_path / file.name).symlink_to(file)
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text())
    other = SpeculationConfig(method="draft_model", model=str(tmp_path))
    config = EngineConfig(model=str(DEMO), device="cpu", speculation=other)
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"] |= {"vocab": {f"\u0120{text}\u0120": at for text, at in vocabulary.items()}, "merges": []}
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for load in (load_rank, check_rank_config):
        refused = f"{other.model} has another vocabulary than {DEMO}: [0-9]+ of its [0-9]+ tokens are in both"
        with pytest.raises(InvalidArgument, match=refused) as refusal:
            load(config)
        assert refusal.value.field == "speculative_config"
    same_alone = replace_fields(config, speculation=replace_fields(other, use_heterogeneous_vocab=False))
    with pytest.raises(InvalidArgument, match=f"another vocabulary than {DEMO}, and use_heterogeneous_vocab is false"):
        check_rank_config(same_alone)


@pytest.mark.parametrize(("name", "splits"), [("qwen3.5", True), ("gemma3n", False), ("opt", False)])
def test_a_rank_says_whether_more_could_share_its_model(
    checkpoint: Callable[..., Path], name: str, splits: bool
) -> None:
    """Streams of hidden states are not shared, nor what transformers computes."""
    rank = load_rank(EngineConfig(model=str(checkpoint(name)), device="cpu"))
    assert rank.capacity().splits is splits
    rank.close()


def test_people_are_told_what_the_states_of_a_text_take(checkpoint: Callable[..., Path]) -> None:
    shape = open_checkpoint(checkpoint("qwen3.5")).spec
    itemsize = getattr(torch, shape.dtype).itemsize
    megabytes = sum(state.bytes(itemsize) for state in shape.states if state is not None) / 1e6
    told = "\n".join(describe_checkpoint(str(checkpoint("qwen3.5"))))
    assert f", and {megabytes:.2g} MB of states for each\n" in told
    # Of a tiny model's, less than one.
    kilobytes = shape.token_numbers * itemsize / 1e3
    assert f" {kilobytes:.2g} KB of KV cache for a token" in told
    assert "states" not in "\n".join(describe_checkpoint(str(DEMO)))


def test_of_a_model_that_takes_images_too_a_check_says_it_once(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Though its parts are looked up twice."""
    directory = str(checkpoint("mistral3"))
    describe_checkpoint(directory)
    check_rank_config(EngineConfig(model=directory))
    assert caplog.text.count("its language part is served; ") == 1


def test_a_small_cache_for_a_model_that_transformers_attends_for_is_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}))
    config = EngineConfig(model=str(tmp_path), device="cpu", cache=CacheConfig(dtype="int8"))
    for load in (load_rank, check_rank_config):
        with pytest.raises(InvalidArgument, match="kv_cache_dtype int8: transformers attends") as refusal:
            load(config)
        assert refusal.value.field == "kv_cache_dtype"


def test_a_draft_model_without_a_tokenizer_needs_as_many_tokens(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(checkpoint("llama") / name)
    other = SpeculationConfig(method="draft_model", model=str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"has another number of tokens than .*, and no tokenizer"):
        load_rank(EngineConfig(model=str(DEMO), device="cpu", speculation=other))
    rank = load_rank(EngineConfig(model=str(checkpoint("llama")), device="cpu", speculation=other))
    assert rank.runner.draft is not None
    rank.close()
