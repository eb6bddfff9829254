"""Two step loops, one of which computes prompts that the other goes on with; and everything that can break between
them. The fake executors hold every block's content against the tokens that it should have."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pytest

from charonia.core.errors import ErrorCode, InvalidArgument
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.core.cache_facts import cache_facts
from charonia.engine.core.inbox import LoopCall
from charonia.engine.core.messages import AbortRequests, AddRequest, RequestRejected, RequestUpdates, Shutdown
from charonia.engine.core.prefix_transfers import PrefixTransfers
from charonia.engine.core.step_loop import EngineCore
from charonia.engine.transfer.prefix_client import NameLookups, PrefixFetch, RemotePrefix
from charonia.engine.transfer.wire import TransferError
from charonia.engine.transfer_config import KVTransferConfig, read_kv_transfer_config
from charonia.engine.worker.executor import Capacity
from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.layer_groups import ONE_GROUP, LayerGroups
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import MaskSource, StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

SIZE = 4
BLOCKS = 48
PROMPT = [*range(100, 141)]
"""Ten full blocks, and the last token."""
NEW = 6
RIGHT = [*range(141, 141 + NEW)]
TOKEN = "a secret of two servers"


def transfer_config(**extra: Any) -> KVTransferConfig:
    limits = {"token": TOKEN, "timeout_seconds": 5, "piece_bytes": 4096, **extra}
    written = {"kv_connector": "CharoniaConnector", "kv_role": "kv_both", "kv_port": 0}
    policy = limits.pop("policy", "recompute")
    written |= {"kv_load_failure_policy": policy, "kv_connector_extra_config": limits}
    return read_kv_transfer_config(msgspec.json.encode(written).decode(), prefix_caching=True)


class CountingExecutor(FakeExecutor):
    """Remembers how many tokens its steps computed."""

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> Any:
        self.computed = getattr(self, "computed", 0) + plan.tokens
        return super().execute(plan, masks)


class Server:
    """A core that turns in a thread, as `kv_both`."""

    def __init__(
        self,
        transfer: KVTransferConfig,
        groups: LayerGroups = ONE_GROUP,
        state_bytes: int = 0,
        blocks: int = BLOCKS,
        clock: Callable[[], float] = time.monotonic,
        dtype: str = "auto",
        host: int = 0,
        snapshots: int = 8,
        max_model_len: int = 128,
        admission: Literal["optimistic", "no_evict"] = "optimistic",
    ) -> None:
        rules = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=max_model_len, admission=admission
        )
        capacity = Capacity(1000, 128, 1, 1 << 20, state_bytes=state_bytes, groups=groups)
        snapshots = snapshots if state_bytes else 0
        in_flight = groups._replace(in_flight=rules.tokens_in_flight)
        draft_states = 0 if state_bytes else None
        of_host = {"host_blocks": host, "host_snapshots": host if state_bytes else 0}
        self.cache = KVCacheManager(
            blocks, SIZE, snapshots=snapshots, groups=in_flight, draft_states=draft_states, **of_host
        )
        self.executor = CountingExecutor(capacity, block_size=SIZE)
        self.executor.allocate(blocks, snapshots=snapshots, **of_host)
        self.scheduler = Scheduler(rules, self.cache)
        self.core = EngineCore(self.scheduler, self.cache, self.executor, clock)
        config = EngineConfig(
            model="none", executor="fake", cache=CacheConfig(block_size=SIZE, dtype=dtype), kv_transfer=transfer
        )
        facts = cache_facts(config, capacity._replace(max_model_len=max_model_len), self.executor)
        parts = self.scheduler, self.cache, self.executor, self.core.inbox, clock
        self.transfers = PrefixTransfers(config, facts, *parts)
        self.core.prefix_origins.append(self.transfers)
        self.sent: list[Any] = []
        self._thread = threading.Thread(target=self.core.run, args=(self.sent.append,))
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        assert self.transfers.address is not None
        return self.transfers.address.host, self.transfers.address.port

    def close(self) -> None:
        """Nothing may be left."""
        self.core.inbox.accept(Shutdown())
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.core.close()
        assert self.transfers.held is not None
        while self.transfers.held.make_room():
            pass
        self.scheduler.check_integrity()
        assert self.cache.free_blocks == self.cache.blocks
        self.executor.close()

    def add(self, key: int, new: int = NEW, prompt: list[int] = PROMPT, **more: Any) -> None:
        spec = SequenceSpec(key=key, prompt=np.array(prompt, np.int32), max_tokens=new)
        self.core.inbox.accept(AddRequest(spec, **more))

    def updates(self) -> list[RequestUpdates]:
        return [message for message in list(self.sent) if isinstance(message, RequestUpdates)]

    def finished(self) -> dict[int, str]:
        return dict(end for message in self.updates() for end in message.updates.finished)

    def refused(self) -> list[RequestRejected]:
        return [message for message in list(self.sent) if isinstance(message, RequestRejected)]

    def tokens(self, key: int) -> list[int]:
        taken: list[int] = []
        for message in self.updates():
            rest = iter(message.updates.tokens)
            for owner, count in zip(message.updates.keys, message.updates.counts, strict=True):
                mine = [next(rest) for _ in range(count)]
                taken += mine if owner == key else []
        return taken

    def cached(self, key: int) -> int:
        return dict(start for message in self.updates() for start in message.updates.started)[key]

    def totals(self) -> Any:
        return self.ask(self.transfers.totals)

    def ask(self, question: Callable[[], Any]) -> Any:
        return self.core.inbox.call(question).result(10)


def held_up(decoder: Server, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until this is set, a step of one sequence alone ends when there is something to do for the loop, and not before:
    so a sequence goes on for as long as it is to, however long that takes."""
    goes_on, execute, inbox = threading.Event(), decoder.executor.execute, decoder.core.inbox

    def execute_late(plan: StepPlan, *more: Any) -> Any:
        while len(plan.rows) == 1 and inbox._queue.empty() and not goes_on.wait(0.001):
            pass
        return execute(plan, *more)

    monkeypatch.setattr(decoder.executor, "execute", execute_late)
    return goes_on


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def go_on(self, server: Server, seconds: float) -> None:
        """After all that the server was told so far."""
        server.ask(lambda: setattr(self, "seconds", self.seconds + seconds))


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def servers(*configs: KVTransferConfig, **options: Any) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Server(config, **options))) for config in configs]


