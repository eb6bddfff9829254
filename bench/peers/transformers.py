"""transformers.generate on a static batch: its best case, for all prompts are equally long."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..peer_runner import PeerSetup

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Peer:
    def __init__(self, setup: "PeerSetup") -> None:
        self._torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        self.about = f"transformers {transformers.__version__}, torch {self._torch.__version__}"
        self._torch.set_num_threads(setup.threads)
        dtype = getattr(self._torch, _DTYPES[setup.precision])
        model = transformers.AutoModelForCausalLM.from_pretrained(setup.checkpoint, dtype=dtype)
        self._model, self._device = model.to(setup.device), setup.device

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = self._torch.tensor(prompts, device=self._device)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with self._torch.inference_mode():
            out = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), **options)
        made: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return made
