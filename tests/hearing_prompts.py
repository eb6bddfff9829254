"""Tiny checkpoints of models whose prompts have sounds, and what transformers' processors make of prompts for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from tokenizers import AddedToken
from tokenizers import Tokenizer as Words
from transformers import AutoImageProcessor, PreTrainedTokenizerFast, WhisperFeatureExtractor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

from charonia.bench.checkpoint import write_random
from tests.checkpoints import CONFIGS, LLAMA, write_tokenizer
from tests.image_processors import write_processor
from tests.media.sounds import RATE
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


def write_hearing(directory: Path, name: str, *, seed: int = 0) -> Path:
    """A whole checkpoint in `directory`: weights, processor, tokenizer, chat template."""
    model = MODELS_THAT_HEAR[name]
    directory.mkdir(parents=True, exist_ok=True)
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
    special = (model.token, model.before, model.behind, *model.others)
    words.add_special_tokens([AddedToken(text, special=True) for text in special if text])
    words.add_tokens([AddedToken("<asr_text>", special=False)])
    words.save(str(path))
    ids = {"audio_token_id": words.token_to_id(model.token)}
    if name == "gemma4":
        ids |= {"image_token_id": words.token_to_id("<|image|>"), "boa_token_id": words.token_to_id("<|audio>")}
        ids |= {"eoa_token_index": words.token_to_id("<audio|>")}
    write_random(directory, {**model.config, "dtype": "float32", **ids}, seed=seed)
    write_chat_template(directory, "<|image|>", f"{model.before}{model.token}{model.behind}")
    return directory


def prompt_inputs(directory: Path, name: str, text: str, sounds: Sequence[Any], images: Sequence[Any] = ()) -> Any:
    """What transformers' model is called with for a rendered text with one token for each medium: by the family's own
    processor, or, where its tokenizer is of another library, by what that processor does."""
    model = MODELS_THAT_HEAR[name]
    words: Any = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), pad_token="<|end|>")
    if name == "qwen3-asr":
        words.audio_token, words.audio_bos_token, words.audio_eos_token = model.token, model.before, model.behind
        extractor: Any = Qwen3ASRFeatureExtractor(**model.extractor)
        return Qwen3ASRProcessor(extractor, words)(text=[text], audio=[*sounds]) if sounds else words(text)
    if name == "voxtral":
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
    tokens = json.loads((directory / "tokenizer_config.json").read_text())["extra_special_tokens"]
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), pad_token="<|end|>", extra_special_tokens=tokens
    )
    seeing: Any = AutoImageProcessor.from_pretrained(directory, backend="pil")
    processor = _WithoutVideo(Gemma4AudioFeatureExtractor(), seeing, words, None)
    pictures = [Image.fromarray(image) for image in images]
    return processor(text=[text], audio=[*sounds], images=pictures or None, return_tensors="pt")
