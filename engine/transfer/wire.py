"""What two servers say to each other: frames over one connection, a handshake, and the fingerprints that must agree.

A frame is 4 bytes with its length, and a msgpack array. It has a deadline and a greatest length, by which a peer that
stalls, drips or sends garbage is cut off. Payloads travel by a transport, see `payloads.py`.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import TypeAlias, TypeVar

import msgspec

M = TypeVar("M")

MAGIC = b"charonia-kv-1"
_LONGEST_FRAME = 1 << 24
"""Bytes of a frame: the hashes of a prompt of eight million tokens."""
_LONGEST_HELLO = 1 << 16
"""Bytes of a frame before the peer has proved that it knows the token."""
_NONCE = 32


class TransferError(Exception):
    """A prefix does not come, or not all of it; `reason` is one of few, for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Challenge(msgspec.Struct, array_like=True, frozen=True):
    """The server's first frame."""

    magic: bytes
    nonce: bytes


class Proof(msgspec.Struct, array_like=True, frozen=True):
    """The client's answer: it knows the token. `fingerprint`: what its cache is."""

    magic: bytes
    proof: bytes
    nonce: bytes
    fingerprint: dict[str, str]
    memory: str = ""
    """The file of shared memory by which pieces may come, if the server finds `secret` at its beginning."""
    secret: bytes = b""


class Welcome(msgspec.Struct, array_like=True, tag="welcome", frozen=True):
    """The server knows it too, and its cache is the same. `transport`: how payloads come."""

    proof: bytes
    transport: str


class Refused(msgspec.Struct, array_like=True, tag="refused", frozen=True):
    """There will be no transfer, or no more of it."""

    reason: str
    message: str


class FetchPrefix(msgspec.Struct, array_like=True, frozen=True):
    """The client asks what is held by this handle."""

    handle: str


class PrefixOffer(msgspec.Struct, array_like=True, tag="offer", frozen=True):
    """What there is: the hashes of all spans. `state`: whether the state after all of them comes last."""

    hashes: list[bytes]
    state: bool


class Piece(msgspec.Struct, array_like=True, tag="piece", frozen=True):
    """The next spans up to `end`, or the state: a payload of so many bytes of each rank, with a checksum."""

    end: int
    state: bool
    sizes: list[int]
    checksum: int


class WantedSpans(msgspec.Struct, array_like=True, frozen=True):
    """What the client wants of it: the spans from `first` up to `end`, in pieces of about so many bytes, and perhaps
    the state."""

    first: int
    end: int
    piece_bytes: int
    state: bool


class PieceTaken(msgspec.Struct, array_like=True, frozen=True):
    """The client has the last piece; after what it wants last, the prefix may be given up."""

    end: int


Reply: TypeAlias = Welcome | Refused | PrefixOffer | Piece


class Link:
    """One connection. `timeout`: seconds for each frame and payload, from its first byte to its last."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self._socket = connected
        self._timeout = timeout
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: msgspec.Struct) -> None:
        content = msgspec.msgpack.encode(message)
        self.send_bytes(len(content).to_bytes(4, "big") + content)

    def send_bytes(self, content: bytes | bytearray | memoryview) -> None:
        """Raises `TransferError` where it does not take them in time, or is gone."""
        left, deadline = memoryview(content), time.monotonic() + self._timeout
        try:
            while len(left):
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                left = left[self._socket.send(left[: 1 << 20]) :]
        except OSError as error:
            raise _lost(error) from error

    def receive(self, kind: type[M], hello: bool = False) -> M:
        """The next frame. `hello`: the peer may be anybody yet. Raises `TransferError` where none comes in time, or
        something else."""
        deadline = time.monotonic() + self._timeout
        length = int.from_bytes(self._receive_into(bytearray(4), deadline), "big")
        if length > (_LONGEST_HELLO if hello else _LONGEST_FRAME):
            raise TransferError("garbage", f"the peer sends a frame of {length} bytes")
        try:
            return msgspec.msgpack.decode(self._receive_into(bytearray(length), deadline), type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TransferError("garbage", f"the peer sends what is no message: {error}") from error

    def receive_bytes(self, into: bytearray | memoryview) -> None:
        """Raises `TransferError` as `receive`."""
        self._receive_into(into, time.monotonic() + self._timeout)

    def _receive_into(self, into: bytearray | memoryview, deadline: float) -> bytearray | memoryview:
        left = memoryview(into)
        try:
            while len(left):
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                count = self._socket.recv_into(left[: 1 << 20])
                if not count:
                    raise TransferError("lost", "the peer closed the connection")
                left = left[count:]
        except OSError as error:
            raise _lost(error) from error
        return into

    def close(self) -> None:
        """Wakes whoever waits for it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _lost(error: OSError) -> TransferError:
    late = isinstance(error, TimeoutError)
    return TransferError("timeout" if late else "lost", "the peer stalls" if late else f"the peer is lost: {error}")


def challenge() -> Challenge:
    return Challenge(MAGIC, secrets.token_bytes(_NONCE))


def prove(secret: bytes, side: bytes, *nonces: bytes) -> bytes:
    """What only who knows the secret can say to these nonces."""
    return hmac.digest(secret, b"|".join((MAGIC, side, *nonces)), sha256)


def is_proof(proof: bytes, secret: bytes, side: bytes, *nonces: bytes) -> bool:
    fits = all(len(nonce) == _NONCE for nonce in nonces)
    return fits and hmac.compare_digest(proof, prove(secret, side, *nonces))


def mismatch(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Why two caches cannot share their blocks; empty where they can."""
    for name in dict.fromkeys((*ours, *theirs)):
        mine, other = ours.get(name, "nothing"), theirs.get(name, "nothing")
        if mine != other:
            return f"{name}: the prefiller has {mine}, the decoder {other}"
    return ""
