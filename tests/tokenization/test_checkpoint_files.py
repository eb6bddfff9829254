"""Which file or directory of a model is meant."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from charonia.core.errors import InvalidArgument, NotFound
from charonia.tokenization.checkpoint_files import (
    SMALL_FILES,
    checkpoint_fingerprint,
    find_gguf,
    locate_checkpoint,
)


def files(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"x")
    return directory


def test_a_file_in_gguf_is_itself_and_any_other_file_is_refused(tmp_path: Path) -> None:
    files(tmp_path, "a.gguf", "model.safetensors")
    assert locate_checkpoint(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    with pytest.raises(InvalidArgument, match=r"is a file; of those, models in GGUF"):
        locate_checkpoint(str(tmp_path / "model.safetensors"))


def test_a_directory_stands_for_its_only_model_in_gguf(tmp_path: Path) -> None:
    here = files(tmp_path, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "config.json")
    assert locate_checkpoint(str(here)) == here / "m-00001-of-00002.gguf"
    assert checkpoint_fingerprint(here / "m-00001-of-00002.gguf")
    files(here, "other.gguf")
    with pytest.raises(InvalidArgument, match=r"2 models in GGUF; name one of them: m-00001-of-00002.gguf, other.gguf"):
        locate_checkpoint(str(here))
    files(here, "model.safetensors")
    assert find_gguf(here) is None
    assert locate_checkpoint(str(here)) == here


HUB = ("m-Q4_K_M.gguf", "m-Q4_K.gguf", "m-IQ4_K_M.gguf", "m.q8_0.gguf", "mmproj-BF16.gguf", "m-BF16.gguf", "m-F16.gguf")
HUB += ("Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k", "m-Q4_K.gguf"),
        ("Q8_0", "m.q8_0.gguf"),
        ("F16", "m-F16.gguf"),
        ("BF16", "m-BF16.gguf"),
        ("Q6_K", "Q6_K/m-Q6_K-00001-of-00002.gguf"),
    ],
)
def test_a_hub_id_with_a_quantisation_is_the_file_that_has_it_in_its_name(
    asked: str, found: str, tmp_path: Path
) -> None:
    calls: list[tuple[str, Any]] = []

    def download(name: str, *, revision: str | None, **patterns: list[str]) -> str:
        from huggingface_hub.utils import filter_repo_objects

        calls.append((name, revision))
        fetched = list(filter_repo_objects(HUB, **patterns))
        assert len(fetched) <= 2, "no more is fetched than is asked for"
        return str(files(tmp_path, *fetched))

    with patch("huggingface_hub.snapshot_download", download):
        assert locate_checkpoint(f"owner/name@v1:{asked}") == tmp_path / found
        with pytest.raises(NotFound, match="owner/name has no file in GGUF with Q2_K in its name"):
            locate_checkpoint("owner/name:Q2_K")
        with pytest.raises(InvalidArgument, match="no name of a quantisation"):
            locate_checkpoint("owner/name:*")
    assert calls == [("owner/name", "v1"), ("owner/name", None)]


def test_weights_are_fetched_once_and_with_the_files_of_every_tokenizer(tmp_path: Path) -> None:
    published = ("config.json", "model-00001-of-00001.safetensors", "tekken.json", "vocab.json", "merges.txt")
    twice = ("params.json", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "README.md")

    def download(name: str, *, revision: str | None, **patterns: list[str]) -> str:
        from huggingface_hub.utils import filter_repo_objects

        return str(files(tmp_path, *filter_repo_objects([*published, *twice], **patterns)))

    with patch("huggingface_hub.snapshot_download", download):
        directory = locate_checkpoint("owner/name", (*SMALL_FILES, "*.safetensors"))
    assert {file.name for file in directory.iterdir()} == {*published, "params.json"}


def test_a_fingerprint_is_of_a_directory_s_files_and_of_the_hub_s_revision_while_they_come(tmp_path: Path) -> None:
    local = files(tmp_path / "local", "config.json")
    revisions = [files(tmp_path / "models--a--b" / "snapshots" / name, "config.json") for name in ("0a", "0b")]
    here, first, second = map(checkpoint_fingerprint, (local, *revisions))
    assert len({here, first, second}) == 3
    for directory in (local, *revisions):
        files(directory, "model.safetensors")
    assert checkpoint_fingerprint(local) != here
    assert [*map(checkpoint_fingerprint, revisions)] == [first, second]
