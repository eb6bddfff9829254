"""The sockets of cache events, as vLLM's: PUB with frames (topic, number, payload), and ROUTER for what a reader
missed. Each has a thread of its own.

Numbers are 8 bytes, big-endian. A reader asks with (empty, first number); it gets (empty, topic, number, payload) for
each batch that is still there, then (empty, topic, -1, empty).
"""

import logging
import threading
import time
from collections import deque
from queue import Empty, Full, Queue
from typing import NamedTuple

import zmq

from ...core.errors import InvalidArgument
from ..config import KVEventsConfig, replica_endpoint
from .cache_events import CacheEventEncoder, Changes

log = logging.getLogger(__name__)

_LINGER_MILLISECONDS = 1000
"""How long a closing socket may take to hand over what was published."""

_NO_MORE = b"\xff" * 8
"""-1, which no batch has as its number."""

_WAITING_REPLIES = 2
"""Replies that may wait for a reader that does not read, in buffers; more is lost to it."""


class NumberedBatch(NamedTuple):
    number: int
    seconds: float
    """Since the epoch."""
    changes: Changes


class EventPublisher:
    """Publishes batches of changes; `publish` is for one thread.

    Raises:
        InvalidArgument: a socket cannot have its address.
    """

    def __init__(self, config: KVEventsConfig, encoder: CacheEventEncoder, replica: int = 0) -> None:
        self._encoder = encoder
        self._topic = config.topic.encode()
        self._queue: Queue[NumberedBatch | None] = Queue(config.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        """The numbers and payloads of the last batches."""
        self._sending = threading.Lock()
        self.next_number = 0
        """The number of the batch to come."""
        self._full = 0
        self._failed = 0
        self._context = zmq.Context()
        try:
            self._publish_socket = self._open_socket(zmq.PUB, config.endpoint, replica, config.hwm)
            self._threads = [threading.Thread(target=self._send_batches, name="cache-events", daemon=True)]
            if config.replay_endpoint is not None:
                waiting = _WAITING_REPLIES * (config.buffer_steps + 1)
                self._replay_socket = self._open_socket(zmq.ROUTER, config.replay_endpoint, replica, waiting)
                self._threads.append(threading.Thread(target=self._replay, name="cache-events-replay", daemon=True))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        for thread in self._threads:
            thread.start()

    def _open_socket(self, kind: int, endpoint: str, replica: int, high_water_mark: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(high_water_mark)
        socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            address = replica_endpoint(endpoint, replica)
            if kind == zmq.ROUTER or "*" in address or "::" in address or address.startswith(("ipc://", "inproc://")):
                socket.bind(address)
            else:
                socket.connect(address)
        except (zmq.ZMQError, ValueError) as error:
            raise InvalidArgument(
                f"kv_events_config: {endpoint}, replica {replica}: {error}", field="kv_events_config"
            ) from None
        return socket

    @property
    def published(self) -> int:
        """Batches that were published."""
        return self.next_number - self.dropped

    @property
    def dropped(self) -> int:
        """Batches that were not, though they have a number."""
        return self._full + self._failed

    @property
    def has_room(self) -> bool:
        return not self._queue.full()

    def publish(self, changes: Changes) -> bool:
        """Send a batch, without waiting. False: the queue is full, and the batch's number will be missing."""
        batch = NumberedBatch(self.next_number, time.time(), changes)
        self.next_number += 1
        try:
            self._queue.put_nowait(batch)
        except Full:
            self._full += 1
            return False
        return True

    def close(self) -> None:
        """Hand over what was published, for a second at most, and end."""
        while True:
            try:
                self._queue.put_nowait(None)
                break
            except Full:  # what waits is not wanted any more
                try:
                    self._queue.get_nowait()
                except Empty:
                    continue
        self._threads[0].join()
        self._context.term()  # ends the other thread, which closes its socket

    def _send_batches(self) -> None:
        try:
            while (batch := self._queue.get()) is not None:
                try:
                    self._send(batch)
                except Exception:
                    self._failed += 1
                    log.exception("cache events: batch %d is lost", batch.number)
        finally:
            self._publish_socket.close()

    def _send(self, batch: NumberedBatch) -> None:
        number = batch.number.to_bytes(8, "big")
        payload = self._encoder.encode(batch.seconds, batch.changes)
        with self._sending:
            self._sent.append((number, payload))
        self._publish_socket.send_multipart((self._topic, number, payload))

    def _replay(self) -> None:
        try:
            while True:
                reader, *request = self._replay_socket.recv_multipart()
                for number, payload in self._missed(request):
                    self._replay_socket.send_multipart((reader, b"", self._topic, number, payload))
                self._replay_socket.send_multipart((reader, b"", self._topic, _NO_MORE, b""))
        except zmq.ContextTerminated:
            return
        finally:
            self._replay_socket.close()

    def _missed(self, request: list[bytes]) -> list[tuple[bytes, bytes]]:
        """What there is from the number on that a request has; nothing if it has none."""
        if len(request) != 2 or len(request[1]) != 8:
            log.warning("cache events: a request for missed batches needs an empty frame and 8 bytes")
            return []
        with self._sending:
            return [sent for sent in self._sent if sent[0] >= request[1]]
