"""Grammars compiled beside the loop: each once, errors too, and no more kept than may be."""

import threading
from concurrent.futures import wait

import pytest

from charonia.core.errors import InvalidArgument, NotFound
from charonia.core.request import GuidedDecoding
from charonia.engine.core.grammar_pool import GrammarCacheLimits, GrammarPool
from charonia.engine.grammars.backend import CompiledGrammar, GrammarMatcher


class Compiled:
    warnings = ()

    def __init__(self, size: int) -> None:
        self.size = size

    def matcher(self) -> GrammarMatcher:
        raise NotImplementedError


class Counting:
    """A backend: a grammar takes as many bytes as its text; one of "!" is refused."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, constraint: GuidedDecoding) -> CompiledGrammar:
        assert self.gate.wait(30)
        self.compiled.append(constraint.text)
        if constraint.text == "!":
            raise InvalidArgument("no", field=constraint.parameter)
        return Compiled(len(constraint.text))


def ask(pool: GrammarPool, *texts: str) -> None:
    for text in texts:
        wait([pool.compile(GuidedDecoding("regex", text))], 30)


def test_a_grammar_is_compiled_once_however_many_ask_while_it_is() -> None:
    backend = Counting()
    pool = GrammarPool(lambda: backend)
    backend.gate.clear()
    several = [pool.compile(GuidedDecoding("regex", "a")) for _ in range(5)]
    backend.gate.set()
    assert len({id(each.result(30)) for each in several}) == 1
    assert backend.compiled == ["a"]
    assert (pool.totals.compiled, pool.totals.hits) == (1, 4)
    pool.close()


def test_what_was_refused_is_known_too() -> None:
    backend = Counting()
    pool = GrammarPool(lambda: backend)
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            pool.compile(GuidedDecoding("regex", "!")).result(30)
    assert backend.compiled == ["!"]
    pool.close()


@pytest.mark.parametrize("limits", [GrammarCacheLimits(entries=2), GrammarCacheLimits(bytes=7)])
def test_those_not_asked_for_longest_are_forgotten(limits: GrammarCacheLimits) -> None:
    backend = Counting()
    pool = GrammarPool(lambda: backend, limits)
    ask(pool, "aaa", "bbb", "aaa", "ccc", "aaa", "bbb")
    assert backend.compiled == ["aaa", "bbb", "ccc", "bbb"]
    ask(pool, "!", "ddd")
    assert pool._bytes == sum(len(constraint.text) for constraint in pool._known if constraint.text != "!") <= 7
    pool.close()


def test_a_tokenizer_that_cannot_be_read_refuses_each_request_by_its_parameter() -> None:
    def fail() -> Counting:
        raise NotFound("no tokenizer.json")

    pool = GrammarPool(fail)
    pool.prepare()
    for parameter in ("guided_json", "response_format"):
        with pytest.raises(InvalidArgument, match=r"no tokenizer\.json") as refused:
            pool.compile(GuidedDecoding("json", parameter=parameter)).result(30)
        assert refused.value.field == parameter
    pool.close()
