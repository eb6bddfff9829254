"""The long proof, shortened."""

from pathlib import Path

import pytest

from charonia.repository.object_storage import stores


def test_what_is_served_is_one_upload_whatever_the_store_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    from ...proofs.object_storage import count_requests, run_rounds, store

    monkeypatch.setattr(stores, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with store() as (proxy, client):
        assert count_requests(proxy, client, tmp_path / "many", versions=4) == [(2, 21), (1, 0)]
        ends = run_rounds(proxy, client, tmp_path / "rounds", rounds=12)
    assert ends["an upload"] > 3
    assert ends.total() == 12
