"""The record that ends a request: its fields, and that no client can forge another."""

import logging
from copy import copy

import pytest

from charonia.core.errors import NotFound
from charonia.core.request_context import GatewayHints, RequestContext
from charonia.telemetry.request_log import (
    RequestLogFields,
    RequestLogRecord,
    log_request,
    request_log_fields,
    request_log_line,
)


def refused(model: str) -> RequestContext:
    context = RequestContext("chat")
    context.tenant, context.model = "alice", model
    context.fail(NotFound("no"))
    context.close()
    return context


def test_a_refusal_has_a_record_without_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "charonia.requests")
    log_request(refused("nope"))
    [record] = caplog.records
    assert (record.outcome, record.reason, record.tenant, record.door) == (
        "rejected",
        "not_found",
        "alice",
        "chat",
    )
    assert (record.queue_ms, record.ttft_ms, record.prompt_tokens, record.choices) == (None, None, None, None)
    begin = "door=chat model=nope tenant=alice outcome=rejected reason=not_found e2e_ms="
    assert record.getMessage().startswith(begin)
    assert set(RequestLogFields._fields) <= vars(record).keys()
    assert (record.name, record.levelname) == ("charonia.requests", "INFO")


def test_nothing_is_written_below_the_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "charonia.requests")
    log_request(refused("nope"))
    assert caplog.records == []


@pytest.mark.parametrize("name", ["a outcome=stop", "a\n1121 I charonia.requests: model=b", 'a"b', "ü\x1b[2J"])
def test_a_made_up_name_stays_one_word_of_one_line(name: str) -> None:
    text = str(request_log_fields(refused(name)))
    assert text.isprintable()
    assert "outcome=stop" not in text.replace('model="a outcome=stop"', "")
    assert "\n" not in text


def test_a_long_name_is_cut() -> None:
    assert len(request_log_fields(refused("x" * 10_000)).model) == 256


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"id": "a b", "trace_id": "ff"},
        {"id": "cmpl-ab", "client_id": "ab"},
        {"id": "1", "client_id": "a b", "trace_id": "ff", "client": "10.0.0.1"},
        {"client": "::1", "route": "chat"},
        {"client": "a b", "id": "1"},
        {"client_id": "y" * 300},
        {"id": "x" * 300, "model": "y" * 300, "version": "3"},
        {"tenant": "alice", "model": 'a"b'},
        {"ended_at": 2.0},
    ],
)
def test_remembered_words_are_those_of_the_record(said: dict[str, object]) -> None:
    context = RequestContext("infer")
    context.finish()
    context.close()
    context.arrived_at, context.ended_at = 0.0, 1.2345678
    for name, value in said.items():
        setattr(context, name, value)
    for _ in range(2):
        assert request_log_line(context) == str(request_log_fields(context))


def test_a_clients_own_id_is_told_unless_ours_has_it() -> None:
    context = refused("m")
    context.id, context.client_id = "cmpl-ab", "ab"
    assert "x_request_id" not in str(request_log_fields(context))
    context.id = "7"
    assert str(request_log_fields(context)).startswith("request_id=7 x_request_id=ab ")


def test_a_session_that_a_gateway_names_is_told() -> None:
    context = refused("m")
    context.id, context.client_id, context.hints = "7", "ab", GatewayHints(session="s 1")
    assert str(request_log_fields(context)).startswith('request_id=7 x_request_id=ab session="s 1" ')
    assert request_log_line(context) == str(request_log_fields(context))


def test_a_record_has_all_attributes_for_handlers_that_ask() -> None:
    context = refused("nope")
    record = RequestLogRecord(context)
    assert copy(record).getMessage() == request_log_line(context) == str(request_log_fields(context))
    assert record.args == (request_log_fields(context),)
    assert request_log_fields(context)._asdict().items() <= vars(record).items()
    assert vars(logging.LogRecord("", 0, "", 0, "", (), None)).keys() <= vars(record).keys()
    with pytest.raises(AttributeError):
        _ = record.nonsense
