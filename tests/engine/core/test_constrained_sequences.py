"""Sequences under grammars, on a core that computes: what they write, and that nothing else changes."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from charonia.core.request import GuidedDecoding
from charonia.core.resolved_sampling import LogitsParams, ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig, SpeculationConfig
from charonia.engine.core.drafters import ProposedDrafts
from charonia.engine.core.grammar_pool import GrammarPool
from charonia.engine.core.messages import AddRequest, FromCore, RequestRejected, RequestUpdates, Shutdown
from charonia.engine.core.step_loop import EngineCore
from charonia.engine.grammars.backend import LIMITS
from charonia.engine.grammars.llguidance_backend import LLGuidanceBackend
from charonia.engine.grammars.vocabulary import read_vocabulary
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.speculation import GRAMMAR, Drafter, DraftRequest, Speculation
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

EOS = 0
BLOCK_SIZE = 8
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["left", "right"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GUIDE = GuidedDecoding("json_schema", json.dumps(SCHEMA))
WARM = ResolvedSampling(temperature=1.5, seed=11)
THINK_END = "hm."


class Answer:
    """What became of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.reason = ""
        self.refused: RequestRejected | None = None
        self.runs: list[int] = []


class Served:
    """A core that computes in this thread, and the tokenizer of its model."""

    def __init__(
        self,
        model: Path,
        ahead: int = 0,
        blocks: int = 64,
        make: Callable[[EngineConfig], Any] = InlineExecutor,
        drafter: Drafter | None = None,
        drafts: SpeculationConfig | None = None,
        block_size: int = BLOCK_SIZE,
        **scheduling: Any,
    ) -> None:
        cache = CacheConfig(block_size=block_size)
        config = EngineConfig(model=str(model), device="cpu", cache=cache, speculation=drafts)
        self.executor = make(config)
        capacity = self.executor.load(lambda *_: None)
        self.executor.allocate(blocks)
        self.cache = KVCacheManager(blocks, block_size)
        limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, ahead=ahead)
        self.speculation = None
        if drafter is not None:
            self.speculation = Speculation({"drafter": drafter}, 5, capacity.vocab_size, draft_model=drafts is not None)
        limits = msgspec.structs.replace(limits, **scheduling)
        self.scheduler = Scheduler(limits, self.cache, speculation=self.speculation)
        self.vocabulary = read_vocabulary(str(model), "", capacity.vocab_size)
        self.grammars = GrammarPool(lambda: LLGuidanceBackend(self.vocabulary, LIMITS._replace(step_items=2000)))
        self.core = EngineCore(
            self.scheduler, self.cache, self.executor, grammars=self.grammars, vocab_size=capacity.vocab_size
        )
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.sent: list[FromCore] = []

    def draft_always(self) -> None:
        """Whatever steps take."""
        assert self.speculation is not None
        self.speculation.costs.observe_step = lambda *observed: None  # type: ignore[method-assign]

    def close(self) -> None:
        self.grammars.close()
        self.executor.close()

    def run(self, *requests: AddRequest) -> dict[int, Answer]:
        """All of these at once, to their ends."""
        answers = {request.spec.key: Answer() for request in requests}
        unfinished, stopped = set(answers), list[bool]()

        def take(message: FromCore) -> None:
            if isinstance(message, RequestRejected):
                answers[message.key].refused = message
                unfinished.discard(message.key)
            elif isinstance(message, RequestUpdates):
                updates, at = message.updates, 0
                for key, count in zip(updates.keys, updates.counts, strict=True):
                    answers[key].tokens += updates.tokens[at : at + count]
                    answers[key].logprobs += updates.logprobs[at : at + count]
                    answers[key].runs.append(count)
                    at += count
                for key, reason in updates.finished:
                    answers[key].reason = reason
                    unfinished.discard(key)
            if not unfinished and not stopped:
                stopped.append(True)
                self.core.inbox.accept(Shutdown())

        wait([self.grammars.compile(each.constraint) for each in requests if each.constraint is not None], 30)
        for request in requests:
            self.core.inbox.accept(request)
        self.core._stopping = False
        self.core.run(take)
        self.scheduler.check_integrity()
        assert not self.core._constraints.live
        return answers

    def text(self, answer: Answer) -> str:
        ends = self.vocabulary.ends
        text: str = self.tokenizer.decode([token for token in answer.tokens if token not in ends])
        return text

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class HalfRight:
    """Drafts the `answers` that it was told, by prompt; after some tokens of them, as chance has it, others."""

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self._random = Random(3)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def _guess(self, request: DraftRequest) -> list[int]:
        done = len(request.outputs)
        tokens = self.answers.get(tuple(request.prompt.tolist()), [])[done : done + request.k]
        for place in range(self._random.randint(0, len(tokens)), len(tokens)):
            tokens[place] = self._random.randrange(1, 300)
        return tokens


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module", params=[0, 1])
def served(model: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(model, ahead=request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Served]:
    made = Served(model)
    yield made
    made.close()


def ask(
    key: int, constraint: GuidedDecoding | None = GUIDE, sampling: ResolvedSampling = WARM, **others: Any
) -> AddRequest:
    about_text = {name: others.pop(name) for name in ("thinking", "thinking_end", "timeout") if name in others}
    prompt = np.array(others.pop("prompt", [key % 50 + 10, 20, 30]), np.int32)
    values: dict[str, Any] = {"max_tokens": 60} | others
    spec = SequenceSpec(key=key, prompt=prompt, sampling=sampling, stop_token_ids=frozenset([EOS]), **values)
    return AddRequest(spec, constraint, **about_text)


def is_valid(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"a", "b"} and found["a"] in ("left", "right") and found["b"] in range(100)


def test_what_is_written_is_valid_and_ends_by_itself(served: Served) -> None:
    answers = served.run(*(ask(key, sampling=WARM._replace(seed=key)) for key in range(12)))
    assert all(is_valid(served.text(answer)) for answer in answers.values())
    assert {answer.reason for answer in answers.values()} == {"stop"}
    assert len({tuple(answer.tokens) for answer in answers.values()}) > 4


def test_free_sequences_write_what_they_write_alone(served: Served) -> None:
    free = [ask(key, None, max_tokens=12) for key in (1, 2, 3)]
    alone = {request.spec.key: served.run(request)[request.spec.key].tokens for request in free}
    together = served.run(free[0], ask(11), free[1], ask(12), free[2])
    assert {key: together[key].tokens for key in alone} == alone


def test_a_guided_sequence_writes_the_same_whatever_shares_the_batch(served: Served) -> None:
    alone = [served.run(ask(key))[key].tokens for key in (1, 2)]
    together = served.run(ask(1), ask(2), *(ask(key, None, max_tokens=20) for key in (5, 6, 7)))
    assert [together[1].tokens, together[2].tokens] == alone


@pytest.mark.parametrize("greedy", [True, False])
def test_the_host_chooses_the_same_as_kernels(plain: Served, greedy: bool) -> None:
    sampling = ResolvedSampling() if greedy else WARM._replace(top_k=40, top_p=0.95, min_p=0.01)
    forced = GuidedDecoding("regex", "[a-z ]{30}[0-9]")  # nothing in it is forced, but where it ends
    kernels = plain.run(ask(1, forced, sampling))[1]
    biased = LogitsParams(logit_bias=((5, 0.0),))
    host = plain.run(ask(1, forced, sampling._replace(logits=biased)))[1]
    reported = plain.run(ask(1, forced, sampling._replace(logprobs=2)))[1]
    assert kernels.tokens == host.tokens == reported.tokens


def test_logprobs_are_the_models_own_beside_a_mask(plain: Served) -> None:
    answer = plain.run(ask(1, sampling=WARM._replace(logprobs=3)))[1]
    assert is_valid(plain.text(answer))
    assert len(answer.logprobs) == len(answer.tokens)
    assert set(answer.runs) == {1}
    assert any(token not in each.ids for token, each in zip(answer.tokens, answer.logprobs, strict=True))
    assert all(logprob.rank >= 1 for logprob in answer.logprobs)


def test_what_has_to_come_is_not_sampled(plain: Served) -> None:
    answer = plain.run(ask(1))[1]
    stepwise = plain.run(ask(1, sampling=WARM._replace(logprobs=0)))[1]
    assert max(answer.runs) > 1
    assert len(answer.runs) < len(stepwise.runs)
    assert is_valid(plain.text(answer))
    assert is_valid(plain.text(stepwise))


def test_penalties_and_biases_hold_under_a_mask(plain: Served) -> None:
    (nine,) = plain.ids("9")
    constraint = GuidedDecoding("regex", "[0-9]{6}")
    liked = plain.run(ask(1, constraint, ResolvedSampling(logits=LogitsParams(logit_bias=((nine, 100.0),)))))[1]
    assert plain.text(liked) == "999999"
    only = LogitsParams(allowed_token_ids=(200, 201))
    assert len(plain.text(plain.run(ask(1, constraint, ResolvedSampling(logits=only)))[1])) == 6


def test_no_end_token_comes_before_the_text_is_complete(plain: Served) -> None:
    likes_ends = ResolvedSampling(logits=LogitsParams(logit_bias=((EOS, 100.0),)))
    answer = plain.run(ask(1, GuidedDecoding("regex", "[a-z]{3}[a-z]*"), likes_ends))[1]
    assert len(plain.tokenizer.decode(answer.tokens[:-2])) < 3 <= len(plain.text(answer))
    assert (answer.tokens[-1], answer.reason) == (EOS, "stop")


def test_a_minimum_of_tokens_holds_where_the_grammar_can_go_on(plain: Served) -> None:
    likes_ends = LogitsParams(logit_bias=((EOS, 100.0),), min_tokens=7, stop_token_ids=(EOS,))
    answer = plain.run(ask(1, GuidedDecoding("regex", "[a-z]*"), ResolvedSampling(logits=likes_ends)))[1]
    assert len(answer.tokens) == 8
    ended = plain.run(ask(1, GuidedDecoding("choice", '["a"]'), ResolvedSampling(logits=likes_ends)))[1]
    assert (plain.text(ended), ended.reason) == ("a", "stop")


def test_what_max_tokens_cuts_is_a_valid_beginning(plain: Served) -> None:
    whole = plain.run(ask(1))[1]
    for most in range(1, len(whole.tokens), 5):
        cut = plain.run(ask(1, max_tokens=most))[1]
        assert cut.tokens == whole.tokens[:most]
        assert cut.reason == "length"


def test_stop_tokens_of_a_request_end_forced_tokens_too(plain: Served) -> None:
    ids = plain.ids("abcdef")
    request = ask(1, GuidedDecoding("choice", '["abcdef"]'))
    spec = msgspec.structs.replace(request.spec, stop_token_ids=frozenset([EOS, ids[2]]))
    cut = msgspec.structs.replace(request, spec=spec)
    answer = plain.run(cut)[1]
    assert (answer.tokens, answer.reason) == (ids[:3], "stop")


@pytest.mark.parametrize("ahead", [0, 1])
def test_preempted_sequences_go_on_where_they_were(model: Path, ahead: int) -> None:
    constraint = GuidedDecoding("regex", "[a-z ]{36}[0-9]{3}")
    requests = [ask(key, constraint) for key in range(5)]
    roomy, tight = Served(model, ahead), Served(model, ahead, blocks=9)
    try:
        expected = {key: answer.tokens for key, answer in roomy.run(*requests).items()}
        assert {key: answer.tokens for key, answer in tight.run(*requests).items()} == expected
        assert tight.scheduler.totals.preemptions > 0
    finally:
        roomy.close()
        tight.close()


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_ranks_choose_under_masks_where_they_choose(
    plain: Served, model: Path, sibling: Callable[[str], ModuleType], tensor: int, stages: int
) -> None:
    threads = sibling("engine/threads.py")
    split = Served(
        model,
        stages - 1,
        make=lambda config: threads.ThreadedExecutor(config, threads.Layout(tensor, stages)),
        drafter=(drafter := HalfRight()),
        in_flight_per_sequence=1 if stages > 1 else None,
    )
    split.draft_always()
    greedy = ResolvedSampling()
    requests = [ask(1, sampling=greedy), ask(2, None, greedy, max_tokens=20), ask(3, sampling=greedy)]
    right = {key: each.tokens for key, each in plain.run(*requests).items()}
    try:
        for drafts in ({}, {tuple(request.spec.prompt.tolist()): right[request.spec.key] for request in requests}):
            drafter.answers = drafts
            answers = split.run(*requests)
            assert {key: each.tokens for key, each in answers.items()} == right
            assert max(answers[1].runs) > 1
    finally:
        split.close()
    assert split.speculation is not None
    assert split.speculation.totals["drafter"].accepted_tokens > 5


def test_a_grammar_that_is_wrong_refuses_its_own_request(plain: Served) -> None:
    answers = plain.run(ask(1, GuidedDecoding("regex", "(a", "guided_regex")), ask(2))
    refused = answers[1].refused
    assert refused is not None
    assert refused.error.field == "guided_regex"
    assert "unclosed group" in refused.error.message
    assert is_valid(plain.text(answers[2]))


def test_a_grammar_that_costs_too_much_on_the_way_ends_its_own_request(plain: Served) -> None:
    hostile = GuidedDecoding("regex", "x(a{1,500}){500}", "guided_regex")
    answers = plain.run(ask(1, hostile, max_tokens=100), ask(2))
    refused = answers[1].refused
    assert refused is not None
    assert (refused.error.field, refused.error.message) == (
        "guided_regex",
        "guided_regex: lexer error: too many expressions constructed",
    )
    assert plain.grammars.compile(hostile).exception() is None, "it was to compile"
    assert is_valid(plain.text(answers[2]))


def test_thinking_is_ended_at_its_limit(served: Served) -> None:
    end = served.ids(THINK_END)
    free = served.run(ask(1, None, max_tokens=20))[1].tokens
    for budget in (0, 1, 7):
        limited = served.run(ask(1, None, max_tokens=20, thinking=budget, thinking_end=end))[1].tokens
        assert limited[:budget] == free[:budget]
        assert limited[budget : budget + len(end)] == end
        assert limited.count(end[0]) >= 1


def test_thinking_that_ended_by_itself_is_not_ended_again(plain: Served) -> None:
    free = plain.run(ask(1, None, max_tokens=20))[1].tokens
    again = plain.run(ask(1, None, max_tokens=20, thinking=9, thinking_end=free[3:5]))[1].tokens
    assert again == free


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_grammar_begins_where_thinking_ended(plain: Served, logprobs: int | None) -> None:
    constraint = GUIDE._replace(after=THINK_END)
    sampling = WARM._replace(logprobs=logprobs)
    answer = plain.run(ask(1, constraint, sampling, thinking=5, thinking_end=plain.ids(THINK_END)))[1]
    thought, _, written = plain.text(answer).partition(THINK_END)
    assert thought == plain.tokenizer.decode(answer.tokens[:5])
    assert is_valid(written)


def test_answers_to_one_prompt_have_a_matcher_each(plain: Served) -> None:
    requests = [ask(key, sampling=WARM._replace(choice=key), prompt=[9, 9]) for key in range(6)]
    answers = plain.run(*requests)
    assert all(is_valid(plain.text(answer)) for answer in answers.values())
    assert len({tuple(answer.tokens) for answer in answers.values()}) > 1


def every_kind(served: Served) -> list[AddRequest]:
    """Requests under grammars and thinking budgets, and free ones."""
    end, tool = served.ids(THINK_END), {"triggers": ["x"], "structures": [{"begin": "x", "schema": SCHEMA, "end": "y"}]}
    thinking = {"thinking": 5, "thinking_end": end}
    letters = GuidedDecoding("regex", "[a-z ]{9}(hello|help me){2}[0-9]{3}")
    penalised = LogitsParams(1.2, 0.3, 0.1, ((9, 2.0),), min_tokens=7, stop_token_ids=(EOS,))
    return [
        ask(1),
        ask(2, sampling=ResolvedSampling()),
        ask(3, sampling=WARM._replace(logprobs=2)),
        ask(4, letters, WARM._replace(logits=penalised)),
        ask(5, GUIDE._replace(after=THINK_END), **thinking),
        ask(6, GUIDE._replace(after=THINK_END), WARM._replace(logprobs=1), **thinking),
        ask(7, None, **thinking, max_tokens=25),
        ask(8, None, ResolvedSampling(logprobs=0), **thinking, max_tokens=25),
        ask(9, GuidedDecoding("structural_tag", json.dumps(tool)), WARM._replace(temperature=3.0)),
        ask(10, GuidedDecoding("choice", '["aaaaaa", "aaaaab", "bbbbbb"]')),
        ask(11, None, max_tokens=25),
        ask(12, letters, max_tokens=17),
    ]


def reported(answer: Answer) -> list[list[int]]:
    return [logprob.ids for logprob in answer.logprobs if logprob is not None]


@pytest.mark.parametrize(
    "others",
    [{}, {"ahead": 1, "max_num_batched_tokens": 11}, {"blocks": 16}],
    ids=["plain", "ahead, few tokens a step", "preempted"],
)
def test_drafts_change_no_guided_text(plain: Served, model: Path, others: dict[str, Any]) -> None:
    """Nor where thinking ends, a grammar begins, or something is forced within what is accepted."""
    requests, drafter = every_kind(plain), HalfRight()
    without = plain.run(*requests)
    drafter.answers = {tuple(request.spec.prompt.tolist()): without[request.spec.key].tokens for request in requests}
    served = Served(model, drafter=drafter, **others)
    served.draft_always()
    try:
        answers = served.run(*requests)
    finally:
        served.close()
    for key, expected in without.items():
        assert answers[key].refused is None
        assert (answers[key].tokens, answers[key].reason) == (expected.tokens, expected.reason), key
        assert reported(answers[key]) == reported(expected)
    shorter = {key for key in without if len(answers[key].runs) < len(without[key].runs)}
    if not others:
        assert shorter >= without.keys() - {10}, "a choice is forced after its first token"
    assert served.speculation is not None
    totals = served.speculation.totals
    assert totals["drafter"].draft_tokens > totals["drafter"].accepted_tokens > 9
    assert totals[GRAMMAR].draft_tokens >= totals[GRAMMAR].accepted_tokens > 0 or others, "all but after a wrong one"


def test_a_grammar_is_compiled_once(plain: Served) -> None:
    constraint = GuidedDecoding("choice", '["once"]')
    compiled = plain.grammars.totals.compiled
    plain.run(*(ask(key, constraint) for key in range(3)))
    assert plain.grammars.totals.compiled == compiled + 1


def test_a_request_that_was_aborted_while_its_grammar_was_compiled_is_forgotten(plain: Served) -> None:
    from charonia.engine.core.messages import AbortRequests

    slow = GuidedDecoding("regex", "(a|b){2,7}c{1,90}")
    plain.core.inbox.accept(ask(77, slow))
    plain.core.inbox.accept(AbortRequests([77]))
    wait([plain.grammars.compile(slow)], 30)
    assert is_valid(plain.text(plain.run(ask(1))[1]))


@pytest.mark.parametrize(("method", "name"), [("draft_model", "draft"), ("eagle3", "eagle3")])
def test_models_draft_for_guided_sequences_too(root: Path, method: Any, name: str) -> None:
    """The demo's, for some that write JSON and some that write what they like, greedily and not. Blocks are such as
    kernels attend to: torch's last bits depend on how many tokens come at once."""
    demo = root / "examples/model_repository/demo/1"
    speculation = SpeculationConfig(method=method, model=str(root / "examples" / name))
    plain = Served(demo, block_size=16)
    drafted = Served(demo, drafter=ProposedDrafts(), drafts=speculation, block_size=16)
    drafted.draft_always()
    requests = [ask(key, GUIDE if key % 3 else None, WARM._replace(temperature=key % 2, seed=key)) for key in range(6)]
    try:
        expected, found = plain.run(*requests), drafted.run(*requests)
        assert {key: answer.tokens for key, answer in found.items()} == {
            key: answer.tokens for key, answer in expected.items()
        }
        assert all(is_valid(drafted.text(found[key])) for key in found if key % 3)
        assert max(max(found[key].runs) for key in found if key % 3) > 1, "no draft was right under a grammar"
    finally:
        plain.close()
        drafted.close()
