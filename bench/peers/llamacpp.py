"""llama.cpp through llama-cpp-python. Its interpreter has gguf too, which a checkpoint that is no GGUF file is
converted with, once."""

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..peer_runner import PeerSetup


class _Row(NamedTuple):
    """A token at its position in a sequence; `last`: the next one is asked for."""

    token: int
    position: int
    sequence: int
    last: bool


class Peer:
    """All is llama.cpp's default but the threads, the sizes, `chunk`, which it calls the physical batch, and what fp32
    needs to be that."""

    def __init__(self, setup: "PeerSetup") -> None:
        self._numpy: Any = import_module("numpy")
        self._api: Any = import_module("llama_cpp")
        self.about = f"llama-cpp-python {version('llama-cpp-python')}"
        self._api.llama_backend_init()
        self._model = self._loaded(setup)
        self._context = self._opened(setup)
        self._vocab = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._batch = self._api.llama_batch_init(setup.sequences * setup.length, 0, 1)

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        made = [[token] for token in self._likeliest(_rows(prompts))]
        lengths = [len(prompt) for prompt in prompts]
        for step in range(new - 1):
            rows = [_Row(own[-1], lengths[at] + step, at, True) for at, own in enumerate(made)]
            for own, token in zip(made, self._likeliest(rows), strict=True):
                own.append(token)
        return made

    def _likeliest(self, rows: Sequence[_Row]) -> list[int]:
        """The token after each last row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, row in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = row.token, row.position, row.last
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row.sequence
        if code := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode of {len(rows)} tokens ended with {code}")
        shape = (sum(row.last for row in rows), self._vocab)
        logits = self._numpy.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape)
        likeliest: list[int] = logits.argmax(axis=1).tolist()
        return likeliest

    def _loaded(self, setup: "PeerSetup") -> Any:
        file = _converted(setup)
        model = self._api.llama_model_load_from_file(str(file).encode(), self._api.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        return model

    def _opened(self, setup: "PeerSetup") -> Any:
        most = self._api.llama_max_parallel_sequences()
        if setup.sequences > most:
            raise ValueError(f"{setup.sequences} sequences: llama.cpp has {most} at most")
        params = self._api.llama_context_default_params()
        params.n_seq_max, params.n_ctx = setup.sequences, setup.sequences * setup.length
        params.n_batch, params.n_ubatch = setup.sequences * setup.length, setup.chunk
        params.n_threads = params.n_threads_batch = setup.threads
        if setup.precision == "fp32":
            # By default the cache is fp16, and its flash attention rounds to that, too.
            params.type_k = params.type_v = self._api.GGML_TYPE_F32
            params.flash_attn_type = self._api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp has no room for {setup.sequences} sequences of {setup.length} tokens")
        return context


def _rows(prompts: Sequence[Sequence[int]]) -> list[_Row]:
    return [
        _Row(token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]


def _converted(setup: "PeerSetup") -> Path:
    if setup.checkpoint.endswith(".gguf"):
        return Path(setup.checkpoint)
    file = Path(setup.folder) / "model.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Only a whole file gets the name that the next run looks for.
        part = file.with_suffix(".part")
        tool = [sys.executable, "-P", str(Path(__file__).with_name("gguf_export.py"))]
        done = subprocess.run([*tool, setup.checkpoint, setup.precision, str(part)], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
        part.rename(file)
    return file
