"""Malformed JSON bodies, each wrong in one way: as a tree, as a text, as bytes.

Every mutation draws from the `Random` that its caller gives: an equal one makes an equal body. Knows nothing of HTTP.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple, TypeAlias

Tree: TypeAlias = dict[str, Any]


class JsonLocation(NamedTuple):
    """One value in a tree: `holder[key]`."""

    holder: Any
    key: Any


STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, -0.0, "", "x", "\0", "1", "true", [], {}, [[]], [None], [{}], {"": ""}),
    *([1, "a"], ["a", "b"], [0, 1, 2], [[1, 2], [3]], {"type": "text"}, {"type": "text", "text": 1}, ["a"] * 65),
    *("<|endoftext|>", "\u202e", "\U0001f600" * 3, "e\u0301", "{{ 7 * 7 }}", "../../etc/passwd", "a\r\nb: c", "\ufffe"),
)
HUGE: tuple[Any, ...] = (
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400),
    *(-(2**31) - 1, -(2**63), -(2**63) - 1, 1e-320, 1e-9, 1e38, 1e39, 1e308, -1e308),
)
FIELDS = (
    *("max_tokens", "n", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "bad_words", "stop_token_ids"),
    *("logit_bias", "logprobs", "top_logprobs", "min_tokens", "repetition_penalty", "presence_penalty", "priority"),
    *("frequency_penalty", "timeout", "cache_salt", "stream", "stream_options", "ignore_eos", "model", "prompt", "id"),
    *("messages", "text_input", "input_ids", "sampling_parameters", "parameters", "tokens", "echo", "tools", "suffix"),
    *("response_format", "sequence_id", "sequence_end", "triton_final_response", "beam_width", "lora_name", "best_of"),
    *("return_log_probs", "return_output_ids", "exclude_input_in_output", "include_stop_str_in_output", "streaming"),
)


def json_locations(tree: Any) -> Iterator[JsonLocation]:
    """Every value below the root."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield JsonLocation(tree, key)
        yield from json_locations(value)


def _any_spot(random: Random, tree: Tree) -> JsonLocation:
    found = list(json_locations(tree))
    return random.choice(found) if found else JsonLocation(tree, "x")


# Of the tree


def wrong_type(random: Random, tree: Tree) -> None:
    holder, key = _any_spot(random, tree)
    holder[key] = deepcopy(random.choice(STRANGE))


def huge_number(random: Random, tree: Tree) -> None:
    holder, key = _any_spot(random, tree)
    holder[key] = random.choice(HUGE)


def missing_field(random: Random, tree: Tree) -> None:
    holder, key = _any_spot(random, tree)
    if tree:
        del holder[key]


def swapped_fields(random: Random, tree: Tree) -> None:
    (one, here), (other, there) = (random.choice([JsonLocation(tree, key) for key in tree]) for _ in range(2))
    one[here], other[there] = other[there], one[here]


def another_field(random: Random, tree: Tree) -> None:
    """A field that some endpoint knows, with a value that may even be valid."""
    tree[random.choice(FIELDS)] = deepcopy(random.choice(STRANGE + HUGE))


def unknown_field(random: Random, tree: Tree) -> None:
    tree[random.choice(("bogus", "", "max_token", "Model", "\0", "é", "__proto__", "x" * 10_000))] = random.random()


def deep_nesting(random: Random, tree: Tree) -> None:
    holder, key = _any_spot(random, tree)
    deep: Any = random.choice((0, "x", []))
    for _ in range(random.choice((20, 130, 254, 260, 900))):
        deep = {"x": deep} if random.random() < 0.5 else [deep]
    holder[key] = deep


def grown(random: Random, tree: Tree) -> None:
    """The body with one value repeated a thousand times."""
    holder, key = _any_spot(random, tree)
    value = holder.get(key, "") if isinstance(holder, dict) else holder[key]
    times = random.choice((100, 1000))
    holder[key] = value * times if isinstance(value, str) else [value] * times


OF_THE_TREE = (wrong_type, huge_number, missing_field, swapped_fields, another_field, unknown_field)
"""Those that may strike several times."""
OF_THE_TREE_ONCE = (deep_nesting, grown)

# Of the text


