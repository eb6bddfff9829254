"""What a reader of cache events is told: over real sockets, and against what the cache holds."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from charonia.core.errors import InvalidArgument
from charonia.engine.config import KVEventsConfig
from charonia.engine.core.cache_events import (
    CacheChange,
    CacheEventEncoder,
    CacheEventRecorder,
    Changes,
    GroupKind,
    group_kinds,
)
from charonia.engine.core.event_publisher import EventPublisher
from charonia.kvcache.events.cache_events import BlockContent
from charonia.kvcache.layer_groups import LayerGroups
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.encoders.encoder_rows import EmbeddedSpan, EncoderRows
from charonia.scheduler.events.block_contents import block_contents, extra_keys
from charonia.scheduler.sequence import Sequence, SequenceSpec

from ...fuzz.cache_reader import short_hash
from ...proofs.cache_events import follow_seed

SIZE = 4
ATTENTION = [GroupKind(0, "full_attention")]
POLL_MILLISECONDS = 10_000


def test_a_reader_knows_what_the_cache_holds() -> None:
    """Through losses, replays and drops, in worlds with windows, states and host memory; both encodings. The
    proof makes more calls."""
    result = follow_seed(3, 800)
    assert result.asked
    assert result.most_blocks > 20


class KeptBatches:
    """Takes `room` batches at most."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.batches: list[Changes] = []
        self.dropped = 0

    @property
    def published(self) -> int:
        return len(self.batches)

    @property
    def has_room(self) -> bool:
        return len(self.batches) < self.room

    def publish(self, changes: Changes) -> bool:
        if self.has_room:
            self.batches.append(changes)
            return True
        self.dropped += 1
        return False

    def close(self) -> None:
        pass


def compute(cache: KVCacheManager, spec: SequenceSpec) -> Sequence:
    """Let the cache have all full blocks of a prompt, as a scheduler does, and nothing hold them."""
    hashes = cache.digest(spec.identities, spec.extras)
    sequence = Sequence(spec, 0, 0, 0, hashes)
    table = cache.open(hashes, len(spec.prompt) + 1)
    cache.restore(table, len(spec.prompt) + 1)
    assert cache.extend(table, len(spec.prompt))
    assert cache.events is not None
    cache.events.describe(block_contents(sequence, table.committed, len(hashes), SIZE))
    cache.commit(table, hashes[table.committed :])
    cache.close(table)
    return sequence


def prompt(first: int, tokens: int, **given: Any) -> SequenceSpec:
    return SequenceSpec(key=first, prompt=np.arange(first, first + tokens, dtype=np.int32), max_tokens=1, **given)


def told(changes: Changes, kinds: list[GroupKind | None] | list[GroupKind] = ATTENTION, arrays: bool = False) -> Any:
    """What the wire has of a batch's events."""
    payload = CacheEventEncoder(SIZE, kinds, 7, arrays).encode(12.5, changes)
    seconds, events, replica = msgspec.msgpack.decode(payload)
    assert (seconds, replica) == (12.5, 7)
    return events


