"""What peers are handed is our model: the GGUF that llama.cpp reads, and, where peers are installed, their tokens."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from charonia.bench import peers
from charonia.bench.checkpoint import SHAPES
from charonia.bench.engine_speed import prompts
from charonia.bench.gguf_export import (
    GgufModelShape,
    Llama3Rope,
    UnsupportedCheckpoint,
    permute_rope_rows,
    tensors,
)
from charonia.bench.peer_process import OURS, PEERS, PeerProcess, PeerSpec
from charonia.bench.peer_runner import PeerSetup
from charonia.bench.peers import CTranslate2Peer
from charonia.bench.roofline import OfflineJob

INSTALLED = dict(each.split("=", 1) for each in os.environ.get("CHARONIA_PEERS", "").split())
"""NAME=PYTHON of each peer to run, as `bench.engine_speed --peer` takes them."""


def rotated(
    one: npt.NDArray[Any], other: npt.NDArray[Any], angles: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return one * np.cos(angles) - other * np.sin(angles), other * np.cos(angles) + one * np.sin(angles)


def halves(rows: npt.NDArray[Any], angles: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One head rotated as checkpoints have it: the first half's values with the second's."""
    return np.concatenate(rotated(*np.split(rows, 2), angles))


def neighbours(rows: npt.NDArray[Any], angles: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One head rotated as llama.cpp rotates Llama's: values 2i with 2i + 1."""
    return np.stack(rotated(rows[0::2], rows[1::2], angles), axis=1).reshape(-1)


def test_paired_rows_score_as_the_checkpoint_does() -> None:
    random = np.random.default_rng(0)
    queries, keys, x = random.normal(size=(2 * 8, 5)), random.normal(size=(8, 5)), random.normal(size=5)
    angles = 0.7 ** np.arange(4)
    key, near = halves(keys @ x, 3 * angles), neighbours(permute_rope_rows(keys, 1) @ x, 3 * angles)
    for head in (slice(0, 8), slice(8, 16)):
        theirs = neighbours(permute_rope_rows(queries, 2)[head] @ x, 9 * angles) @ near
        assert theirs == pytest.approx(halves(queries[head] @ x, 9 * angles) @ key)
    assert (permute_rope_rows(queries[:, 0], 2) == permute_rope_rows(queries, 2)[:, 0]).all(), (
        "biases go with their rows"
    )


def test_stretched_frequencies_are_those_of_transformers() -> None:
    fields = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **fields})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    divisors = Llama3Rope(**fields).divisors(500000.0, 64)
    assert len(set(divisors.tolist())) > 3, "quick, slow and some between"
    np.testing.assert_allclose(plain / divisors, frequencies.numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_weights_are_read_as_they_were_written(kind: str, making: ModuleType, tmp_path: Path) -> None:
    making.write_random(tmp_path, making.LLAMA | {"dtype": kind}, shard="100KB")
    written = {}
    for file in tmp_path.glob("*.safetensors"):
        written |= load_file(file)
    read = {tensor.name: tensor.floats() for tensor in tensors(tmp_path)}
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert read.keys() == written.keys()
    for name, values in written.items():
        np.testing.assert_array_equal(read[name], values.float().numpy(), name)


def test_weights_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="no safetensors"):
        list(tensors(tmp_path))
    save_file({"a.weight": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=r"a\.weight: I8 is not converted to GGUF"):
        list(tensors(tmp_path))


def config_of(making: ModuleType, name: str, directory: Path) -> dict[str, Any]:
    making.write_random(directory, making.CONFIGS[name])
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("mistral", "model_type 'mistral' is not converted to GGUF: llama and qwen2 are"),
        ("qwen2-window", "use_sliding_window is not"),
        ("llama-linear-biased", "rope_type 'linear' of llama is not"),
    ],
)
def test_models_that_are_not_converted_are_named(name: str, refusal: str, making: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=refusal):
        GgufModelShape.of(config_of(making, name, tmp_path))


