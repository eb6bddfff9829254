"""What --kv-transfer-config may say, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.engine.transfer_config import read_kv_transfer_config

TOKEN = "sixteen letters!"


def written(extra: dict[str, Any] | None = None, **keys: Any) -> str:
    limits = {"token": TOKEN} if extra is None else extra
    base = {"kv_connector": "CharoniaConnector", "kv_role": "kv_both", "kv_connector_extra_config": limits}
    return json.dumps(base | keys)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[]", "must be an object"),
        ("{", "must be a JSON object"),
        (written(kv_connector="NixlConnector"), "kv_connector must be CharoniaConnector"),
        (written(kv_role="both"), "kv_role"),
        (written(kv_rank=0), "kv_rank means nothing"),
        (written(kv_portt=1), "kv_portt is unknown"),
        (written(kv_ip="localhost"), "localhost"),
        (written({}), "needs either token or token_file"),
        (written({"token": "short"}), "at least 16 characters"),
        (written({"token_file": "/none/there"}), "token_file /none/there"),
        (written({"token": TOKEN, "peers": ["10.0.0.1/8"]}), "host bits"),
        (written({"token": TOKEN, "transports": []}), "transports must name one"),
        (written({"token": TOKEN, "transports": ["nixl"]}), "transports"),
        (written({"token": TOKEN, "hold_fraction": 1.5}), "hold_fraction"),
    ],
)
def test_what_means_nothing_is_refused_by_name(config: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match="kv_transfer_config") as refusal:
        read_kv_transfer_config(config, prefix_caching=True)
    assert words in refusal.value.message
    assert refusal.value.field == "kv_transfer_config"


def test_the_token_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    config = read_kv_transfer_config(written({"token_file": str(tmp_path / "token")}), prefix_caching=True)
    assert config.secret == TOKEN.encode()


def test_there_is_nothing_to_transfer_without_a_prefix_cache() -> None:
    with pytest.raises(InvalidArgument, match="prefix_caching is off"):
        read_kv_transfer_config(written(), prefix_caching=False)


def test_prefixes_are_fetched_from_private_addresses_or_those_that_are_named() -> None:
    usual = read_kv_transfer_config(written(), prefix_caching=True)
    named = read_kv_transfer_config(
        written({"token": TOKEN, "peers": ["10.1.0.0/16", "fd00::/8"]}), prefix_caching=True
    )
    addresses = ("10.1.2.3", "10.2.2.3", "127.0.0.1", "8.8.8.8", "fd00::1", "2600::1")
    assert [usual.may_fetch_from(address) for address in addresses] == [True, True, True, False, True, False]
    assert [named.may_fetch_from(address) for address in addresses] == [True, False, False, False, True, False]
