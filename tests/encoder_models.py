"""Tiny encoders as they are published: transformers with random weights, a WordPiece tokenizer, modules.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

TEXT = "the ferry crosses a river by night and day fast slow boat charon waits for two coins where is it"
WORDS = TEXT.split()
MASK = "multi_vector_mask.MultiVectorMask"
NORMALIZE = "sentence_transformer.modules.normalize.Normalize"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
SIZE = 32
LENGTH = 16

SIZES = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL_IDS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64},
    "roberta": {
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 66,
    },
    "qwen3": SIZES | {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64},
    "gemma3_text": SIZES
    | {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 8}
    | {"use_bidirectional_attention": True},
    "modernbert": SIZES | SPECIAL_IDS | {"max_position_embeddings": 64, "local_attention": 8},
    "gte": SIZES | {"max_position_embeddings": 64},
    "nomic_bert": SIZES | {"max_position_embeddings": 64},
    "jina_embeddings_v3": SIZES | {"max_position_embeddings": 66},
    "xlm-roberta": SIZES | {"max_position_embeddings": 66},
    "distilbert": {"dim": SIZE, "hidden_dim": 48, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64},
}


def write_transformer(directory: Path, kind: str, auto: Any, **more: Any) -> Any:
    """Weights, config.json and tokenizer.json; the module that was written."""
    torch.manual_seed(7)
    words = (*WORDS, *more.pop("words", ()))
    vocabulary = len(SPECIAL) + len(words)
    sizes = {"hidden_size": SIZE} if kind != "distilbert" else {}
    config = AutoConfig.for_model(kind, vocab_size=vocabulary, pad_token_id=0, **sizes, **CONFIGS[kind], **more)
    module = auto.from_config(config).eval()
    for parameter in module.parameters():
        # transformers' own start is so small that texts hardly differ.
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    module.save_pretrained(directory)
    write_tokenizer(directory, words)
    return module


def write_tokenizer(directory: Path, words: Sequence[str] = WORDS) -> None:
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"mask_token": "[MASK]"} if "[MASK]" in words else {}
    special |= {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def write_embedder(
    directory: Path, kind: str = "bert", pooling: str = "mean_tokens", tail: Sequence[str] = ("Normalize",)
) -> Any:
    """A sentence-transformers directory; the transformer that was written. `tail`: Dense, Normalize."""
    directory.mkdir(parents=True, exist_ok=True)
    module = write_transformer(directory, kind, AutoModel)
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": True})
    write_json(directory / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    steps = [("Transformer", ""), ("Pooling", "1_Pooling")]
    steps += [(name, f"{index}_{name}") for index, name in enumerate(tail, 2)]
    if "Dense" in tail:
        write_dense(directory / "2_Dense")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(steps)
    ]
    write_json(directory / "modules.json", modules)
    return module


def write_dense(directory: Path) -> None:
    torch.manual_seed(8)
    write_json(
        directory / "config.json",
        {
            "in_features": SIZE,
            "out_features": 8,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    )
    save_file({"linear.weight": torch.randn(8, SIZE), "linear.bias": torch.randn(8)}, directory / "model.safetensors")


def write_cross_encoder(directory: Path, labels: int = 1, **more: Any) -> Any:
    """A cross-encoder's directory; the module that was written."""
    directory.mkdir(parents=True, exist_ok=True)
    return write_transformer(directory, "bert", AutoModelForSequenceClassification, num_labels=labels, **more)


MARKS = ("[MASK]", "[unused0]", "[unused1]", ",", ".")
"""What a late-interaction model's vocabulary has besides words."""


