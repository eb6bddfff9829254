"""The decoding server's end: fetches one prefix from the server that computed it. Blocks; for threads of its own."""

import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from zlib import crc32

from ...processes.daemon_threads import DaemonThreads
from ..transfer_config import KVTransferConfig
from .payloads import PayloadReceiver
from .shared_memory_payloads import SharedMemoryReceiver
from .tcp_payloads import TcpReceiver
from .wire import (
    MAGIC,
    Challenge,
    FetchPrefix,
    Link,
    Piece,
    PieceTaken,
    PrefixOffer,
    Proof,
    Refused,
    Reply,
    TransferError,
    WantedSpans,
    Welcome,
    challenge,
    is_proof,
    prove,
)

R = TypeVar("R", Welcome, PrefixOffer, Piece)
Addresses: TypeAlias = list[tuple[Any, ...]]
"""As `getaddrinfo` has them."""

_LOOKUPS = 4
"""Names that are looked up at a time."""


class RemotePrefix(NamedTuple):
    """Where a computed prefix is held."""

    host: str
    port: int
    handle: str
    engine: str = ""
    """The name of the engine that holds it, for messages."""


class PrefixSink(Protocol):
    """Whoever takes a prefix, as the thread that fetches it gives it."""

    @property
    def hashes(self) -> Sequence[bytes]:
        """The hashes of the spans that are wanted."""

    @property
    def first(self) -> int:
        """The first span that has to come."""

    @property
    def whole(self) -> bool:
        """Whether a prefix is of use as a whole alone, because layers keep windows or states."""

    def piece_sizes(self, first: int, end: int) -> list[int]:
        """The bytes of these spans, by rank."""

    def state_sizes(self) -> list[int]:
        """The bytes of a state, by rank; none where sequences have no states."""

    def largest_piece(self, wanted: int) -> int:
        """Bytes of a piece that has at least a span, or is a state, and about `wanted` ones."""

    def take(self, first: int, end: int, payload: memoryview) -> None:
        """The bytes of these spans have come, rank after rank; afterwards their memory may change. Raises
        `TransferError` where they are not wanted any more."""

    def take_state(self, payload: memoryview) -> None:
        """The bytes of the state after all spans have come; otherwise as `take`."""


class NameLookups(DaemonThreads):
    """Threads that look names up, for no call of the system's that does so can be ended."""

    def __init__(self) -> None:
        super().__init__("kv-transfer-names", _LOOKUPS)

    def addresses(self, remote: RemotePrefix) -> Future[Addresses]:
        """Of its host, once they are known. Whoever cancels it waits no more."""
        future: Future[Addresses] = Future()
        with suppress(OSError):  # it is a name
            future.set_result(_addresses(remote, socket.AI_NUMERICHOST))
            return future
        self.start(partial(self._look_up, remote, future))
        return future

    def _look_up(self, remote: RemotePrefix, future: Future[Addresses]) -> None:
        if future.cancelled():
            return
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            try:
                future.set_result(_addresses(remote))
            except (OSError, UnicodeError) as error:
                future.set_exception(error)


def _addresses(remote: RemotePrefix, flags: int = 0) -> Addresses:
    return list(socket.getaddrinfo(remote.host, remote.port, type=socket.SOCK_STREAM, flags=flags))


