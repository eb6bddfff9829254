"""A small byte-level BPE checkpoint, made here."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role not in ["system", "user", "assistant"] %}
{{ raise_exception("no such role: " + message.role) }}
{% endif %}
<|{{ message.role }}|>
{{ message.content | trim }}<|end|>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}"""

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def fibonacci(n): return n",
    "où est l'été? ça va",
    "日本語のテキスト",
]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "chat_template": TEMPLATE,
    }
    write_json(tmp_path / "tokenizer_config.json", config)
    return tmp_path
