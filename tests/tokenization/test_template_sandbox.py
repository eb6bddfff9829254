"""What templates may do, and what hostile ones do: each ends after a bounded number of steps."""

import tracemalloc
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import ChatMessage, Conversation
from charonia.tokenization.chat_template import ChatTemplate
from charonia.tokenization.template_sandbox import MAX_SOURCE, TemplateSandbox, metered
from charonia.tokenization.template_work import TemplateLimitExceeded, WorkMeter

WORK, TURNS = 100_000, 2_000
TEXT = "ab\tc " * 1000
BOMB = "{% set x = ['a'] %}" + "{% set x = [x, x] %}" * 40
NEST = "{% set ns = namespace(x=()) %}{% for i in range(1500) %}{% set ns.x = (ns.x,) %}{% endfor %}"
NEST_90 = "{% set ns = namespace(x=[1]) %}{% for i in range(90) %}{% set ns.x = [ns.x] %}{% endfor %}"
ONE_HASH = "{% set numbers = range(0, (2 ** 61 - 1) * 9999, 2 ** 61 - 1) %}"
CHAIN = "{% set ns = namespace(x=[1]) %}{% for i in range(1500) %}{% set ns.x = ns.x | map('string') %}{% endfor %}"


def render(source: str, work: int = WORK, turns: int = TURNS, **variables: Any) -> str:
    with metered(WorkMeter(work, turns)):
        return TemplateSandbox().compiled(source).render(variables)


