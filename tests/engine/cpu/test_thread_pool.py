"""Threads that stay: steps of real decoders, begun before anybody comes to help, by however many."""

import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.native import NativeAttention
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.cpu import library
from charonia.engine.cpu.program import StepRun, ThreadPool
from charonia.engine.layers.step_context import StepContext
from charonia.engine.models.native_decoder import NativeDecoder
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.step_batch import SAMPLING_DTYPE, SampledTokens, SamplingArray, StepBatch
from charonia.engine.worker.sampler import sample

CPU, BLOCK = torch.device("cpu"), 16

pytestmark = pytest.mark.skipif(library.level() is None, reason="no C extension here")


class World:
    """Rows of a real decoder, as the runner keeps them."""

    def __init__(self, directory: Path, rows: int = 3) -> None:
        self.decoder, shape, *_ = checkpoint_builder(open_checkpoint(directory)).build(
            BuildContext(torch.float32, CPU, 128)
        )
        spec = CacheSpec(shape.attention, shape.heads, shape.kv_heads, shape.head_dim, BLOCK, torch.float32, CPU)
        self.attention = NativeAttention(spec)
        self.attention.allocate(8 * rows)
        self.known = torch.zeros(rows, 128, dtype=torch.int32)
        self.known[:, :5] = torch.arange(5) + torch.arange(1, 1 + rows).unsqueeze(1)
        self.blocks = torch.arange(8 * rows).view(rows, 8)

    def begin(
        self, starts: list[int], counts: list[int], *, pick: bool = True, choices: SamplingArray | None = None
    ) -> tuple[StepRun, np.ndarray]:
        context = self.context(starts, counts)
        picked = np.full(len(starts), -1, np.int32)
        places = torch.from_numpy(context.batch.first_places + context.batch.counts - 1)
        running = self.decoder.begin_step(context, places, SampledTokens(picked, choices) if pick else None)
        assert running is not None
        return running, picked

    def context(self, starts: list[int], counts: list[int]) -> StepContext:
        batch = StepBatch(range(len(starts)), starts, counts, self.known, self.blocks, BLOCK)
        return StepContext(batch, self.attention.begin_step(batch))

    def one_by_one(self, steps: int) -> list[list[int]]:
        """Each step finished before the next begins."""
        found = []
        for start, count in spans(steps):
            running, picked = self.begin([start] * 3, [count] * 3)
            running.finish()
            found.append(picked.tolist())
        return found


def spans(steps: int) -> Iterator[tuple[int, int]]:
    """The prompt, then token after token: (start, count)."""
    yield 0, 5
    for position in range(5, 4 + steps):
        yield position, 1


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_steps_begun_ahead_are_those_of_one_after_the_other(checkpoint: Callable[..., Path], threads: int) -> None:
    """More than the pool has places for, so that giving one has to wait for another."""
    expected = World(checkpoint("llama")).one_by_one(24)
    world = World(checkpoint("llama"))
    begun = [world.begin([start] * 3, [count] * 3) for start, count in spans(24)]
    begun[-1][0].finish()
    assert [picked.tolist() for _, picked in begun] == expected
    assert world.known[:, 5:29].T.tolist() == expected


def test_logits_are_those_that_were_picked_from(checkpoint: Callable[..., Path], threads: int) -> None:
    world = World(checkpoint("llama"))
    running, _ = world.begin([0, 0, 0], [5, 3, 4], pick=False)
    running.finish()
    logits = running.logits.clone()
    for choices in (None, mixed_choices()):
        running, picked = world.begin([0, 0, 0], [5, 3, 4], choices=choices)
        running.finish()
        assert picked.tolist() == sample(logits, choices).tolist()
        assert world.known[range(3), [5, 3, 4]].tolist() == picked.tolist()


def test_some_of_the_places_are_sampled_and_all_have_logits(checkpoint: Callable[..., Path], threads: int) -> None:
    """Several places of a row have logits, and two of the three rows a token; nothing is written behind the third."""
    world = World(checkpoint("llama"))
    context = world.context([0, 0, 0], [5, 3, 4])
    places = torch.tensor([1, 3, 4, 7, 8, 11])
    running = world.decoder.begin_step(context, places)
    assert running is not None
    running.finish()
    logits = running.logits.clone()
    more = running.more_logits([torch.tensor([0, 2]), torch.tensor([9])])
    assert more is not None
    rest = [each.clone() for each in more]
    everywhere = world.decoder.begin_step(world.context([0, 0, 0], [5, 3, 4]), torch.arange(12))
    assert everywhere is not None
    everywhere.finish()
    assert torch.equal(logits, everywhere.logits[places])
    assert torch.equal(torch.cat(rest), everywhere.logits[[0, 2, 9]])
    for choices in (None, mixed_choices()[[0, 2]]):
        world.known[range(3), [5, 3, 4]] = -7
        tokens, selected = np.full(2, -1, np.int32), np.array([2, 5])
        running = world.decoder.begin_step(context, places, SampledTokens(tokens, choices, selected))
        assert running is not None
        running.finish()
        assert torch.equal(running.logits, logits)
        assert tokens.tolist() == sample(logits[selected], choices).tolist()
        assert world.known[range(3), [5, 3, 4]].tolist() == [tokens[0], -7, tokens[1]]


