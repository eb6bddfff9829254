"""The proof of speculation, with short texts and few machines."""

import json

from tokenizers import Tokenizer

from . import speculation as proof


def test_drafts_cost_neither_throughput_nor_any_sequence_its_time() -> None:
    guesses = ["never right", "half right", "mostly right", "in spells", "some right"]
    runs = list(proof.never_slower(["VNNI", "computing"], guesses, (1, 4), new=150, seed=0))
    assert [run for run in runs if not run.holds] == []
    gains = {(run.machine, run.guesses): run.speed for run in runs if run.streams == 1}
    assert gains["VNNI", "mostly right"] > 2
    assert gains["computing", "never right"] < 1.01


def test_drafts_change_no_token_of_the_demo_model() -> None:
    drafters = {name: proof.DRAFTERS[name] for name in ("ngram", "synthetic")}
    differing = proof.exactness(["int8"], ["drawn"], [4], drafters, ["edit"], new=24)
    assert differing == {("int8", "drawn", 4, drafter): 0 for drafter in ("none", *drafters)}


def test_the_recorded_ids_are_the_demo_models() -> None:
    tokenizer = Tokenizer.from_file(str(proof.DEMO / "tokenizer.json"))
    for line in proof.TEXTS.read_text().splitlines():
        text = json.loads(line)
        for name in ("prompt", "output"):
            assert tokenizer.encode(text[name], add_special_tokens=False).ids == text[f"{name}_tokens"]
