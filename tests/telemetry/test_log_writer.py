"""Lines of the log, and the pipes they are written to: read at once, late, or never."""

import io
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from charonia.core.request_context import RequestContext
from charonia.telemetry.logging_setup import LogWriter
from charonia.telemetry.request_log import RequestLogRecord

UNREAD = """
import logging, signal
signal.alarm(60)
from charonia.telemetry.logging_setup import LogSettings
from charonia.telemetry.logging_setup import configured_logging

log = logging.getLogger("charonia.test")
with configured_logging(LogSettings()):
    for _ in range(40_000):
        log.warning("%s", "x" * 100)
    print("said", flush=True)
log.warning("after")
"""


def logger_of(lines: LogWriter) -> logging.Logger:
    logger = logging.Logger("alone", logging.INFO)
    logger.addHandler(lines)
    return logger


def ended() -> logging.LogRecord:
    context = RequestContext("infer")
    context.finish()
    context.close()
    return RequestLogRecord(context)


def test_what_somebody_reads_is_written_in_order_and_all_of_it_at_the_end() -> None:
    stream = io.StringIO()
    lines = LogWriter(stream)
    lines.addFilter(lambda record: "unwanted" not in record.getMessage())
    logger = logger_of(lines)
    for number in range(100):
        logger.info("%d", number)
        logger.info("unwanted %d", number)
    logger.handle(ended())
    assert lines.stop()
    *numbers, last = stream.getvalue().splitlines()
    assert numbers == [str(number) for number in range(100)]
    assert last.startswith("door=infer ")


def test_requests_wait_for_each_other_and_nothing_else_waits() -> None:
    stream = io.StringIO()
    lines = LogWriter(stream)
    logger = logger_of(lines)
    logger.handle(ended())
    assert not stream.getvalue()
    logger.info("0")
    deadline = time.monotonic() + 60
    while not stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert stream.getvalue().endswith("\n0\n")
    assert lines.stop()


def test_a_pipe_that_is_read_late_gets_the_oldest_lines_and_how_many_are_lost() -> None:
    taken, given = os.pipe()
    told: list[str] = []

    def read() -> None:
        with open(taken, encoding="utf-8") as stream:
            told.extend(stream.read().splitlines())

    reader = threading.Thread(target=read, daemon=True)
    with open(given, "w", encoding="utf-8") as stream:
        lines = LogWriter(stream, most=100_000)
        logger = logger_of(lines)
        for number in range(20_000):  # 400 kB: several times what may wait, and a pipe takes of itself
            logger.info("line %014d", number)
        reader.start()
        lines.flush()
        logger.info("later")
        assert lines.stop()
    reader.join(60)
    lost = [int(line.split()[0]) for line in told if line.endswith("not quickly enough")]
    kept = [line for line in told if line.startswith("line ")]
    assert told[-1] == "later"
    assert kept == sorted(kept)
    assert kept[0].endswith(" 00000000000000")
    assert sum(lost) + len(kept) == 20_000
    assert sum(lost) > 0
    assert told[-2].startswith(f"{lost[-1]} lines of the log are lost")


def test_a_full_disk_loses_lines_and_says_so_when_there_is_room_again() -> None:
    class Disk(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = Disk()
    lines = LogWriter(stream)
    logger = logger_of(lines)
    logger.info("0")
    logger.info("1")
    lines.flush()
    stream.full = False
    logger.info("2")
    assert lines.stop()
    assert stream.getvalue().startswith("3 lines of the log are lost")


def test_a_file_that_cannot_be_written_is_told_on_stderr_once_and_with_a_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """First its directory is gone, then it is another file, as logrotate leaves it."""
    folder, away = tmp_path / "logs", tmp_path / "away"
    folder.mkdir()
    file = folder / "log"
    lines = LogWriter(file.open("a", encoding="utf-8"), file=str(file))
    logger = logger_of(lines)
    logger.info("0")
    lines.flush()
    folder.rename(away)
    for number in range(1, 4):
        logger.info("%d", number)
        lines.flush()
    folder.mkdir()
    logger.info("4")
    lines.flush()
    logger.info("5")
    assert lines.stop()
    assert (away / "log").read_text() == "0\n"
    assert file.read_text() == "4 lines of the log are lost: they could not be written, or not quickly enough\n5\n"
    assert capfd.readouterr().err.splitlines() == [
        f"charonia: cannot write lines of the log to {file}: No such file or directory",
        f"charonia: 4 lines of the log are lost: {file} could not be written",
    ]


def test_a_full_disk_is_told_on_stderr_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    file = Path("/dev/full")
    lines = LogWriter(file.open("a", encoding="utf-8"), file=str(file))
    logger_of(lines).info("0")
    lines.flush()
    logger_of(lines).info("1")
    assert lines.stop()
    said = capfd.readouterr().err
    assert "cannot write lines of the log to /dev/full: No space left on device\n" in said
    assert "2 lines of the log are lost: /dev/full could not be written\n" in said


def test_garbage_that_is_collected_while_a_line_is_put_may_say_so() -> None:
    class Talking(str):
        """Its length is asked for in the midst of it."""

        def __len__(self) -> int:
            if not said:
                said.append("garbage")
                logger.info("garbage")
            return super().__len__()

    class Form(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return Line(super().format(record))

    class Line(str):
        def __add__(self, other: str) -> str:
            return Talking(str(self) + other)

    said: list[str] = []
    stream = io.StringIO()
    lines = LogWriter(stream)
    lines.setFormatter(Form())
    logger = logger_of(lines)
    thread = threading.Thread(target=logger.info, args=("0",), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert lines.stop()
    assert stream.getvalue() == "garbage\n0\n"


def test_a_pipe_that_nobody_reads_stops_nobody_and_lets_the_process_end() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "said\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
