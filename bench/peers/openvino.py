"""OpenVINO GenAI's continuous batching. Its interpreter has optimum-intel too, which exports the checkpoint, once."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..peer_runner import PeerSetup

_FORMATS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
"""What its weights are stored as. It picks what to compute with itself: bf16 where the processor has that."""
_CACHE_GB = 4


class Peer:
    def __init__(self, setup: "PeerSetup") -> None:
        self._numpy: Any = import_module("numpy")
        self._openvino: Any = import_module("openvino")
        self._genai: Any = import_module("openvino_genai")
        self.about = f"openvino-genai {version('openvino-genai')}"
        options = {"INFERENCE_NUM_THREADS": setup.threads}
        self._pipeline = self._genai.ContinuousBatchingPipeline(_exported(setup), self._schedule(setup), "CPU", options)

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = [self._openvino.Tensor(self._numpy.array([prompt], self._numpy.int64)) for prompt in prompts]
        answers = self._pipeline.generate(ids, [self._sampling(new)] * len(ids))
        return [list(answer.m_generation_ids[0]) for answer in answers]

    def _schedule(self, setup: "PeerSetup") -> Any:
        config = self._genai.SchedulerConfig()
        config.cache_size = _CACHE_GB
        config.max_num_batched_tokens, config.max_num_seqs = setup.chunk, max(64, setup.sequences)
        config.dynamic_split_fuse, config.enable_prefix_caching = True, False
        return config

    def _sampling(self, new: int) -> Any:
        config = self._genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        # It insists on one, though it is to be ignored.
        config.set_eos_token_id(0)
        return config


def _exported(setup: "PeerSetup") -> str:
    folder = Path(setup.folder)
    if not folder.exists():
        # Only a whole export gets the name that the next run looks for.
        part = folder.with_name(folder.name + ".part")
        tool = Path(sys.executable).with_name("optimum-cli")
        kind = ["--task", "text-generation-with-past", "--weight-format", _FORMATS[setup.precision]]
        subprocess.run([tool, "export", "openvino", "--model", setup.checkpoint, *kind, part], check=True)
        part.rename(folder)
    return str(folder)
