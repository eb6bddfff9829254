"""Decoders of models whose encoder reads text, over what transformers' encoders made: their texts are those of
transformers."""

from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

from charonia.core.resolved_sampling import ResolvedSampling
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.encoders.encoder_rows import EncoderRows
from charonia.scheduler.sequence import SequenceSpec

from .test_equality import NEW, Bench, Setting

LENGTHS = (1, 5, 1, 20, 34)
"""Of the decoder's prompts."""
SOURCES = (3, 40, 17, 1, 70)
"""Of the encoder's texts."""
FAMILIES: dict[str, dict[str, Any]] = {
    "bart": {},
    "mbart": {"scale_embedding": True},
    "marian": {"scale_embedding": True, "activation_function": "swish"},
    "pegasus": {"activation_function": "relu"},
    "m2m_100": {"scale_embedding": True, "activation_function": "relu"},
}


_T5: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 32,
    "d_ff": 96,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 2,
    "initializer_factor": 2.0,
}
RELATIVE: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "t5-untied": _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": _T5,
}
"""Those whose scores have additions by distance."""


class Written(NamedTuple):
    directory: Path
    model: Any
    sources: list[Tensor]
    prompts: list[list[int]]


def written(family: str, directory: Path) -> Written:
    torch.manual_seed(5)
    if family in RELATIVE:
        return relative(family, directory)
    config = CONFIG_MAPPING[family](
        vocab_size=384,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=256,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        init_std=0.2,
        **FAMILIES[family],
    )
    model: Any = AutoModelForSeq2SeqLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.2)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    model.save_pretrained(directory)
    return with_prompts(directory, model)


def relative(family: str, directory: Path) -> Written:
    config = CONFIG_MAPPING[family.partition("-")[0]](vocab_size=384, d_model=64, pad_token_id=1, **RELATIVE[family])
    model: Any = AutoModelForSeq2SeqLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "relative" in name:
                weight.normal_(mean=float("norm" in name), std=0.3 if "norm" in name else 1.5)
    if family == "t5-untied":
        model.lm_head.weight = torch.nn.Parameter(torch.randn(384, 64) / 8)
    model.save_pretrained(directory)
    if family == "t5-untied":
        weights = load_file(directory / "model.safetensors")
        save_file({**weights, "lm_head.weight": model.lm_head.weight.detach()}, directory / "model.safetensors")
    return with_prompts(directory, model)


def with_prompts(directory: Path, model: Any) -> Written:
    with torch.inference_mode():
        sources = [
            model.get_encoder()(torch.randint(4, 384, (1, length))).last_hidden_state[0].contiguous()
            for length in SOURCES
        ]
    prompts = [[2, *torch.randint(4, 384, (length - 1,)).tolist()] for length in LENGTHS]
    return Written(directory, model, sources, prompts)


class WrittenBench(Bench):
    written: Written

    def request(self, cache: KVCacheManager, key: int, prompt: list[int], sampling: ResolvedSampling) -> SequenceSpec:
        source = self.written.sources[key]
        rows = source.numpy().tobytes()
        encoded = EncoderRows(len(source), sha256(rows).digest(), rows, "float32")
        spec = SequenceSpec(key=key, prompt=np.array(prompt, np.int32), max_tokens=NEW, encoded=encoded)
        return msgspec.structs.replace(spec, hashes=cache.digest(spec.identities, spec.extras))


@torch.inference_mode()
def chosen(own: Written, number: int, text: list[int]) -> list[int]:
    """What transformers chooses greedily after the prompt and after each token of the text."""
    prompt = own.prompts[number]
    ids = torch.tensor([[*prompt, *text]])
    encoded = (own.sources[number].unsqueeze(0),)
    logits = own.model(encoder_outputs=encoded, decoder_input_ids=ids).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens


def more(*cases: tuple[str, str]) -> list[Any]:
    """Cases that are proofs: each has a like one in the suite."""
    return [pytest.param(*case, marks=pytest.mark.proof) for case in cases]


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *((family, "auto") for family in ("bart", "marian", "m2m_100", "t5", "t5-untied")),
        *more(("mbart", "auto"), ("pegasus", "auto"), ("mt5", "auto"), ("t5", "reference"), ("mt5", "reference")),
        *more(*((family, backend) for family in FAMILIES for backend in ("torch", "reference"))),
    ],
)
def test_texts_are_those_of_transformers(
    family: str, backend: str, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    own = written(family, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "model.decoder.stray": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    bench = WrittenBench(own.directory, backend)
    request.addfinalizer(bench.executor.close)
    bench.written = own
    assert "knows nothing of 1 tensors of the weights, such as model.decoder.stray" in caplog.text
    assert "tower" not in caplog.text
    outcome, _ = bench.run(Setting(chunk=29, prefix=True, ahead=1), asked=own.prompts)
    for number in range(len(LENGTHS)):
        assert outcome.tokens[number] == chosen(own, number, outcome.tokens[number]), number
    decoder: Any = bench.executor.rank.runner.computer.decoder
    assert (decoder.program is not None) == (backend == "auto")
