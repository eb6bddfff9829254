"""Writes an encoder of BERT's kind with random weights, as sentence-transformers publishes one."""

import json
from pathlib import Path
from typing import Any

TOKENS = 4096
"""Words of its vocabulary, w0 and so on, each a token; behind them come the special ones."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write_encoder(directory: Path, hidden: int, layers: int) -> None:
    """Weights, config.json, tokenizer.json, and modules that take the mean and normalise it; heads of at most 64
    numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(1)
    vocabulary = {f"w{number}": number for number in range(TOKENS)} | {
        word: TOKENS + number for number, word in enumerate(SPECIAL)
    }
    config: Any = AutoConfig.for_model(
        "bert",
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 1),
        intermediate_size=4 * hidden,
        max_position_embeddings=512,
        pad_token_id=TOKENS,
    )
    auto: Any = AutoModel
    auto.from_config(config).eval().save_pretrained(directory)
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds)
    ]
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}
    for name, content in (
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names}),
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": 512}),
    ):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