def write_late_interaction(directory: Path, form: str, **own: Any) -> Any:
    """A ColBERT's directory, of the form `stanford`, `pylate` or `multi_vector` (sentence-transformers' own), with more
    of its settings; the transformer that was written, and the weight of its projection."""
    directory.mkdir(parents=True, exist_ok=True)
    module = write_transformer(directory, "bert", AutoModel, words=MARKS)
    weight = torch.randn(8, SIZE)
    if form == "stanford":
        weights = {f"bert.{name}": each.contiguous() for name, each in module.state_dict().items()}
        save_file({**weights, "linear.weight": weight}, directory / "model.safetensors", {"format": "pt"})
        config = read_json(directory / "config.json")
        write_json(directory / "config.json", {**config, "architectures": ["HF_ColBERT"]})
        write_json(directory / "artifact.metadata", {"dim": 8, "query_maxlen": 12, "doc_maxlen": 14, **own})
        return module, weight
    dense = {"in_features": SIZE, "out_features": 8, "bias": False}
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    tokens = {"module_input_name": "token_embeddings"} if form == "multi_vector" else {}
    write_json(directory / "1_Dense" / "config.json", dense | identity | tokens)
    save_file({"linear.weight": weight}, directory / "1_Dense" / "model.safetensors")
    steps = ["base.modules.transformer.Transformer", "base.modules.dense.Dense"]
    common = {"similarity_fn_name": "MaxSim", "document_length": 14}
    if form == "pylate":
        steps = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
        settings = {"model_type": "ColBERT", "query_prefix": "[unused0]", "document_prefix": "[unused1]"}
        write_json(directory / "config_sentence_transformers.json", common | settings | {"query_length": 12} | own)
    else:
        steps = [
            f"sentence_transformers.{step}" for step in (*steps, f"multi_vector_encoder.modules.{MASK}", NORMALIZE)
        ]
        prompts = {"query": "where is ", "document": ""}
        settings = {"model_type": "MultiVectorEncoder", "similarity_fn_name": "maxsim", "prompts": prompts}
        write_json(directory / "config_sentence_transformers.json", settings)
        write_json(directory / "sentence_bert_config.json", {"document_length": 14, **own})
        write_json(directory / "2_MultiVectorMask" / "config.json", {"skiplist_words": [",", "absent"]})
        write_json(directory / "3_Normalize" / "config.json", {"module_input_name": "token_embeddings"})
    paths = [f"{index}_{step.rpartition('.')[2]}" if index else "" for index, step in enumerate(steps)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": step}
        for index, (path, step) in enumerate(zip(paths, steps, strict=True))
    ]
    write_json(directory / "modules.json", modules)
    return module, weight


def write_token_heads(directory: Path, **ends: Any) -> tuple[Any, Any]:
    """bge-m3's heads for an embedder's directory: the layers."""
    torch.manual_seed(9)
    layers = torch.nn.Linear(SIZE, 1), torch.nn.Linear(SIZE, SIZE)
    for name, layer in zip(("sparse_linear", "colbert_linear"), layers, strict=True):
        torch.save(layer.state_dict(), directory / f"{name}.pt")
    write_json(directory / "config.json", {**read_json(directory / "config.json"), **SPECIAL_IDS, **ends})
    return layers


PAIRS = (
    "{%- for m in messages if m.role == 'system' %}where {{ m.content }} {% endfor -%}"
    "{% for m in messages if m.role != 'system' %}[CLS] {{ m.content }} {% endfor %}is it"
)
"""A reranker's chat template: an instruction, a query, a document and an end."""


def write_causal_reranker(directory: Path, score: Mapping[str, Any] | None, template: str = PAIRS, **more: Any) -> Any:
    """A reranker by the logits of tokens, as sentence-transformers saves it with a LogitScore's config in `score`; the
    module that was written."""
    directory.mkdir(parents=True, exist_ok=True)
    module = write_transformer(directory, "qwen3", AutoModelForCausalLM, **more)
    (directory / "chat_template.jinja").write_text(template)
    if score is not None:
        write_json(directory / "config_sentence_transformers.json", {"model_type": "CrossEncoder", "prompts": {}})
        method = {"method": "forward", "method_output_name": "logits"}
        own = {"transformer_task": "text-generation", "module_output_name": "causal_logits"}
        modalities = {"text": method, "message": method | {"format": "flat"}}
        write_json(directory / "sentence_bert_config.json", own | {"modality_config": modalities})
        write_json(directory / "1_LogitScore" / "config.json", score)
        steps = [("", "base.modules.transformer.Transformer"), ("1_LogitScore", "cross_encoder.modules.LogitScore")]
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
            for index, (path, kind) in enumerate(steps)
        ]
        write_json(directory / "modules.json", modules)
    return module


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())
