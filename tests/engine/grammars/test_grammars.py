"""Constraints of every kind, compiled for a vocabulary and followed token by token."""

import json
import re
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from charonia.core.errors import InvalidArgument
from charonia.core.request import GrammarKind, GuidedDecoding
from charonia.engine.grammars.backend import GrammarLimits
from charonia.engine.grammars.lark_rules import MAX_WHITESPACE
from charonia.engine.grammars.llguidance_backend import LLGuidanceBackend, check_grammar
from charonia.engine.grammars.vocabulary import Vocabulary, build_vocabulary

from .conftest import SIZE, Follow, allowed_tokens

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)
OLD_TAG = {"structures": [{"begin": "<f=a>", "schema": json.loads(SCHEMA), "end": "</f>"}], "triggers": ["<f="]}


def new_tag(**part: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": part})


TOOLS = new_tag(
    type="triggered_tags",
    triggers=["[TOOL]"],
    tags=[{"begin": "[TOOL]a", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "."}],
    at_least_one=True,
    stop_after_first=True,
)
PARTS = new_tag(
    type="sequence",
    elements=[
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
        {"type": "or", "elements": [{"type": "const_string", "value": "A"}, {"type": "regex", "pattern": "b+/"}]},
        {"type": "grammar", "grammar": 'root ::= "c"'},
    ],
)
LIST = new_tag(
    type="tags_with_separator",
    separator=",",
    tags=[{"begin": "<", "content": {"type": "regex", "pattern": "[a-z]+"}, "end": ">"}],
    at_least_one=True,
)

ACCEPTED: list[tuple[GrammarKind, str, str, str]] = [
    ("json", "", "", '[1, {"a": null}]'),
    ("json_schema", SCHEMA, "", '{"name": "grüße", "n": -3}'),
    ("json_schema", "true", "", "[]"),
    ("regex", r"\d{3}/[a-z]+\"", "", '123/abc"'),
    ("choice", '["yes", "no", "no \\"東\\""]', "", 'no "東"'),
    ("choice", '["[TOOL]a", "b</think>c"]', "", "b</think>c"),
    ("choice", '["[TOOL]a", "ab", "b"]', "", "ab"),
    ("choice", json.dumps(["\x7f\x00", "[TOOL]"]), "", "\x7f\x00"),
    ("choice", json.dumps(["[TOOL]\x7f"]), "", "[TOOL]\x7f"),
    ("choice", json.dumps([f"label {number}" for number in range(5000)]), "", "label 4321"),
    ("ebnf_grammar", 'root ::= "a" digit+\ndigit ::= [0-9]', "", "a12"),
    ("ebnf_grammar", 'start: "a" /[0-9]+/', "", "a12"),
    ("lark", f"start: <|user|> %json {SCHEMA} <|end|>", "", '<|user|>{"name": "", "n": 0}<|end|>'),
    ("structural_tag", json.dumps(OLD_TAG), "", 'text <f=a>{"name": "x", "n": 1}</f> and <f'),
    ("structural_tag", TOOLS, "", "[TOOL]a12."),
    ("structural_tag", PARTS, "", "<t>a < b\n</t>bb/c"),
    ("structural_tag", LIST, "", "<a>,<bc>"),
    ("json_schema", SCHEMA, "</think>", 'a {"b" c</think>{"name": "x", "n": 1}'),
    ("json_schema", SCHEMA, "</t>", 'a </u> c</t>{"name": "x", "n": 1}'),
    (
        "choice",
        '["yes"]',
        "<|channel|>final<|message|>",
        "<|channel|>it<|message|>[TOOL]b<|channel|>final<|message|>yes",
    ),
]
REFUSED: list[tuple[GrammarKind, str, str]] = [
    ("json_schema", "{", "not JSON"),
    ("json_schema", "[" * 100_000, "nested too deeply"),
    ("json_schema", '{"type": "what"}', "what"),
    ("json_schema", "false", "nsatisfiable"),
    ("json_schema", '{"$ref": "http://example.com/s.json"}', "http://example.com"),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ("regex", "(a", "unclosed group"),
    ("choice", "[]", "at least one string"),
    ("choice", '["a", 1]', "at least one string"),
    ("ebnf_grammar", "root ::= " + "(" * 5000, "nested too deeply"),
    ("lark", "start: nothing_of_the_kind", "nothing_of_the_kind"),
    ("structural_tag", "3", "an object"),
    ("structural_tag", '{"structures": []}', "'triggers'"),
    ("structural_tag", '{"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": ["<b"]}', "no trigger"),
    ("structural_tag", '{"format": {"type": "dance"}}', "'dance'"),
    ("regex", "a" * (1 << 19), "characters"),
]


@pytest.mark.parametrize(("kind", "text", "after", "sample"), ACCEPTED)
def test_each_kind_lets_its_texts_pass(follow: Follow, kind: GrammarKind, text: str, after: str, sample: str) -> None:
    passed, matcher = follow(GuidedDecoding(kind, text, after=after), sample)
    assert passed == sample
    assert matcher.complete
    assert 0 in allowed_tokens(matcher)


@pytest.mark.parametrize(("kind", "text", "after", "sample"), ACCEPTED)
def test_no_text_may_end_before_it_is_complete(
    follow: Follow, kind: GrammarKind, text: str, after: str, sample: str
) -> None:
    if kind == "structural_tag" and not after:
        return  # free text, which may end anywhere
    _, matcher = follow(GuidedDecoding(kind, text, after=after), sample[: len(after) or 1])
    assert not matcher.complete
    assert not {0, 1} & allowed_tokens(matcher)


@pytest.mark.parametrize(("kind", "text", "words"), REFUSED)
def test_what_is_wrong_is_refused_by_name(backend: LLGuidanceBackend, kind: GrammarKind, text: str, words: str) -> None:
    for compile_it in (backend.compile, check_grammar):
        with pytest.raises(InvalidArgument, match=words) as refused:
            compile_it(GuidedDecoding(kind, text, "guided_this"))
        assert refused.value.field == "guided_this"
        assert refused.value.message.startswith("guided_this: ")
        assert len(refused.value.message) < 1000


def test_a_special_token_that_is_not_there_is_known_to_the_vocabulary_alone(backend: LLGuidanceBackend) -> None:
    constraint = GuidedDecoding("lark", 'start: <|nothing|> "a"')
    assert check_grammar(constraint) == ()
    with pytest.raises(InvalidArgument, match="nothing"):
        backend.compile(constraint)


def test_what_cannot_be_enforced_is_named(backend: LLGuidanceBackend) -> None:
    constraint = GuidedDecoding("json_schema", '{"type": "array", "uniqueItems": true, "title": "x", "default": []}')
    assert len(backend.compile(constraint).warnings) == 1
    assert "uniqueItems" in backend.compile(constraint).warnings[0]
    assert check_grammar(constraint) == backend.compile(constraint).warnings
    with pytest.raises(InvalidArgument, match="uniqueItems"):
        check_grammar(constraint._replace(strict=True))


@pytest.mark.parametrize(
    "constraint",
    [GuidedDecoding("json"), GuidedDecoding("json_schema", "{}"), GuidedDecoding("lark", "start: %json {}")],
    ids=["json", "json_schema", "lark"],
)
def test_white_space_in_json_does_not_run_away(follow: Follow, constraint: GuidedDecoding) -> None:
    most = "[" + "\n" * MAX_WHITESPACE
    assert follow(constraint, most + "\n")[0] == most
    assert follow(constraint, most + "1]")[0] == most + "1]"


def test_a_schema_cannot_lift_the_cap_itself(follow: Follow) -> None:
    schema = '{"x-guidance": {"whitespace_pattern": " *"}}'
    assert len(follow(GuidedDecoding("json_schema", schema), "[" + " " * 20)[0]) <= 1 + MAX_WHITESPACE


def test_text_that_spells_a_special_token_is_text(follow: Follow, tokenizer: Tokenizer) -> None:
    matcher = follow(GuidedDecoding("json_schema", '{"const": "<|end|>"}'), "")[1]
    text = ""
    while not matcher.finished:
        token = Random(len(text)).choice(sorted(allowed_tokens(matcher) - {0, 1}))
        assert matcher.accept([token])
        text += tokenizer.decode([token], skip_special_tokens=True)
    assert text == '"<|end|>"'


def test_only_tokens_that_exist_are_allowed(follow: Follow, vocabulary: Vocabulary) -> None:
    _, matcher = follow(GuidedDecoding("json", after="</think>"), "free")
    assert max(allowed_tokens(matcher)) < len(vocabulary.tokens) == SIZE
    assert all(vocabulary.tokens[token] for token in allowed_tokens(matcher))


def test_what_opens_the_constrained_text_is_all_that_may_come_before_it(follow: Follow) -> None:
    opened = GuidedDecoding("choice", '["yes"]', after="</think>", opening="<|user|><|message|>")
    passed, matcher = follow(opened, "hm<|channel|></think><|user|><|message|>yes")
    assert passed.endswith("yes")
    assert matcher.complete
    for text in ("hm</think>yes", "hm</think><|channel|>", "hm</think><|user|>yes"):
        assert follow(opened, text)[0] in ("hm</think>", "hm</think><|user|>")
    assert follow(GuidedDecoding("choice", '["yes"]', opening="<|user|>"), "<|user|>yes")[1].complete


@pytest.mark.parametrize("after", ["", "</think>", "</t>"])
def test_a_matcher_goes_back(follow: Follow, tokenizer: Tokenizer, after: str) -> None:
    text = f"ab{after}" * bool(after) + "yes"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    _, matcher = follow(GuidedDecoding("choice", '["yes", "no"]', after=after), "")
    masks = []
    for token in ids:
        masks.append(allowed_tokens(matcher))
        assert matcher.accept([token])
    for back in range(1, len(ids) + 1):
        matcher.rollback(back)
        assert allowed_tokens(matcher) == masks[-back]
        assert matcher.accept(ids[-back:])
    assert matcher.finished


def test_matchers_of_one_grammar_do_not_share_their_place(backend: LLGuidanceBackend, tokenizer: Tokenizer) -> None:
    grammar = backend.compile(GuidedDecoding("choice", '["ab", "cd"]'))
    one, other = grammar.matcher(), grammar.matcher()
    assert one.accept(tokenizer.encode("a").ids)
    assert other.accept(tokenizer.encode("c").ids)
    assert allowed_tokens(one) == set(tokenizer.encode("b").ids)
    assert allowed_tokens(other) == set(tokenizer.encode("d").ids)


def test_what_has_to_come_is_forced(follow: Follow, tokenizer: Tokenizer) -> None:
    _, matcher = follow(GuidedDecoding("lark", 'start: "name" /[0-9]/'), "")
    assert tokenizer.decode(matcher.forced_tokens()) == "name"
    assert follow(GuidedDecoding("json"), "[1")[1].forced_tokens() == []


def test_a_grammar_that_costs_too_much_ends_with_words(vocabulary: Vocabulary) -> None:
    backend = LLGuidanceBackend(vocabulary, GrammarLimits(step_fuel=300))
    with pytest.raises(InvalidArgument, match=r"guided_decoding_guide_type: .+"):
        backend.compile(GuidedDecoding("regex", "(.*a){50}.{1000}b"))


def test_a_matcher_that_failed_stays_so_and_raises_nothing(follow: Follow) -> None:
    _, matcher = follow(GuidedDecoding("choice", '["ab"]'), "")
    assert not matcher.accept([200])
    assert matcher.error
    assert allowed_tokens(matcher) <= {0, 1}
    assert matcher.forced_tokens() == []
    assert not matcher.accept([200])


def test_a_text_that_no_token_can_begin_is_refused() -> None:
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(100)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend = LLGuidanceBackend(build_vocabulary(words, 100, (90,)))
    assert backend.compile(GuidedDecoding("choice", '[" w7"]')).matcher().accept([7])
    with pytest.raises(InvalidArgument, match="no text can satisfy it"):
        backend.compile(GuidedDecoding("json"))


PIECES = st.sampled_from(["a", "[a-e]", "(ab|c)", "[0-9]", "é", r"\.", "東?", "(x|yz)*", "[^a]", "b{1,3}", "( w)+"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pattern=st.lists(PIECES, min_size=1, max_size=6).map("".join), seed=st.integers(0, 2**16))
def test_whatever_is_allowed_leads_to_a_text_that_fits(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, pattern: str, seed: int
) -> None:
    matcher, random, taken = backend.compile(GuidedDecoding("regex", pattern)).matcher(), Random(seed), list[int]()
    for _ in range(60):
        allowed = sorted(allowed_tokens(matcher) - {0, 1})
        forced = matcher.forced_tokens()
        assert not forced or forced[0] in allowed
        if matcher.finished or (matcher.complete and random.random() < 0.2):
            break
        taken.append(random.choice(allowed))
        assert matcher.accept(taken[-1:]), matcher.error
    if matcher.complete:
        assert re.fullmatch(pattern, tokenizer.decode(taken), re.DOTALL)
