"""The prefilling server's end: listens for peers that know the token and have the same kind of cache, and sends them
the prefixes that are held for them. Threads; nothing here waits for a step but who asked for it."""

import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import reduce
from typing import NamedTuple, Protocol
from zlib import crc32

from ...core.errors import InvalidArgument
from ..transfer_config import FIELD, KVTransferConfig
from .payloads import PayloadSender
from .shared_memory_payloads import SharedMemorySender
from .tcp_payloads import TcpSender
from .wire import (
    FetchPrefix,
    Link,
    Piece,
    PieceTaken,
    PrefixOffer,
    Proof,
    Refused,
    TransferError,
    WantedSpans,
    Welcome,
    challenge,
    is_proof,
    mismatch,
    prove,
)

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.05
"""After a connection that was not had."""


class OfferedPrefix(NamedTuple):
    hashes: list[bytes]
    """The hashes of its spans."""
    state: bool
    """Whether there is a state after all of them."""


class PrefixSource(Protocol):
    """Who holds prefixes, as connections' threads ask it."""

    def offer(self, handle: str) -> OfferedPrefix | None:
        """The prefix of this handle, which stays while it is being sent; None: there is none, or it is being sent
        already."""

    def pieces(self, first: int, end: int, piece_bytes: int) -> Sequence[int]:
        """Where pieces of about so many bytes end, of these spans."""

    def read(self, handle: str, first: int, end: int) -> list[bytes]:
        """By rank the bytes of these spans. Raises `TransferError` where the prefix is gone."""

    def read_state(self, handle: str) -> list[bytes]:
        """The state after all of them, likewise."""

    def sent(self, handle: str, size: int, whole: bool) -> None:
        """No more of it is sent, after so many bytes; `whole`: the peer has all that it wants."""


class PrefixServer:
    """Listens at the address of `config` until it is closed.

    Raises:
        InvalidArgument: the address is not to be had.
    """

    def __init__(
        self, config: KVTransferConfig, replica: int, fingerprint: Mapping[str, str], source: PrefixSource
    ) -> None:
        self._config = config
        self._fingerprint = dict(fingerprint)
        self._source = source
        self._links: set[Link] = set()
        self._guard = threading.Lock()
        self._closed = threading.Event()
        port = config.kv_port + replica if config.kv_port else 0
        family = socket.AF_INET6 if ":" in config.kv_ip else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((config.kv_ip, port))
            self._listener.listen(config.limits.most_peers)
        except (OSError, OverflowError) as error:
            self._listener.close()
            message = f"{FIELD}: cannot listen on {config.kv_ip}, port {port}: {error}"
            raise InvalidArgument(message, field=FIELD) from None
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="kv-transfer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and cut all peers off."""
        with self._guard:
            self._closed.set()
            links = list(self._links)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in links:
            link.close()
        self._thread.join()

    def _listen(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:  # the peer was gone before, or this process has no descriptor left
                if self._closed.wait(_PAUSE_SECONDS):
                    return
                continue
            try:
                self._begin(connected)
            except (OSError, RuntimeError) as error:  # it was gone at once, or there is no thread left
                log.warning("kv transfer: a peer is not served: %s", error)
                connected.close()

    def _begin(self, connected: socket.socket) -> None:
        """Serve a peer in a thread of its own, if there are not too many."""
        link = Link(connected, self._config.limits.timeout_seconds)
        with self._guard:
            full = self._closed.is_set() or len(self._links) >= self._config.limits.most_peers
            if not full:
                self._links.add(link)
        if full:
            link.close()
            return
        thread = threading.Thread(target=self._serve, args=(link,), name="kv-transfer-peer", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            with self._guard:
                self._links.discard(link)
            raise

    def _serve(self, link: Link) -> None:
        try:
            self._greet_and_send(link)
        except TransferError as error:
            if not self._closed.is_set():
                log.warning("kv transfer: a peer is cut off: %s", error)
        except Exception:
            log.exception("kv transfer: a peer is cut off")
        finally:
            link.close()
            with self._guard:
                self._links.discard(link)

    def _greet_and_send(self, link: Link) -> None:
        greeting = challenge()
        link.send(greeting)
        proof = link.receive(Proof, hello=True)
        secret = self._config.secret
        if not is_proof(proof.proof, secret, b"decoder", greeting.nonce, proof.nonce):
            link.send(Refused("token", "the tokens of the two servers differ"))
            raise TransferError("token", "it does not know the token")
        if reason := mismatch(self._fingerprint, proof.fingerprint):
            link.send(Refused("mismatch", reason))
            raise TransferError("mismatch", reason)
        with closing(self._transport(link, proof)) as payloads:
            link.send(Welcome(prove(secret, b"prefiller", proof.nonce, greeting.nonce), payloads.name))
            self._send_prefix(link, payloads, link.receive(FetchPrefix).handle)

    def _transport(self, link: Link, proof: Proof) -> PayloadSender:
        if proof.memory and "shared_memory" in self._config.limits.transports:
            with suppress(OSError):
                return SharedMemorySender(link, proof.memory, proof.secret)
        return TcpSender(link)

    def _send_prefix(self, link: Link, payloads: PayloadSender, handle: str) -> None:
        source = self._source
        prefix = source.offer(handle)
        if prefix is None:
            message = "the prefiller holds no such prefix: its time has passed, it made room, or it was fetched before"
            link.send(Refused("unknown", message))
            return
        size, whole = 0, False

        def send(end: int, state: bool, parts: Sequence[bytes]) -> None:
            nonlocal size
            checksum = reduce(lambda checksum, part: crc32(part, checksum), parts, 0)
            payloads.send(Piece(end, state, list(map(len, parts)), checksum), parts)
            size += sum(map(len, parts))
            link.receive(PieceTaken)

        try:
            link.send(PrefixOffer(prefix.hashes, prefix.state))
            wanted = link.receive(WantedSpans)
            first = wanted.first
            if not 0 <= first <= wanted.end <= len(prefix.hashes) or (wanted.state and not prefix.state):
                raise TransferError("garbage", "it wants what was not offered")
            for end in source.pieces(first, wanted.end, wanted.piece_bytes):
                send(end, False, source.read(handle, first, end))
                first = end
            if wanted.state:
                send(first, True, source.read_state(handle))
            whole = True
        finally:
            source.sent(handle, size, whole)
