"""Grammars of characters: whatever text one describes passes the library's greedy lexer, and may end where it ends."""

import sys
from collections.abc import Mapping
from random import Random

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import GuidedDecoding
from charonia.engine.grammars import lexeme_places, lexemes
from charonia.engine.grammars.constraint_check import checking_backend
from charonia.engine.grammars.gbnf import Choice, Concatenation, Expression, Letter, Reference, Text, read_gbnf
from charonia.engine.grammars.lexeme_places import first_bytes, part_ranges
from charonia.engine.grammars.lexemes import write_rules

from .conftest import Follow

_BACKEND = checking_backend({})

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws   # digits
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
LISTS = 'root ::= "[" (root | words "end") ("," root)* "]"\nwords ::= [a-z \\n]*'


def doubled(first: str, levels: int = 38, more: str = "") -> list[str]:
    """Rules of which each has the one before twice."""
    return [f"a0 ::= {first}", *(f"a{level + 1} ::= a{level} a{level} {more}" for level in range(levels))]


def accepts(grammar: str, text: str) -> bool:
    matcher = _BACKEND.compile(GuidedDecoding("ebnf_grammar", grammar)).matcher()
    return matcher.accept(list(text.encode())) and matcher.complete


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (ARITHMETIC, "a=1\n"),
        (ARITHMETIC, "a+b*(c-12)=17\n\n \nalpha +beta /3 = gamma\n"),
        (JSON, '{"a": [1, -2.5e3, true ],\n\t"\\u00e9 grüße": {"b":"c"} }\n  '),
        (LISTS, "[[a wendend],[the end],[end]]"),
        ('root ::= words "done"\nwords ::= [a-z ]+', "all done"),
        ('root ::= words "done"\nwords ::= [a-z ]+', "donedone"),
        ('root ::= "Reason: " thought "Answer: " [0-9]+\nthought ::= [^0-9]+', "Reason: no Answer: yet Answer: 12"),
        ('root ::= "a" root "a" | [a-z]', "aaaaa"),
        ('root ::= key ("=" root)?\nkey ::= "if" | [a-z]+ | "i" "f" "x"?', "ifx=iffy=if"),
        ('root ::= [é東] root | "é"', "é東éé"),
    ],
)
def test_a_text_of_the_grammar_passes_and_may_end(follow: Follow, grammar: str, text: str) -> None:
    passed, matcher = follow(GuidedDecoding("ebnf_grammar", grammar), text)
    assert passed == text
    assert matcher.complete
    assert not accepts(grammar, text + "?")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a"{2}', ["aa"], ["a", "aaa"]),
        ('root ::= "a"{2,} root?', ["aa", "aaaaa"], ["a"]),
        ('root ::= ("ab"{1,2} root?) {1,1}', ["ab", "abab", "ababab"], ["", "a", "abb"]),
        ('root ::= "a"{0} "b"', ["b"], ["ab", ""]),
        ('root ::= "a" | | "b"', ["", "a", "b"], ["ab"]),
        ('root ::= ""', [""], ["a"]),
        (r'root ::= "\x41\u00e9\U0001F600\"\\\t" [\]\[\-^]', ['Aé😀"\\\t]', 'Aé😀"\\\t-'], ["x"]),
        (r'root ::= "/%json {" [^^/] [a-] [-z]', ["/%json {xa-", "/%json {\n-z"], ["/%json {^a-"]),
        ("root ::= start\nstart ::= [ab]", ["a"], [""]),
        ("root ::= .", ["\n", "東", "a"], ["", "ab"]),
        ("root ::= one-Two\r\none-Two ::=\n  [a-c] # a comment: ]\n  | (\n  [x]\n)\n", ["a", "x"], ["d"]),
        ("a ::= root\nroot ::= [0-9]\nroot ::= [a]", ["a"], ["0"]),
        ("root ::= x\nx ::= x{2,} | x* | x{0,3} [a]\nunneeded ::= unneeded", ["", "a", "aa"], ["b"]),
        ("\n".join((*doubled('""'), "root ::= a38 [a]")), ["a"], ["", "aa"]),
    ],
)
def test_what_may_be_written(grammar: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "no rule 'root'"),
        ('rot ::= "a"', "no rule 'root'"),
        ("root ::= [a]\n  | other\n", "line 2, before 'other.*there is no rule 'other'"),
        ("root ::= [a]\n)", r"line 2, before '\)': there should be a rule"),
        ('root ::= "a', 'line 1, at its end: " is missing'),
        ("root ::= (", r"'\)' is missing"),
        (r'root ::= "\q"', "no such escape"),
        (r'root ::= "\ud800"', "no such character"),
        ("root ::= [z-a]", "goes backwards"),
        ("root ::= []", "no character"),
        ("root ::= [a]{2,1}", "numbers rise"),
        ("root ::= [a]{99999}", "numbers rise"),
        ("root ::= [a]{,2}", "a repetition is"),
        ("root ::= [a] | x\nx ::= x{2,}", "line 2, before 'x ::= x.*no text can satisfy rule 'x'"),
        ("root ::= root", "no text can satisfy rule 'root'"),
        ('root ::= [a] | x\nx ::= "b" (y | "" x)\ny ::= [c]? x+', "line 2, .*no text can satisfy rule 'x'"),
    ],
)
def test_what_is_no_gbnf_is_refused_with_its_place(grammar: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_gbnf(grammar)


def random_part(random: Random, depth: int, names: list[str]) -> str:
    kind = random.random()
    if depth == 0 or kind < 0.35:
        return random.choice([*names, '"a"', '"b"', '"ab"', '"é"', "[ab]", "[^a]", '""', ".", '"aab"'])
    inner = [random_part(random, depth - 1, names) for _ in range(random.randint(2, 3))]
    if kind < 0.8:
        return f"({(' ' if kind < 0.6 else ' | ').join(inner)})"
    return f"({inner[0]}){random.choice(['*', '+', '?', '{2}', '{1,2}', '{2,}'])}"


Spans = set[tuple[int, int]]


def spans(part: Expression, text: str, known: Mapping[str, Spans]) -> Spans:
    """The pieces of a text that a part describes, by where they begin and end."""
    match part:
        case Letter(ranges):
            return {(at, at + 1) for at, x in enumerate(text) if any(low <= ord(x) <= high for low, high in ranges)}
        case Text(letters):
            return {(at, at + len(letters)) for at in range(len(text)) if text.startswith(letters, at)}
        case Reference(name):
            return known[name]
        case Choice(parts):
            return set[tuple[int, int]]().union(*(spans(element, text, known) for element in parts))
        case Concatenation(parts):
            found = {(at, at) for at in range(len(text) + 1)}
            for element in parts:
                found = joined(found, spans(element, text, known))
            return found
    once = spans(part.part, text, known)
    found = {(at, at) for at in range(len(text) + 1)}
    for _ in range(part.least):
        found = joined(found, once)
    for _ in range(len(text) + 1 if part.most is None else part.most - part.least):
        found |= joined(found, once)
    return found


def joined(these: Spans, those: Spans) -> Spans:
    return {(begin, end) for begin, middle in these for other, end in those if middle == other}


def describes(rules: Mapping[str, Expression], text: str) -> bool:
    known: dict[str, Spans] = {name: set() for name in rules}
    while True:
        more = {name: spans(rule, text, known) for name, rule in rules.items()}
        if more == known:
            return (0, len(text)) in known["root"]
        known = more


def check_random_grammars(random: Random, grammars: int) -> None:
    for _ in range(grammars):
        root, x = random_part(random, 3, ["x", "root"]), random_part(random, 2, ["root", "x"])
        grammar = f'root ::= {root} | "b"\nx ::= {x} | "a"'
        rules = read_gbnf(grammar)
        compiled = _BACKEND.compile(GuidedDecoding("ebnf_grammar", grammar))
        for _ in range(8):
            text = "".join(random.choice("abé") for _ in range(random.randint(0, 5)))
            matcher = compiled.matcher()
            passes = matcher.accept(list(text.encode())) and matcher.complete
            if "limit" not in matcher.error:
                assert passes == describes(rules, text), (grammar, text)


@pytest.mark.parametrize("seed", range(3))
def test_the_lexer_takes_exactly_the_texts_that_the_rules_describe(seed: int) -> None:
    check_random_grammars(Random(seed), 25)


def test_so_it_does_of_single_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexeme_places, "MOST_STEPS", 0)
    check_random_grammars(Random(9), 15)


