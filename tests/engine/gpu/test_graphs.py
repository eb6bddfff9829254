"""Decode steps that are recorded once and replayed, with a recorder that replays the launches over the same buffers.

Whatever they read on the host is as wrong here as in a graph, because a recorded step's host numbers are only bounds.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from weakref import ReferenceType, ref

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from charonia.core.eager_reason import EagerReason
from charonia.engine.attention import selector
from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.attention.triton_latents import TritonLatents
from charonia.engine.config import CacheConfig, EngineConfig, LoraConfig, SpeculationConfig
from charonia.engine.core.drafters import ProposedDrafts
from charonia.engine.cpu import library
from charonia.engine.cpu.lora import CAdapterTable
from charonia.engine.gpu.graph_buckets import GRAPH_BYTES, GraphBuckets, GraphKey, StepExtent
from charonia.engine.gpu.graphs import StaticStep, StepGraphs
from charonia.engine.layers import linear
from charonia.engine.step_adapters import StepAdapters
from charonia.engine.step_batch import StepBatch
from charonia.engine.worker.draft_model import DraftModel
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.engine.worker.row_states import StepInputs
from charonia.engine.worker.step_recording import record_steps
from charonia.engine.worker.step_samples import ChosenTokens, StepLogits, TokenChooser
from charonia.engine.worker.vocabulary_map import VocabularyMap
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.speculation import Drafter, DraftRequest, Speculation
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec
from tests.recording import DeviceAttention, Recorder, compute_on_queue

from ...adapters import layers_of, write_adapter

BLOCK, BLOCKS, LONGEST, NEW, MOST = 8, 13, 128, 14, 3
CPU = torch.device("cpu")
LARGEST = GraphBuckets((1, 2, 4), (32, LONGEST), (1, 4, 16), 1 + MOST, 2, (8, 24))
"""Of steps with up to MOST drafts a row, two adapters, and parts of prompts."""


class DeviceLora:
    """Reads adapters on the device alone, as `TritonLora` does; `known`: those that there are, by where they lie."""

    known: ClassVar[dict[int, Any]] = {}

    def __init__(self, number: int) -> None:
        self._number = number

    def add(self, x: Tensor, out: Tensor, step: StepAdapters) -> None:
        packed, most = step.blocks(CPU)
        for address, first, end in packed[1:, :most].T.tolist():
            for part in self.known[address].parts[self._number] if address else ():
                places = packed[0, first:end]
                added = (x[places] @ part.a.T * part.scale) @ part.b
                out[:, part.first : part.first + part.outputs].index_add_(0, places, added)


class SomeRight:
    """Guesses what each prompt is answered with, and after as many tokens as chance has it, something else."""

    def __init__(self, answers: Sequence[tuple[list[int], list[int]]]) -> None:
        self._answers = {tuple(prompt): answer for prompt, answer in answers}
        self._random = Random(7)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def _guess(self, request: DraftRequest) -> list[int]:
        done, most = len(request.outputs), self._random.randint(0, request.k)
        tokens = self._answers[tuple(request.prompt.tolist())][done : done + most]
        right = self._random.randint(0, len(tokens))
        return [token if at < right else (token + 1) % 384 for at, token in enumerate(tokens)]


class EveryDraft(Speculation):
    """Verifies all drafts, whatever steps cost."""

    def is_due(self, step: int) -> bool:
        return True

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.costs.observe_step = lambda *times, **more: None  # type: ignore[method-assign]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 384, (length,), generator=generator).tolist() for length in (1, 7, 16, 25, 33, 60)]


@cache
@torch.inference_mode()
def transformers_tokens(checkpoint: Path) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


class Setting:
    """A tiny model whose decode steps are recorded, prompts, and how transformers goes on with them. `adapters`: the
    digests of those that sequences have in turn, each with a `table` by whose address it is found, if not its own."""

    def __init__(
        self, checkpoint: Path, adapters: Sequence[Path] = (), table: Callable[..., Any] | None = None, **changes: Any
    ) -> None:
        self.recorder, self.preemptions, self.accepted, self.new = Recorder(), 0, 0, NEW
        cache, lora = CacheConfig(block_size=BLOCK), LoraConfig(max_rank=16) if adapters else None
        sizes = {"cache": cache, "scheduler": SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24)}
        self.config = EngineConfig(
            model=str(checkpoint), device="cpu", attention="device", lora=lora, **sizes, **changes
        )
        self.executor = InlineExecutor(self.config)
        self.executor.load(lambda phase, fraction: None)
        self.computer = compute_on_queue(self.executor.rank)
        has_states = self.computer.stores.states is not None
        self.snapshots, self.draft_states = (2, 4 * MOST) if has_states else (0, None)
        self.executor.allocate(BLOCKS, snapshots=self.snapshots + (self.draft_states or 0))
        if adapters and table is not None:
            self.executor.rank.loaded_adapters._targets._table = table  # type: ignore[method-assign]
        self.paths = adapters
        self.adapters = ["", *(self.executor.load_adapter(str(adapter)).result().digest for adapter in adapters)]
        self.set_pace(1.0)
        self.prompts = prompts()
        self.right = transformers_tokens(checkpoint)

    def set_pace(self, seconds: float) -> None:
        """Begin anew without graphs, with so many seconds from one step to the next."""
        runner, clock = self.executor.rank.runner, (at * seconds for at in range(10**6))
        self.graphs = StepGraphs(self.computer.compute_static, LARGEST, CPU, self.recorder, clock.__next__)
        self.computer.graphs = self.graphs
        if isinstance(runner.draft, DraftModel):
            buckets = GraphBuckets((1, 2, 4), (32, LONGEST), (2, 8), 2)
            runner.draft.graphs = StepGraphs(runner.draft.compute_static, buckets, CPU, self.recorder, clock.__next__)

    def eager_answers(self) -> list[list[int]]:
        """How each prompt is answered with each adapter, one after the other, by steps that are not recorded."""
        graphs, self.computer.graphs = self.computer.graphs, None
        answers = []
        for key in range(len(self.prompts) * len(self.adapters)):
            scheduler, cache = self.scheduler(0)
            scheduler.add(self.request(key, cache))
            found: list[int] = []
            while plan := scheduler.schedule():
                found += scheduler.apply(self.executor.execute(plan).result()).tokens
            answers.append(found)
        self.computer.graphs = graphs
        return answers

    def scheduler(self, ahead: int, drafter: Drafter | None = None) -> tuple[Scheduler, KVCacheManager]:
        cache = KVCacheManager(BLOCKS, BLOCK, snapshots=self.snapshots, draft_states=self.draft_states)
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=LONGEST, ahead=ahead)
        drafts = isinstance(drafter, ProposedDrafts)
        speculation = None if drafter is None else EveryDraft({"drafter": drafter}, MOST, 384, draft_model=drafts)
        return Scheduler(config, cache, speculation=speculation), cache

    def request(self, key: int, cache: KVCacheManager) -> SequenceSpec:
        prompt = np.array(self.prompts[key % len(self.prompts)], np.int32)
        adapter = self.adapters[key // len(self.prompts) % len(self.adapters)]
        hashes = cache.digest(prompt, (adapter, "", ""))
        return SequenceSpec(key=key, prompt=prompt, max_tokens=self.new, hashes=hashes, adapter=adapter)


@contextmanager
def loaded(checkpoint: Path, adapters: Sequence[Path] = (), **changes: Any) -> Iterator[Setting]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(selector.BACKENDS, "device", DeviceAttention)
        if adapters:
            patch.setattr(library, "supports", lambda *_: False)
            patch.setattr(linear, "_fastest_lora", lambda number, *_: DeviceLora(number))
        setting = Setting(checkpoint, adapters, CAdapterTable, **changes)
    yield setting
    setting.executor.close()


@pytest.fixture(scope="module")
def setting(checkpoint: Callable[..., Path]) -> Iterator[Setting]:
    with loaded(checkpoint("llama")) as setting:
        yield setting


@pytest.fixture(scope="module")
def adapted(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """One whose sequences have two adapters, of different ranks and layers, or none."""
    directory, layers = tmp_path_factory.mktemp("adapters"), layers_of(checkpoint("llama"), ("proj",))
    some = {path: shape for path, shape in layers.items() if path.endswith(("q_proj", "v_proj", "down_proj"))}
    written = [write_adapter(directory / "all", layers, 1), write_adapter(directory / "some", some, 2, r=3)]
    with loaded(checkpoint("llama"), written) as setting:
        held = setting.executor.rank.loaded_adapters.held
        DeviceLora.known.update({value.address: value for value in held.values()})
        setting.right = setting.eager_answers()
        yield setting


@pytest.fixture(scope="module")
def drafting(checkpoint: Callable[..., Path]) -> Iterator[Setting]:
    """One for which the same model in four bits drafts."""
    speculation = SpeculationConfig(
        method="draft_model", model=str(checkpoint("llama")), quantization="int4", num_speculative_tokens=MOST
    )
    with loaded(checkpoint("llama"), speculation=speculation) as setting:
        yield setting


def run(
    setting: Setting, ahead: int, cancelled: dict[int, list[int]], drafter: Drafter | None = None, requests: int = 12
) -> dict[int, list[int]]:
    """So many requests, two at each step; `cancelled`: keys by step. The tokens of the others."""
    scheduler, cache = setting.scheduler(ahead, drafter)
    waiting, flying = deque(range(requests)), deque[Any]()
    found: dict[int, list[int]] = {key: [] for key in waiting}
    step = 0
    while waiting or scheduler.has_work:
        for _ in range(min(2, len(waiting))):
            scheduler.add(setting.request(waiting.popleft(), cache))
        scheduler.abort(cancelled.get(step, ()))
        while plan := scheduler.schedule():
            flying.append(setting.executor.execute(plan))
        if flying:
            updates = scheduler.apply(flying.popleft().result())
            stream = iter(updates.tokens)
            for key, count in zip(updates.keys, updates.counts, strict=True):
                found[key] += (next(stream) for _ in range(count))
            setting.accepted += sum(accepted for _, _, accepted in updates.drafts)
        scheduler.check_integrity()
        step += 1
    while flying:
        scheduler.apply(flying.popleft().result())
    setting.preemptions += scheduler.totals.preemptions
    gone = {key for keys in cancelled.values() for key in keys}
    return {key: tokens for key, tokens in found.items() if key not in gone}


def expected(setting: Setting, found: dict[int, list[int]]) -> dict[int, list[int]]:
    return {key: setting.right[key % len(setting.right)] for key in found}


@pytest.mark.parametrize("ahead", [0, 1])
def test_replayed_steps_are_transformers(setting: Setting, ahead: int) -> None:
    """Through chunks, prefix hits and preemptions, while graphs come one after the other."""
    setting.set_pace(0.1)
    replays = setting.recorder.replays
    found = run(setting, ahead, {})
    assert len(found) == 12
    assert found == expected(setting, found)
    assert setting.executor.eager_steps == setting.graphs.eager_steps
    assert setting.graphs.eager_steps[EagerReason.NOT_CAPTURED] > 5
    assert any(key.prompts for key in setting.graphs._replays)
    assert setting.recorder.replays > replays + 5
    assert setting.preemptions


def test_more_drafts_than_places_beside_a_prompt_are_right(setting: Setting) -> None:
    """In the smallest bucket, which has fewer places than any step has logits."""
    setting.set_pace(1.0)
    found = run(setting, 0, {2: [0]}, SomeRight([*zip(setting.prompts, setting.right, strict=True)]))
    assert found == expected(setting, found)


CANCELLED = st.dictionaries(st.integers(0, 40), st.lists(st.integers(0, 11), max_size=3), max_size=6)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CANCELLED, st.sampled_from((0, 1)), st.booleans())
def test_cancels_and_rejected_drafts_leave_the_others_as_they_are(
    setting: Setting, cancelled: dict[int, list[int]], ahead: int, drafts: bool
) -> None:
    """All of the decode steps are replayed, those with drafts of any number too."""
    setting.set_pace(1.0)
    replays = setting.recorder.replays
    drafter = SomeRight([*zip(setting.prompts, setting.right, strict=True)]) if drafts else None
    found = run(setting, ahead, cancelled, drafter)
    assert found == expected(setting, found)
    assert not setting.graphs.eager_steps
    assert not found or setting.recorder.replays > replays
    assert not (found and drafts) or any(key.most > 1 for key in setting.graphs._replays)


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CANCELLED, st.sampled_from((0, 1)), st.booleans())
def test_sequences_with_adapters_and_without_say_what_they_do_alone(
    adapted: Setting, cancelled: dict[int, list[int]], ahead: int, drafts: bool
) -> None:
    """Mixed, with drafts and without; all of the decode steps are replayed."""
    adapted.set_pace(1.0)
    answers = [*zip(adapted.prompts, adapted.right, strict=False)]  # which are wrong with an adapter
    found = run(adapted, ahead, cancelled, SomeRight(answers) if drafts else None, requests=18)
    assert found == expected(adapted, found)
    assert not adapted.graphs.eager_steps
    assert not found or any(key.adapted for key in adapted.graphs._replays)


def test_adapters_change_what_is_said(adapted: Setting) -> None:
    each = len(adapted.prompts)
    plain, first, second = (adapted.right[at * each :][:each] for at in range(3))
    assert plain != first != second != plain


def test_an_adapter_that_comes_later_needs_no_other_graph(adapted: Setting, tmp_path: Path) -> None:
    adapted.set_pace(1.0)
    while adapted.graphs.capture_one():
        pass
    captures, before, right = adapted.recorder.captures, adapted.adapters, adapted.right
    layers, held = layers_of(Path(adapted.config.model)), adapted.executor.rank.loaded_adapters.held
    later = adapted.executor.load_adapter(str(write_adapter(tmp_path, layers, 3, r=5))).result().digest
    DeviceLora.known[held[later].address] = held[later]
    adapted.adapters = ["", later]
    found = run(adapted, 0, {})
    assert (adapted.recorder.captures, adapted.graphs.eager_steps.total()) == (captures, 0)
    adapted.right = adapted.eager_answers()
    assert found == expected(adapted, found)
    assert adapted.right[len(adapted.prompts) :] != right[len(adapted.prompts) :][: len(adapted.prompts)]
    adapted.adapters, adapted.right = before, right


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CANCELLED, st.booleans())
def test_a_draft_models_passes_are_replayed(drafting: Setting, cancelled: dict[int, list[int]], mapped: bool) -> None:
    """Also over its own tokens, `mapped` from the model's; as many proposals are right as of launched passes."""
    draft = drafting.executor.rank.runner.draft
    assert isinstance(draft, DraftModel)
    each = torch.arange(384, dtype=torch.int32)
    same = VocabularyMap(each, each.numpy(), np.full((1, 12), -1, np.int32)) if mapped else None
    draft._limits = draft._limits._replace(vocabulary=same)
    drafting.set_pace(1.0)
    assert draft.graphs is not None
    draft.forget(BLOCKS)
    found, before = run(drafting, 0, cancelled, ProposedDrafts(), requests=6), drafting.accepted
    assert found == expected(drafting, found)
    assert drafting.executor.eager_steps.keys() <= {EagerReason.PROMPT}
    assert not found or {key.most for key in draft.graphs._replays} == {1, 2}
    draft.graphs = None
    draft.forget(BLOCKS)
    drafting.accepted -= before
    assert run(drafting, 0, cancelled, ProposedDrafts(), requests=6) == found
    assert drafting.accepted == before
    assert before or not found
    drafting.accepted = 0


