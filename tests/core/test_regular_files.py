"""Pipes, sockets and devices are refused by name, and nobody waits for them."""

import os
import socket
from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.regular_files import (
    file_within,
    open_regular,
    read_regular,
    refuse_special_file,
    refuse_special_files,
)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    return path


def test_a_pipe_is_refused_without_waiting(pipe: Path) -> None:
    for attempt in (open_regular, refuse_special_file, lambda path: refuse_special_files(path.parent)):
        with pytest.raises(InvalidArgument, match=r"model\.safetensors is a named pipe, and no regular file"):
            attempt(pipe)


def test_a_device_and_a_socket_are_refused_behind_links_too(tmp_path: Path) -> None:
    device, bound = tmp_path / "config.json", tmp_path / "tokenizer.json"
    device.symlink_to("/dev/zero")
    with pytest.raises(InvalidArgument, match="a device"):
        read_regular(device, 10)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(bound))
        with pytest.raises(InvalidArgument, match="a socket"):
            refuse_special_file(bound)


def test_a_file_that_is_larger_than_any_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(InvalidArgument, match=r"config\.json has 1099511627776 bytes, and may have 100 at most"):
        read_regular(path, 100)


def test_files_links_and_what_is_not_there_pass(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"text")
    (tmp_path / "link").symlink_to("blob")
    (tmp_path / "broken").symlink_to("nowhere")
    refuse_special_files(tmp_path)
    assert read_regular(tmp_path / "link", 4) == b"text"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "broken")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\0b", 7, None])
def test_a_name_stays_in_its_directory(tmp_path: Path, name: object) -> None:
    assert file_within(tmp_path, "a/b") == tmp_path / "a" / "b"
    with pytest.raises(InvalidArgument, match="is not the name of a file in it"):
        file_within(tmp_path, name)
