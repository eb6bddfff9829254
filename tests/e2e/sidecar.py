"""The steps that llm-d's routing sidecar takes before a decoding server, by its published protocol."""

from collections.abc import Callable
from typing import Any

import httpx

TIMEOUT = 60.0
NOTHING_YET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Sidecar:
    """Sends each request to a prefilling server first, which a gateway names by `x-prefiller-host-port`. `between`: is
    called when that has answered, as a test's chance to break something."""

    def __init__(self, prefiller: str, decoder: str, between: Callable[[], object] = lambda: None) -> None:
        self._prefiller, self._decoder = prefiller, decoder
        self._between = between
        self.prefilled: dict[str, Any] = {}
        """The last answer of the prefilling server; empty if it gave none."""

    def ask(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer for the client."""
        headers = {"x-request-id": "of the sidecar"}
        self.prefilled = self._prefill(path, body, headers)
        self._between()
        told = self.prefilled.get("kv_transfer_params")
        decoding = body | ({"kv_transfer_params": told} if told is not None else {})
        return httpx.post(self._decoder + path, json=decoding, headers=headers, timeout=TIMEOUT)

    def _prefill(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        shortened = {name: value for name, value in body.items() if name != "stream_options"}
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        shortened |= {"stream": False, limit: 1, "kv_transfer_params": NOTHING_YET}
        try:
            answer = httpx.post(self._prefiller + path, json=shortened, headers=headers, timeout=TIMEOUT)
            return dict(answer.raise_for_status().json())
        except httpx.HTTPError:  # the decoder is asked alone
            return {}
