"""Members of bodies of the wrong JSON type: every one of every endpoint is refused, and the error names it."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import httpx
import msgspec
import pytest

from charonia.api.anthropic.messages_request import IgnoredOfMessages, MessagesBody
from charonia.api.openai.embeddings import EmbeddingsBody, RerankBody
from charonia.api.openai.json_body import IgnoredFields
from charonia.api.openai.responses_request import IgnoredOfResponses, ResponsesBody
from charonia.api.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, SamplingFields, TokenizeBody
from charonia.api.openai.scoring import ClassifyBody, PoolingBody, ScoreBody

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ENDPOINTS: dict[str, tuple[dict[str, Any], tuple[type[msgspec.Struct], ...]]] = {
    "/v1/completions": ({"prompt": "hi"}, (CompletionBody, SamplingFields, IgnoredFields)),
    "/v1/chat/completions": (HI, (ChatBody, SamplingFields, IgnoredFields)),
    "/v1/responses": ({"input": "hi"}, (ResponsesBody, SamplingFields, IgnoredOfResponses)),
    "/v1/messages": (HI | {"max_tokens": 5}, (MessagesBody, IgnoredOfMessages)),
    "/v1/embeddings": ({"input": "hi"}, (EmbeddingsBody, IgnoredFields)),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, (RerankBody, IgnoredFields)),
    "/score": ({"text_1": "a", "text_2": "b"}, (ScoreBody, IgnoredFields)),
    "/classify": ({"input": "a"}, (ClassifyBody, IgnoredFields)),
    "/pooling": ({"input": "a"}, (PoolingBody, IgnoredFields)),
    "/tokenize": ({"prompt": "hi"}, (TokenizeBody, IgnoredFields)),
    "/detokenize": ({"tokens": [1]}, (DetokenizeBody, IgnoredFields)),
}
SAMPLES: dict[str, tuple[Any, ...]] = {
    "string": ("xyzzy",),
    "integer": (7,),
    "float": (0.5,),
    "boolean": (True, False),
    "array": ([{}], [[]]),
    "object": ({"xyzzy": 1},),
}
"""Values by their JSON type. No empty ones: some of those ask for nothing."""


def json_types(hint: Any) -> set[str]:
    """The names in SAMPLES of the values that a member declared so may have."""
    if get_origin(hint) is Annotated:
        return json_types(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return set().union(*map(json_types, get_args(hint)))
    if get_origin(hint) is Literal or hint is str:
        return {"string"}
    kind = get_origin(hint) or hint
    plain = {bool: {"boolean"}, int: {"integer"}, float: {"integer", "float"}, type(None): set[str](), Any: {*SAMPLES}}
    if kind in plain:
        return plain[kind]
    if issubclass(kind, list | tuple | set | frozenset):
        return {"array"}
    return {"object"} if issubclass(kind, Mapping | msgspec.Struct) else {"string"}


def wrong_values(kinds: tuple[type[msgspec.Struct], ...]) -> Iterator[tuple[str, Any]]:
    for kind in kinds:
        for name, hint in get_type_hints(kind, include_extras=True).items():
            allowed = json_types(hint)
            yield from ((name, value) for said in SAMPLES.keys() - allowed for value in SAMPLES[said])


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_member_of_another_type_is_refused_and_named(client: httpx.AsyncClient, path: str) -> None:
    body, kinds = ENDPOINTS[path]
    wrong = []
    for name, value in wrong_values(kinds):
        answer = await client.post(path, json={"model": "llm"} | body | {name: value})
        if answer.status_code != 400 or name not in answer.json()["error"]["message"]:
            wrong.append((name, value, answer.status_code, answer.text[:200]))
    assert wrong == []


UNTYPED: dict[str, tuple[Any, ...]] = {
    "prompt": (7, True, {}, [{}], ["a", 1], [0.5]),
    "input": (7, True, {}, [{}], ["a", 1], [0.5]),
    "kv_cache_retention_config": (7, "xyzzy", True, [{}]),
    "retention_directives": (7, "xyzzy", True, {"a": 1}),
}
"""Members that are declared as anything, and values that they may not have."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"])
async def test_what_an_untyped_member_may_not_be_is_refused(client: httpx.AsyncClient, path: str) -> None:
    body, kinds = ENDPOINTS[path]
    own = {name for kind in kinds for name in kind.__struct_fields__}
    wrong = []
    for name, value in [(member, value) for member in UNTYPED.keys() & own for value in UNTYPED[member]]:
        answer = await client.post(path, json={"model": "llm"} | body | {name: value})
        if answer.status_code != 400 or name not in answer.json()["error"]["message"]:
            wrong.append((name, value, answer.status_code, answer.text[:200]))
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "use_beam_search", 0),
        ("/v1/chat/completions", "use_beam_search", True),
        ("/v1/chat/completions", "do_sample", 1),
        ("/v1/completions", "parallel_tool_calls", 1),
        ("/v1/responses", "background", 0),
        ("/v1/chat/completions", "functions", {}),
    ],
)
async def test_a_value_that_asks_for_nothing_has_its_type(
    client: httpx.AsyncClient, path: str, field: str, value: Any
) -> None:
    answer = await client.post(path, json={"model": "llm"} | ENDPOINTS[path][0] | {field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


OFF = (
    *("dry_allowed_length", "dry_base", "dry_multiplier", "dynatemp_exponent", "dynatemp_range", "epsilon_cutoff"),
    *("eta_cutoff", "mirostat", "mirostat_eta", "mirostat_mode", "mirostat_tau", "n_probs", "no_repeat_ngram_size"),
    *("penalty_alpha", "repeat_last_n", "smoothing_factor", "top_a", "top_n_sigma", "xtc_probability", "xtc_threshold"),
)
"""Numbers that frontends of llama.cpp and text-generation-webui always send, and that are off at 0."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_sampler_that_is_off_asks_for_nothing(client: httpx.AsyncClient, path: str) -> None:
    for off in (0, 0.0, False):
        answer = await client.post(path, json={"model": "llm"} | ENDPOINTS[path][0] | dict.fromkeys(OFF, off))
        assert answer.status_code == 200, answer.text
    for name in OFF:
        answer = await client.post(path, json={"model": "llm"} | ENDPOINTS[path][0] | {name: 0.5})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    for name in ("return_hidden_states", "n_predict", "typical_p"):
        answer = await client.post(path, json={"model": "llm"} | ENDPOINTS[path][0] | {name: 0})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
