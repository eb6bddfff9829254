"""Tiny checkpoints of models whose prompts have sounds, and what transformers' processors make of prompts for them."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as Words
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedTokenizerFast, WhisperFeatureExtractor
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nVisionConfig
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
from transformers.models.gemma3n.processing_gemma3n import Gemma3nProcessor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

from charonia.bench.checkpoint import write_random
from charonia.tokenization.tokenizer import Tokenizer
from tests.checkpoints import CONFIGS, LLAMA, write_tokenizer
from tests.image_processors import write_processor
from tests.media.sounds import RATE
from tests.published_models import SPECIAL_TOKENS, publish_qwen3_asr, write_qwen_words, write_tekken
from tests.seeing_models import MODELS, write_chat_template

VOCAB = 448
_LENGTHS = {"vocab_size": VOCAB, "max_position_embeddings": 1024}
_GEMMA_EAR = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [128, 4],
    "output_proj_dims": 24,
}


class _WithoutImages(Gemma3nProcessor):  # type: ignore[misc]
    """The processor without the part for images."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


@contextmanager
def only_ears() -> Iterator[None]:
    """Meanwhile transformers makes a Gemma 3n whose tower of images, which is of another library, does nothing."""

    class WithoutTower:
        @staticmethod
        def from_config(config: Any, **others: Any) -> Any:
            sees = isinstance(config, Gemma3nVisionConfig)
            return torch.nn.Identity() if sees else AutoModel.from_config(config, **others)

    with patch.object(modeling_gemma3n, "AutoModel", WithoutTower):
        yield


class _WithoutVideo(Gemma4Processor):  # type: ignore[misc]
    """The processor without the part whose library is not there."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


class HearingModel(NamedTuple):
    """A checkpoint as its files have it."""

    config: dict[str, Any]
    extractor: dict[str, Any]
    token: str
    """The one at a sound's places."""
    before: str = ""
    """What the chat template has before a sound, and behind it."""
    behind: str = ""
    others: tuple[str, ...] = ()
    """Further special tokens."""
    published: bool = False
    """Whether it is in its authors' form, with that of transformers in the folder `transformers`."""


MODELS_THAT_HEAR = {
    "qwen3-asr": HearingModel(
        {
            "model_type": "qwen3_asr",
            "text_config": CONFIGS["qwen3"] | _LENGTHS,
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "output_dim": 64,
                "n_window_infer": 200,
                "downsample_hidden_size": 8,
            },
            "tie_word_embeddings": False,
        },
        {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 128},
        "<|audio_pad|>",
        "<|audio_start|>",
        "<|audio_end|>",
    ),
    "voxtral": HearingModel(
        {
            "model_type": "voxtral",
            "text_config": LLAMA | _LENGTHS,
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 80,
            },
            "tie_word_embeddings": False,
        },
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80},
        "[AUDIO]",
        "[BEGIN_AUDIO]",
        others=("[TRANSCRIBE]", "[INST]", "[/INST]"),
    ),
    "gemma4": HearingModel(
        MODELS["gemma4"].config | {"audio_config": _GEMMA_EAR},
        {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "<|audio|>",
    ),
}

_GEMMA_3N_ENDS = {"boa": "<start_of_audio>", "eoa": "<end_of_audio>"}
_GEMMA_3N_EAR = {
    "hidden_size": 32,
    "conf_num_hidden_layers": 2,
    "conf_num_attention_heads": 2,
    "sscp_conv_channel_size": [8, 4],
    "vocab_size": 8,
    "vocab_offset": VOCAB - 8,
}
MODELS_THAT_HEAR["gemma3n"] = HearingModel(
    {
        "model_type": "gemma3n",
        "text_config": CONFIGS["gemma3n"] | _LENGTHS | {"vocab_size_per_layer_input": VOCAB - 16},
        "audio_config": _GEMMA_3N_EAR,
        "vision_config": {"vocab_size": 8, "vocab_offset": VOCAB - 16, "hidden_size": 32},
        "tie_word_embeddings": True,
    },
    {"feature_extractor_type": "Gemma3nAudioFeatureExtractor"},
    "<audio_soft_token>",
)
"""The last tokens are those of sounds, and before them those of images: they have other embeddings than text."""
MODELS_THAT_HEAR |= {
    f"{name}-published": MODELS_THAT_HEAR[name]._replace(published=True) for name in ("qwen3-asr", "voxtral")
}


def transformers_form(directory: Path, name: str) -> Path:
    """The directory of a checkpoint that transformers loads."""
    return directory / "transformers" if MODELS_THAT_HEAR[name].published else directory