def prefill(server: Server, handle: str = "handle", prompt: list[int] = PROMPT) -> None:
    key = hash(handle) % 10**6
    server.add(key, 1, prompt, handle=handle)
    until(lambda: key in server.finished())


def decode(server: Server, address: tuple[str, int], key: int = 1, handle: str = "handle") -> list[int]:
    server.add(key, remote=RemotePrefix(*address, handle))
    until(lambda: key in server.finished())
    return server.tokens(key)


KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "windows": {"groups": LayerGroups(1, 2, window=10)},
    "states": {"state_bytes": 100},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_the_prompt_is_computed_by_one_and_answered_by_the_other(kind: str, transport: str) -> None:
    config = transfer_config(transports=[transport])
    with servers(config, config, **KINDS[kind]) as (prefiller, decoder):
        prefill(prefiller)
        assert prefiller.executor.computed == len(PROMPT)
        assert decode(decoder, prefiller.address) == RIGHT
        assert decoder.cached(1) == 40
        assert decoder.executor.computed == NEW, "the prompt's last token, and the new ones but the last"
        until(lambda: prefiller.totals()["sent"])
        assert prefiller.ask(lambda: prefiller.transfers.held_blocks) == 0
        sent, received = prefiller.totals(), decoder.totals()
        assert sent["sent_bytes"] == received["received_bytes"] > 0
        assert (received["received"], received["failed"], received["received_tokens"]) == (1, 0, 40)
        assert received["wait_seconds"] > 0


