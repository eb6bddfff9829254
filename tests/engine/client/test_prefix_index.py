"""What is remembered of prompts: beginnings that equal prompts share, within the size of the cache."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.engine.client.routing import NOT_CACHED, ExpectedPrefix, PrefixIndex, PromptPrefix, prompt_prefixes

EXTRAS = ("", "", "")


def held(index: PrefixIndex, prefixes: list[PromptPrefix]) -> int:
    """Tokens of the longest prefix that it has."""
    return index.longest_match(prefixes)[0]


prompts = st.integers(0, 2000).map(lambda length: list(range(7, 7 + length)))


@given(prompts)
def test_a_prompt_has_few_beginnings_and_the_last_is_all_of_it(prompt: list[int]) -> None:
    found = [prefix.tokens for prefix in prompt_prefixes(prompt, EXTRAS)]
    assert found == sorted(set(found))
    assert len(found) <= 30
    assert found[-1:] == ([len(prompt)] if prompt else [])


@given(prompts, st.integers(0, 2000), st.integers(1, 300))
def test_prompts_have_in_common_what_they_share(prompt: list[int], shared: int, more: int) -> None:
    shared = min(shared, len(prompt))
    other = prompt[:shared] + [1] * more
    mine, theirs = prompt_prefixes(prompt, EXTRAS), set(prompt_prefixes(other, EXTRAS))
    common = [each.tokens for each in mine if each in theirs]
    assert max(common, default=0) <= shared
    assert max(common, default=0) >= (0.8 * shared - 16 if shared >= 64 else shared - 15) or shared == len(prompt)
    assert common == [each.tokens for each in mine if each.tokens <= shared and each.tokens in common]


def test_what_sets_prompts_apart() -> None:
    """Adapter, tenant and salt part the cache, and a token each digest after it."""
    prompt = list(range(100))
    every = [prompt_prefixes(prompt, extras) for extras in [EXTRAS, ("a", "", ""), ("", "a", ""), ("", "", "a")]]
    digests = [each.digest for found in every for each in found]
    assert len(set(digests)) == len(digests)
    changed = prompt_prefixes([*prompt[:40], 1, *prompt[41:]], EXTRAS)
    assert [a.tokens for a, b in zip(every[0], changed, strict=True) if a == b] == [16, 32]


def test_it_knows_how_much_of_a_prompt_is_held() -> None:
    known, prompt = PrefixIndex(), list(range(200))
    assert held(known, prompt_prefixes(prompt, EXTRAS)) == 0
    known.insert(prompt_prefixes(prompt, EXTRAS), 10_000)
    assert held(known, prompt_prefixes(prompt, EXTRAS)) == 200
    assert held(known, prompt_prefixes([*prompt, 1, 2, 3], EXTRAS)) == 192
    assert held(known, prompt_prefixes([*prompt[:70], *prompt[:70]], EXTRAS)) == 64
    assert held(known, prompt_prefixes(prompt[1:], EXTRAS)) == 0
    known.clear()
    assert (held(known, prompt_prefixes(prompt, EXTRAS)), known.tokens, len(known)) == (0, 0, 0)


def test_the_end_of_the_oldest_prompt_goes_first() -> None:
    known = PrefixIndex()
    first, second = prompt_prefixes([1] * 128, EXTRAS), prompt_prefixes([2] * 128, EXTRAS)
    known.insert(first, 192)
    known.insert(second, 192)
    assert (held(known, first), held(known, second)) == (64, 128)
    known.insert(first, 192)
    assert (held(known, first), held(known, second)) == (128, 64)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400)), max_size=30), st.integers(0, 1000))
def test_it_holds_what_a_cache_of_that_size_would_and_no_more(asked: list[tuple[int, int]], capacity: int) -> None:
    known = PrefixIndex()
    for group, length in asked:
        beginnings = prompt_prefixes([group] * length, EXTRAS)
        known.insert(beginnings, capacity)
        assert known.tokens <= capacity
        assert len(known) <= capacity // 16
        _check_no_gap(known, beginnings)
    assert known.tokens == sum(tokens for tokens, _ in known._spans.values())


def _check_no_gap(known: PrefixIndex, beginnings: list[PromptPrefix]) -> None:
    """What is held of a prompt is held from its beginning."""
    longest = held(known, beginnings)
    assert all(held(known, [beginning]) == beginning.tokens for beginning in beginnings if beginning.tokens <= longest)


def test_any_token_id_has_a_place() -> None:
    assert array("i").itemsize == 4
    assert prompt_prefixes([0, 2**31 - 1], EXTRAS)[0].tokens == 2


def test_a_core_that_had_less_says_that_what_was_used_before_is_gone() -> None:
    index = PrefixIndex()
    texts = [prompt_prefixes([number] * 128, EXTRAS) for number in range(4)]
    for text in texts[:3]:
        index.insert(text, 10_000)
    expected = ExpectedPrefix(*index.longest_match(texts[1]))
    index.insert(texts[1], 10_000)  # it is sent there
    index.insert(texts[3], 10_000)
    index.correct(expected, 64)
    assert [held(index, text) for text in texts] == [128] * 4, "half of it was there"
    index.correct(expected, 48)
    assert [held(index, text) for text in texts] == [0, 128, 128, 128], "what was used later, or again, stays"
    assert index.tokens == 3 * 128
    index.correct(NOT_CACHED, 0)
    assert len(index) == 3 * len(texts[0])
