"""Two servers and one directory of cached blocks and states: whatever is asked, aborted, damaged, deleted and started
anew, what comes back is what was written, or is computed.

    python -m tests.proofs.directory [--operations 10000] [--seed 1]

Each server is the real scheduler, cache and prefix fetches over the fake executor, which refuses a block or a state
that holds another sequence's tokens; files are read and written by the real threads.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from cyclopts import App

from charonia.core.metrics import ImageTotals
from charonia.engine.core.cache_events import CacheEventRecorder, Changes
from charonia.engine.core.inbox import NewRequest
from charonia.engine.core.prefix_fetches import PrefixFetches
from charonia.engine.worker.executor import Capacity
from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.engine.worker.image_files import ImageDirectorySettings
from charonia.kvcache.exchange.directory_tier import DirectoryTier
from charonia.kvcache.layer_groups import LayerGroups
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig, SnapshotRule
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

from ..fuzz.cache_reader import FindableBlock, findable_blocks, short_hash

BLOCK, LONGEST = 4, 96
BUDGET = 150_000
_PATIENCE_SECONDS = 20.0


class Shape(NamedTuple):
    """What a sequence keeps: blocks of one group or two, and states or none."""

    sliding: bool = False
    states: bool = False

    @property
    def groups(self) -> LayerGroups:
        return LayerGroups(1, 1, window=9, in_flight=64) if self.sliding else LayerGroups()


PLAIN = Shape()


class CacheFollower:
    """A `ChangesPublisher` whose reader loses nothing."""

    published = dropped = 0
    has_room = True

    def __init__(self) -> None:
        self.blocks: set[FindableBlock] = set()

    def publish(self, changes: Changes) -> bool:
        for change in changes:
            if change is None:
                self.blocks.clear()
                continue
            if change.is_shared:
                continue
            block = FindableBlock(short_hash(change.content.digest), change.group, "CPU" if change.on_host else "GPU")
            assert (block in self.blocks) != change.stored, "stored twice, or removed and never stored"
            (self.blocks.add if change.stored else self.blocks.remove)(block)
        return True

    def close(self) -> None:
        pass


class DirectoryServer:
    """A server without sockets: its operations are calls."""

    def __init__(self, root: Path, shape: Shape, random: Random) -> None:
        self._random = random
        state_bytes = 64 if shape.states else 0
        groups = shape.groups
        capacity = Capacity(1000, LONGEST, 64, 1 << 20, state_bytes=state_bytes, groups=groups)
        self._executor = FakeExecutor(capacity, block_size=BLOCK, threaded=False)
        blocks, snapshots = 40 * groups.total, 6 if shape.states else 0
        host = random.choice([0, 10])
        self._follower = CacheFollower()
        self._events = CacheEventRecorder(self._follower)
        self._executor.allocate(blocks, host, snapshots, host // 5 if shape.states else 0)
        self._cache = KVCacheManager(
            blocks,
            BLOCK,
            host_blocks=host,
            snapshots=snapshots,
            draft_states=0 if shape.states else None,
            groups=groups,
            host_snapshots=host // 5 if shape.states else 0,
            events=self._events,
            landing=30,
            landing_states=3,
        )
        rules = SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=LONGEST,
            snapshots=SnapshotRule(prompt_stride=16, generated_stride=16, least_gain=4, prompt_tail=0),
        )
        self._scheduler = Scheduler(rules, self._cache)
        settings = ImageDirectorySettings(str(root), BUDGET, bytes(32))
        self._images = self._executor.open_directory(settings)
        self._replies: SimpleQueue[Callable[[], None]] = SimpleQueue()
        shares = [settings.share(0, 1)]
        self._fetches = PrefixFetches(
            DirectoryTier(self._cache),
            self._images,
            shares,
            self._replies.put,
            lambda tokens, context: 1e6,
            self._events,
        )
        self._next_key = 0
        self._open: dict[int, tuple[int, int]] = {}
        """By the key of a request the last token of its prompt, and how many are to come."""
        self._answers: dict[int, list[int]] = {}
        self.answered = 0

    def ask(self, prompt: list[int], new: int) -> None:
        tokens = np.array(prompt, np.int32)
        key, self._next_key = self._next_key, self._next_key + 1
        spec = SequenceSpec(key=key, prompt=tokens, max_tokens=new, hashes=self._cache.digest(tokens))
        self._open[key] = prompt[-1], new
        self._answers[key] = []
        request = NewRequest(spec, None, 0.0)
        if not self._fetches.take(request):
            self._scheduler.add(spec)

    def abort_one(self) -> None:
        if self._open:
            key = self._random.choice([*self._open])
            self._scheduler.abort([key])
            self._fetches.discard([key])
            del self._open[key], self._answers[key]

    def turn(self) -> None:
        """What the step loop does in one turn."""
        while True:
            try:
                self._replies.get_nowait()()
            except Empty:
                break
        for request in self._fetches.turn():
            self._scheduler.add(request.spec)
        plan = self._scheduler.schedule()
        if plan is not None:
            updates = self._scheduler.apply(self._executor.execute(plan).result())
            tokens = iter(updates.tokens)
            for key, count in zip(updates.keys, updates.counts, strict=True):
                self._answers[key] += [next(tokens) for _ in range(count)]
            self._fetches.on_updates(updates)
            for key, _ in updates.finished:
                last, new = self._open.pop(key)
                assert self._answers.pop(key) == [*range(last + 1, last + 1 + new)], "a wrong answer"
                self.answered += 1
        self._events.flush()

    def check_integrity(self) -> None:
        self._events.flush()
        assert self._follower.blocks == findable_blocks(self._cache), "a router believes something else than is so"
        self._scheduler.check_integrity()
        self._fetches.check_integrity()

    def finish(self) -> ImageTotals:
        """Answer what is open; then nothing may be left."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._open:
            assert time.monotonic() < deadline, f"{len(self._open)} requests hang"
            self.turn()
            if not self._scheduler.has_work:
                time.sleep(0.0005)
        while self._fetches.fetching:
            assert time.monotonic() < deadline, "a fetch hangs"
            self.turn()
        self.turn()
        self.check_integrity()
        memory = self._executor.memory
        assert (memory.block_images.landed, memory.state_images.landed) == ({}, {}), "an image leaked"
        self._fetches.close()
        self._executor.close()
        return self._images.totals