def test_what_is_cached_here_does_not_come_again() -> None:
    config = transfer_config()
    with servers(config, config) as (prefiller, decoder):
        for key, first in enumerate((0, 20, 40), 1):
            handle = f"of {key}"
            prefill(prefiller, handle, [*PROMPT[:first], *range(500, 541 - first)])
            decoder.add(
                key, 2, [*PROMPT[:first], *range(500, 541 - first)], remote=RemotePrefix(*prefiller.address, handle)
            )
            until(lambda key=key: key in decoder.finished())
            decoder.add(10 + key, 1)
            until(lambda key=key: 10 + key in decoder.finished())
        until(lambda: prefiller.totals()["sent"] == 3)
        assert decoder.totals()["received_bytes"] == (10 + 5 + 0) * 8 * SIZE


def test_nobody_waits_for_what_is_cached_whole() -> None:
    with servers(transfer_config()) as (decoder,):
        decoder.add(1)
        until(lambda: 1 in decoder.finished())
        assert decode(decoder, ("127.0.0.1", 1), key=2) == RIGHT
        assert decoder.totals()["failed"] == 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unknown", "holds no such prefix"),
        ("token", "tokens of the two servers differ"),
        ("mismatch", "block_size: the prefiller has 4, the decoder 5"),
        ("connect", "refused"),
        ("peers", "see peers"),
        ("prompt", "another prompt"),
    ],
)
def test_what_does_not_come_is_computed_or_refused_by_name(
    kind: str, words: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    peers = ["10.0.0.0/8"] if kind == "peers" else []
    other = transfer_config(policy=policy, token=TOKEN + "!" * (kind == "token"), peers=peers)
    with servers(transfer_config(), other) as (prefiller, decoder):
        if kind != "unknown":
            prefill(prefiller, prompt=[*range(700, 741)] if kind == "prompt" else PROMPT)
        if kind == "mismatch":
            assert decoder.transfers.arriving is not None
            decoder.transfers.arriving._fingerprint = {**decoder.transfers.arriving._fingerprint, "block_size": "5"}
        address = prefiller.address
        if kind == "connect":
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                address = unused.getsockname()
        decoder.add(1, remote=RemotePrefix(*address, "handle"))
        until(lambda: 1 in decoder.finished() or decoder.refused())
        if policy == "recompute":
            assert decoder.tokens(1) == RIGHT
        else:
            assert decoder.refused()[0].error.error().code == ErrorCode.UNAVAILABLE
            assert decoder.refused()[0].error.message == "kv_transfer_params: the prefix did not come"
        assert decoder.totals()["failed"] == 1
        assert f"{kind}; " in caplog.text
        assert words in caplog.text


class Proxy:
    """Passes on what the prefiller says, up to `most` bytes; then it closes both connections, says nothing more, or
    says what is garbage."""

    def __init__(self, target: tuple[str, int], most: int, then: str) -> None:
        self._target, self._most, self._then = target, most, then
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._open: list[socket.socket] = []
        self.passed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            self._open += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
            left = self._most
            while left and (content := server.recv(left)):
                client.sendall(content)
                left -= len(content)
                self.passed += len(content)
            if not left and self._then == "garbage":
                client.sendall(b"\x00\x00\x00\x09not this!" + b"\xff" * 4096)
            if left or self._then == "close":
                self.close()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while content := client.recv(1 << 16):
                server.sendall(content)
            server.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in (*self._open, self._listener):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.mark.parametrize("then", ["close", "garbage", "stall"])
@pytest.mark.parametrize("kind", ["attention", "windows"])
def test_a_prefiller_that_breaks_off_anywhere_loses_no_request(kind: str, then: str) -> None:
    """All that has come is used, where a part is of use; what is wrong is never used: the executor would notice."""
    config = transfer_config(transports=["tcp"], piece_bytes=4096, timeout_seconds=0.3 if then == "stall" else 1)
    config = msgspec.structs.replace(
        config, kv_connector_extra_config=msgspec.structs.replace(config.limits, piece_bytes=2 * 8 * SIZE)
    )
    cuts = (0, 3, 40, 300, 900) if then == "stall" else (0, 3, 40, 90, 200, 480, 560, 640, 760, 900, 1000)
    with servers(config, config, **KINDS[kind]) as (prefiller, decoder):
        for number, cut in enumerate(cuts):
            prompt = [*range(200 + 50 * number, 241 + 50 * number)]
            prefill(prefiller, f"of {number}", prompt)
            with closing(Proxy(prefiller.address, cut, then)) as proxy:
                decoder.add(number, 3, prompt, remote=RemotePrefix(*proxy.address, f"of {number}"))
                until(lambda number=number: number in decoder.finished())
                assert decoder.tokens(number) == [(prompt[-1] + place) % 1000 for place in (1, 2, 3)]
                if kind == "windows":
                    assert decoder.cached(number) in (0, 40)
        totals = decoder.totals()
        assert totals["failed"] + totals["received"] == len(cuts)
        assert totals["failed"] > len(cuts) // 2
        until(lambda: not prefiller.ask(lambda: prefiller.transfers.held._sending))


def test_a_request_that_is_gone_frees_everything_at_once() -> None:
    config = transfer_config(transports=["tcp"], timeout_seconds=30)
    with servers(config, config) as (prefiller, decoder):
        prefill(prefiller)
        with closing(Proxy(prefiller.address, 400, "stall")) as proxy:
            decoder.add(1, remote=RemotePrefix(*proxy.address, "handle"))
            until(lambda: proxy.passed == 400)
            until(lambda: decoder.cache.free_blocks == BLOCKS - 10)
            decoder.core.inbox.accept(AbortRequests([1]))
            until(lambda: decoder.cache.free_blocks == BLOCKS)
            until(lambda: decoder.ask(lambda: decoder.transfers.waiting) == 0)
            until(lambda: prefiller.cache.free_blocks == BLOCKS)
        assert prefiller.totals()["dropped"] == 1
        assert decode(decoder, prefiller.address, 2) == RIGHT


def test_a_request_times_out_while_its_blocks_come() -> None:
    config = transfer_config(transports=["tcp"], timeout_seconds=30)
    with servers(config, config) as (prefiller, decoder):
        prefill(prefiller)
        with closing(Proxy(prefiller.address, 400, "stall")) as proxy:
            decoder.add(1, remote=RemotePrefix(*proxy.address, "handle"), timeout=0.3)
            until(lambda: decoder.finished() == {1: "timeout"})
            until(lambda: decoder.cache.free_blocks == BLOCKS)


def test_what_nobody_fetches_is_given_up_in_time() -> None:
    clock = Clock()
    with servers(transfer_config(hold_seconds=60), clock=clock) as (prefiller,):
        prefill(prefiller)
        assert prefiller.cache.free_blocks == BLOCKS - 10
        clock.go_on(prefiller, 61.0)
        until(lambda: prefiller.cache.free_blocks == BLOCKS)
        assert prefiller.totals()["expired"] == 1


def test_an_aborted_prefill_holds_nothing() -> None:
    with servers(transfer_config()) as (prefiller,):
        prefiller.add(1, 60, handle="handle")
        until(lambda: prefiller.tokens(1))
        prefiller.core.inbox.accept(AbortRequests([1]))
        until(lambda: prefiller.cache.free_blocks == BLOCKS)


def test_what_is_held_gives_way_to_who_needs_all() -> None:
    config = transfer_config(hold_fraction=0.9)
    with servers(config, config, blocks=20) as (prefiller, decoder):
        prefill(prefiller)
        prefiller.add(1, 20, [*range(300, 350)])
        until(lambda: 1 in prefiller.finished())
        assert len(prefiller.tokens(1)) == 20
        assert prefiller.totals()["dropped"] == 1
        prefill(prefiller, "again")
        decoder.add(2, 30, [*range(300, 345)])
        assert decode(decoder, prefiller.address, 3, "again") == RIGHT
        until(lambda: 2 in decoder.finished())


def test_many_at_once_get_their_own() -> None:
    config = transfer_config(most_fetches=3)
    with servers(config, config, blocks=60) as (prefiller, decoder):
        prompts = {key: [*range(10 * key, 10 * key + 41)] for key in range(1, 12)}
        for key, prompt in prompts.items():
            prefiller.add(key, 1, prompt, handle=f"of {key}")
            until(lambda key=key: key in prefiller.finished())
            decoder.add(key, 3, prompt, remote=RemotePrefix(*prefiller.address, f"of {key}"))
        until(lambda: len(decoder.finished()) == len(prompts))
        for key, prompt in prompts.items():
            assert decoder.tokens(key) == [prompt[-1] + place for place in (1, 2, 3)]


def test_a_request_that_can_never_run_is_refused_before_anything_comes() -> None:
    with servers(transfer_config(), blocks=8) as (decoder,):
        decoder.add(1, remote=RemotePrefix("127.0.0.1", 1, "handle"))
        until(lambda: decoder.refused())
        assert decoder.refused()[0].error.error().code == ErrorCode.INVALID_ARGUMENT


def test_an_address_that_is_taken_is_told() -> None:
    with servers(transfer_config()) as (server,):
        config = msgspec.structs.replace(transfer_config(), kv_port=server.address[1])
        with pytest.raises(InvalidArgument, match=r"kv_transfer_config: cannot listen on 127\.0\.0\.1"):
            Server(config)


def test_a_server_that_peers_crowd_serves_some() -> None:
    config = transfer_config(most_peers=2, timeout_seconds=2)
    with servers(config, config) as (prefiller, decoder):
        prefill(prefiller)
        crowd = [socket.create_connection(prefiller.address) for _ in range(6)]
        assert decode(decoder, prefiller.address) == RIGHT  # cut off, and computed
        for idle in crowd:
            idle.close()
        until(lambda: not prefiller.transfers.held.server._links)
        assert decode(decoder, prefiller.address, 2) == RIGHT


def test_several_answers_share_what_comes_once() -> None:
    config = transfer_config()
    with servers(config, config) as (prefiller, decoder):
        prefill(prefiller)
        for key in (1, 2, 3):
            decoder.add(key, remote=RemotePrefix(*prefiller.address, "handle"))
        until(lambda: len(decoder.finished()) == 3)
        assert [decoder.tokens(key) for key in (1, 2, 3)] == [RIGHT] * 3
        totals = decoder.totals()
        assert (totals["received"], totals["failed"]) == (1, 0)


@pytest.mark.parametrize("gone", [1, 2])
def test_an_answer_that_is_gone_leaves_the_others(gone: int) -> None:
    config = transfer_config(transports=["tcp"], timeout_seconds=1)
    with servers(config, config) as (prefiller, decoder):
        prefill(prefiller)
        with closing(Proxy(prefiller.address, 400, "stall")) as proxy:
            for key in (1, 2):
                decoder.add(key, remote=RemotePrefix(*proxy.address, "handle"))
            until(lambda: proxy.passed == 400)
            decoder.core.inbox.accept(AbortRequests([gone]))
            until(lambda: 3 - gone in decoder.finished())
            assert decoder.tokens(3 - gone) == RIGHT
            assert gone not in decoder.finished()


@pytest.mark.parametrize("kind", KINDS)
def test_what_makes_room_for_what_comes_is_saved_before(kind: str) -> None:
    """The executor would notice bytes that are another prompt's."""
    config = transfer_config()
    full = {"blocks": {"attention": 12, "windows": 40, "states": 12}[kind], "host": 200, "snapshots": 2}
    with servers(config, **KINDS[kind]) as (prefiller,), servers(config, **KINDS[kind], **full) as (decoder,):
        prefill(prefiller)
        for first in (500, 600, 700):
            prefill(decoder, f"of {first}", [*range(first, first + 41)])  # so that the state at its end is kept
        while decoder.ask(decoder.transfers.make_room):
            pass
        assert decode(decoder, prefiller.address, 4) == RIGHT
        assert decoder.cached(4) == 40
        for key, first in ((5, 700), (6, 600), (7, 500), (8, 100)):
            decoder.add(key, 3, [*range(first, first + 41)])
            until(lambda key=key: key in decoder.finished())
            assert decoder.tokens(key) == [first + 41, first + 42, first + 43]
        assert [decoder.cached(key) for key in (5, 6, 7, 8)] == [40] * 4


def test_the_longest_sequence_is_compared() -> None:
    """With some rotary embeddings keys depend on it."""
    config = transfer_config(policy="fail")
    with servers(config) as (prefiller,), servers(config, max_model_len=64) as (decoder,):
        prefill(prefiller)
        decoder.add(1, remote=RemotePrefix(*prefiller.address, "handle"))
        until(lambda: decoder.refused())


@pytest.mark.parametrize("at_once", [True, False])
def test_answers_that_are_gone_together_are_not_computed(at_once: bool) -> None:
    config = transfer_config(transports=["tcp"], timeout_seconds=30)
    with servers(config, config) as (prefiller, decoder):
        prefill(prefiller)
        with closing(Proxy(prefiller.address, 400, "stall")) as proxy:
            for key in (1, 2):
                decoder.add(key, 60, remote=RemotePrefix(*proxy.address, "handle"))
            until(lambda: proxy.passed == 400)
            gone = [AbortRequests([1, 2])] if at_once else [AbortRequests([1]), AbortRequests([2])]
            decoder.ask(lambda: [decoder.core.inbox.accept(message) for message in gone])  # all in one turn
            until(lambda: decoder.cache.free_blocks == BLOCKS)
            decoder.add(3, 1, [1, 2, 3])
            until(lambda: 3 in decoder.finished())
            assert decoder.tokens(2) == []


def test_who_waits_for_a_fetch_longer_than_computing_takes_computes(caplog: pytest.LogCaptureFixture) -> None:
    config = transfer_config(transports=["tcp"], most_fetches=1, timeout_seconds=30)
    with servers(config, config) as (prefiller, decoder):
        prefill(prefiller)
        decoder.add(9, 8, [1, 2, 3])  # now the pace is known
        until(lambda: 9 in decoder.finished())
        with closing(Proxy(prefiller.address, 400, "stall")) as proxy:
            decoder.add(1, remote=RemotePrefix(*proxy.address, "handle"))
            until(lambda: proxy.passed == 400)
            decoder.ask(lambda: setattr(decoder.scheduler.step_times, "prompt_seconds", lambda tokens, context: 0.0))
            assert decode(decoder, prefiller.address, 2, "another") == RIGHT
            assert "late; " in caplog.text
            decoder.core.inbox.accept(AbortRequests([1]))


def test_a_tenant_leaves_fetches_to_others() -> None:
    config = transfer_config(transports=["tcp"], most_fetches=2, timeout_seconds=30)
    with servers(config, config) as (prefiller, decoder):
        prefill(prefiller)
        proxies = [Proxy(prefiller.address, 3, "stall") for _ in range(2)]
        for key, proxy in enumerate(proxies):
            spec = SequenceSpec(key=key, prompt=np.array(PROMPT, np.int32), max_tokens=1, tenant="a")
            decoder.core.inbox.accept(AddRequest(spec, remote=RemotePrefix(*proxy.address, f"of {key}")))
        until(lambda: proxies[0].passed == 3)
        assert decode(decoder, prefiller.address, 5) == RIGHT
        assert decoder.cached(5) == 40
        decoder.core.inbox.accept(AbortRequests([0, 1]))
        for proxy in proxies:
            proxy.close()


def test_a_request_that_is_gone_connects_no_more() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        crowd = [socket.socket() for _ in range(4)]
        for waiting in crowd:
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        remote = RemotePrefix(*silent.getsockname(), "handle")
        fetch = PrefixFetch(transfer_config(timeout_seconds=600), {}, remote, NameLookups())
        errors: list[TransferError] = []

        def run() -> None:
            try:
                fetch.run(None)  # type: ignore[arg-type]
            except TransferError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: fetch._connecting)
        fetch.cancel()
        thread.join(30)
        assert [error.reason for error in errors] == ["connect"]
        for waiting in crowd:
            waiting.close()


