"""What config.json of T5 may say of distances: tables are made of it."""

import pytest

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