def test_neighbouring_blocks_are_one_event_with_all_fields_of_vllm() -> None:
    kept = KeptBatches()
    cache = KVCacheManager(8, SIZE, events=(recorder := CacheEventRecorder(kept)))
    sequence = compute(cache, prompt(100, 9))
    recorder.flush()
    [changes] = kept.batches
    stored = {
        "type": "BlockStored",
        "block_hashes": [short_hash(digest) for digest in sequence.hashes],
        "parent_block_hash": None,
        "token_ids": [*range(100, 108)],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert told(changes) == [{"type": "AllBlocksCleared"}, stored]
    assert told(changes, arrays=True) == [["AllBlocksCleared"], [*stored.values()]]


def test_a_continuation_names_its_parent() -> None:
    kept = KeptBatches()
    cache = KVCacheManager(8, SIZE, events=(recorder := CacheEventRecorder(kept)))
    compute(cache, prompt(0, 8))
    recorder.flush()
    sequence = compute(cache, prompt(0, 12))
    recorder.flush()
    [event] = told(kept.batches[1])
    assert event["parent_block_hash"] == short_hash(sequence.hashes[1])
    assert (event["block_hashes"], event["token_ids"]) == ([short_hash(sequence.hashes[2])], [8, 9, 10, 11])


def test_nothing_changed_is_no_batch() -> None:
    kept = KeptBatches()
    cache = KVCacheManager(8, SIZE, events=(recorder := CacheEventRecorder(kept)))
    for _ in range(3):
        compute(cache, prompt(0, 8))
        recorder.flush()
    assert kept.published == 1


def test_what_made_room_is_removed_before_what_took_it() -> None:
    kept = KeptBatches()
    cache = KVCacheManager(2, SIZE, events=(recorder := CacheEventRecorder(kept)))
    gone = compute(cache, prompt(0, 8))
    recorder.flush()
    compute(cache, prompt(50, 8))
    recorder.flush()
    removed, stored = told(kept.batches[1])
    assert removed == {
        "type": "BlockRemoved",
        "block_hashes": [short_hash(digest) for digest in reversed(gone.hashes)],
        "medium": "GPU",
        "group_idx": 0,
    }
    assert stored["type"] == "BlockStored"


def test_blocks_in_the_hosts_memory_are_on_the_cpu() -> None:
    kept = KeptBatches()
    cache = KVCacheManager(2, SIZE, host_blocks=4, events=(recorder := CacheEventRecorder(kept)))
    first = compute(cache, prompt(0, 8))
    compute(cache, prompt(50, 8))
    recorder.flush()
    media = [(event["type"], event.get("medium")) for event in told(kept.batches[0])]
    cpu, gpu = ("BlockStored", "CPU"), ("BlockRemoved", "GPU")
    assert [medium for medium in media if medium in (cpu, gpu)] == [gpu, cpu, gpu, cpu]
    compute(cache, prompt(0, 8))
    recorder.flush()
    back = [event for event in told(kept.batches[1]) if (event["type"], event["medium"]) == ("BlockStored", "GPU")]
    assert [digest for event in back for digest in event["block_hashes"]] == [*map(short_hash, first.hashes)]
    assert [token for event in back for token in event["token_ids"]] == [*range(8)]
    assert back[1]["parent_block_hash"] == short_hash(first.hashes[0])


def test_extra_keys_say_what_a_hash_depends_on_beside_tokens() -> None:
    span = EmbeddedSpan(2, 4, b"\xab" * 32, b"", "float32")
    kept = KeptBatches()
    cache = KVCacheManager(8, SIZE, events=(recorder := CacheEventRecorder(kept)))
    compute(cache, prompt(0, 12, adapter="0123", adapter_name="sql", salt="pepper", embedded=(span,)))
    recorder.flush()
    [_, event] = told(kept.batches[0])
    image = span.digest.hex()
    assert event["lora_name"] == "sql"
    assert event["extra_keys"] == [["sql", [image, 2], "pepper"], ["sql", [image, -2]], ["sql"]]
    assert event["token_ids"] == [*range(12)], "tokens as they were sent"


def test_an_adapter_without_a_name_has_its_digest_and_a_tenant_is_part_of_the_salt() -> None:
    spec = prompt(0, 8, adapter="0123", tenant="acme", salt="x")
    assert extra_keys(spec, 0, SIZE) == ("0123", "4:acmex")
    assert extra_keys(spec, SIZE, 2 * SIZE) == ("0123",)


def test_a_decoder_of_an_encoders_output_shares_blocks_with_nobody_who_has_another() -> None:
    prompt = np.arange(2 * SIZE, dtype=np.int32)
    specs = [
        SequenceSpec(key=0, prompt=prompt, max_tokens=1, encoded=EncoderRows(1, digest, b"", "float32"))
        for digest in (b"\x01", b"\x02")
    ]
    assert extra_keys(specs[0], 0, SIZE) == ("01",)
    assert extra_keys(specs[0], SIZE, 2 * SIZE) == ()
    cache = KVCacheManager(8, SIZE)
    one, other = (cache.digest(spec.identities, spec.extras) for spec in specs)
    assert not {*one} & {*other}
    assert one == cache.digest(specs[0].identities, specs[0].extras)


def test_groups_of_layers_have_events_of_their_own() -> None:
    groups = LayerGroups(full=1, sliding=1, window=6)
    kept = KeptBatches()
    cache = KVCacheManager(16, SIZE, groups=groups, snapshots=2, events=(recorder := CacheEventRecorder(kept)))
    sequence = compute(cache, prompt(0, 8))
    assert cache.states is not None
    snapshot = cache.states.reserve()
    assert snapshot is not None
    cache.states.publish(snapshot, sequence.hashes[1])
    recorder.flush()
    kinds = group_kinds(groups, latent=False, keeps_tokens=True)
    _, full, sliding, states = told(kept.batches[0], [kind for kind in kinds if kind])
    names = "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"
    assert [[event.get(name) for name in names] for event in (full, sliding, states)] == [
        [0, "full_attention", None],
        [1, "sliding_window", 6],
        [2, "mamba", None],
    ]
    assert full["block_hashes"] == sliding["block_hashes"] == [short_hash(digest) for digest in sequence.hashes]
    assert (states["block_hashes"], states["token_ids"]) == ([short_hash(sequence.hashes[1])], [4, 5, 6, 7])


def test_latents_are_named_and_a_model_of_states_alone_has_one_group() -> None:
    latent = group_kinds(LayerGroups(1, 1, 9), latent=True, keeps_tokens=True)
    assert [kind and kind.kind for kind in latent] == ["mla_attention", "sliding_window_mla", "mamba"]
    assert group_kinds(LayerGroups(), latent=False, keeps_tokens=False) == [None, GroupKind(0, "mamba")]
    content = BlockContent(bytes(32), None, (1, 2, 3, 4))
    assert told([CacheChange(content, 0, on_host=False, stored=True)], [None, GroupKind(0, "mamba")]) == []


def test_after_a_drop_events_begin_anew() -> None:
    kept = KeptBatches(room=1)
    cache = KVCacheManager(8, SIZE, host_blocks=2, events=(recorder := CacheEventRecorder(kept)))
    sequences = []
    for first in (0, 20, 40):
        sequences.append(compute(cache, prompt(first, 8)))
        recorder.flush()
    assert (kept.dropped, recorder.behind) == (2, True)
    kept.room = 2
    recorder.flush()
    assert not recorder.behind
    cleared, *stored = told(kept.batches[1])
    assert cleared == {"type": "AllBlocksCleared"}
    hashes = [digest for event in stored for digest in event["block_hashes"]]
    assert hashes == [short_hash(digest) for sequence in sequences for digest in sequence.hashes]


def test_contents_are_forgotten_with_the_last_place_that_has_them() -> None:
    cache = KVCacheManager(4, SIZE, host_blocks=3, events=(recorder := CacheEventRecorder(KeptBatches())))
    for first in range(0, 2000, 20):
        compute(cache, prompt(first, 16))
        recorder.flush()
    assert len(recorder._known) == 4 + 3


class Sockets:
    """A publisher, and a reader's sockets to it."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.addresses = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
        endpoints = {"endpoint": self.addresses[0], "replay_endpoint": self.addresses[1]}
        self.publisher = EventPublisher(
            KVEventsConfig(topic="t", **endpoints, **config), CacheEventEncoder(SIZE, ATTENTION, 0)
        )
        self.context = zmq.Context()
        self.reader, self.dealer = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.reader.subscribe(b"")
        self.reader.connect(self.addresses[0])
        self.dealer.connect(self.addresses[1])

    def replay(self, *request: bytes) -> list[list[bytes]]:
        self.dealer.send_multipart(request)
        replies: list[list[bytes]] = []
        while not replies or replies[-1][2] != b"\xff" * 8:
            assert self.dealer.poll(POLL_MILLISECONDS)
            replies.append(self.dealer.recv_multipart())
        return replies

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.publisher.close()


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Sockets]:
    sockets = Sockets(tmp_path, buffer_steps=3)
    yield sockets
    sockets.close()


def await_number(sockets: Sockets, number: int) -> None:
    """Until the batch of this number was sent."""
    for _ in range(1000):
        replies = sockets.replay(b"", number.to_bytes(8, "big"))
        if len(replies) > 1:
            return
    raise AssertionError(f"{number} was never sent")


def test_a_batch_has_three_frames_and_numbers_count_up(sockets: Sockets) -> None:
    for _ in range(200):  # until the subscription has arrived
        sockets.publisher.publish([None])
        if sockets.reader.poll(50):
            break
    topic, number, payload = sockets.reader.recv_multipart()
    assert (topic, len(number)) == (b"t", 8)
    assert msgspec.msgpack.decode(payload)[1:] == [[{"type": "AllBlocksCleared"}], 0]
    sockets.publisher.publish([None])
    assert sockets.reader.poll(POLL_MILLISECONDS)
    following = int.from_bytes(sockets.reader.recv_multipart()[1], "big")
    assert following == int.from_bytes(number, "big") + 1


def test_missed_batches_are_sent_again_as_far_as_they_are_kept(sockets: Sockets) -> None:
    for _ in range(5):
        sockets.publisher.publish([None])
    await_number(sockets, 4)
    *batches, last = sockets.replay(b"", (0).to_bytes(8, "big"))
    assert [(frames[0], frames[1], int.from_bytes(frames[2], "big")) for frames in batches] == [
        (b"", b"t", number) for number in (2, 3, 4)
    ]
    assert last == [b"", b"t", b"\xff" * 8, b""]
    assert len(sockets.replay(b"", (4).to_bytes(8, "big"))) == 2


def test_a_wrong_request_for_missed_batches_gets_none(sockets: Sockets, caplog: pytest.LogCaptureFixture) -> None:
    sockets.publisher.publish([None])
    await_number(sockets, 0)
    for request in ([b"0"], [b"", b"0"], [b"", bytes(8), b""]):
        assert len(sockets.replay(*request)) == 1
    assert "needs an empty frame and 8 bytes" in caplog.text


def test_a_batch_that_finds_no_room_is_a_gap_and_is_counted(tmp_path: Path) -> None:
    sockets = Sockets(tmp_path, max_queue_size=1)
    publisher = sockets.publisher
    try:
        slow = publisher._encoder.encode
        publisher._sending.acquire()  # the sending thread waits, as for a full disk; the caller does not
        try:
            taken = [publisher.publish([None]) for _ in range(5)]
        finally:
            publisher._sending.release()
        assert slow(0.0, [None])
        assert (publisher.published, publisher.dropped) == (sum(taken), 5 - sum(taken))
        assert 1 <= sum(taken) <= 2
        await_number(sockets, max(number for number, was in enumerate(taken) if was))
        *batches, _ = sockets.replay(b"", bytes(8))
        assert [int.from_bytes(frames[2], "big") for frames in batches] == [
            number for number, was in enumerate(taken) if was
        ]
    finally:
        sockets.close()


def test_an_address_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path}/none/there")
    with pytest.raises(InvalidArgument, match="none/there") as refusal:
        EventPublisher(config, CacheEventEncoder(SIZE, ATTENTION, 0))
    assert refusal.value.field == "kv_events_config"


def test_the_random_worlds_differ() -> None:
    """Or the proof would show less than it says."""
    from ...proofs.cache_events import caching_world

    random = Random(3)
    worlds = [caching_world(random) for _ in range(40)]
    assert any(world.groups.sliding for world in worlds)
    assert any(world.host_blocks and world.snapshots for world in worlds)
    assert any(world.adapters for world in worlds)


def test_what_was_never_described_is_not_told() -> None:
    """And the step loop goes on."""
    recorder = CacheEventRecorder(kept := KeptBatches())
    recorder.flush()
    recorder.stored(bytes(32), on_host=False)
    recorder.removed(bytes(32), on_host=False)
    recorder.describe([BlockContent(bytes(32), None, (1, 2, 3, 4))])
    recorder.removed(bytes(32), on_host=True)
    recorder.flush()
    assert kept.batches == [[None]]
