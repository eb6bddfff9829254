"""The directory: whose it is, who may read it, and what of a server that died stays in it."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from charonia.api.http.error_responses import ApiError
from charonia.core.errors import InvalidArgument
from charonia.extras.batches.records import FilePurpose, StoredFile, new_id
from charonia.extras.batches.store import FILE_CHARGE, StorageFull, open_store


def file(store: Any, content: bytes = b"x", tenant: str = "", seconds: int = 10**6) -> StoredFile:
    now = store.time_ns()
    made = StoredFile(
        id=new_id("file-"),
        tenant=tenant,
        purpose=FilePurpose.BATCH,
        filename="x",
        size=len(content),
        made=now,
        expires_at=now // 10**9 + seconds,
    )
    store.path(made.id).write_bytes(content)
    store.write_file(made)
    store.add_file(made)
    store.charge(tenant, FILE_CHARGE)
    return made


def test_a_directory_is_one_server_s_alone(store: Any, limits: Any) -> None:
    with pytest.raises(InvalidArgument, match="another server"):
        open_store(store.directory, limits)
    store.charge("", 0)


def test_only_the_owner_may_look(store: Any) -> None:
    made = file(store)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in store.directory.rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert modes[store.path(made.id + ".json")] == 0o600
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


def test_a_place_that_cannot_be_used_is_told(tmp_path: Path, limits: Any) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=r"--files-dir .* cannot be used: Not a directory"):
        open_store(tmp_path / "file" / "x", limits)


def test_what_is_half_done_is_swept_and_what_is_whole_stays(store: Any, limits: Any) -> None:
    kept = file(store, b"abc")
    folder = store.directory / "files"
    for name in ("file-1.part", "file-2", "file-3.json.part"):
        (folder / name).touch()
    (folder / "file-5.part").mkdir()  # not ours to remove
    (folder / "lost+found").mkdir()
    os.close(store._lock)
    again = open_store(store.directory, limits)
    left = {path.name for path in folder.iterdir()}
    assert left == {kept.id, kept.id + ".json", "file-5.part", "lost+found"}
    assert again.list_files("") == [kept]
    assert again.used == FILE_CHARGE
    again.close()
    store._lock = os.open("/dev/null", os.O_RDONLY)


def test_what_is_damaged_is_named_kept_and_answered_as_such(
    tmp_path: Path, limits: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No record of it is taken for one that is not there, and what a damaged batch may have written stays."""
    before = open_store(tmp_path / "other", limits)
    whole, cut, gone, swapped = (file(before, b"abc", tenant="a") for _ in range(4))
    folder, batches = before.directory / "files", before.directory / "batches"
    before.path(cut.id).write_bytes(b"a")
    before.path(gone.id).unlink()
    before.path(swapped.id).unlink()
    before.path(swapped.id).mkdir()
    before.close()
    (folder / "file-4").write_bytes(bytes(limits.tenant_bytes))
    (folder / "file-4.json").write_text("{")
    (folder / "file-5.json").mkdir()
    (folder / "file-6.json").write_bytes((folder / (whole.id + ".json")).read_bytes())
    os.mkfifo(folder / "file-7.json")
    (folder / "file-8").touch()  # of the batch
    (batches / "batch_1.json").write_bytes(b"\xff")
    store = open_store(tmp_path / "other", limits)
    damaged = {cut.id, gone.id, swapped.id, "file-4", "file-5", "file-6", "file-7"}
    assert store.damaged.keys() == {*damaged, "batch_1"}
    assert len(caplog.records) == len(store.damaged)
    assert store.list_files("a") == [whole]
    for find, ids in ((store.find_file, damaged), (store.find_batch, {"batch_1"})):
        for id_ in ids:
            with pytest.raises(ApiError, match=f"{id_} is damaged on the server's disk") as raised:
                find("a", id_)
            assert raised.value.status == 500
    assert (folder / "file-8").exists()
    assert store.used == limits.tenant_bytes + 2 * FILE_CHARGE, "of nobody, and so in nobody's way"
    store.close()


def test_a_tenant_has_a_share(tmp_path: Path, limits: Any) -> None:
    store = open_store(tmp_path / "other", limits._replace(tenant_bytes=3 * FILE_CHARGE))
    for _ in range(3):
        file(store, tenant="a")
    with pytest.raises(StorageFull, match=r"your files take all of the 196608 bytes .* \(--files-tenant-bytes\)"):
        store.charge("a", 1)
    mine = file(store, tenant="b")
    store.count("a", 10)  # what a batch had written before the share was made smaller
    store.charge("b", 2 * FILE_CHARGE)
    store.forget_file(mine)
    store.charge("b", FILE_CHARGE)
    store.close()


def test_files_are_parted_by_tenant_and_end_in_time(tmp_path: Path, limits: Any) -> None:
    now = 1_000_000.0
    store = open_store(tmp_path / "other", limits, lambda: now)
    mine, theirs = file(store, tenant="a"), file(store, tenant="b", seconds=5)
    assert store.find_file("a", mine.id) == mine
    for tenant, wanted in (("a", theirs.id), ("", mine.id), ("a", "file-x"), ("a", "../" + mine.id), ("a", "")):
        with pytest.raises(Exception, match="No such File object") as raised:
            store.find_file(tenant, wanted)
        assert getattr(raised.value, "status", 0) == 404
    now += 5
    assert store.list_files("b") == []
    assert store.expired()[0] == [theirs]
    store.forget_file(theirs)
    assert store.used == FILE_CHARGE
    store.close()


def test_times_only_grow_though_clocks_do_not(tmp_path: Path, limits: Any) -> None:
    times = iter([5.0, 4.0, 3.0])
    store = open_store(tmp_path / "other", limits, lambda: next(times))
    made = [store.time_ns() for _ in range(3)]
    assert made == sorted(set(made))
    store.close()


def test_a_full_disk_leaves_the_old_record(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = file(store)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="disk is full"):
        store.write_file(msgspec.structs.replace(made, filename="y"))
    monkeypatch.undo()
    record = msgspec.json.decode(store.path(made.id + ".json").read_bytes(), type=StoredFile)
    assert record == made
    assert not list(store.directory.rglob("*.part"))