def mixed_choices() -> SamplingArray:
    """One row of each kind: by temperature alone, filtered, greedy."""
    choices = np.zeros(3, SAMPLING_DTYPE)
    choices["temperature"], choices["top_p"], choices["seed"] = [1.5, 2, 0], [1, 0.9, 1], [3, 4, 5]
    choices["top_k"], choices["position"] = [0, 40, 0], [5, 3, 4]
    return choices


def test_closing_waits_for_what_was_begun(checkpoint: Callable[..., Path], threads: int) -> None:
    expected = World(checkpoint("llama")).one_by_one(6)
    world = World(checkpoint("llama"))
    begun = [world.begin([start] * 3, [count] * 3) for start, count in spans(6)]
    world.decoder.close()
    world.decoder.close()
    done = expected if threads > 1 else [[-1] * 3] * 6  # alone, nobody computes what nobody waits for
    assert [picked.tolist() for _, picked in begun] == done


def test_memory_grows_under_nobody(checkpoint: Callable[..., Path], threads: int) -> None:
    """A larger step that is begun while smaller ones are computed."""
    steps = [(0, 1), (1, 1), (2, 30), (32, 1), (33, 64), (97, 2)]

    def picked(world: World, each: Callable[[StepRun], object]) -> list[list[int]]:
        world.known[:] = torch.arange(world.known.numel(), dtype=torch.int32).view(world.known.shape) % 300
        begun = []
        for start, count in steps:
            begun.append(world.begin([start] * 3, [count] * 3))
            each(begun[-1][0])
        begun[-1][0].finish()
        return [tokens.tolist() for _, tokens in begun]

    alone = picked(World(checkpoint("llama")), lambda running: running.finish())
    assert picked(World(checkpoint("llama")), lambda _: None) == alone


def test_who_was_interrupted_comes_back_for_the_step(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C while a step is computed: without helpers a step that nobody comes for would hold up all others."""
    world, joined = World(checkpoint("llama")), list[int]()
    first, second = (world.begin([start] * 3, [count] * 3)[0] for start, count in spans(2))
    assert isinstance(world.decoder, NativeDecoder)
    program = world.decoder.program
    assert program is not None
    join = program._wait

    def interrupted(pool: int, number: int) -> None:
        joined.append(number)
        if len(joined) == 1:
            raise KeyboardInterrupt
        join(pool, number)

    monkeypatch.setattr(program, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.finish()
    second.finish()
    assert joined == [0, 0, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_waits_for_no_threads(checkpoint: Callable[..., Path], threads: int) -> None:
    """It has none of them."""
    world = World(checkpoint("llama"))
    world.begin([0] * 3, [5] * 3)[0].finish()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where threads are
        child = os.fork()
    if child == 0:
        world.decoder.close()
        os._exit(0)
    deadline = time.monotonic() + 30
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.001)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pool alone, watched by the thread sanitizer where the compiler has it."""
    compiler, to = shutil.which("gcc") or shutil.which("cc"), tmp_path_factory.mktemp("pool") / "stress"
    if compiler is None:
        pytest.skip("no compiler here")
    here, kernels = Path(__file__).parent, Path(library.__file__).parent
    command = [compiler, "-std=gnu11", "-O1", "-g", "-pthread", f"-I{kernels}", str(here / "thread_pool_stress.c")]
    command += [str(kernels / "thread_pool.c"), "-o", str(to)]
    if subprocess.run([*command, "-fsanitize=thread"], capture_output=True, check=False).returncode:
        subprocess.run(command, check=True)
    return to


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_everything_is_done_once_whoever_comes_when(stress: Path, helpers: int) -> None:
    done = subprocess.run([stress, str(helpers), "600"], capture_output=True, text=True, timeout=60, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert (done.stdout, done.stderr, done.returncode) == ("right\n", "", 0)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _masks_of_helpers(threads: int) -> tuple[ThreadPool, list[set[int]]]:
    """A pool of so many threads, and the processors that each of its helpers may run on."""
    torch.set_num_threads(threads)
    before = {path.name for path in Path("/proc/self/task").iterdir()}
    pool = ThreadPool()
    helpers = [int(path.name) for path in Path("/proc/self/task").iterdir() if path.name not in before]
    deadline = time.monotonic() + (10 if threads == len(os.sched_getaffinity(0)) else 0.05)
    while any(len(os.sched_getaffinity(helper)) > 1 for helper in helpers) and time.monotonic() < deadline:
        time.sleep(0.001)  # they bind themselves
    return pool, [os.sched_getaffinity(helper) for helper in helpers]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are not bound here")
@pytest.mark.usefixtures("torch_threads")
def test_each_thread_has_a_processor_where_there_is_one_for_each(checkpoint: Callable[..., Path]) -> None:
    """Else the kernel has two of them take turns on one, with another one idle. What the submitting thread starts later
    may run anywhere."""
    allowed = os.sched_getaffinity(0)
    pool, masks = _masks_of_helpers(len(allowed))
    assert sorted(map(len, masks)) == [1] * (len(allowed) - 1)
    assert len(set[int]().union(*masks)) == len(masks)
    pool.close()
    world = World(checkpoint("llama"))
    world.begin([0] * 3, [5] * 3)[0].finish()
    assert os.sched_getaffinity(0) == allowed
    world.decoder.close()
    more, masks = _masks_of_helpers(len(allowed) + 1)
    assert masks == [allowed] * len(allowed)
    more.close()
