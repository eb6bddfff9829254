"""The engines that ours is compared with. Each computes in an interpreter of its own, which has it and no charonia:
what is imported here is the standard library alone."""

import os
import subprocess
import sys
from collections.abc import Sequence
from ctypes.util import find_library
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .peer_runner import PeerSetup

_CACHE_GIB = 4
"""Of OpenVINO and vLLM, which want to be told."""

_TRANSFORMERS_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class TransformersPeer:
    """transformers.generate on a static batch: its best case, for all prompts are equally long."""

    def __init__(self, setup: "PeerSetup") -> None:
        self._torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        self.about = f"transformers {transformers.__version__}, torch {self._torch.__version__}"
        self._torch.set_num_threads(setup.threads)
        dtype = getattr(self._torch, _TRANSFORMERS_DTYPES[setup.precision])
        model = transformers.AutoModelForCausalLM.from_pretrained(setup.checkpoint, dtype=dtype)
        self._model, self._device = model.to(setup.device), setup.device

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = self._torch.tensor(prompts, device=self._device)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with self._torch.inference_mode():
            out = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), **options)
        made: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return made


_OPENVINO_FORMATS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
"""What OpenVINO's weights are stored as. It picks what to compute with itself: bf16 where the processor has that."""


class OpenVinoPeer:
    """OpenVINO GenAI's continuous batching. Its interpreter has optimum-intel too, which exports a checkpoint once."""

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
        config.cache_size = _CACHE_GIB
        config.max_num_batched_tokens = setup.chunk
        config.max_num_seqs = max(64, setup.sequences)
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
        kind = ["--task", "text-generation-with-past", "--weight-format", _OPENVINO_FORMATS[setup.precision]]
        subprocess.run([tool, "export", "openvino", "--model", setup.checkpoint, *kind, part], check=True)
        part.rename(folder)
    return str(folder)


class _LlamaRow(NamedTuple):
    """A token at its position in a sequence; `last`: the next one is asked for."""

    token: int
    position: int
    sequence: int
    last: bool


class LlamaCppPeer:
    """llama.cpp through llama-cpp-python. Its interpreter has gguf too, which a checkpoint that is no GGUF file is
    converted with, once. All is llama.cpp's default but the threads, the sizes, `chunk`, which it calls the physical
    batch, and what fp32 needs to be that."""

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
            rows = [_LlamaRow(own[-1], lengths[at] + step, at, True) for at, own in enumerate(made)]
            for own, token in zip(made, self._likeliest(rows), strict=True):
                own.append(token)
        return made

    def _likeliest(self, rows: Sequence[_LlamaRow]) -> list[int]:
        """The token after each last row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, row in enumerate(rows):
            batch.token[at] = row.token
            batch.pos[at] = row.position
            batch.logits[at] = row.last
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


def _rows(prompts: Sequence[Sequence[int]]) -> list[_LlamaRow]:
    return [
        _LlamaRow(token, position, sequence, position == len(prompt) - 1)
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


_VLLM_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class VllmPeer:
    """vLLM's CPU build, offline: its engine and its worker are processes of their own, as it starts them by default."""

    def __init__(self, setup: "PeerSetup") -> None:
        # It reads them when it is imported.
        cores = sorted(os.sched_getaffinity(0))[: setup.threads]
        os.environ.update(vllm_environment(sys.prefix, cores, setup.folder))
        self._vllm: Any = import_module("vllm")
        self.about = f"vllm {self._vllm.__version__}"
        self._engine = self._vllm.LLM(
            model=setup.checkpoint,
            dtype=_VLLM_DTYPES[setup.precision],
            skip_tokenizer_init=True,
            max_model_len=setup.length,
            max_num_seqs=setup.sequences,
            max_num_batched_tokens=max(setup.chunk, setup.length),
            enable_prefix_caching=False,
        )

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._engine.generate(inputs, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


def vllm_environment(prefix: str, cores: Sequence[int], folder: str) -> dict[str, str]:
    """What vLLM's CPU build is told before it starts: `prefix` is its interpreter's, `folder` has what it keeps."""
    libraries = (*map(str, Path(prefix, "lib").glob("libiomp5.so")), find_library("tcmalloc_minimal"))
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": folder,
        # Its manual has workers load Intel's OpenMP and tcmalloc first, for their speed.
        "LD_PRELOAD": ":".join(filter(None, (*libraries, os.environ.get("LD_PRELOAD")))),
        # Its processes meet at this address, and at no other.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class CTranslate2Peer:
    """CTranslate2's Whisper behind faster-whisper's features: a window of noise for each prompt, all as one batch. Its
    interpreter has transformers, too, by which it reads a checkpoint."""

    def __init__(self, setup: "PeerSetup") -> None:
        self._library: Any = import_module("ctranslate2")
        converters: Any = import_module("ctranslate2.converters")
        self._numpy: Any = import_module("numpy")
        self._extract: Any = import_module("faster_whisper.feature_extractor").FeatureExtractor()
        self.about = f"ctranslate2 {self._library.__version__}, faster-whisper {version('faster-whisper')}"
        converted = Path(setup.folder) / f"{Path(setup.checkpoint).name}-ctranslate2"
        if not converted.exists():
            # Only a whole conversion gets the name that the next run looks for.
            part = converted.with_name(converted.name + ".part")
            rmtree(part, ignore_errors=True)
            converters.TransformersConverter(setup.checkpoint).convert(str(part), quantization=setup.precision)
            part.rename(converted)
        self._model = self._library.models.Whisper(
            str(converted), device=setup.device, compute_type=setup.precision, intra_threads=setup.threads
        )
        self._drawn = self._numpy.random.default_rng(0)

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        sounds = self._drawn.normal(0, 0.1, (len(prompts), 480000)).astype("float32")
        features = self._numpy.stack([self._extract(sound)[:, :3000] for sound in sounds]).astype("float32")
        answers = self._model.generate(
            self._library.StorageView.from_array(features),
            prompts,
            beam_size=1,
            max_length=2 * new,  # of which it makes half
            return_scores=True,
            return_no_speech_prob=True,
        )
        return [answer.sequences_ids[0] for answer in answers]


PEER_CLASSES = {
    "ctranslate2": CTranslate2Peer,
    "transformers": TransformersPeer,
    "openvino": OpenVinoPeer,
    "llamacpp": LlamaCppPeer,
    "vllm": VllmPeer,
}
