"""Trains the embedder of `ask`, or its reranker, in a fixed number of steps.

Both begin with word vectors from counts, of rare words more than of frequent ones. The embedder is taught to find a
passage, or the rest of a text, by a few of its words or a question about it; the reranker to tell the right passage
from those that the embedder finds beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from pairs import Pair, library_pairs, library_texts, passage_pairs, passages, questions
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

VOCABULARY, CONTEXT = 4096, 160
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
ENDINGS = r"(?<=\p{L}\p{L}\p{L})(?:ing|ies|ied|ed|es|e|s|y)(?!\p{L})"
NEGATIVES, LISTS = 7, 8
MODELS = Path(__file__).parents[1] / "model_repository"


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    inner: int
    heads: int

    def config(self) -> BertConfig:
        return BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.inner,
            max_position_embeddings=CONTEXT,
            attention_probs_dropout_prob=0.0,
            pad_token_id=0,
            num_labels=1,
        )


EMBEDDER = Shape(hidden=256, layers=1, inner=128, heads=4)
RERANKER = Shape(hidden=192, layers=2, inner=192, heads=4)


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Pieces of words, of which the usual endings of English are pieces of their own."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[arg-type]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    endings = pre_tokenizers.Split(Regex(ENDINGS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), endings])
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(each, SPECIAL.index(each)) for each in ("[CLS]", "[SEP]")],
    )
    tokenizer.enable_truncation(CONTEXT, strategy="longest_first")
    return tokenizer


def co_occurrences(rows: list[list[int]]) -> Tensor:
    """float32 [vocabulary, vocabulary]: how much more often than by chance two tokens stand within five of each
    other, as the positive part of a logarithm (positive pointwise mutual information)."""
    flat = torch.tensor([each for ids in rows for each in [*ids, *[0] * 5]])
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    for distance in range(1, 6):
        left, right = flat[:-distance], flat[distance:]
        counts.index_put_((left, right), torch.full((len(left),), 1 / distance), accumulate=True)
    counts[0] = counts[:, 0] = 0
    counts += counts.T.clone()
    smooth = counts.sum(0) ** 0.75
    by_chance = counts.sum(1, keepdim=True) * smooth / smooth.sum()
    return torch.where(counts > 0, (counts / by_chance.clamp(min=1e-6)).log(), 0).clamp(min=0)


@dataclass(frozen=True)
class Words:
    """What counts tell of the vocabulary. `company`: float32 [vocabulary, size], of length 1, alike for tokens that
    stand in like places; `rarity`: float32 [vocabulary], from 0 to 1, a search engine's."""

    company: Tensor
    rarity: Tensor


def count_words(rows: list[list[int]], size: int) -> Words:
    directions, sizes, _ = torch.svd_lowrank(co_occurrences(rows), size, niter=4)
    found = torch.zeros(VOCABULARY)
    for ids in rows:
        found[list(set(ids))] += 1
    rarity = torch.log(1 + len(rows) / (found + 1))
    rarity[: len(SPECIAL)] = 0
    return Words(functional.normalize(directions * sizes.sqrt(), dim=-1), rarity / rarity.max())


