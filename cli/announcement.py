"""What a server says of its addresses once it serves: URLs that somebody on this machine can paste."""

import shlex
import sys

from ..core.gateway import Gateway


def reachable_address(address: str, port: int) -> str:
    """Where somebody on this machine finds what listens on `address`."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def base_url(address: str, port: int, encrypted: bool = False) -> str:
    return f"{'https' if encrypted else 'http'}://{reachable_address(address, port)}"


def print_ready(gateway: Gateway, at: str, guarded: bool) -> None:
    """The URL, and a line to paste; `guarded`: it needs a key."""
    key = "-H 'Authorization: Bearer <key>' " if guarded else ""
    print(f"Serving on {at}")
    for config in gateway.model_configs():
        if any(spec.name == "text_input" for spec in config.inputs):
            body = shlex.quote('{"text_input": "def fibonacci(n):", "max_tokens": 64}')
            print(f"Try: curl -N {key}{at}/v2/models/{config.name}/generate_stream -d {body}")
            break
    sys.stdout.flush()
