"""Writes what a head for drafts is trained on elsewhere: texts as tokens, and the target's hidden states at each.

One safetensors file a text: `input_ids` int64 [T], `loss_mask` bool [T] (the answers of chats, or all), and
`hidden_states` bf16 [T, layers, hidden]: as they enter each of `--layers`; the number of layers stands for what the
last one makes, before the final norm.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from prepare import SCRATCH
from safetensors.torch import save_file
from tokenize_corpus import CONTEXT, read_documents
from torch import Tensor
from train_eagle import LAYERS
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

ANSWER, END = "<|assistant|>", "<|end|>"


@torch.no_grad()
def hidden_states(target: PreTrainedModel, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """[T, layers, hidden] of one text [T]. transformers applies the final norm to the last of its states, hence the
    hook."""
    last: list[Tensor] = []
    hook = target.model.layers[-1].register_forward_hook(
        lambda module, given, made: last.append(made[0] if isinstance(made, tuple) else made)
    )
    try:
        found = target.model(input_ids=ids[None], use_cache=False, output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    return torch.stack([(*found[:-1], last[0])[layer][0] for layer in layers], 1)


def loss_mask(ids: list[int], begin: int, end: int) -> Tensor:
    """What an answer is made of, its end included; all of a text that is no chat."""
    mask, within = torch.zeros(len(ids), dtype=torch.bool), False
    for place, token in enumerate(ids):
        mask[place] = within
        within = (within or token == begin) and token != end
    return mask if begin in ids else ~mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--layers", type=int, nargs="+", default=[*LAYERS, 4])
    parser.add_argument("--texts", type=int, default=1000)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).eval()
    begin, end = (tokenizer.convert_tokens_to_ids(each) for each in (ANSWER, END))
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in read_documents(options.scratch) if each["split"] == "train"][: options.texts]
    for number, document in enumerate(chosen):
        ids = tokenizer.encode(document["text"], add_special_tokens=False)[:CONTEXT]
        states = hidden_states(target, torch.tensor(ids), tuple(options.layers))
        tensors = {
            "input_ids": torch.tensor(ids),
            "loss_mask": loss_mask(ids, begin, end),
            "hidden_states": states.to(torch.bfloat16).contiguous(),
        }
        save_file(tensors, options.out / f"{number:06}.safetensors")
    print(f"{len(chosen)} texts in {options.out}")


if __name__ == "__main__":
    main()
