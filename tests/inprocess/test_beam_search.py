"""Beam search, over a model that computes and over one whose log-probabilities are known."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import charonia
from charonia import BeamSearchParams, CompletionOutput, Logprob, RequestOutput, SamplingParams
from charonia.inprocess.beam_search import BeamSearch


def beams_by_hand(llm: charonia.LLM, prompt: list[int], width: int, steps: int) -> list[tuple[float, list[int]]]:
    """What beam search is: all continuations by the likeliest tokens, the best `width` of them kept."""
    one = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * width, ignore_eos=True)
    beams = [(0.0, prompt)]
    for _ in range(steps):
        outputs = llm.generate([tokens for _, tokens in beams], one)
        longer = []
        for (total, tokens), output in zip(beams, outputs, strict=True):
            [likeliest] = output.outputs[0].logprobs or []
            longer += [(total + known.logprob, [*tokens, token]) for token, known in likeliest.items()]
        beams = sorted(longer, reverse=True)[:width]
    return beams


def test_beams_are_the_likeliest_continuations(root: Path) -> None:
    with charonia.LLM(root / "examples" / "model_repository" / "demo" / "1", threads=1, kv_cache_bytes=16 << 20) as llm:
        prompts = [llm.tokenize("def add("), [9, 10]]
        found = llm.beam_search(["def add(", {"prompt_token_ids": [9, 10]}], BeamSearchParams(3, 4, ignore_eos=True))
        for prompt, output in zip(prompts, found, strict=True):
            expected = beams_by_hand(llm, prompt, 3, 4)
            assert [sequence.tokens for sequence in output.sequences] == [tokens for _, tokens in expected]
            for sequence, (total, tokens) in zip(output.sequences, expected, strict=True):
                assert sequence.cum_logprob == pytest.approx(total, abs=1e-4)
                assert (sequence.finish_reason, len(sequence.logprobs)) == ("length", 4)
                assert sequence.text == llm.detokenize(tokens)
        [greedy] = llm.generate("def add(", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        [alone] = llm.beam_search("def add(", BeamSearchParams(1, 4, ignore_eos=True))
        assert alone.sequences[0].tokens == [*prompts[0], *greedy.outputs[0].token_ids]
        short = BeamSearchParams(10, 6, length_penalty=-4)
        [ends] = asyncio.run(llm.async_beam_search("import os\n", short, use_tqdm=True))
        assert len(ends.sequences) == 10
        last = llm.server.look(lambda gateway: gateway.text_model(llm.model_name)).end_tokens
        assert "stop" in [sequence.finish_reason for sequence in ends.sequences]
        for sequence in ends.sequences:
            generated = sequence.tokens[-len(sequence.logprobs) :]
            if sequence.finish_reason == "stop":
                assert generated.pop() == sequence.stop_reason
                assert sequence.stop_reason in last
            assert {*last}.isdisjoint(generated)
        assert llm.beam_search([], BeamSearchParams(2, 2)) == []
        two = ["def add(", "import os\n"]
        at_once, one_by_one = (llm.beam_search(two, BeamSearchParams(2, 3), None, False, limit) for limit in (None, 1))
        assert [[beam.tokens for beam in found.sequences] for found in one_by_one] == [
            [beam.tokens for beam in found.sequences] for found in at_once
        ]
        tokenizer = llm.get_tokenizer()
        assert tokenizer.encode("def add(a, b):") == llm.tokenize("def add(a, b):")
        chat = [{"role": "user", "content": "hi"}]
        assert "hi" in tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_beams_end_with_the_model_and_with_its_length() -> None:
    """The next token is the last plus one, and the end is likely from the third on."""

    class Counting:
        async def answer_all(self, asked: Any, on_answer: object) -> list[Any]:
            return [self.answer(prompt.given.prompt[-1]) for prompt in asked]

        def answer(self, last: int) -> Any:
            end = -0.1 if last >= 3 else -9.0
            likeliest = {last + 1: Logprob(-0.5, 1), 99: Logprob(end, 2), last + 50: Logprob(-4.0, 3)}
            answer = CompletionOutput(0, "", [last + 1], logprobs=[likeliest])
            return RequestOutput("", None, [], None, [answer], True)

    def search(params: BeamSearchParams, longest: int = 100, prompt: tuple[int, ...] = (1,)) -> list[Any]:
        found = BeamSearch([prompt], params, frozenset({99}), longest).run(Counting(), "", None)  # type: ignore[arg-type]
        return asyncio.run(found)[0].sequences

    first, second = search(BeamSearchParams(2, 9))
    assert (first.tokens, first.finish_reason, first.stop_reason) == ([1, 2, 3, 99], "stop", 99)
    assert first.cum_logprob == pytest.approx(-1.1)
    assert second.tokens == [1, 2, 3, 4, 99]
    assert search(BeamSearchParams(2, 9, include_stop_str_in_output=True)) == [first, second]
    [behind_an_end] = search(BeamSearchParams(1, 2, length_penalty=2), prompt=(5, 99))
    assert (behind_an_end.tokens, behind_an_end.stop_reason) == ([5, 99, 99], 99)
    assert [*map(len, (sequence.tokens for sequence in search(BeamSearchParams(1, 9, ignore_eos=True))))] == [10]
    longest = search(BeamSearchParams(1, 9, ignore_eos=True), longest=4)
    assert [(sequence.tokens, sequence.finish_reason) for sequence in longest] == [([1, 2, 3, 99], "length")]
    short, long = search(BeamSearchParams(1, 9, length_penalty=0)), search(BeamSearchParams(1, 9, length_penalty=3))
    assert len(short[0].tokens) < len(long[0].tokens)