HOSTILE = {
    # operators
    "text times": "{{ 'x' * 10 ** 10 }}",
    "times text": "{{ 10 ** 10 * 'x' }}",
    "list times": "{{ ([0] * 10 ** 8) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "products": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a long number": "{{ ('f' * 5000) | int(base=16) * 2 }}",
    "doubling": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "tildes": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "printf": "{{ '%999999999d' % 1 }}",
    "printf, digits": "{{ '%.999999999f' % 1 }}",
    "printf, by name": "{{ '%((a))999999999d' % {'(a)': 1} }}",
    "printf, a star": "{{ '%*d' % (999999999, 1) }}",
    "printf, often": "{{ ('%(a)s' * 1000) % {'a': text} }}",
    # what is written
    "a bomb": BOMB + "{{ x }}",
    "a bomb in JSON": BOMB + "{{ x | tojson }}",
    "a bomb, joined": BOMB + "{{ x | join }}",
    "a bomb, compared": BOMB + "{{ x == x }}",
    "a bomb in a test": BOMB + "{{ x is equalto x }}",
    "a bomb that is counted": BOMB + "{{ [x].count(x) }}",
    "a bomb that changes": BOMB + "{% for i in [1, 2] %}{{ loop.changed(x) }}{% endfor %}",
    "a bomb in a namespace": BOMB + "{{ namespace(x=x) }}",
    "a bomb, sorted": BOMB + "{{ [x, x] | sort }}",
    "a bomb, by tilde": BOMB + "{{ 'a' ~ x }}",
    "a bomb by printf": BOMB + "{{ '%s' % x }}",
    "a bomb by format": BOMB + "{{ '{}'.format(x) }}",
    "a bomb that is a form": BOMB + "{{ x | format }}",
    "a bomb that is replaced": BOMB + "{{ x | replace('a', 'b') }}",
    "a bomb that is looked for": BOMB + "{{ text | replace(x, 'b') }}",
    "a bomb between": BOMB + "{{ [1, 2] | join(x) }}",
    "a bomb whose words count": BOMB + "{{ x | wordcount }}",
    "a bomb for a default": BOMB + "{{ nothing | default(x) }}",
    "lists that are replaced": "{{ (['a'] * 500) | replace('', text) }}",
    "a bomb as text": BOMB + "{{ x | string | length }}",
    "a bomb among values": BOMB + "{{ {'a': x}.values() }}",
    "text between turns": "{% for i in range(1500) %}" + "x" * 500 + "{% endfor %}",
    "text in a block": "{% set x %}{% for i in range(1500) %}" + "x" * 500 + "{% endfor %}{% endset %}",
    # turns
    "loops": "{% for i in range(99999) %}{% endfor %}",
    "loops in loops": "{% for i in range(99) %}{% for j in range(99) %}{% endfor %}{% endfor %}",
    "loops that find nothing": "{% for i in range(99) %}{% for j in range(99) if false %}{% endfor %}{% endfor %}",
    "much between turns": "{% for i in range(1500) %}" + "{{ i }}" * 200 + "{% endfor %}",
    "recursion": "{% for i in range(4) recursive %}{{ loop(range(4)) if loop.depth < 9 }}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "blocks": "{% block b %}{% endblock %}{% for i in range(1500) %}{{ self.b() }}{% endfor %}",
    "filters": "{{ range(99999) | list | map('string') | list | map('upper') | list | length }}",
    # filters
    "center": "{{ 'x' | center(999999999) }}",
    "center, mapped": "{{ ['x'] | map('center', 999999999) | list }}",
    "indent": "{{ ('\\n' * 999) | indent(9999) }}",
    "indent by text": "{{ ('\\n' * 999) | indent(text) }}",
    "format": "{{ '%999999999d' | format(1) }}",
    "join": "{{ range(999) | join(text) }}",
    "replace": "{{ text | replace('', text) }}",
    "round": "{{ 1.5 | round(999999999, 'ceil') }}",
    "batch": "{{ [1] | batch(999999999, 0) | list }}",
    "slice": "{{ [1] | slice(999999999) | list }}",
    "JSON": "{{ [[[1, 2], 3]] | tojson(indent=999999999) }}",
    "sums of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "trim": "{{ (text * 9) | trim(text * 9) }}",
    # methods
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "expandtabs": "{{ text.expandtabs(999999) }}",
    "a method's join": "{{ text.join(['x'] * 999) }}",
    "a method's replace": "{{ text.replace('', text) }}",
    "a method's format": "{{ '{:999999999}'.format(1) }}",
    "a format in a format": "{{ '{:{}}'.format(1, 999999999) }}",
    "a safe format": "{{ ('{:999999999}' | safe).format(1) }}",
    "split": "{{ (text * 9).split() }}",
    "strip": "{{ (text * 9).strip(text * 9) }}",
    "to_bytes": "{{ (1).to_bytes(999999999, 'big') }}",
    "encode": "{{ text.encode('punycode') }}",
    "translate": "{{ text.translate({97: text}) }}",
    "rfind": "{{ ('a' * 5000).rfind('ab' + 'a' * 5000) }}",
    "rsplit": "{{ ('a' * 5000).rsplit('ab' + 'a' * 5000) }}",
    "replace by name": "{{ (text * 9) | replace(new=text, old='') | length }}",
    "a split by name": "{{ ('a' * 5000).split(maxsplit=9999, sep='a') | length }}",
    "JSON in text": NEST_90 + "{{ ns.x | tojson(indent=text) }}",
    "a text that is rounded": "{{ 'x' | round(9, 'ceil') }}",
    "a list that is trimmed": "{{ ['a' * 9000] | trim(text) }}",
    # what is done for each element, by as much as an argument is long
    "each character's attribute": "{{ text | selectattr(text) }}",
    "no character's attribute": "{{ text | rejectattr(text) }}",
    "each character's element": "{{ text | selectattr(9) }}",
    "an attribute of each": "{{ text | map(attribute=text) }}",
    "attributes of attributes": "{{ range(99) | map(attribute='.' * 99, default='x') | list | length }}",
    "attributes that are grouped": "{{ text | groupby(text) }}",
    "groups of what has none": "{{ range(99) | groupby('x', default=text) | length }}",
    "attributes that are sorted": "{{ range(99) | sort(attribute=text) }}",
    "attributes that differ": "{{ range(99) | unique(attribute=text) }}",
    "the smallest attribute": "{{ range(99) | min(attribute=text) }}",
    "attributes that are added": "{{ range(99) | sum(text) }}",
    "attributes that are joined": "{{ range(99) | join('', text) }}",
    "a test of each": "{{ text | select('eq', 'x') }}",
    "a test that none passes": "{{ text | reject('defined') }}",
    "names of attributes": "{% for i in range(500) %}{% set x = 'x'[text] %}{% endfor %}",
    "a text to format in a test": "{{ '%999999999d' is odd }}",
    "formatting by division": "{{ '%999999999d' is divisibleby(1) }}",
    "differences of keys": "{% for i in range(500) %}{% set x = {}.keys() - text %}{% endfor %}",
    "a loop as a list": "{% for i in text %}{{ loop | reject }}{% endfor %}",
    "a loop that is joined": "{% for i in text %}{{ text.join(loop) }}{% endfor %}",
    "arguments from a text": "{% macro m() %}{% endmacro %}{{ m(*text) }}",
    "a filter's from a text": "{{ 'x' | format(*text) }}",
    # numbers that have one hash
    "unique numbers": ONE_HASH + "{{ numbers | unique | list | length }}",
    "keys that are numbers": ONE_HASH + "{{ dict.fromkeys(numbers) | length }}",
    "pairs of numbers": ONE_HASH + "{{ dict(numbers | batch(2)) | length }}",
    "differences of numbers": ONE_HASH + "{{ {}.keys() - numbers }}",
    "numbers that are looked up": "{% set d = dict.fromkeys(range(999)) %}"
    "{% for i in range(999) %}{{ d[i] }}{{ d.get(i) }}{% endfor %}",
    "a dictionary in a loop": "{% for i in range(99) %}{% set x = {" + "1: 1, " * 200 + "} %}{% endfor %}",
    # what would end the process
    "a deep value in a test": NEST + "{{ ns.x is filter }}",
    "deep keys": NEST + "{{ {ns.x: 1} }}",
    "a deep item": NEST + "{{ {}[ns.x] }}",
    "deep and unique": NEST + "{{ [ns.x] | unique | list }}",
    "a deep key that is got": NEST + "{{ {}.get(ns.x) }}",
    "deep in a dictionary": NEST + "{{ ns.x in {} }}",
    "a chain of iterators": CHAIN + CHAIN + "{{ ns.x | list }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_stopped_before_it_takes_memory(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitExceeded):
            render(source, text=TEXT)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{{ 3 * 'ab' ~ (1 + 2) }}{{ 2 ** 10 }}{{ -7 // 2 }}{{ 7 % 4 }}{{ '%s-%05.1f' % ('a', 2) }}",
            "ababab31024-43a-002.0",
        ),
        ("{{ messages[1:] | map(attribute='role') | join(', ') }}", "user, tool"),
        ("{{ messages | selectattr('role', 'equalto', 'tool') | list | length }}", "1"),
        ("{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }} {% endfor %}", "1/2 2/2 "),
        ("{% for m in messages[::-1] %}{{ m.role[0] }}{% if loop.last %}.{% endif %}{% endfor %}", "tus."),
        ("{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "12"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro m(x, y=2) %}[{{ x }}{{ y }}{{ caller() if caller }}]{% endmacro %}{{ m(1) }}", "[12]"),
        ("{% macro m() %}<{{ caller(1) }}>{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}", "<1>"),
        ("{{ 'a</think>b'.split('</think>')[-1].strip('b').strip() or 'none' }}", "none"),
        ("{{ '{}-{:>3}'.format('a', 1) }}{{ 'Ab'.upper().startswith('AB') }}{{ ' a ' | trim }}", "a-  1Truea"),
        (
            "{{ {'b': 1, 'a': [1, 'x']} | dictsort }}{{ {'a': 1}.items() | list }}",
            "[('a', [1, 'x']), ('b', 1)][('a', 1)]",
        ),
        ("{{ [3, 1, 2] | sort | first }}{{ [1, 2] | sum }}{{ [1, 1] | unique | list }}{{ 1 < 2 <= 2 }}", "13[1]True"),
        ("{{ 'x\\ny' | indent(2, true) }}{{ nothing | default('d') }}{{ none is none }}", "  x\n  ydTrue"),
        (
            "{{ 'a-b' | replace(new='+', old='-') }}{{ 'aXb' | replace('X', new='') }}{{ 2.567 | round(1, 'floor') }}",
            "a+bab2.5",
        ),
        (
            "{{ messages | map(attribute='name', default='?') | join }}{{ 4 is divisibleby 2 }}{{ 3 is odd }}",
            "???TrueTrue",
        ),
        (
            "{% macro m(x, y=0) %}{{ x }}{{ y }}{% endmacro %}{{ m(*[1], **{'y': 2}) }}{{ {1: 'a'}[1] }}",
            "12a",
        ),
        ("{% filter upper %}a{% endfilter %}{% set x %}b{% endset %}{{ x }}{{ 'a' in 'cat' }}", "AbTrue"),
    ],
)
def test_what_templates_do_every_day(source: str, text: str) -> None:
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "tool")]
    assert render(source, messages=messages) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ a }}" * (MAX_SOURCE // 7 + 1),
        "{{ " * 20_000,
        "{{ " + "(" * 60_000,
        "{{ " + "not " * 15_000 + "a }}",
        "{{ a" + "+a" * 30_000 + " }}",
        "{{ a" + ".a" * 30_000 + " }}",
        "{{ a" + "|e" * 30_000 + " }}",
        "{% if a %}" * 5_000 + "{% endif %}" * 500,
        "{% for a in a %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "9" * 10_000 + " }}",
        "{{ x | urlize }}",
    ],
)
def test_what_cannot_be_compiled_is_the_templates_fault(source: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^the test's chat template does not compile: "):
        ChatTemplate(source, {}, "the test's")


def test_nothing_is_computed_ahead() -> None:
    TemplateSandbox().compiled("{{ 'x' | center(999999999) }}{{ 'x' ~ 'y' * 10 ** 10 }}{% if 9 ** 9 ** 9 %}{% endif %}")


def test_a_conversation_pays_for_itself_and_errors_name_the_template() -> None:
    chat = Conversation((ChatMessage("user", "x" * 60_000_000),))
    template = ChatTemplate("{{ messages[0].content | trim }}{{ messages[0].content[1:] | length }}", {})
    assert len(template.render(chat)) == 60_000_000 + len("59999999")
    with pytest.raises(InvalidArgument, match=r"^the given chat template does more than it may: it") as refusal:
        ChatTemplate("{{ messages[0].content * 10 }}", {}, "the given", "chat_template").render(chat)
    assert refusal.value.field == "chat_template"
