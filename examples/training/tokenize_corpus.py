"""Trains the byte-level BPE on the training documents, or takes one that is there, and packs both splits into token
files.

Writes `tokenizer/` (as transformers reads it) and one flat uint16 file for each split and kind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from prepare import SCRATCH
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
CONTEXT = 1024
END_OF_TEXT = "<|endoftext|>"
SPECIAL = [END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHUNK = 4096

# A line break joins neither the colon before it nor the indentation after it, so that a prompt
# may end with any of the three.
WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The models have seen neither tools nor their results: a result is shown as something the user says, a call as models
# that know tools write it.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('Unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|user|>' if message['role'] == 'tool' else '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}"
    "{{- message['content'] | trim -}}"
    "{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set called = {'name': call['function']['name'], 'arguments': call['function']['arguments']} -%}"
    "{{- '<tool_call>\\n' + (called | tojson) + '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def read_documents(scratch: Path) -> list[dict[str, Any]]:
    with open(scratch / "documents.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def training_texts(documents: list[dict[str, Any]]) -> Iterator[str]:
    for document in documents:
        if document["split"] == "train" and document["kind"] != "function":
            yield document["text"]


def train_tokenizer(documents: list[dict[str, Any]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(documents), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(folder)
    # The name transformers 4 knows as well; transformers 5 writes its own class's.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: Tokenizer, documents: list[dict[str, Any]], seed: int) -> np.ndarray:
    """One shuffled stream of documents, each closed by the end-of-text token."""
    rng = np.random.default_rng(seed)
    texts = [d["text"] for d in documents for _ in range(d["repeats"])]
    order = rng.permutation(len(texts))
    end = SPECIAL.index(END_OF_TEXT)
    ids: list[int] = []
    for start in range(0, len(order), CHUNK):
        batch = [texts[index] for index in order[start : start + CHUNK]]
        for encoding in tokenizer.encode_batch(batch):
            ids += [*encoding.ids, end]
    return np.asarray(ids, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to pack with; a new one is trained without")
    options = parser.parse_args()
    documents = read_documents(options.scratch)
    tokenizer = Tokenizer.from_file(str(options.tokenizer)) if options.tokenizer else train_tokenizer(documents)
    save_tokenizer(tokenizer, options.scratch / "tokenizer")
    train = [d for d in documents if d["split"] == "train"]
    chosen = {"train": train}
    for kind in ("module", "docs", "chat"):
        chosen[f"held_out_{kind}"] = [
            d | {"repeats": 1} for d in documents if (d["split"], d["kind"]) == ("held_out", kind)
        ]
    for name, part in chosen.items():
        ids = encode(tokenizer, part, options.seed)
        ids.tofile(options.scratch / f"{name}.bin")
        characters = sum(len(d["text"]) * d["repeats"] for d in part)
        print(f"{name:16} {len(ids):9} tokens, {characters / len(ids):.2f} characters a token")


if __name__ == "__main__":
    main()
