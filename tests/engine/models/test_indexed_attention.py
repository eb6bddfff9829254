"""DeepSeek V3.2 and GLM-5, whose indexer chooses the tokens to attend to: they are served while it chooses all."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from charonia.core.errors import InvalidArgument
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.config import EngineConfig
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.worker.loaded_rank import check_rank_config
from charonia.engine.worker.model_setup import build_context
from charonia.engine.worker.roofline import describe_checkpoint
from tests.checkpoints import LATENTS

from .test_models import logits, prompts

MOST = LATENTS["deepseek-v3.2"]["index_topk"]


@torch.inference_mode()
def test_attention_is_dense_up_to_the_bound_and_not_beyond(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("deepseek-v3.2")
    model = transformers.DeepseekV32ForCausalLM.from_pretrained(directory)
    text = prompts((MOST + 40,))[0]
    right = model(text[None]).logits[0]
    own = logits(directory, [text[:MOST]], torch.float32)
    assert (own - right[:MOST]).abs().max() < 1e-4 * right.abs().max()
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = len(text)
    dense = model(text[None]).logits[0]
    assert torch.equal(dense[:MOST], right[:MOST])
    assert (dense[MOST:] - right[MOST:]).abs().max() > 1e-3 * right.abs().max()


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm5"])
def test_longer_texts_are_refused_by_name(
    checkpoint: Callable[..., Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model=str(checkpoint(name)), device="cpu")
    builder = checkpoint_builder(open_checkpoint(config.model))
    context = build_context(config, builder)
    assert context.max_positions == builder.default_length == builder.max_position == MOST
    with caplog.at_level(logging.WARNING):
        builder.build(context)
    assert f"texts of at most {MOST} tokens are served, of 256: up to there its index_topk" in caplog.text
    assert "knows nothing of" not in caplog.text, "tensors of the indexer are known, and left out"
    with pytest.raises(InvalidArgument, match=rf"checkpoint's {MOST}, got {MOST + 1} \(of 256: up to there") as refusal:
        check_rank_config(EngineConfig(model=config.model, device="cpu", max_model_len=MOST + 1))
    assert refusal.value.field == "max_model_len"
    assert f"texts to {MOST} tokens, of 256: up to there" in describe_checkpoint(config.model)[0]


def test_a_model_without_an_indexer_has_no_such_bound(checkpoint: Callable[..., Path]) -> None:
    usual = checkpoint_builder(open_checkpoint(checkpoint("glm4-lite")))
    assert (usual.length_reason, usual.max_position) == ("", 256)