def _literals(text: str) -> list[int]:
    """The positions where a value may begin: behind a colon or at the opening of a list."""
    return [at + 1 for at, letter in enumerate(text) if letter in ":["] or [0]


def not_json_number(random: Random, text: str) -> str:
    literal = random.choice(("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "1.", ".5", "0x1F", "+1", "1_0"))
    at = random.choice(_literals(text))
    end = next((place for place in range(at, len(text)) if text[place] in ",}]"), len(text))
    return text[:at] + literal + text[end:]


def repeated_key(random: Random, text: str) -> str:
    key = random.choice(list(json.loads(text)) or ["x"])
    value = json.dumps(random.choice(STRANGE))
    return f"{{{json.dumps(key)}: {value}, {text[1:]}" if len(text) > 2 else text


def lone_surrogate(random: Random, text: str) -> str:
    quotes = [at + 1 for at, letter in enumerate(text) if letter == '"'] or [0]
    at = random.choice(quotes)
    return text[:at] + random.choice(("\\ud800", "\\udc00", "\\udfff\\ud800", "\\ud83d")) + text[at:]


def deep_text(random: Random, text: str) -> str:
    """Nesting too deep for a tree."""
    depth = random.choice((1_000, 5_000, 100_000))
    opening, closing = random.choice((("[", "]"), ('{"x":', "}")))
    whole = random.random() < 0.5
    deep = opening * depth + ("0" + closing * depth if whole else "")
    return deep if random.random() < 0.3 else f'{{"parameters": {deep}, {text[1:]}'


def enormous_integer(random: Random, text: str) -> str:
    at = random.choice(_literals(text))
    return text[:at] + "9" * random.choice((25, 400, 5_000)) + text[at:]


def not_quite_json(random: Random, text: str) -> str:
    ways = (text + text, text + "]", text[:-1] + ",}", text.replace('"', "'"), f"/* */ {text}", f"[{text}]", text[1:-1])
    return random.choice((*ways, json.dumps(text), "null", "0", '""', "[]", "{", "text_input=x&stream=true"))


OF_THE_TEXT = (not_json_number, repeated_key, lone_surrogate, deep_text, enormous_integer, not_quite_json)

# Of the bytes


def truncated(random: Random, body: bytes) -> bytes:
    return body[: random.randrange(max(1, len(body)))]


def flipped(random: Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(random.randint(1, 8)):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def invalid_utf8(random: Random, body: bytes) -> bytes:
    at = random.randrange(len(body))
    bad = random.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80"))
    return body[:at] + bad + body[at:]


def other_encoding(random: Random, body: bytes) -> bytes:
    return body.decode().encode(random.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7")))


def random_bytes(random: Random, body: bytes) -> bytes:
    return random.randbytes(random.choice((1, 10, 1000, 100_000)))


def nothing(random: Random, body: bytes) -> bytes:
    return random.choice((b"", b" ", b"\n\n", b"\0", b"\0" * 1000))


OF_THE_BYTES = (truncated, flipped, invalid_utf8, other_encoding, random_bytes, nothing)

Mutation: TypeAlias = Callable[[Random, Tree], bytes]


def _on_tree(mutate: Callable[[Random, Tree], None], times: tuple[int, ...] = (1,)) -> Mutation:
    def made(random: Random, tree: Tree) -> bytes:
        changed = deepcopy(tree)
        for _ in range(random.choice(times)):
            mutate(random, changed)
        return json.dumps(changed).encode()

    return made


def _on_text(mutate: Callable[[Random, str], str]) -> Mutation:
    return lambda random, tree: mutate(random, json.dumps(tree)).encode()


def _on_bytes(mutate: Callable[[Random, bytes], bytes]) -> Mutation:
    return lambda random, tree: mutate(random, json.dumps(tree).encode())


MUTATIONS: Mapping[str, Mutation] = {
    **{each.__name__: _on_tree(each, (1, 1, 1, 2, 4)) for each in OF_THE_TREE},
    **{each.__name__: _on_tree(each) for each in OF_THE_TREE_ONCE},
    **{each.__name__: _on_text(each) for each in OF_THE_TEXT},
    **{each.__name__: _on_bytes(each) for each in OF_THE_BYTES},
}
"""Every way to make a body wrong, by name. Some leave it right by chance."""
