"""`kv_transfer_params`: how vLLM's NIXL connector, and llm-d's sidecar, tell of a prompt that one server computes and
another one answers. Between the two it is opaque to everybody."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from .errors import InvalidArgument, describe_validation_error

FIELD = "kv_transfer_params"
_LONGEST_NAME = 256


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """The object, by vLLM's names; what others put into it is ignored.

    Raises:
        InvalidArgument: it wants both, or does not say where the prompt was computed.
    """

    do_remote_decode: bool = False
    """Another server is to answer what this one computes."""
    do_remote_prefill: bool = False
    """Another server has computed the prompt: where, the rest says."""
    remote_engine_id: Annotated[str, msgspec.Meta(max_length=_LONGEST_NAME)] | None = None
    remote_request_id: Annotated[str, msgspec.Meta(max_length=_LONGEST_NAME)] | None = None
    """The id by which the prompt is held there."""
    remote_host: Annotated[str, msgspec.Meta(max_length=_LONGEST_NAME)] | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    remote_block_ids: list[Any] | None = None
    """Numbers of the prompt's full blocks, from 0 on."""
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.do_remote_decode and self.do_remote_prefill:
            raise InvalidArgument(f"{FIELD}: do_remote_decode and do_remote_prefill can't both be true", field=FIELD)
        if self.do_remote_prefill:
            for name in ("remote_request_id", "remote_host", "remote_port"):
                if not getattr(self, name):
                    raise InvalidArgument(f"{FIELD}.{name} is missing, which do_remote_prefill needs", field=FIELD)


def parse_kv_transfer(members: Mapping[str, Any]) -> KVTransferParams | None:
    """The transfer that a body asks for, if any. Raises `InvalidArgument` for what is not one."""
    try:
        given = {name: value for name, value in members.items() if value is not None}
        params = msgspec.convert(given, KVTransferParams)
    except msgspec.ValidationError as error:
        path, reason, *_ = describe_validation_error(error)
        raise InvalidArgument(f"{FIELD}{'.' if path else ''}{path} {reason}", field=FIELD) from None
    return params if params.do_remote_decode or params.do_remote_prefill else None


def new_handle() -> str:
    """A name under which a prompt is held, which nobody guesses."""
    return secrets.token_hex(16)


class TransferAddress(msgspec.Struct, array_like=True, frozen=True):
    """Where other servers fetch what an engine has computed."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1

    def held_params(self, handle: str, blocks: int) -> dict[str, Any]:
        """What the server that goes on is to be told: the keys of vLLM's NIXL connector."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(blocks)),
            "remote_engine_id": self.engine_id,
            "remote_request_id": handle,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp_size,
        }
