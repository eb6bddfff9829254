"""vLLM's CPU build, offline: its engine and its worker are processes of their own, as it starts them by default."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..peer_runner import PeerSetup

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_CACHE_GB = 4


class Peer:
    def __init__(self, setup: "PeerSetup") -> None:
        # It reads them when it is imported.
        os.environ.update(_environment(setup))
        self._vllm: Any = import_module("vllm")
        self.about = f"vllm {self._vllm.__version__}"
        self._engine = self._vllm.LLM(
            model=setup.checkpoint,
            dtype=_DTYPES[setup.precision],
            skip_tokenizer_init=True,
            max_model_len=setup.length,
            max_num_seqs=setup.sequences,
            max_num_batched_tokens=max(setup.chunk, setup.length),
            enable_prefix_caching=False,
        )

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._engine.generate(asked, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


def _environment(setup: "PeerSetup") -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[: setup.threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": setup.folder,
        # Its processes meet at this address, and at no other.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