class PrefixFetch:
    """One fetch; `run` is called once, and `cancel` by any thread. `received`: bytes so far."""

    def __init__(
        self, config: KVTransferConfig, fingerprint: Mapping[str, str], remote: RemotePrefix, names: NameLookups
    ) -> None:
        self._config = config
        self._fingerprint = dict(fingerprint)
        self.remote = remote
        self._names = names
        self._lookup: Future[Addresses] | None = None
        self._link: Link | None = None
        self._connecting: socket.socket | None = None
        self._guard = threading.Lock()
        self.cancelled = False
        self.received = 0

    def cancel(self) -> None:
        """Have `run` end soon."""
        with self._guard:
            self.cancelled = True
            link, connecting, lookup = self._link, self._connecting, self._lookup
        if lookup is not None:
            lookup.cancel()
        if connecting is not None:
            with suppress(OSError):  # it is connected, or refused
                connecting.shutdown(socket.SHUT_RDWR)
        if link is not None:
            link.close()

    def run(self, sink: PrefixSink) -> None:
        """Fetch what `sink` lacks. Raises `TransferError` where not all of it comes."""
        with ExitStack() as stack:
            link = self._connect()
            stack.callback(link.close)
            with self._guard:
                self._link = link
                if self.cancelled:
                    raise TransferError("cancelled", "the request is gone")
            largest = sink.largest_piece(self._config.limits.piece_bytes)
            payloads = self._agree(link, largest, stack)
            self._fetch(link, payloads, sink, largest)

    def _connect(self) -> Link:
        remote, timeout = self.remote, self._config.limits.timeout_seconds
        where = f"{remote.host}, port {remote.port}"
        try:
            family, *_, target = self._look_up(remote, timeout)[0]
        except TimeoutError as error:
            raise TransferError("connect", f"{where}: the name is not found in {timeout:g} s") from error
        except (OSError, UnicodeError) as error:
            raise TransferError("connect", f"{where}: {error}") from error
        address = str(target[0])
        if not self._config.may_fetch_from(address):
            raise TransferError("peers", f"{where}: prefixes are not fetched from there, see peers")
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.settimeout(timeout)
            with self._guard:
                self._connecting = connecting
                if self.cancelled:
                    raise OSError("the request is gone")
            connecting.connect(target)
            return Link(connecting, timeout)
        except OSError as error:
            connecting.close()
            raise TransferError("connect", f"{where}: {error}") from error
        finally:
            with self._guard:
                self._connecting = None

    def _look_up(self, remote: RemotePrefix, timeout: float) -> Addresses:
        with self._guard:
            if self.cancelled:
                raise OSError("the request is gone")
            self._lookup = self._names.addresses(remote)
        try:
            return self._lookup.result(timeout)
        except CancelledError:
            raise OSError("the request is gone") from None
        finally:
            self._lookup.cancel()

    def _agree(self, link: Link, largest: int, stack: ExitStack) -> PayloadReceiver:
        secret = self._config.secret
        theirs = link.receive(Challenge, hello=True)
        if theirs.magic != MAGIC:
            raise TransferError("garbage", "the peer speaks another protocol, or another version of it")
        mine = challenge()
        memory: SharedMemoryReceiver | None = None
        if "shared_memory" in self._config.limits.transports:
            with suppress(OSError):
                memory = SharedMemoryReceiver(largest)
                stack.callback(memory.close)
        proof = prove(secret, b"decoder", theirs.nonce, mine.nonce)
        name, known = ("", b"") if memory is None else (memory.name, memory.secret)
        link.send(Proof(MAGIC, proof, mine.nonce, self._fingerprint, name, known))
        welcome = self._reply(link, Welcome)
        if not is_proof(welcome.proof, secret, b"prefiller", mine.nonce, theirs.nonce):
            raise TransferError("token", "the peer does not know the token")
        if memory is not None:
            memory.forget_name()
            if welcome.transport == "shared_memory":
                return memory
        if welcome.transport != "tcp":
            raise TransferError("garbage", f"the peer sends by {welcome.transport!r}")
        return TcpReceiver(link)

    def _reply(self, link: Link, kind: type[R]) -> R:
        reply: Reply = link.receive(Reply)  # type: ignore[arg-type]
        if isinstance(reply, Refused):
            raise TransferError(reply.reason[:32], reply.message[:512])
        if not isinstance(reply, kind):
            raise TransferError("garbage", f"the peer sends a {type(reply).__name__} in place of a {kind.__name__}")
        return reply

    def _fetch(self, link: Link, payloads: PayloadReceiver, sink: PrefixSink, largest: int) -> None:
        link.send(FetchPrefix(self.remote.handle))
        end = _wanted_end(self._reply(link, PrefixOffer), sink)
        at, has_state = sink.first, bool(sink.state_sizes())
        link.send(WantedSpans(at, end, largest, has_state))
        while at < end:
            piece = self._reply(link, Piece)
            if piece.state or not at < piece.end <= end:
                raise TransferError("garbage", "the peer sends spans that do not follow, or are not wanted")
            sink.take(at, piece.end, self._payload(payloads, piece, sink.piece_sizes(at, piece.end)))
            at = piece.end
            link.send(PieceTaken(at))
        if has_state:
            piece = self._reply(link, Piece)
            sink.take_state(self._payload(payloads, piece, sink.state_sizes()))
            link.send(PieceTaken(at))

    def _payload(self, payloads: PayloadReceiver, piece: Piece, sizes: list[int]) -> memoryview:
        if piece.sizes != sizes:
            raise TransferError("garbage", f"the peer sends pieces of {piece.sizes} bytes in place of {sizes}")
        payload = payloads.receive(sum(sizes))
        if crc32(payload) != piece.checksum:
            raise TransferError("garbage", "the bytes of a piece are damaged")
        self.received += len(payload)
        return payload


def _wanted_end(offer: PrefixOffer, sink: PrefixSink) -> int:
    """The last span that is wanted of an offer. Raises `TransferError` where it is another prompt's, or cannot be used
    because it is not the whole."""
    ours, theirs = sink.hashes, offer.hashes
    same = next((at for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)) if mine != other), None)
    end = min(len(ours), len(theirs)) if same is None else same
    if same is not None and end <= sink.first:
        message = "the peer holds another prompt, or another tenant's, adapter's or salt's"
        raise TransferError("prompt", message)
    needs_all = sink.whole and (end < len(ours) or end < len(theirs))
    if needs_all or (sink.state_sizes() and not offer.state):
        raise TransferError(
            "part", f"the peer has {len(theirs)} blocks of tokens, which must be the {len(ours)} wanted ones"
        )
    return end