class Reader:
    """Texts, or pairs of texts, to the tensors of a batch."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def rows(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def __call__(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> dict[str, Tensor]:
        encoded = self._tokenizer.encode_batch(list(texts))
        length = max(len(each.ids) for each in encoded)

        def filled(rows: Iterator[list[int]]) -> Tensor:
            return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])

        return {
            "input_ids": filled(each.ids for each in encoded),
            "token_type_ids": filled(each.type_ids for each in encoded),
            "attention_mask": filled(each.attention_mask for each in encoded),
        }


def embed(model: BertModel, batch: dict[str, Tensor]) -> Tensor:
    """Means of the tokens' vectors, of length 1."""
    vectors = model(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    return functional.normalize((vectors * mask).sum(1) / mask.sum(1), dim=-1)


def embedder_loss(model: BertModel, read: Reader, pairs: Sequence[Pair]) -> Tensor:
    """Of each short text, to find its long one among those of the batch; and the other way round."""
    shorts, longs = embed(model, read([pair.short for pair in pairs])), embed(model, read([p.long for p in pairs]))
    groups = [pair.group for pair in pairs]
    same = torch.tensor([[a == b for b in groups] for a in groups]) & ~torch.eye(len(groups), dtype=torch.bool)
    scores = (20 * shorts @ longs.T).masked_fill(same, -torch.inf)
    wanted = torch.arange(len(pairs))
    return (functional.cross_entropy(scores, wanted) + functional.cross_entropy(scores.T, wanted)) / 2


def new_embedder(words: Words) -> BertModel:
    """All word vectors have one length: the rarer a token, the more of it is its company; the rest is a direction that
    all share. So means of them weigh words as a search engine does, though the model begins with a norm."""
    model, size = BertModel(EMBEDDER.config(), add_pooling_layer=False), EMBEDDER.hidden
    weight = words.rarity[:, None] ** 1.5
    vectors = torch.cat([weight * words.company, (1 - weight**2).sqrt()], 1)
    with torch.no_grad():
        turn = torch.linalg.qr(torch.randn(size, size))[0]
        model.embeddings.word_embeddings.weight.copy_(size**0.5 * vectors @ turn)
    return model


@torch.no_grad()
def new_reranker(words: Words) -> BertForSequenceClassification:
    """Scores at first how many of the question's words, rare ones before all, have their like in the passage.

    Of each vector one place says which text the token is of, one what it has found, one how rare it is. The first
    layer attends to tokens alike, and notes which text those are of; the second gathers that of the question's tokens.
    """
    model, size = BertForSequenceClassification(RERANKER.config()), RERANKER.hidden
    text, match, rare, channels = 0, 1, 2, slice(None, None, size // RERANKER.heads)
    embeddings, (first, second) = model.bert.embeddings, model.bert.encoder.layer
    embeddings.word_embeddings.weight.zero_()
    embeddings.word_embeddings.weight[:, 3:] = size**0.5 * words.company
    embeddings.word_embeddings.weight[:, rare] = 6 * (words.rarity - 0.5)
    embeddings.token_type_embeddings.weight[:, text] = torch.tensor([-3.0, 3.0])
    alike = torch.zeros(size, size)
    alike[:, 3:] = 1.2 * torch.linalg.qr(torch.randn(size, size))[0][:, 3:]
    first.attention.self.query.weight.copy_(alike)
    first.attention.self.key.weight.copy_(alike)
    first.attention.self.value.weight[channels, text] = 1.0
    first.attention.output.dense.weight[match, channels] = 1 / RERANKER.heads
    second.attention.self.query.bias[channels] = (size / RERANKER.heads) ** 0.5
    second.attention.self.key.weight[channels, text] = -1.0
    second.attention.self.key.weight[channels, rare] = 1.0
    second.attention.self.value.weight[channels, match] = 1.0
    second.attention.output.dense.weight[match, channels] = 2 / RERANKER.heads
    model.bert.pooler.dense.weight[0, match] = 0.3
    model.classifier.weight[0, 0] = 4.0
    return model


class Neighbours:
    """The texts that an embedder finds beside the right one."""

    def __init__(self, embedder: BertModel, read: Reader, texts: Sequence[str], rng: random.Random) -> None:
        self.texts, self._rng = list(dict.fromkeys(texts)), rng
        self._embedder, self._read = embedder, read
        with torch.no_grad():
            parts = [embed(embedder, read(self.texts[start : start + 64])) for start in range(0, len(self.texts), 64)]
        self._vectors = torch.cat(parts)

    @torch.no_grad()
    def nearest(self, shorts: Sequence[str], count: int) -> list[list[str]]:
        scores = embed(self._embedder, self._read(shorts)) @ self._vectors.T
        return [[self.texts[index] for index in row] for row in scores.topk(count).indices.tolist()]

    def lists(self, pairs: Sequence[Pair]) -> list[tuple[str, str]]:
        """For each pair the right one and then the wrong ones."""
        found = []
        for pair, near in zip(pairs, self.nearest([each.short for each in pairs], 32), strict=True):
            wrong = [text for text in near if text != pair.long]
            chosen = [pair.long, *self._rng.sample(wrong, NEGATIVES)]
            found += [(pair.short, text) for text in chosen]
        return found


def reranker_loss(model: BertForSequenceClassification, read: Reader, lists: list[tuple[str, str]]) -> Tensor:
    scores = model(**read(lists)).logits.view(-1, NEGATIVES + 1)
    return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


def optimize(model: torch.nn.Module, losses: Iterator[Tensor], steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    begun, mean = time.monotonic(), 0.0
    model.train()
    for step, loss in enumerate(islice(losses, steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * min(1.0, (steps - step) / (0.6 * steps))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean += (float(loss.detach()) - mean) * (0.05 if step else 1)
        if step % 50 == 49:
            print(f"step {step + 1} loss {mean:.3f} {time.monotonic() - begun:.0f} s", flush=True)
    model.eval()


def mixed(
    read_from: list[Pair], asked: Iterator[Pair], sizes: tuple[int, int], rng: random.Random
) -> Iterator[list[Pair]]:
    while True:
        yield [*rng.sample(read_from, sizes[0]), *islice(asked, sizes[1])]


def train_embedder(
    read: Reader, words: Words, asked: dict[str, list[str]], steps: int, rng: random.Random
) -> BertModel:
    model = new_embedder(words)
    batches = mixed(library_pairs(), passage_pairs(asked, rng), (24, 40), rng)
    optimize(model, (embedder_loss(model, read, batch) for batch in batches), steps, 1e-3)
    return model


def train_reranker(
    read: Reader, words: Words, embedder: BertModel, asked: dict[str, list[str]], steps: int, rng: random.Random
) -> BertForSequenceClassification:
    model, library = new_reranker(words), library_pairs()
    near = Neighbours(embedder, read, [passage.text for passage in passages()], rng)
    far = Neighbours(embedder, read, [each.long for each in library], rng)

    def losses() -> Iterator[Tensor]:
        for batch in mixed(library, passage_pairs(asked, rng), (1, LISTS - 1), rng):
            lists = far.lists(batch[:1]) + near.lists(batch[1:])
            yield reranker_loss(model, read, lists)

    optimize(model, losses(), steps, 5e-4)
    return model


def save(model: BertModel | BertForSequenceClassification, tokenizer: Tokenizer, folder: Path) -> None:
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=CONTEXT
    ).save_pretrained(folder)
    if isinstance(model, BertModel):
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        listed = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, path) in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed, indent=2) + "\n")
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"word_embedding_dimension": EMBEDDER.hidden, "pooling_mode_mean_tokens": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["embedder", "reranker"])
    parser.add_argument(
        "--out", type=Path, default=MODELS, help="the model repository; the reranker needs its embedder"
    )
    parser.add_argument("--steps", type=int, help="450 for the embedder, 320 for the reranker")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=20261122)
    options = parser.parse_args()
    steps = options.steps or {"embedder": 450, "reranker": 320}[options.model]
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    rng, asked = random.Random(options.seed), questions()
    texts = [*library_texts(), *[passage.text for passage in passages()] * 8]
    folder = options.out / options.model / "1"
    if options.model == "embedder":
        tokenizer = train_tokenizer(texts)
        read = Reader(tokenizer)
        words = count_words(read.rows(texts), EMBEDDER.hidden - 1)
        save(train_embedder(read, words, asked, steps, rng), tokenizer, folder)
    else:
        first = options.out / "embedder" / "1"
        tokenizer = Tokenizer.from_file(str(first / "tokenizer.json"))
        read = Reader(tokenizer)
        embedder = BertModel.from_pretrained(first, dtype=torch.float32, add_pooling_layer=False)
        words = count_words(read.rows(texts), RERANKER.hidden - 3)
        save(train_reranker(read, words, embedder.eval(), asked, steps, rng), tokenizer, folder)


if __name__ == "__main__":
    main()
