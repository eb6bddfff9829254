"""Checkpoints as their authors publish them, where that is another form than transformers': their tokenizers, their
config.json and the names of their tensors."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from charonia.tokenization.byte_level_bpe import LETTER_BYTES
from tests.checkpoints import LINES

TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "<SPECIAL_20>", "[CALL_ID]", "[ARGS]"),
    *("<SPECIAL_23>", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "[THINK]", "[/THINK]"),
)
"""Those of Voxtral's file at its places, and those of later ones behind them."""
_SPECIAL, _WORDS = 32, 384


def _trained() -> tuple[dict[str, int], list[list[str]]]:
    """The tokens and merges of a byte-level BPE of lines of text."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=_WORDS, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(words.to_str())["model"]
    return model["vocab"], model["merges"]


def write_tekken(
    directory: Path, version: str = "v11", special: Sequence[str] | None = SPECIAL_TOKENS, **others: Any
) -> int:
    """A tekken.json with some tokens that it does not use, as all have, beside other fields of the file. The result is
    the number of tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    ids, _ = _trained()
    tokens = [bytes(LETTER_BYTES[letter] for letter in text) for text in sorted(ids, key=ids.__getitem__)]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate([*tokens, b"never used"])
    ]
    config = {
        "pattern": TEKKEN_PATTERN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(tokens) + _SPECIAL,
        "default_num_special_tokens": _SPECIAL,
        "version": version,
    }
    named = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special or ())]
    file = {"config": config, "vocab": vocab, "special_tokens": named if special else None, **others}
    (directory / "tekken.json").write_text(json.dumps({key: value for key, value in file.items() if value is not None}))
    return len(tokens) + _SPECIAL


def write_qwen_words(directory: Path, added: Mapping[str, bool]) -> dict[str, int]:
    """vocab.json, merges.txt and tokenizer_config.json, with added tokens, special ones or not. The result is their
    ids."""
    directory.mkdir(parents=True, exist_ok=True)
    ids, merges = _trained()
    numbers = {text: len(ids) + number for number, text in enumerate(added)}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {str(numbers[text]): {"content": text, "special": special, **flags} for text, special in added.items()}
    (directory / "vocab.json").write_text(json.dumps(ids))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges), ""]))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "pad_token": "<|endoftext|>"}
    config |= {"bos_token": None, "added_tokens_decoder": decoder, "add_prefix_space": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return numbers


_THINKER_NAMES = {
    "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
    "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
    "model.audio_tower.": "thinker.audio_tower.",
    "model.language_model.": "thinker.model.",
    "lm_head.": "thinker.lm_head.",
}


def publish_qwen3_asr(source: Path, target: Path) -> None:
    """config.json and weights of a checkpoint that transformers wrote, in Qwen's own form."""
    config = json.loads((source / "config.json").read_text())
    text, audio = config["text_config"], config["audio_config"]
    rope = text.pop("rope_parameters")
    sections = {"interleaved": True, "mrope_interleaved": True, "mrope_section": [6, 5, 5], "type": "default"}
    text |= {"model_type": "qwen3_asr_text", "rope_theta": rope["rope_theta"]}
    text |= {"rope_scaling": {"rope_type": "default", **sections}}
    audio |= {"model_type": "qwen3_asr_audio_encoder", "conv_chunksize": 500, "max_source_positions": 1500}
    del audio["max_position_embeddings"]
    tokens = {"audio_token_id": config["audio_token_id"], "user_token_id": 1}
    thinker = {"model_type": "qwen3_asr_thinker", "audio_config": audio, "text_config": text, **tokens}
    outer = {"architectures": config["architectures"], "model_type": "qwen3_asr", "support_languages": ["English"]}
    outer |= {"thinker_config": thinker | {"dtype": config["dtype"]}, "transformers_version": "4.57.6"}
    (target / "config.json").write_text(json.dumps(outer))
    tensors = load_file(source / "model.safetensors")
    renamed = {
        f"{published}{name.removeprefix(own)}": tensor
        for name, tensor in tensors.items()
        for own, published in _THINKER_NAMES.items()
        if name.startswith(own)
    }
    assert len(renamed) == len(tensors)
    save_file(renamed, target / "model.safetensors", {"format": "pt"})