class SlowNames(NamedTuple):
    """A name, `far.example`, that has been asked for, and is known in the end."""

    asked: threading.Event
    known: threading.Event


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowNames]:
    names, look_up = SlowNames(threading.Event(), threading.Event()), socket.getaddrinfo

    def wait(host: str, *more: Any, **flags: Any) -> Any:
        if host == "far.example" and not flags.get("flags"):
            names.asked.set()
            names.known.wait(60)
        return look_up(host, *more, **flags)

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    yield names
    names.known.set()


def test_a_request_that_is_gone_waits_for_no_name(slow_names: SlowNames) -> None:
    config = transfer_config(most_fetches=1, timeout_seconds=600)
    with servers(config, config) as (prefiller, decoder):
        prefill(prefiller)
        host, port = prefiller.address
        decoder.add(1, remote=RemotePrefix("far.example", port, "handle"))
        assert slow_names.asked.wait(30)
        assert decoder.cache.free_blocks == BLOCKS - 10
        decoder.core.inbox.accept(AbortRequests([1]))
        assert decode(decoder, (host, port), 2) == RIGHT
        assert decoder.cached(2) == 40, "there is room for one fetch, and it was free at once"


def test_a_name_that_is_not_found_in_time_is_told(slow_names: SlowNames, caplog: pytest.LogCaptureFixture) -> None:
    with servers(transfer_config(timeout_seconds=0.2)) as (decoder,):
        assert decode(decoder, ("far.example", 1)) == RIGHT
    assert slow_names.asked.is_set()
    assert "connect; what did not come is computed: far.example, port 1: the name is not found in 0.2 s" in caplog.text


