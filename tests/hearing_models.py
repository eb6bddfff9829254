"""Tiny checkpoints of models that write down sounds: random weights, a trained tokenizer with the special tokens of
Whisper's, and its extractor of features."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.media.sounds import write_extractor

LANGUAGES = ("en", "zh", "de", "es")
_TEXT = "so it goes and the sound of it is a word, another word and no more than that; say what you hear. " * 4
_BEFORE, _BEHIND = ("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"), 1501
_WORDS = 320
"""Tokens that are no special ones, and before `<|endoftext|>`."""


def write_whisper_tokenizer(directory: Path, multilingual: bool = True) -> dict[str, int]:
    """The tokenizer, whose special tokens stand in Whisper's order; their ids."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([_TEXT], trainers.BpeTrainer(vocab_size=_WORDS, initial_alphabet=alphabet))
    languages = [f"<|{language}|>" for language in (LANGUAGES if multilingual else ("en",))]
    special = ["<|endoftext|>", "<|startoftranscript|>", *languages, "<|translate|>", "<|transcribe|>", *_BEFORE]
    times = [f"<|{number * 0.02:.2f}|>" for number in range(_BEHIND)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in times])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "WhisperTokenizer", "eos_token": special[0], "bos_token": special[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return {text: tokenizer.token_to_id(text) for text in (*special, *times[:1])}


def whisper_config(ids: dict[str, int], **others: Any) -> dict[str, Any]:
    """The fields of config.json."""
    return {
        "model_type": "whisper",
        "vocab_size": ids["<|0.00|>"] + _BEHIND,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 64,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "dtype": "float32",
    } | others


def write_whisper(
    directory: Path, *, multilingual: bool = True, seed: int = 0, sureness: float = 1.0, **others: Any
) -> Path:
    """A whole checkpoint in `directory`. `sureness`: by how much its logits are larger."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    ids = write_whisper_tokenizer(directory, multilingual)
    write_extractor(directory)
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(**whisper_config(ids, **others)))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.1)
        elif "embed_positions" not in name or "decoder" in name:
            parameter.data.normal_(0.0, 2.0 / parameter.shape[1:].numel() ** 0.5)
    model.model.decoder.layer_norm.weight.data *= sureness
    model.model.decoder.embed_tokens.weight.data[ids["<|endoftext|>"] + 1 :] *= 0.3  # which texts have seldom
    special = {
        "_from_model_config": False,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "suppress_tokens": [3, 7, ids["<|startoftranscript|>"], ids["<|startofprev|>"], ids["<|nospeech|>"]],
        "begin_suppress_tokens": [220, ids["<|endoftext|>"]],
        "is_multilingual": multilingual,
        "alignment_heads": [[1, 0], [1, 2]],
        "return_timestamps": False,
        "max_length": 64,
    }
    if multilingual:
        special["lang_to_id"] = {f"<|{language}|>": ids[f"<|{language}|>"] for language in LANGUAGES}
        special["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    for name, value in special.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(directory)
    return directory
