"""Several engine cores behind one client: who gets a request, and what becomes of it and of the others."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.errors import CharoniaError, InvalidArgument, SentError, Unavailable
from charonia.core.metrics import DrafterTotals, EngineTotals
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.client import client as client_module
from charonia.engine.client.client import EngineClient, Replica
from charonia.engine.client.routing import TOKENS_PER_REQUEST, prompt_prefixes
from charonia.engine.client.token_stream import TokenStream
from charonia.engine.config import CacheConfig, EngineConfig, FakeConfig
from charonia.engine.core.messages import (
    AbortRequests,
    AddRequest,
    CoreLoading,
    CoreReady,
    EngineLoad,
    ReleaseScope,
    RequestRejected,
    RequestUpdates,
)
from charonia.processes.patient_work import patient_work
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.encoders.encoder_rows import EncoderRows
from charonia.scheduler.plan import StepUpdates
from charonia.scheduler.sequence import SequenceSpec

from ...waiting import until

READY = CoreReady(vocab_size=1000, max_model_len=4096, block_size=16, blocks=1000)
DOCUMENT = list(range(400))
OTHER = list(range(500, 900))


class FakeCore:
    """A supervisor whose core only listens."""

    def __init__(self, config: EngineConfig, listener: Replica, timeouts: object) -> None:
        self.info: CoreReady | None = READY
        self.load, self.ready, self.pid = EngineLoad(free_blocks=READY.blocks), True, config.replica
        self.sent: list[object] = []
        self._listener = listener

    def send(self, message: object) -> None:
        self.sent.append(message)

    async def start(self) -> CoreReady:
        return READY

    async def close(self) -> None:
        self.die(Unavailable("the engine was stopped"))

    def die(self, error: CharoniaError) -> None:
        self.info, self.ready = None, False
        self._listener.on_loss(error)


class Fleet:
    """A client over fake cores, and the requests that it has."""

    def __init__(self, size: int = 2, caching: bool = True, affinity: bool = True) -> None:
        cache = CacheConfig(prefix_caching=caching)
        config = EngineConfig(model="", data_parallel_size=size, cache=cache, max_queued_tokens=10**9)
        self.client = EngineClient(config, affinity=affinity)
        self.all = self.client.replicas
        self.taken: dict[int, tuple[Replica, TokenStream, AbstractContextManager[TokenStream]]] = {}

    def core(self, at: int) -> FakeCore:
        core = self.all[at].core
        assert isinstance(core, FakeCore)
        return core

    def open(self, prompt: list[int], choice: int = 0, tenant: str = "") -> int:
        """Which replica gets it."""
        sampling = ResolvedSampling(choice=choice)
        tokens = np.array(prompt, np.int32)
        spec = SequenceSpec(key=0, prompt=tokens, max_tokens=9, sampling=sampling, tenant=tenant)
        opened = self.client.open_stream(AddRequest(spec))
        stream = opened.__enter__()
        [replica] = [each for each in self.all if stream in each.streams]
        self.taken[self.client._last_key] = replica, stream, opened
        return self.all.index(replica)

    def leave(self, key: int) -> None:
        _, _, opened = self.taken.pop(key)
        opened.__exit__(None, None, None)

    def say(self, at: int, **what: object) -> None:
        """What replica `at` reports of a step."""
        updates = StepUpdates([], [], [], [], [])._replace(**what)
        self.all[at].on_updates(RequestUpdates(1, updates, EngineLoad()))


async def test_all_cores_know_whether_patient_work_waits() -> None:
    fleet = Fleet()
    await fleet.client.start()
    with patient_work.pending():
        with patient_work.pending():
            await asyncio.sleep(0)
        fleet.all[0].on_serving()
    await asyncio.sleep(0)
    told = [[message.waits for message in fleet.core(at).sent] for at in (0, 1)]
    assert told == [[True, True, False], [True, False]]
    await fleet.client.close()
    with patient_work.pending():
        await asyncio.sleep(0)
    assert len(fleet.core(1).sent) == 2


@pytest.fixture(autouse=True)
def fake_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "client" not in request.fixturenames:
        monkeypatch.setattr(client_module, "CoreSupervisor", FakeCore)


def test_a_prompt_that_an_encoder_reads_counts_as_it_was_sent() -> None:
    """And not as the token or two that its decoder begins with: limits of the queue, metrics and the log go by it."""
    fleet = Fleet(1)
    source = np.arange(80, dtype=np.int32).tobytes()
    spec = SequenceSpec(key=0, prompt=np.array([2], np.int32), max_tokens=9)
    for read, tokens in ((80, 80), (0, 1)):
        encoded = EncoderRows(80, b"text", source, "float32", read)
        with fleet.client.open_stream(AddRequest(msgspec.structs.replace(spec, encoded=encoded))) as stream:
            assert (stream.stats.prompt, stream.uncomputed_tokens) == (tokens, tokens)
            assert fleet.client.admission.waiting.tokens == tokens


# Who gets a request


def test_requests_spread_and_what_begins_alike_meets() -> None:
    fleet = Fleet()
    assert [fleet.open(DOCUMENT), fleet.open(OTHER)] == [0, 1]
    assert [fleet.open([*prompt, n]) for n in range(2) for prompt in (DOCUMENT, OTHER)] == [0, 1, 0, 1]
    assert fleet.open([*DOCUMENT, 7], tenant="somebody else") == 0  # nowhere cached: the least busy, or the first


def test_a_popular_beginning_keeps_nobody_from_the_rest() -> None:
    """Four times what the imbalance may be: all are at it, and none has more than its part and that."""
    fleet = Fleet(4)
    taken = [fleet.open([*DOCUMENT, n]) for n in range(100)]
    counts = [taken.count(at) for at in range(4)]
    assert sum(counts) == 100
    assert max(counts) - min(counts) <= 17
    assert counts[0] == max(counts)


def test_documents_that_no_cache_holds_alone_are_divided() -> None:
    """Sixty of 400 tokens, caches of 16,000, one question at a time: each stays where it was read first."""
    fleet, random, homes = Fleet(), Random(3), dict[int, int]()
    documents = [[random.randrange(1000) for _ in range(400)] for _ in range(60)]
    for turn in range(300):
        which = turn % 60
        at = fleet.open([*documents[which], turn])
        fleet.leave(turn + 1)
        assert at == homes.setdefault(which, at)
    assert list(homes.values()).count(0) == 30


def test_answers_to_one_prompt_stay_together() -> None:
    fleet = Fleet()
    assert {fleet.open([1, 2, 3], choice) for choice in range(8)} == {0}
    assert fleet.open([1, 2, 3]) == 1


@pytest.mark.parametrize(("caching", "affinity"), [(False, True), (True, False)])
def test_without_affinity_only_the_load_counts(caching: bool, affinity: bool) -> None:
    fleet = Fleet(caching=caching, affinity=affinity)
    assert [fleet.open(DOCUMENT) for _ in range(4)] == [0, 1, 0, 1]
    assert all(len(replica.prefix_index) == 0 for replica in fleet.all)


def test_one_alone_gets_everything_and_nothing_is_hashed() -> None:
    fleet = Fleet(1)
    assert {fleet.open(DOCUMENT), fleet.open(OTHER)} == {0}
    assert len(fleet.all[0].prefix_index) == 0


def test_a_computed_prompt_weighs_no_more() -> None:
    fleet = Fleet()
    assert fleet.open([1] * 1000) == 0
    assert [fleet.open([n]) for n in range(2, 5)] == [1, 1, 1]
    fleet.say(0, keys=[1], counts=[1], tokens=[5])
    assert fleet.all[0].pending_work == TOKENS_PER_REQUEST
    assert fleet.open([9]) == 0


def test_nothing_new_goes_to_the_dead_or_stuck() -> None:
    fleet = Fleet(3)
    assert fleet.open(DOCUMENT) == 0
    fleet.core(0).ready = False
    assert [fleet.open([*DOCUMENT, n]) for n in range(2)] == [1, 1]
    fleet.core(1).die(Unavailable("dead"))
    assert fleet.open([*DOCUMENT, 5]) == 2
    assert fleet.client.ready
    fleet.core(2).die(Unavailable("dead"))
    assert not fleet.client.ready
    assert fleet.open([*DOCUMENT, 6]) == 0  # slow to turn, and the only one that may answer yet
    fleet.core(0).die(Unavailable("dead"))
    with pytest.raises(Unavailable, match="not ready"):
        fleet.open([1])


def test_who_lost_its_cache_is_not_believed_to_have_it() -> None:
    fleet = Fleet()
    assert fleet.open(DOCUMENT) == 0
    fleet.core(0).die(Unavailable("dead"))
    fleet.core(0).info, fleet.core(0).ready = READY, True
    fleet.leave(1)
    assert fleet.open([2]) == 0
    assert fleet.open([*DOCUMENT, 1]) == 1


# What becomes of it


async def test_a_loss_ends_the_streams_of_one() -> None:
    fleet = Fleet()
    assert [fleet.open([1]), fleet.open([2])] == [0, 1]
    fleet.core(0).die(Unavailable("it died"))
    with pytest.raises(Unavailable, match="it died"):
        await fleet.taken[1][1].read()
    fleet.say(1, keys=[2], counts=[1], tokens=[3])
    assert (await fleet.taken[2][1].read()).token_ids == (3,)
    assert [replica.losses for replica in fleet.all] == [1, 0]


def test_an_abort_goes_where_the_request_went() -> None:
    fleet = Fleet()
    fleet.open([1])
    fleet.open([2])
    fleet.leave(2)
    assert [type(message) for message in fleet.core(0).sent] == [AddRequest]
    assert fleet.core(1).sent[1:] == [AbortRequests([2])]


actions = st.lists(
    st.tuples(st.sampled_from(["open", "start", "token", "finish", "refuse", "leave", "die"]), st.integers(0, 2**16)),
    max_size=60,
)


@settings(max_examples=60)
@given(actions)
def test_work_is_counted_to_the_token_whatever_happens(moves: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "CoreSupervisor", FakeCore)
        fleet = Fleet(3)
    for what, number in moves:
        _move(fleet, what, number)
        for replica in fleet.all:
            assert replica.pending_work == sum(
                TOKENS_PER_REQUEST + stream.uncomputed_tokens for stream in replica.streams
            )
            assert replica.prefix_index.tokens <= 16_000
    for key in list(fleet.taken):
        fleet.leave(key)
    assert [replica.pending_work for replica in fleet.all] == [0] * 3
    assert fleet.client.admission.waiting.requests == 0


def _move(fleet: Fleet, what: str, number: int) -> None:
    key = sorted(fleet.taken)[number % len(fleet.taken)] if fleet.taken else None
    if what == "open":
        fleet.core(number % 3).info, fleet.core(number % 3).ready = READY, True
        fleet.open([number % 7] * (number % 300))
    elif what == "die":
        fleet.core(number % 3).die(Unavailable("dead"))
    elif key is not None:
        _tell(fleet, what, key)


def _tell(fleet: Fleet, what: str, key: int) -> None:
    replica, channel, _ = fleet.taken[key]
    at = fleet.all.index(replica)
    if what == "leave":
        fleet.leave(key)
    elif channel.ended:
        return
    elif what == "refuse":
        replica.on_refused(RequestRejected(key, SentError.of(InvalidArgument("no"))))
    elif what == "finish" and channel.started:
        fleet.say(at, finished=[(key, "length")])
    elif what == "start" and not channel.started:
        fleet.say(at, started=[(key, 0)])
    elif what == "token" and channel.started:
        fleet.say(at, keys=[key], counts=[2], tokens=[1, 2])


# The machine they share


def test_replicas_share_cores_and_memory_evenly() -> None:
    config = EngineConfig(model="m", data_parallel_size=3)
    configs = config.split(threads=8, memory=9000)
    assert [(each.replica, each.threads, each.host_memory) for each in configs] == [(n, 2, 3000) for n in range(3)]
    assert [each.threads for each in config.split(threads=2, memory=0)] == [1, 1, 1]
    given_threads = EngineConfig(model="m", data_parallel_size=2, threads=8)
    assert [each.threads for each in given_threads.split(threads=4, memory=0)] == [8, 8]
    alone = EngineConfig(model="m")
    assert alone.split(threads=8, memory=9000) == [alone]


# Real cores


def config(**engine: object) -> EngineConfig:
    fake = FakeConfig(vocab_size=1000, max_model_len=512, step_seconds=0.01)
    cache, scheduler = CacheConfig(blocks=64), SchedulerConfig(max_num_seqs=4)
    return EngineConfig(
        model="", executor="fake", data_parallel_size=2, cache=cache, scheduler=scheduler, fake=fake, **engine
    )


@pytest.fixture
async def client(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EngineClient]:
    """Two cores that serve, and of which nothing may be left."""
    sockets = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    heard: list[CoreLoading] = []
    client = EngineClient(config(), heard.append)
    await client.start()
    assert {loading.phase for loading in heard} >= {"replica 0: weights", "replica 1: weights"}
    pids = client.pids
    assert len(pids) == 2
    yield client
    await asyncio.gather(client.close(), client.close())
    assert not any(alive(pid) for pid in [*pids, *client.pids])
    assert list(sockets.iterdir()) == []


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def ask(client: EngineClient, prompt: list[int], max_tokens: int) -> list[int]:
    tokens: list[int] = []
    spec = SequenceSpec(key=0, prompt=np.array(prompt, np.int32), max_tokens=max_tokens)
    with client.open_stream(AddRequest(spec)) as channel:
        while (delta := await channel.read()).finish_reason is None:
            tokens += delta.token_ids
        tokens += delta.token_ids
    return tokens


async def test_two_cores_serve_and_one_outlives_the_other(client: EngineClient) -> None:
    readers = [asyncio.create_task(ask(client, [first], 120)) for first in (10, 20, 30, 40)]
    await until(lambda: [replica.core.load.running for replica in client.replicas] == [2, 2])
    state = client.state()
    assert (state.running, state.replicas_ready, state.core_restarts) == (4, 2, 0)
    assert client.kv_tokens[1] == 2 * 64 * 16
    assert 4 / 128 <= state.kv_usage <= 0.5
    lost = client.pids[0]
    os.kill(lost, signal.SIGKILL)
    ends = await asyncio.gather(*readers, return_exceptions=True)
    assert [end if isinstance(end, list) else str(end) for end in ends][1::2] == [
        list(range(21, 141)),
        list(range(41, 161)),
    ]
    for end in ends[::2]:
        assert isinstance(end, Unavailable)
        assert "the engine core of replica 0 died (exit code -9); it is being restarted" in end.message
    assert client.ready
    assert client.admission.waiting.requests == 0
    assert await ask(client, [7], 2) == [8, 9]
    await until(lambda: client.state().replicas_ready == 2)
    assert lost not in client.pids
    assert client.state().core_restarts == 1
    assert await asyncio.gather(*(ask(client, [first], 2) for first in (1, 5))) == [[2, 3], [6, 7]]


async def test_a_replica_that_cannot_start_fails_the_load(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    sockets = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    client = EngineClient(config(max_model_len=4096))
    with pytest.raises(InvalidArgument, match="max_model_len 4096"):
        await client.start()
    await client.close()
    assert client.pids == []
    assert list(sockets.iterdir()) == []


def test_totals_outlive_their_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CoreSupervisor", FakeCore)
    replica = Fleet(1).all[0]
    last = EngineTotals(
        2, 20, 6, drafters={"ngram": DrafterTotals(2, 8, 5, 0.5, [4, 1])}, sequence_seconds={"running": 2.0}
    )
    for totals in (EngineTotals(1, 10, 5), last):
        replica.on_updates(updates(totals))
    replica.on_loss(Unavailable("it died"))
    assert replica.totals == last
    more = {"ngram": DrafterTotals(1, 3, 6, 0.5, [2, 2, 2]), "grammar": DrafterTotals(1, 1)}
    replica.on_updates(updates(EngineTotals(1, 1, 0, drafters=more, sequence_seconds={"no_row": 1.0})))
    for _ in range(2):
        replica.on_loss(Unavailable("it died"))
    both = {"ngram": DrafterTotals(3, 11, 11, 1.0, [6, 3, 2]), "grammar": DrafterTotals(1, 1)}
    spent = {"running": 2.0, "no_row": 1.0}
    assert replica.totals == EngineTotals(3, 21, 6, drafters=both, sequence_seconds=spent)


def updates(totals: EngineTotals) -> RequestUpdates:
    return RequestUpdates(0, StepUpdates([], [], [], [], []), EngineLoad(), totals=totals)


def test_what_a_core_finds_of_a_prompt_corrects_what_it_is_thought_to_have() -> None:
    fleet = Fleet()
    third = [*range(900, 999), *range(300)]
    for prompt, replica in ((third, 0), (DOCUMENT, 1), (OTHER, 0)):
        assert fleet.open(prompt) == replica
        fleet.leave(fleet.client._last_key)
    index = fleet.all[0].prefix_index
    prefixes = prompt_prefixes(third, ("", "", ""))
    assert index.longest_match(prefixes)[0] == len(third)
    for cached, kept in ((384, len(third)), (0, 0)):
        assert fleet.open(OTHER) == 0
        fleet.say(0, started=[(fleet.client._last_key, cached)])
        assert index.longest_match(prefixes)[0] == kept, "what was used before has made room, too"
        fleet.leave(fleet.client._last_key)
    assert fleet.open(OTHER) == 0, "it has it now"
    fleet.leave(fleet.client._last_key)
    assert not fleet.all[0]._expected


def test_a_scope_is_released_by_all() -> None:
    fleet = Fleet()
    fleet.client.release_scope("team", "run-7")
    assert [fleet.core(at).sent for at in range(2)] == [[ReleaseScope("team", "run-7")]] * 2
