"""What the bytes of an engine's cache mean."""

from hashlib import sha256
from pathlib import Path

import msgspec

from ...core.errors import shorten
from ..checkpoint.fingerprint import content_fingerprint
from ..config import EngineConfig
from ..worker.executor import Capacity, Executor


def cache_facts(config: EngineConfig, capacity: Capacity, executor: Executor) -> dict[str, str]:
    """By name, what must be equal in two engines for the bytes of one's cache to mean the same in the other: then they
    compute the same into the same bytes, whatever machine they are on.

    Raises:
        CharoniaError, OSError: the checkpoint cannot be read.
    """
    parallel, drafts = config.parallel, config.speculation
    is_fake = config.executor == "fake"
    return {
        "model": config.model if is_fake else content_fingerprint(config.model).hex(),
        "dtype": capacity.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.cache.dtype,
        "block_size": str(config.cache.block_size),
        "max_model_len": str(capacity.max_model_len),
        "device": "GPU" if capacity.on_gpu else "CPU",
        "batch_invariance": str(config.batch_invariance),
        "recurrence_chunks": str(config.recurrence_chunks),
        "ranks": f"tensor {parallel.tensor}, pipeline {parallel.pipeline} {parallel.layers}, {parallel.whole_experts}",
        "drafter": f"{drafts.method} {Path(drafts.model).name}" if drafts is not None and drafts.computes else "",
        "groups": str(capacity.groups._replace(in_flight=0)),
        "fake": str(msgspec.structs.astuple(config.fake)) if is_fake else "",
        "layout": shorten(" | ".join(of_rank.layout for of_rank in executor.image_layouts), 512),
        "layouts": sha256(repr(executor.image_layouts).encode()).hexdigest(),
    }