def damage(root: Path, random: Random) -> None:
    """Harm a file as disks, people and other servers do."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if not files:
        return
    path = random.choice(files)
    try:
        content = bytearray(path.read_bytes())
        match random.randrange(6):
            case 0:
                path.unlink()
            case 1:
                path.write_bytes(content[: random.randrange(len(content) or 1)])
            case 2 if content:
                content[random.randrange(len(content))] ^= 1 << random.randrange(8)
                path.write_bytes(content)
            case 3:
                path.write_bytes(random.choice(files).read_bytes())  # another block's image under this name
            case 4:
                shutil.rmtree(path.parent, ignore_errors=True)  # a server may write into it meanwhile
            case _:
                path.write_bytes(content + b"\0")
    except FileNotFoundError:
        return  # a server was quicker


class Outcome(NamedTuple):
    answered: int
    totals: ImageTotals
    bytes: int
    """Of all files at the end."""


def run(root: Path, operations: int, seed: int, shape: Shape = PLAIN) -> Outcome:
    """Raises `AssertionError` where anything is wrong."""
    random = Random(seed)
    servers = [DirectoryServer(root, shape, random) for _ in range(2)]
    totals, answered = ImageTotals(), 0
    for number in range(operations):
        index = random.randrange(2)
        server = servers[index]
        choice = random.random()
        if choice < 0.25:
            family, length = random.randrange(5), random.randrange(1, 70)
            prompt = [*range(100 * family, 100 * family + length)]
            if random.random() < 0.3:  # it parts from the others
                fork = random.randrange(length)
                prompt[fork:] = range(600 + fork, 600 + length)
            server.ask(prompt, random.randrange(1, 20))
        elif choice < 0.28:
            server.abort_one()
        elif choice < 0.34:
            damage(root, random)
        elif choice < 0.345:
            totals.add(server.finish())
            answered += server.answered
            servers[index] = DirectoryServer(root, shape, random)
        else:
            server.turn()
        if number % 50 == 0:
            server.check_integrity()
    for server in servers:
        totals.add(server.finish())
        answered += server.answered
    return Outcome(answered, totals, sum(path.stat().st_size for path in root.rglob("*") if path.is_file()))


app = App(help=__doc__)


@app.default
def main(*, operations: int = 10_000, seed: int = 1) -> None:
    for shape in (Shape(), Shape(sliding=True), Shape(states=True)):
        with TemporaryDirectory() as directory:
            outcome = run(Path(directory), operations, seed, shape)
        totals = outcome.totals
        print(f"{shape}: {operations} operations, {outcome.answered} answers, all right; {totals.read} images came,")
        print(
            f"  {totals.missing} missing, {totals.damaged} damaged, {totals.written} written, {totals.evicted} evicted"
        )


if __name__ == "__main__":
    app()
