"""What tells one checkpoint from another."""

from pathlib import Path

import gguf
import numpy as np

from charonia.engine.checkpoint.fingerprint import content_fingerprint


def test_every_shard_of_a_file_counts(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=1)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = sorted(tmp_path.glob("big-*.gguf"))
    own = content_fingerprint(str(first))
    assert own == content_fingerprint(str(second))
    second.write_bytes(second.read_bytes()[:-1] + b"\1")
    assert own != content_fingerprint(str(first))
