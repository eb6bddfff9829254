"""Our own engine without a server: scheduler and executor in a loop of the benchmark."""

import msgspec
import numpy as np
import torch

from .. import __version__
from ..engine.config import CacheConfig, EngineConfig
from ..engine.cpu import library
from ..engine.worker.inline_executor import InlineExecutor
from ..kvcache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceRequest
from .inline_loop import run_to_end
from .peer_runner import PeerSetup

BLOCK = 16
PRECISIONS: dict[str, dict[str, str]] = {
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


class Peer:
    def __init__(self, setup: PeerSetup) -> None:
        kernels = f", {library.describe()}" if setup.device == "cpu" else ""
        self.about = f"charonia {__version__}{kernels}, torch {torch.__version__}"
        self.executor = InlineExecutor(_config(setup))
        self.executor.load(lambda phase, fraction: None)
        blocks = setup.sequences * -(-setup.length // BLOCK)
        self.executor.allocate(blocks)
        rule = SchedulerConfig(
            max_num_seqs=setup.sequences, max_num_batched_tokens=setup.chunk, max_model_len=setup.length, ahead=1
        )
        self._scheduler = Scheduler(rule, KVCacheManager(blocks, BLOCK, prefix_caching=False))

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        requests = [
            SequenceRequest(key=key, prompt=np.array(prompt, np.int32), max_tokens=new)
            for key, prompt in enumerate(prompts)
        ]
        made = run_to_end(self._scheduler, self.executor, requests).tokens
        return [made[key] for key in range(len(prompts))]


def _config(setup: PeerSetup) -> EngineConfig:
    plain = EngineConfig(
        model=setup.checkpoint,
        device=setup.device,
        threads=setup.threads,
        max_model_len=setup.length,
        cache=CacheConfig(block_size=BLOCK),
    )
    return msgspec.structs.replace(plain, **PRECISIONS[setup.precision])
