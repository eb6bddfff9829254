"""What config.json of T5 may say of distances, of which tables are made, and the names of its tensors."""

import pytest

from charonia.engine.checkpoint.hf_checkpoint import text_tensor_name
from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.checkpoint.model_spec import CheckpointError

T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}


@pytest.mark.parametrize(
    ("buckets", "farthest", "refusal"),
    [
        (1, 128, "num_buckets 1 and relative_attention_max_distance 128: there must be 2 or more"),
        (32, 16, "num_buckets 32 and relative_attention_max_distance 16: .* half of them for less"),
        (0, 128, "num_buckets must be a positive whole number, got 0"),
        (32, 2_000_000_000, "max_distance 2000000000 is more than"),
    ],
)
def test_distances_that_no_table_has_are_refused(buckets: int, farthest: int, refusal: str) -> None:
    changes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": farthest}
    with pytest.raises(CheckpointError, match=refusal):
        read_spec(T5 | changes, "here")


def test_the_last_distance_has_all_beyond() -> None:
    spec = read_spec(T5 | {"relative_attention_max_distance": 17}, "here")
    assert [kind and kind.distances for kind in spec.attention] == [18] * spec.layers


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("decoder.block.3.layer.0.SelfAttention.q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("decoder.block.3.layer.2.DenseReluDense.wi_0.weight", "model.layers.3.gate_proj.weight"),
        *((name, name) for name in ("decoder.block.3.layer.2.mlp.wi.weight", "decoder.block.3.layer.1.gate.weight")),
    ],
)
def test_tensors_that_t5_has_not_keep_their_names(stored: str, own: str) -> None:
    assert text_tensor_name(stored) == own
