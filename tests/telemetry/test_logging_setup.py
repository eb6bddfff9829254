"""Logging set up for a process, and changed while it runs."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument, NotFound, Unsupported
from charonia.core.request_context import DONE, RequestContext
from charonia.http_workers.messages import SentSequence
from charonia.telemetry.logging_setup import LogSettings, configured_logging
from charonia.telemetry.request_log import LoggedRequests, log_request

log = logging.getLogger("charonia.test")


@contextmanager
def alone() -> Iterator[None]:
    """Without pytest's handlers; afterwards the process's loggers are as they were."""
    names = ("", "charonia", "charonia.requests", "uvicorn")
    loggers = [(each := logging.getLogger(name), each.level, each.handlers, each.propagate) for name in names]
    logging.getLogger().handlers = []
    yield
    for each, level, handlers, propagate in loggers:
        each.setLevel(level)
        each.handlers, each.propagate = handlers, propagate


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    for handler in logging.getLogger().handlers:
        handler.flush()
    return capsys.readouterr().err.splitlines()


def say_all() -> None:
    log.debug("d")
    log.info("i")
    log.warning("w")
    log.error("e")


def test_levels_and_formats_change_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with alone(), configured_logging(LogSettings()) as logs:
        say_all()
        assert [re.sub(r"^\d{4} \d\d:\d\d:\d\d ", "", line) for line in said(capsys)] == [
            "I charonia.test: i",
            "W charonia.test: w",
            "E charonia.test: e",
        ]
        logs.update(replace(logs.settings, log_verbose_level=1, log_info=False, log_error=False))
        say_all()
        assert [line[-1] for line in said(capsys)] == ["d", "w"]
        logs.update(LogSettings(log_format="ISO8601", log_warning=False))
        say_all()
        lines = said(capsys)
        assert [line[-1] for line in lines] == ["i", "e"]
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} I ", lines[0])
        logs.update(LogSettings(log_format="json"))
        say_all()
        assert [json.loads(line)["message"] for line in said(capsys)] == ["i", "w", "e"]


def test_a_file_may_have_the_log_and_keeps_what_it_had(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("before\n")
    requests = logging.getLogger("charonia.requests")
    with alone():
        with configured_logging(LogSettings(log_file=str(file))) as logs:
            log.warning("w")
            requests.info("r")
            assert logs.update(replace(logs.settings, log_verbose_level=1)).log_file == str(file)
            with pytest.raises(Unsupported, match="log file location can not be updated through network protocol"):
                logs.update(replace(logs.settings, log_file="other"))
        log.warning("after")
    assert [line.rpartition(" ")[2] for line in file.read_text().splitlines()] == ["before", "w", "r"]
    assert [line[-5:] for line in said(capsys)] == ["after"]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidArgument, match=r"--log-file .* cannot be written: Is a directory"),
        configured_logging(LogSettings(log_file=str(tmp_path))),
    ):
        pass


def test_records_that_end_requests_go_with_what_informs(capsys: pytest.CaptureFixture[str]) -> None:
    requests = logging.getLogger("charonia.requests")
    with alone(), configured_logging(LogSettings(log_info=False)) as logs:
        assert not requests.isEnabledFor(logging.INFO)
        logs.update(LogSettings())
        requests.info("one")
    assert [line[-3:] for line in said(capsys)] == ["one"]


def test_lines_of_the_web_server_are_for_the_curious() -> None:
    access = logging.getLogger("uvicorn.access")
    with alone(), configured_logging(LogSettings()) as logs:
        assert not access.isEnabledFor(logging.INFO)
        logs.update(LogSettings(log_verbose_level=1))
        assert access.isEnabledFor(logging.INFO)


def ended(tenant: str) -> RequestContext:
    context = RequestContext("infer")
    context.tenant = tenant
    context.finish()
    context.close()
    return context


def test_requests_that_ended_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with alone(), configured_logging(LogSettings()) as logs:
        log_request(ended("é"))
        logs.update(LogSettings(log_format="json"))
        log_request(ended("é"))
    text, line = said(capsys)
    assert re.match(r'\d{4} \d\d:\d\d:\d\d I charonia.requests: door=infer tenant="\\u00e9" outcome=done ', text)
    told = json.loads(line)
    assert (told["logger"], told["level"], told["tenant"]) == ("charonia.requests", "INFO", "é")
    assert told.keys().isdisjoint({"ttft_ms", "choices", "generated_tokens", "model", "reason"})
    assert told["message"].startswith("door=infer ")


@pytest.mark.parametrize(
    ("requests", "logged"),
    [
        ("all", ["done", "text", "refused", "left", "child"]),
        ("llm", ["text", "refused"]),
        ("errors", ["refused"]),
    ],
)
def test_which_requests_have_a_record(
    requests: LoggedRequests, logged: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with alone(), configured_logging(LogSettings(), requests):
        for name in ("done", "text", "refused", "left"):
            context = RequestContext("infer")
            context.model = name
            if name == "text":
                context.add_sequence(SentSequence(end=DONE))
                with context.child("BLS") as child:
                    child.model = "child"
                    child.finish()
                log_request(child)
            elif name == "refused":
                context.fail(NotFound("no"))
            elif name == "done":
                context.finish()
            context.close()
            log_request(context)
    assert sorted(re.findall(r"model=(\w+)", capsys.readouterr().err)) == sorted(logged)


def test_what_comes_after_the_end_is_written_too(capsys: pytest.CaptureFixture[str]) -> None:
    requests = logging.getLogger("charonia.requests")
    with alone():
        with configured_logging(LogSettings()):
            requests.info("one")
        requests.info("two")
    assert [line[-3:] for line in said(capsys)] == ["one", "two"]