def test_a_missing_field_is_named(making: ModuleType, tmp_path: Path) -> None:
    config = config_of(making, "llama", tmp_path)
    assert GgufModelShape.of(config).head_dim == 16
    del config["hidden_size"]
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.json has no 'hidden_size'"):
        GgufModelShape.of(config)


@pytest.mark.parametrize("there", [True, False])
def test_vllm_loads_first_what_its_manual_asks_for(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openmp = tmp_path / "lib" / "libiomp5.so"
    if there:
        openmp.parent.mkdir()
        openmp.touch()
    monkeypatch.setattr(peers, "find_library", {"tcmalloc_minimal": "libtcmalloc.so"}.get if there else {}.get)
    monkeypatch.setenv("LD_PRELOAD", "libown.so")
    environment = peers.vllm_environment(str(tmp_path), [0, 1], str(tmp_path))
    assert environment["LD_PRELOAD"] == (f"{openmp}:libtcmalloc.so:libown.so" if there else "libown.so")
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_lfm2_has_the_published_fields_that_vllm_reads() -> None:
    """transformers goes without them, vLLM ends at its start: `'Lfm2Config' object has no attribute 'conv_dim'`."""
    config = AutoConfig.for_model(**SHAPES["lfm2-1.2b"])
    assert (config.conv_dim, config.block_dim) == (config.hidden_size, config.hidden_size)


@pytest.mark.parametrize(
    ("peer", "name"),
    [("transformers", "llama")]
    + [(peer, name) for peer in INSTALLED for name in ("llama", "llama-llama3-tied", "qwen2")],
)
@pytest.mark.proof
def test_a_peer_makes_our_tokens(peer: str, name: str, making: ModuleType, tmp_path: Path) -> None:
    """In fp32, or bf16 where a peer has no fp32: then the first ones, for one near tie changes all that follow."""
    # Wide enough for heads of 32: vLLM has no smaller ones.
    making.write_random(tmp_path, making.CONFIGS[name] | {"hidden_size": 128})
    precision = "fp32" if "fp32" in PEERS[peer] else "bf16"
    asked, made = prompts(OfflineJob(3, 40, 8), making.VOCAB, seed=1), []
    for contender, python in ((OURS, sys.executable), (peer, INSTALLED.get(peer, sys.executable))):
        setup = PeerSetup(str(tmp_path), precision, 3, 48, 32, 1, "cpu", str(tmp_path / contender))
        with PeerProcess(PeerSpec(contender, precision, Path(python)), setup) as running:
            made.append(running.generate(asked, 8).tokens)
    compared = 8 if precision == "fp32" else 1
    assert [one[:compared] for one in made[0]] == [one[:compared] for one in made[1]]


def test_an_interrupted_conversion_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over what stands in for CTranslate2: a converter that is interrupted, and a model that reads its files."""
    interrupted = [True, False]

    class Converter:
        def __init__(self, checkpoint: str) -> None: ...

        def convert(self, output: str, quantization: str) -> None:
            Path(output).mkdir()
            (Path(output) / "config.json").write_text(quantization)
            if interrupted.pop(0):
                raise KeyboardInterrupt
            (Path(output) / "model.bin").write_bytes(b"whole")

    library, converters = ModuleType("ctranslate2"), ModuleType("ctranslate2.converters")
    extractor = ModuleType("faster_whisper.feature_extractor")
    converters.TransformersConverter = Converter  # type: ignore[attr-defined]
    library.__version__ = "0"  # type: ignore[attr-defined]
    library.models = SimpleNamespace(Whisper=lambda path, **_: Path(path, "model.bin").read_bytes())  # type: ignore[attr-defined]
    extractor.FeatureExtractor = object  # type: ignore[attr-defined]
    for module in (library, converters, extractor):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("charonia.bench.peers.version", lambda name: "0")

    setup = PeerSetup("/checkpoints/whisper", "int8", 1, 48, 32, 1, "cpu", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        CTranslate2Peer(setup)
    for _ in range(2):  # by a second conversion, and by what is left of it
        assert CTranslate2Peer(setup)._model == b"whole"
    assert [folder.name for folder in tmp_path.iterdir()] == ["whisper-ctranslate2"]