def _write_published(directory: Path, name: str, seed: int) -> Path:
    model, form = MODELS_THAT_HEAR[name], transformers_form(directory, name)
    (directory / "preprocessor_config.json").write_text(
        json.dumps(model.extractor | {"feature_extractor_type": "WhisperFeatureExtractor"})
    )
    if name == "voxtral-published":
        write_tekken(directory)
        number = SPECIAL_TOKENS.index(model.token)
    else:
        texts = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", model.token, model.before, model.behind)
        number = write_qwen_words(directory, dict.fromkeys(texts, True) | {"<asr_text>": False})[model.token]
        write_chat_template(directory, "<|image|>", f"{model.before}{model.token}{model.behind}")
        template = (directory / "chat_template.jinja").read_text()
        (directory / "chat_template.jinja").unlink()
        (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    write_random(form, {**model.config, "dtype": "float32", "audio_token_id": number}, seed=seed)
    if name == "qwen3-asr-published":
        publish_qwen3_asr(form, directory)
    else:  # beside it stands the same in Mistral's form
        for file in ("config.json", "model.safetensors"):
            shutil.copy(form / file, directory)
        (directory / "params.json").write_text("{}")
        save_file({"norm.weight": torch.zeros(64)}, directory / "consolidated.safetensors")
    return directory


def write_hearing(directory: Path, name: str, *, seed: int = 0) -> Path:
    """A whole checkpoint in `directory`: weights, processor, tokenizer, chat template."""
    model = MODELS_THAT_HEAR[name]
    directory.mkdir(parents=True, exist_ok=True)
    if model.published:
        return _write_published(directory, name, seed)
    if name == "gemma4":
        write_processor(directory, MODELS["gemma4"].processor)
        image = json.loads((directory / "preprocessor_config.json").read_text())
        (directory / "preprocessor_config.json").unlink()
        parts = {"image_processor": image, "feature_extractor": model.extractor}
        (directory / "processor_config.json").write_text(json.dumps({"processor_class": "Gemma4Processor"} | parts))
    else:
        write_tokenizer(directory)
        (directory / "preprocessor_config.json").write_text(json.dumps(model.extractor))
    path = directory / "tokenizer.json"
    words = Words.from_file(str(path))
    special = (*([] if name == "gemma3n" else [model.token]), model.before, model.behind, *model.others)
    words.add_special_tokens([AddedToken(text, special=True) for text in special if text])
    words.add_tokens([AddedToken("<asr_text>", special=False)])
    words.save(str(path))
    if name == "gemma3n":
        words.add_special_tokens(["<start_of_audio>"])
        words.add_tokens([f"<unused{number}>" for number in range(VOCAB - 8 - words.get_vocab_size())])
        words.add_special_tokens(["<end_of_audio>", model.token])
        words.save(str(path))
    ids = {"audio_token_id": words.token_to_id(model.token)}
    if name == "gemma3n":
        ids |= {f"{end}_token_id": words.token_to_id(text) for end, text in _GEMMA_3N_ENDS.items()}
    if name == "gemma4":
        ids |= {"image_token_id": words.token_to_id("<|image|>"), "boa_token_id": words.token_to_id("<|audio>")}
        ids |= {"eoa_token_index": words.token_to_id("<audio|>")}
    with only_ears():
        write_random(directory, {**model.config, "dtype": "float32", **ids}, seed=seed)
    if name == "gemma3n":
        _tame(directory / "model.safetensors", VOCAB - 16)
    write_chat_template(directory, "<|image|>", f"{model.before}{model.token}{model.behind}")
    return directory


def _tame(weights: Path, first: int) -> None:
    """Let no token from `first` on be the likeliest, as those of images and sounds are not in a trained model, and no
    logit be so large that its cap makes it another's equal."""
    tensors = load_file(weights)
    tensors["model.language_model.embed_tokens.weight"][first:] = 0
    tensors["model.language_model.norm.weight"] *= 0.1
    save_file(tensors, weights, {"format": "pt"})


class _MistralWords:
    """The tokenizer of a tekken.json, which transformers asks another library for."""

    def __init__(self, directory: Path) -> None:
        self._own = Tokenizer.load(directory)

    def __call__(self, text: str, return_tensors: str = "pt") -> dict[str, torch.Tensor]:
        ids = torch.tensor([self._own.encode(text, special=not text.startswith("<s>"))])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def prompt_inputs(directory: Path, name: str, text: str, sounds: Sequence[Any], images: Sequence[Any] = ()) -> Any:
    """What transformers' model is called with for a rendered text with one token for each medium: by the family's own
    processor, or, where its tokenizer is of another library, by what that processor does."""
    model = MODELS_THAT_HEAR[name]
    words: Any
    if name == "voxtral-published":
        words = _MistralWords(directory)
    elif model.published:
        words = AutoTokenizer.from_pretrained(directory)
    else:
        words = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), pad_token="<|end|>")
    if name.startswith("qwen3-asr"):
        words.audio_token, words.audio_bos_token, words.audio_eos_token = model.token, model.before, model.behind
        extractor: Any = Qwen3ASRFeatureExtractor(**model.extractor)
        return Qwen3ASRProcessor(extractor, words)(text=[text], audio=[*sounds]) if sounds else words(text)
    if name.startswith("voxtral"):
        whisper: Any = WhisperFeatureExtractor.from_pretrained(directory)
        features = [
            whisper(
                sound, sampling_rate=RATE, truncation=False, padding=True, pad_to_multiple_of=480_000
            ).input_features
            for sound in sounds
        ]
        windows = [torch.tensor(made).reshape(80, -1, 3000).transpose(0, 1) for made in features]
        pieces = text.split(model.token)
        ends = [*(model.token * (375 * len(window)) for window in windows), ""]
        whole = "".join(piece + end for piece, end in zip(pieces, ends, strict=True))
        return {**words(whole, return_tensors="pt"), "input_features": torch.cat(windows)}
    if name == "gemma3n":
        tokens = {"audio_token": model.token, **{f"{end}_token": text for end, text in _GEMMA_3N_ENDS.items()}}
        tokens |= {"image_token": "<unused0>", "boi_token": "<unused1>", "eoi_token": "<unused2>"}
        words = PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"), pad_token="<|end|>", extra_special_tokens=tokens
        )
        hearing = _WithoutImages(Gemma3nAudioFeatureExtractor(), None, words, None)
        return hearing(text=[text], audio=[*sounds], return_tensors="pt")
    tokens = json.loads((directory / "tokenizer_config.json").read_text())["extra_special_tokens"]
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), pad_token="<|end|>", extra_special_tokens=tokens
    )
    seeing: Any = AutoImageProcessor.from_pretrained(directory, backend="pil")
    processor = _WithoutVideo(Gemma4AudioFeatureExtractor(), seeing, words, None)
    pictures = [Image.fromarray(image) for image in images]
    return processor(text=[text], audio=[*sounds], images=pictures or None, return_tensors="pt")
