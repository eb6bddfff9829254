"""The files of what is done: whatever is left of the last line, no request is lost and none stands there twice."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.extras.batches.journal import Journal, LineOutcome, encode_outcome
from charonia.extras.batches.store import StorageFull

BATCH = "batch_" + "ab" * 16
ANSWER = LineOutcome(200, "id", b'{"text":"a \\n b",\n"n":1}')
NOT_ASKED = LineOutcome(code="batch_expired", message="too late")


def lines(count: int) -> list[bytes]:
    return [
        encode_outcome(BATCH, index, f"r{index}\n", NOT_ASKED if index % 3 == 2 else ANSWER) for index in range(count)
    ]


def test_a_line_has_what_clients_of_openai_read() -> None:
    answered, _, expired = lines(3)
    told = json.loads(answered)
    assert told["custom_id"] == "r0\n"
    assert told["response"] == {"status_code": 200, "request_id": "id", "body": {"text": "a \n b", "n": 1}}
    assert told["error"] is None
    assert json.loads(expired)["error"] == {"code": "batch_expired", "message": "too late"}
    assert json.loads(expired)["response"] is None
    assert answered.count(b"\n") == 1


@settings(max_examples=50)
@given(st.integers(0, 6), st.data())
def test_whatever_was_cut_off_is_written_again_once(tmp_path_factory: Any, count: int, data: Any) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "journal"
    whole = b"".join(lines(count))
    path.write_bytes(
        whole[: data.draw(st.integers(0, len(whole)))] + data.draw(st.sampled_from([b"", b"\0" * 7, b"{}"]))
    )
    journal = Journal(path)
    done = journal.recover()
    assert list(done) == list(range(len(done)))
    for index in range(len(done), count):
        journal.append(lines(count)[index])
    assert path.read_bytes() == whole
    again = Journal(path)
    assert list(again.recover()) == list(range(count))
    assert again.count == sum(index % 3 != 2 for index in range(count))


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, write = Journal(tmp_path / "journal"), os.pwrite
    first, second, _ = lines(3)
    journal.append(first)

    def short(descriptor: int, content: bytes, at: int) -> int:
        if at > journal.size:
            raise OSError(errno.ENOSPC, "no space")
        return write(descriptor, bytes(content)[:5], at)

    monkeypatch.setattr(os, "pwrite", short)
    with pytest.raises(StorageFull) as raised:
        journal.append(second)
    assert raised.value.status == 507
    assert journal.path.read_bytes() == first
    monkeypatch.undo()
    journal.append(second)
    assert journal.path.read_bytes() == first + second


def test_a_journal_without_a_line_leaves_no_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.path.touch()
    assert not journal.sync()
    assert not journal.path.exists()