def test_who_may_not_compute_leaves_the_line_in_time(caplog: pytest.LogCaptureFixture) -> None:
    config = transfer_config(transports=["tcp"], most_fetches=1, timeout_seconds=30)
    with servers(config, transfer_config(policy="fail", most_fetches=1, timeout_seconds=1)) as (prefiller, decoder):
        prefill(prefiller)
        slow = decoder.transfers.arriving
        assert slow is not None
        with closing(Proxy(prefiller.address, 400, "stall")) as proxy:
            decoder.ask(lambda: slow._fetching.update({"": 1}))  # a fetch that goes on and on
            for key in (1, 2):
                decoder.add(key, remote=RemotePrefix(*proxy.address, "handle"))
            until(lambda: len(decoder.refused()) == 2)
            assert {refusal.error.error().code for refusal in decoder.refused()} == {ErrorCode.UNAVAILABLE}
            assert "late; what did not come is refused" in caplog.text
            assert decoder.cache.free_blocks == BLOCKS
            assert decoder.ask(lambda: decoder.transfers.waiting) == 0
            decoder.ask(lambda: slow._fetching.subtract({"": 1}))
        assert decode(decoder, prefiller.address, 3) == RIGHT
        assert decoder.cached(3) == 40


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_who_may_not_compute_waits_for_room_no_longer_than_for_a_peer(
    policy: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, clock = transfer_config(policy=policy), Clock()
    with servers(transfer_config(), config, blocks=20, clock=clock) as (prefiller, decoder):
        prefill(prefiller)
        goes_on = held_up(decoder, monkeypatch)
        decoder.add(1, new=40, prompt=[*range(200, 237)])  # it keeps the blocks that the other lacks
        until(lambda: decoder.ask(lambda: decoder.scheduler.running) == 1)
        decoder.add(2, remote=RemotePrefix(*prefiller.address, "handle"))
        clock.go_on(decoder, 5.1)
        if policy == "fail":
            until(lambda: len(decoder.refused()) == 1)
            assert decoder.refused()[0].error.error().code is ErrorCode.UNAVAILABLE
            assert "late; what did not come is refused: the cache has no room for it" in caplog.text
            assert 1 not in decoder.finished()
        goes_on.set()
        until(lambda: 1 in decoder.finished())
        if policy == "recompute":
            until(lambda: 2 in decoder.finished())
            assert decoder.refused() == []


def test_one_that_fits_passes_one_that_waits_for_room_and_that_one_is_computed_in_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, clock = transfer_config(transports=["tcp"]), Clock()
    with servers(config, config, blocks=32, clock=clock) as (prefiller, decoder):
        small = [*range(300, 309)]
        prefill(prefiller)
        prefill(prefiller, "small", small)
        goes_on = held_up(decoder, monkeypatch)
        decoder.add(1, new=40, prompt=[*range(200, 285)])  # it keeps the blocks that the second lacks
        until(lambda: decoder.ask(lambda: decoder.scheduler.running) == 1)
        decoder.add(2, remote=RemotePrefix(*prefiller.address, "handle"))
        decoder.add(3, 2, small, remote=RemotePrefix(*prefiller.address, "small"))
        until(lambda: 3 in decoder.finished())
        assert decoder.cached(3) == 8
        assert "late; " not in caplog.text
        clock.go_on(decoder, 5.1)
        until(lambda: decoder.ask(lambda: decoder.scheduler.waiting) == 1)
        assert "late; what did not come is computed: the cache has no room for it" in caplog.text
        until(lambda: prefiller.ask(lambda: prefiller.transfers.held_blocks) == 0)  # it was told
        goes_on.set()
        until(lambda: 2 in decoder.finished())
        assert decoder.tokens(2) == RIGHT


def test_what_running_sequences_were_promised_is_not_held_for_one_in_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it is cached whole already."""
    with servers(transfer_config(), blocks=26, admission="no_evict") as (decoder,):
        decoder.add(9, 1)
        until(lambda: 9 in decoder.finished())
        goes_on = held_up(decoder, monkeypatch)
        decoder.add(1, new=60, prompt=[*range(200, 237)])
        until(lambda: decoder.ask(lambda: decoder.scheduler.running) == 1)
        decoder.add(2, remote=RemotePrefix("127.0.0.1", 1, "handle"))
        until(lambda: decoder.ask(lambda: decoder.scheduler.waiting) == 1)
        decoder.ask(decoder.scheduler.check_integrity)
        goes_on.set()
        until(lambda: {1, 2} <= decoder.finished().keys())
        assert decoder.tokens(1) == [*range(237, 297)]
        assert decoder.tokens(2) == RIGHT
        assert decoder.scheduler.totals.preemptions == 0


def test_an_answer_that_is_not_waited_for_changes_nothing() -> None:
    asked: list[int] = []
    call = LoopCall(lambda: asked.append(1), Future())
    assert call.done.cancel()
    call.run()
    assert asked == []


def test_a_server_without_descriptors_or_threads_pauses_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(transfer_config()) as (prefiller,):
        held = prefiller.transfers.held
        assert held is not None
        tries: list[int] = []
        pauses: list[float | None] = []
        server, listener, closed = held.server, held.server._listener, held.server._closed

        def accept() -> tuple[socket.socket, Any]:
            tries.append(1)
            if len(tries) < 4:
                raise OSError(errno.EMFILE, "no descriptor is left")
            return listener.accept()

        def wait(seconds: float | None = None) -> bool:
            pauses.append(seconds)
            return closed.is_set()

        patched = {"accept": accept, "shutdown": listener.shutdown, "close": listener.close}
        monkeypatch.setattr(server, "_listener", SimpleNamespace(**patched))
        monkeypatch.setattr(closed, "wait", wait)
        start, failed = threading.Thread.start, list[str]()

        def start_few(thread: threading.Thread) -> None:
            if thread.name == "kv-transfer-peer" and not failed:
                failed.append(thread.name)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_few)
        with socket.create_connection(prefiller.address) as refused:
            assert refused.recv(1) == b""
        until(lambda: len(tries) == 4)
        assert len(pauses) == 3
        monkeypatch.undo()
        decoded = Server(transfer_config())
        with closing(decoded):
            prefill(prefiller)
            assert decode(decoded, prefiller.address) == RIGHT
