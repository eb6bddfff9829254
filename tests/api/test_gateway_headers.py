"""The headers of a gateway in front: which are believed, and what they mean."""

from typing import Any

import pytest

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.gateway_headers import (
    FAIRNESS_ID,
    GATEWAY_HEADERS,
    ITL_TARGET,
    OBJECTIVE,
    SESSION,
    TTFT_TARGET,
    GatewayHeaders,
    parse_gateway_headers,
)
from charonia.api.grpc.settings import build_call_policy
from charonia.core.errors import InvalidArgument
from charonia.core.request_context import GatewayHints, RequestContext

ALL = parse_gateway_headers(["all"], ["interactive=0, batch=5"])


def noted(headers: dict[str, str], gateway: GatewayHeaders = ALL, has_key: bool = False) -> RequestContext:
    context = RequestContext("chat", tenant="of the key" if has_key else "", tenant_weight=2.0 if has_key else 1.0)
    gateway.note_in(context, headers.items(), has_key)
    return context


def test_each_header_has_its_meaning() -> None:
    context = noted(
        {
            FAIRNESS_ID: "team-a",
            OBJECTIVE: "batch",
            TTFT_TARGET: "800",
            ITL_TARGET: "40.5",
            SESSION: "s1",
            "accept": "*",
        }
    )
    assert (context.tenant, context.hints) == ("team-a", GatewayHints(5, 800.0, 40.5, "s1"))
    assert noted({}).hints == GatewayHints()


def test_only_what_the_flag_names_is_believed() -> None:
    some = parse_gateway_headers(["X-SLO-TTFT-MS", "x-session-id"], [])
    context = noted({FAIRNESS_ID: "team-a", OBJECTIVE: "?", TTFT_TARGET: "800", ITL_TARGET: "?", SESSION: "s"}, some)
    assert (context.tenant, context.hints) == ("", GatewayHints(None, 800.0, 0.0, "s"))
    assert not parse_gateway_headers([], [])
    assert OBJECTIVE not in parse_gateway_headers(["all"], []).believed
    assert ALL.believed == {*GATEWAY_HEADERS}


def test_a_keys_tenant_stays() -> None:
    context = noted({FAIRNESS_ID: "team-a", OBJECTIVE: "batch"}, has_key=True)
    assert (context.tenant, context.tenant_weight, context.hints.priority) == ("of the key", 2.0, 5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (FAIRNESS_ID, "", "1 to 256 printable ASCII characters"),
        (FAIRNESS_ID, "x" * 257, "1 to 256 printable ASCII characters"),
        (SESSION, "a\tb", "printable ASCII"),
        (OBJECTIVE, "fast", "unknown objective 'fast'; known are interactive, batch"),
        (TTFT_TARGET, "soon", "must be a number of milliseconds above 0 and at most 3600000, got 'soon'"),
        (TTFT_TARGET, "0", "above 0"),
        (ITL_TARGET, "-1", "above 0"),
        (ITL_TARGET, "nan", "above 0"),
        (ITL_TARGET, "1e9", "at most 3600000"),
    ],
)
def test_a_value_that_means_nothing_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        noted({name: value})
    assert said in refusal.value.message
    assert (name in refusal.value.message, refusal.value.field) == (True, name)


def test_a_header_that_comes_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=f"several headers {SESSION}"):
        ALL.note_in(RequestContext("chat"), [(SESSION, "a"), (SESSION, "a")], has_key=False)


def test_names_without_end_become_one_tenant() -> None:
    """Those beside a key count for nothing."""
    gateway = parse_gateway_headers([FAIRNESS_ID], [])
    for number in range(1100):
        noted({FAIRNESS_ID: f"beside a key {number}"}, gateway, has_key=True)
    tenants = [noted({FAIRNESS_ID: f"t{number}"}, gateway).tenant for number in range(1100)]
    assert len({*tenants}) == 1025
    assert (tenants[1023], tenants[1024]) == ("t1023", "others")
    assert noted({FAIRNESS_ID: "t7"}, gateway).tenant == "t7"


@pytest.mark.parametrize(
    ("trusted", "objectives", "said"),
    [
        (["x-forwarded-for"], [], "unknown header 'x-forwarded-for'; known are"),
        ([OBJECTIVE], [], "needs --gateway-objectives"),
        ([], ["a=1"], "--gateway-objectives needs --trust-gateway-headers"),
        (["all"], ["a"], "must be NAME=CLASS"),
        (["all"], ["a=x"], "must be NAME=CLASS"),
        (["all"], ["=1"], "must be NAME=CLASS"),
    ],
)
def test_flags_that_mean_nothing_are_refused(trusted: list[str], objectives: list[str], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_gateway_headers(trusted, objectives)


@pytest.mark.parametrize("keyed", [False, True])
def test_grpc_has_them_as_metadata(keyed: bool) -> None:
    keys = Keyring([("secret", Tenant("alpha", 3.0))] if keyed else [])
    policy = build_call_policy([], "", keys, ALL)
    metadata: list[tuple[str, Any]] = [
        ("authorization", "Bearer secret"),
        (FAIRNESS_ID, "team-a"),
        (TTFT_TARGET, "800"),
        ("x-bin", b"1"),
    ]
    context = RequestContext("infer")
    policy.identify_caller("ModelInfer", metadata, "10.0.0.1").note_in(context)
    assert context.tenant == ("alpha" if keyed else "team-a")
    assert context.tenant_weight == (3.0 if keyed else 1.0)
    assert context.hints.target_ttft_ms == 800.0
    with pytest.raises(InvalidArgument, match=TTFT_TARGET):
        policy.identify_caller("ModelInfer", [("authorization", "Bearer secret"), (TTFT_TARGET, "x")])