@pytest.mark.parametrize(
    "rules",
    [
        doubled('""'),
        doubled('""', more='"x"'),
        doubled('"x"'),
        doubled('""?', more='| ""'),
        ['n ::= ""', *doubled(f'"x" {"n " * 500}')],
        doubled(f"[{''.join(chr(0x4E00 + 2 * number) for number in range(500))}]"),
    ],
    ids=lambda rules: str(rules)[:60],
)
def test_rules_that_need_others_twice_take_few_steps(rules: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexemes, "_MOST_STEPS", 1 << 12)
    monkeypatch.setattr(lexeme_places, "MOST_STEPS", 1 << 12)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        assert calls < 400_000

    read = read_gbnf("\n".join((*rules, "root ::= a38")))
    sys.setprofile(count)
    try:
        _, lines = write_rules(read, Reference("root"), "g", followed=False)
    finally:
        sys.setprofile(None)
    assert sum(map(len, lines)) < 400_000


def test_a_letter_of_more_ranges_than_a_lexeme_may_have() -> None:
    letters = "".join(chr(0x10000 + 2 * number) for number in range(lexemes._LARGEST.steps + 1))
    _, lines = write_rules(read_gbnf(f"root ::= [{letters}]"), Reference("root"), "g", followed=False)
    assert len(lines) == 2


def test_characters_are_parted_by_their_first_bytes() -> None:
    ranges = ((0x41, 0x43), (0x7F, 0x10FFFF))
    these, those = part_ranges(ranges, first_bytes(((0x42, 0x42), (0x6771, 0x6771), (0x1F600, 0x1F600))))
    assert these == ((0x42, 0x42), (0x6000, 0x6FFF), (0x10000, 0x3FFFF))
    assert those == ((0x41, 0x41), (0x43, 0x43), (0x7F, 0x5FFF), (0x7000, 0xFFFF), (0x40000, 0x10FFFF))


def test_a_recursive_grammar_of_many_words(follow: Follow) -> None:
    words = [f"word {number}" for number in range(2000)]
    choice = " | ".join(f'"{word}"' for word in words)
    text = "(word 17,(word 170),word 1999)"
    grammar = f'root ::= "(" (word | root) ("," (word | root))* ")"\nword ::= {choice}'
    assert follow(GuidedDecoding("ebnf_grammar", grammar), text)[0] == text