def test_what_can_be_recorded_is(drafting: Setting, adapted: Setting, caplog: pytest.LogCaptureFixture) -> None:
    """As many places a row as drafts need, and the attention takes; two for a draft model."""
    rank = drafting.executor.rank
    record_steps(drafting.config, rank.context, drafting.computer, rank.runner.draft, drafting.recorder)
    target, draft = rank.runner.all_graphs
    assert (target.buckets.most, target.buckets.adapters) == (1 + MOST, 0)
    assert (draft.buckets.most, draft.buckets.contexts) == (2, target.buckets.contexts)
    many = msgspec.structs.replace(
        drafting.config, speculation=SpeculationConfig(num_speculative_tokens=20, method="ngram")
    )
    record_steps(many, rank.context, drafting.computer, rank.runner.draft, drafting.recorder)
    assert rank.runner.all_graphs[0].buckets.most == DeviceAttention.recordable_places
    while any(graphs.capture_one() for graphs in rank.runner.all_graphs):
        pass
    assert all(len(graph._replays) == len(graph.buckets.keys) for graph in rank.runner.all_graphs)
    drafting.computer.graphs = None
    with caplog.at_level("INFO"):
        eager = msgspec.structs.replace(drafting.config, enforce_eager=True)
        record_steps(eager, rank.context, drafting.computer, rank.runner.draft, drafting.recorder)
    assert drafting.computer.graphs is None
    assert caplog.messages == ["steps are computed without CUDA graphs: enforce_eager"]


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # padded places hold whatever was there
def test_tokens_are_the_same_with_kernels(
    checkpoint: Callable[..., Path],
    adapted: Setting,
    interpreted: None,
    short_pieces: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layers and the attention of a GPU, interpreted, in steps that are replayed: of a row with an adapter, and
    drafts of which some are right."""
    monkeypatch.setitem(selector.BACKENDS, "device", TritonAttention)
    made = Setting(checkpoint("llama"), adapted.paths[1:])
    right = adapted.right[2 * len(adapted.prompts) + 1]
    made.prompts, made.adapters, made.new = made.prompts[1:2], made.adapters[1:], 6
    assert run(made, 0, {}, SomeRight([(made.prompts[0], right)]), requests=1) == {0: right[:6]}
    assert {key.most for key in made.graphs._replays if key.adapted} == {1, 1 + MOST}
    assert any(key.prompts for key in made.graphs._replays)
    assert made.recorder.replays > 2
    assert not made.graphs.eager_steps
    made.executor.close()


@pytest.mark.proof
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "granite-hybrid", "mamba2", "deepseek-v3"])
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_states_and_latents_are_the_same_in_recorded_steps(
    checkpoint: Callable[..., Path], interpreted: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kernels, interpreted, which go back to states after wrong drafts; in steps with parts of prompts, too."""
    monkeypatch.setitem(selector.BACKENDS, "device", TritonLatents if name == "deepseek-v3" else TritonAttention)
    made = Setting(checkpoint(name))
    made.prompts, made.right, made.new = made.prompts[1:4:2], made.right[1:4:2], 6
    found = run(made, 1, {}, SomeRight([*zip(made.prompts, made.right, strict=True)]), requests=2)
    assert found == {key: made.right[key][:6] for key in range(2)}
    assert {key.most for key in made.graphs._replays} == {1, 1 + MOST}
    assert any(key.prompts for key in made.graphs._replays)
    assert not made.graphs.eager_steps
    made.executor.close()


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_logits_are_the_same_bits_launched_and_replayed(
    checkpoint: Callable[..., Path], interpreted: None, sums_of_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parts of prompts beside rows that decode, padded to a bucket, with products that do not go by rows."""
    monkeypatch.setitem(selector.BACKENDS, "device", TritonAttention)
    logits: list[Tensor] = []

    class Chooser(TokenChooser):
        def choose(self, inputs: StepInputs, made: StepLogits, *rest: Any) -> ChosenTokens:
            if made.wanted is not None:
                logits.append(made.wanted.clone())
            return super().choose(inputs, made, *rest)

    made = Setting(checkpoint("llama"), batch_invariance=True)
    made.prompts, made.new = made.prompts[1:4:2], 2
    made.computer._chooser = Chooser(made.executor.rank.rows, CPU)
    replayed = run(made, 0, {}, requests=2)
    assert not made.graphs.eager_steps
    assert any(key.prompts for key in made.graphs._replays)
    graphs, made.computer.graphs = logits.copy(), None
    logits.clear()
    assert run(made, 0, {}, requests=2) == replayed
    made.executor.close()
    assert len(graphs) == len(logits) == 3
    assert all(torch.equal(one, other) for one, other in zip(graphs, logits, strict=True))


def table(compute: Callable[[StaticStep], list[Tensor]], clock: Callable[[], float]) -> tuple[StepGraphs, Recorder]:
    recorder = Recorder()
    return StepGraphs(compute, GraphBuckets((1, 2, 4), (16, 64), (2, 8), 3), CPU, recorder, clock), recorder


def batch(counts: Sequence[int], start: int) -> StepBatch:
    rows = np.arange(len(counts))
    return StepBatch(rows, start * np.ones_like(rows), counts, torch.zeros(9, 9), torch.zeros(9, 9), BLOCK)


def sums(step: StaticStep) -> list[Tensor]:
    found = (step.numbers.sum(0, keepdim=True).T + step.key.context + 1000 * step.key.most).float()
    return [found.repeat(1, 3), -found]


def test_a_bucket_is_captured_at_most_once_a_second() -> None:
    now = [0.0]
    graphs, recorder = table(sums, lambda: now[0])
    first = graphs.replay(batch((1, 1, 1), 5))
    assert first is not None
    assert first[0].tolist() == [[float(2 * row + 6 + 1016)] * 3 for row in range(3)]
    assert first[1].tolist() == [[-float(2 * row + 6 + 1016)] for row in range(3)]
    assert graphs.replay(batch((1,), 5)) is None
    now[0] = 1.0
    assert graphs.replay(batch((1,), 5)) is not None
    assert (recorder.captures, graphs.eager_steps) == (2, {EagerReason.NOT_CAPTURED: 1})
    assert graphs.replay(batch((1,) * 5, 5)) is None  # larger than the largest bucket
    assert graphs.replay(batch((1,), 64)) is None
    assert graphs.replay(batch((4,), 5)) is None
    assert graphs.eager_steps == {EagerReason.NOT_CAPTURED: 1, EagerReason.TOO_LARGE: 3}


def test_rows_of_several_places_are_packed_and_then_padded() -> None:
    graphs, _ = table(sums, lambda: 0.0)
    found = graphs.replay(batch((2, 1, 3), 10))
    assert found is not None
    rows = [0 + 10 + 2 + 0, 1 + 10 + 1 + 2, 2 + 10 + 3 + 3, 6, 6, 6]  # padded ones begin behind the last place
    assert found[0][:, 0].tolist() == [float(number + 16 + 3000) for number in rows]
    assert [*graphs._replays] == [(16, False, 3, 8, False)]


def test_an_idle_engine_captures_the_rest_short_contexts_first() -> None:
    asked: list[tuple[int, int, int]] = []

    def compute(step: StaticStep) -> list[Tensor]:
        assert not step.numbers.any()  # nothing but padded rows while a step is captured
        asked.append((step.key.context, step.key.most, step.numbers.shape[1]))
        return sums(step)

    graphs, recorder = table(compute, lambda: 0.0)
    assert [graphs.capture_one() for _ in range(11)] == [True] * 10 + [False]
    sizes = (3, 8), (3, 2), (1, 4), (1, 2), (1, 1)
    assert asked[::2] == [(context, *size) for context in (16, 64) for size in sizes]
    assert recorder.captures == 10
    graphs.forget()
    assert not graphs._replays


def test_usual_steps_are_captured_before_anybody_waits() -> None:
    """Those of short contexts; after a failure the start goes on without the others."""
    graphs, recorder = table(sums, lambda: 0.0)
    fractions = [graphs.capture_next_usual() for _ in range(5)]
    assert fractions == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert recorder.captures == 5
    assert {key.context for key in graphs._replays} == {16}
    assert graphs.replay(batch((2, 1, 3), 10)) is not None
    assert not graphs.eager_steps
    assert graphs.capture_next_usual() == 1.0
    assert recorder.captures == 5
    graphs.forget()
    recorder.failing = 1
    while graphs.capture_next_usual() < 1.0:
        pass
    assert (graphs.failed_captures, len(graphs._replays), recorder.captures) == (1, 0, 6)


def test_steps_with_prompts_have_graphs_too() -> None:
    """Captured before anybody waits, the largest first; logits are at the places that are asked for."""
    asked: list[GraphKey] = []

    def compute(step: StaticStep) -> list[Tensor]:
        asked.append(step.key)
        places = torch.arange(step.key.places) if step.logits_at is None else step.logits_at
        everywhere = torch.arange(step.key.places).float()[:, None]
        return [places.float()[:, None], everywhere]

    buckets = GraphBuckets((1, 2, 4), (64,), (2, 8), 3, 0, (8, 24))
    graphs = StepGraphs(compute, buckets, CPU, Recorder(), lambda: 0.0)
    while graphs.capture_next_usual() < 1.0:
        pass
    assert [key[2:4] for key in asked[::2] if key.prompts] == [(3, 24), (3, 8), (1, 24), (1, 8)]
    assert [key.prompts for key in asked] == sorted(key.prompts for key in asked)
    for counts, places in (((1, 17, 1), (0, 17, 18)), ((5,), ()), ((2, 1, 4), (0, 1, 6))):
        outputs = graphs.replay(batch(counts, 5), logits_at=torch.tensor(places, dtype=torch.int64))
        assert outputs is not None
        assert outputs[0][:, 0].tolist() == [*places]
        assert outputs[1][:, 0].tolist() == [*range(sum(counts))]
    assert not graphs.eager_steps
    nowhere = torch.zeros(0, dtype=torch.int64)
    assert graphs.replay(batch((25,), 5), logits_at=nowhere) is None
    assert graphs.replay(batch((1, 1, 1, 1, 9), 5), logits_at=nowhere) is None
    assert graphs.eager_steps == {EagerReason.PROMPT: 2}
    graphs.compute_largest()
    assert graphs.bytes == len(buckets.keys) * GRAPH_BYTES + 4 * (8 + 24)


LIMITS = [(256, 1, 0, 0), (20, 5, 8, 300), (300, 5, 0, 2048), (1024, 1, 4, 2048), (5000, 8, 0, 64)]


@pytest.mark.parametrize(("rows", "most", "adapters", "prompts"), LIMITS)
def test_the_graphs_of_a_pool_share_one_buffer_of_logits(rows: int, most: int, adapters: int, prompts: int) -> None:
    """A pool never joins what it has taken of the device: logits that are larger than all before take more of it."""
    buckets = GraphBuckets.of_limits(rows, 100_000, most, adapters, prompts)
    taken: list[int] = []
    for logits in map(buckets.logits_of, buckets.keys):
        if all(logits > other for other in taken):
            taken.append(logits)
    assert taken == [buckets.lines]
    usual = buckets.usual_keys
    assert usual == buckets.keys[: len(usual)] or adapters
    assert {key.most for key in usual} == {1, most}


def test_graphs_that_were_forgotten_are_captured_again() -> None:
    """Into another pool: CUDA takes no graph into one that its last graph has left."""
    graphs, recorder = table(sums, lambda: 0.0)
    for times in (1, 2):
        while graphs.capture_one():
            pass
        assert (recorder.captures, graphs.failed_captures) == (10 * times, 0)
        assert [users for users in recorder.cuda.users.values() if users] == [10]
        graphs.forget()
    assert not any(recorder.cuda.users.values())


def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    """Neither its stream nor its pool, nor a generator that waits for its end: random numbers are drawn, the graph that
    there was is replayed, and others are captured."""
    now = [0.0]
    graphs, recorder = table(sums, lambda: now[0])
    assert graphs.capture_one()
    recorder.failing = 1
    assert graphs.capture_one()
    assert graphs.failed_captures == 1
    cuda = recorder.cuda
    assert cuda.stream is cuda.default_stream
    assert not cuda.taken_from
    cuda.draw()
    assert graphs.replay(batch((2, 1, 3), 5)) is not None
    now[0] = 2.0
    while graphs.capture_one():
        pass
    assert (len(graphs._replays), graphs.failed_captures) == (10, 1)
    graphs.forget()
    assert not any(cuda.users.values())


@pytest.mark.parametrize("steps", [1, 2], ids=["computed", "captured"])
def test_a_capture_that_fails_holds_no_memory(steps: int) -> None:
    """Neither of the step that fails before anything is recorded, nor of one that fails while it is, whose error the
    capture's end hides behind its own: not until a collection of cycles that may be minutes away."""
    held: list[ReferenceType[Tensor]] = []

    def compute(step: StaticStep) -> list[Tensor]:
        activations = step.numbers.float()
        held.append(ref(activations))
        if len(held) == steps:
            if steps == 2:
                recorder.cuda.invalidate()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sums(step)

    graphs, recorder = table(compute, lambda: 0.0)
    gc.disable()
    try:
        assert graphs.capture_one()
        assert (graphs.failed_captures, len(held)) == (1, steps)
        assert [made() for made in held] == [None] * steps
        assert not recorder.cuda.live_graphs
    finally:
        gc.enable()


def test_what_could_not_be_captured_is_tried_again_after_twice_as_long(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    graphs, recorder = table(sums, lambda: now[0])
    recorder.failing = 3
    for seconds, captures in ((0.0, 1), (1.9, 1), (2.0, 2), (5.9, 2), (6.0, 3), (13.9, 3)):
        now[0] = seconds
        assert graphs.replay(batch((1,), 5)) is None
        assert not graphs.capture_one()
        assert recorder.captures == captures
    now[0] = 14.0
    assert graphs.replay(batch((1,), 5)) is not None
    assert (graphs.failed_captures, graphs.eager_steps.total()) == (3, 6)
    assert caplog.messages == [
        f"a CUDA graph for steps of 1 places could not be captured, and is tried again in {wait} s: "
        "RuntimeError: operation not permitted when stream is capturing"
        for wait in (2, 4, 8)
    ]


def test_a_bucket_without_a_graph_keeps_no_other_from_its_own() -> None:
    def compute(step: StaticStep) -> list[Tensor]:
        if step.numbers.shape[1] == 2 and step.key.most == 1:
            raise RuntimeError("out of memory")
        return sums(step)

    graphs, _ = table(compute, count().__next__)
    for _ in range(60):
        graphs.capture_one()
    assert len(graphs._replays) == 8
    assert 2 <= graphs.failed_captures <= 12


def test_steps_are_right_while_captures_fail(setting: Setting) -> None:
    setting.set_pace(1.0)
    setting.recorder.failing = 3
    found = run(setting, 1, {})
    assert found == expected(setting, found)
    assert (setting.executor.failed_captures, setting.recorder.failing) == (3, 0)
    assert setting.graphs._replays


def test_buckets_reach_the_limits() -> None:
    buckets = GraphBuckets.of_limits(20, 100_000)
    assert buckets.rows == (1, 2, 4, 8, 16, 20)
    assert buckets.contexts == (8192, 32768, 100_000)
    assert GraphBuckets.of_limits(5000, 4096) == GraphBuckets.of_limits(1024, 4096)
    assert GraphBuckets.of_limits(5000, 4096).contexts == (4096,)
    assert buckets.others == ()
    assert {key.adapted for key in buckets.keys} == {False}
    with_drafts = GraphBuckets.of_limits(20, 4096, 5)
    assert with_drafts.others == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert [key.places for key in with_drafts.keys if key.most == 5] == [*with_drafts.others[:0:-1]]
    assert with_drafts.places == 100
    with_adapters = GraphBuckets.of_limits(20, 4096, 5, 8)
    assert len(with_adapters.keys) == 6 + 10 + 11 + 10
    assert with_adapters.bytes == (6 + 10 + 2 * (11 + 10)) * GRAPH_BYTES
    many = GraphBuckets.of_limits(300, 4096, 5)
    assert many.places == 1024
    found = [many.find(StepExtent(places, 4096, 5)) for places in (320, *range(257, 1025))]
    assert found[0] is not None, "64 rows with 4 drafts each are not padded"
    assert found[0].places == 320
    assert all(
        key is not None and key.places <= 1.25 * places for key, places in zip(found[1:], range(257, 1025), strict=True)
    )
    with_prompts = GraphBuckets.of_limits(64, 4096, prompt_places=300)
    assert {with_prompts.logits_of(key) for key in with_prompts.keys if key.prompts} == {63, 64}, "fewer than places"
    with_prompts = GraphBuckets.of_limits(20, 4096, prompt_places=300)
    assert with_prompts.prompts == (64, 128, 192, 256, 300)
    assert [key.places for key in with_prompts.usual_keys if key.prompts] == [300, 256, 192, 128, 64]
    assert with_prompts.find(StepExtent(200, 4096, prompts=True, rows=21)) is None
