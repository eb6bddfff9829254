"""What is kept by name: whole or not at all, one server's alone."""

import stat
from pathlib import Path

import msgspec
import pytest

from charonia.core.errors import DiskFull, InvalidArgument
from charonia.repository.state_directory import StateDirectory


class Kept(msgspec.Struct):
    numbers: list[int]


def test_what_was_written_is_read_by_the_next_server(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    assert state.read("numbers", Kept) is None
    state.write("numbers", Kept([1]))
    state.write("numbers", Kept([2, 3]))
    with pytest.raises(InvalidArgument, match=r"^--state-dir .*state is another server's: each needs its own$"):
        StateDirectory(tmp_path / "state")
    (state.path / "numbers.json.0.part").write_text("half of one")
    (state.path / "somebody-else.part").mkdir()
    state.close()
    state = StateDirectory(tmp_path / "state")
    assert state.read("numbers", Kept) == Kept([2, 3])
    (state.path / "somebody-else.part").rmdir()
    assert sorted(path.name for path in state.path.iterdir()) == [".lock", "numbers.json"]
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in state.path.iterdir()} == {0o600}
    state.close()


@pytest.mark.parametrize(("old", "new"), [(b"1", b"2"), (b"]", b""), (b"\n", b"")])
def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path, old: bytes, new: bytes) -> None:
    state, file = StateDirectory(tmp_path / "state"), tmp_path / "state" / "numbers.json"
    state.write("numbers", Kept([1]))
    checksum, content = file.read_bytes().split(b"\n", 1)
    file.write_bytes(checksum + b"\n" + content.replace(old, new))
    with pytest.raises(InvalidArgument, match=rf"^{file} is damaged: .*take it away to begin without it$"):
        state.read("numbers", Kept)
    state.close()


def test_another_kind_of_struct_is_refused(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    state.write("numbers", msgspec.defstruct("Other", [("numbers", str)])("one"))
    with pytest.raises(InvalidArgument, match=r"is damaged: Expected `array`, got `str`"):
        state.read("numbers", Kept)
    state.close()


def test_a_directory_that_others_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidArgument, match="nobody else may write to it"):
        StateDirectory(tmp_path)


def test_a_write_that_fails_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDirectory(tmp_path / "state")
    state.write("numbers", Kept([1]))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskFull, match="cannot be written: No space left on device; nothing is changed"):
        state.write("numbers", Kept([2]))
    assert state.read("numbers", Kept) == Kept([1])
    assert sorted(path.name for path in state.path.iterdir()) == [".lock", "numbers.json"]
    state.close()
