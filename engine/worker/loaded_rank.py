"""A rank built from a configuration: its device, model, adapters, attention, rows and runner, and the memory left for
its cache.

Every executor builds its ranks here. Knows nothing of threads, processes, or how ranks reach each other.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from ...core.adapter import Adapter
from ...core.errors import InvalidArgument, NotFound
from ...processes.host import available_memory, lower_thread_priority, own_anonymous_memory, usable_cores
from ...tokenization.checkpoint_files import locate_checkpoint
from ...tokenization.tokenizer_json import read_tokenizer
from ..attention.backend import AttentionBackend, CacheSpec
from ..attention.selector import capable_backends, create_backend
from ..checkpoint.adapter_files import read_adapter
from ..checkpoint.adapter_targets import AdapterTargets
from ..checkpoint.build_context import BuildContext, Shard
from ..checkpoint.hf_checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.model_spec import DTYPES, DecoderShape, ModelSpec
from ..checkpoint.packing_cache import open_packing_cache
from ..checkpoint.quantization_config import STORED_AS
from ..checkpoint.served_forms import ServedForms
from ..checkpoint.weights import dtype_name
from ..config import EngineConfig, LoraConfig, ParallelConfig, SpeculationConfig
from ..cpu import library
from ..gpu import runtime
from ..gpu.graphs import CudaRecorder, DecodeGraphs, GraphBuckets, Recorder
from ..kernel_choice import LEVEL_VARIABLE
from ..layers.linear import serves_int8
from ..models.draft_head import DraftHead
from ..models.eagle3 import Eagle3Head, read_eagle3_config
from ..models.interfaces import CheckpointBuilder, Decoder
from ..models.mtp import MtpHead, check_mtp
from ..models.native_decoder import NativeDecoder
from ..models.registry import checkpoint_builder
from ..step_adapters import RankAdapter
from .executor import Capacity
from .model_runner import ModelRunner
from .roofline import measure_roofline
from .row_states import RowStates
from .step_drafters import DraftLimits, DraftModel, HeadDrafter, StepDrafter
from .vocabulary_map import VocabularyMap, map_vocabularies

log = logging.getLogger(__name__)


class RankAdapters:
    """The adapters that a rank holds, read and prepared beside its steps: `held`, by digest. Those of steps that are
    being computed live as long as these, whatever is unloaded."""

    def __init__(self, targets: AdapterTargets, limits: LoraConfig) -> None:
        self._targets, self._limits = targets, limits
        self.held: dict[str, RankAdapter] = {}
        self._thread = ThreadPoolExecutor(1, "adapters", initializer=lower_thread_priority, initargs=(19,))

    def load(self, path: str) -> Future[Adapter]:
        """See `Executor.load_adapter`."""
        return self._thread.submit(self._load, path)

    def close(self) -> None:
        """Load nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, path: str) -> Adapter:
        files = read_adapter(path, self._limits)
        found = self.held.get(files.digest)
        if found is None:
            found = self._targets.prepare(files)
            if found.bytes > self._limits.max_bytes:
                message = f"{path}: {found.bytes} bytes in memory, more than max_lora_bytes {self._limits.max_bytes}"
                raise InvalidArgument(message, field="lora_path")
            self.held[files.digest] = found
        return Adapter("", path, found.digest, found.rank, found.bytes)


def assign_device(config: EngineConfig, local: int = 0, here: int = 1) -> str:
    """The device of rank `local`, of `here` ranks that each replica has on this machine: a GPU of its own, or the
    processor that all share. Names that are unknown or not here are left to `resolve_device`.

    Raises:
        InvalidArgument: there are fewer GPUs than ranks, or one is named for all.
    """
    kind, _, number = config.device.partition(":")
    if kind == "auto":
        kind = _fastest()
    ranks = here * config.data_parallel_size
    if kind != "cuda" or ranks == 1 or not torch.cuda.is_available():
        return config.device if number else kind
    if number:
        message = f"device {config.device!r} is one GPU, and there are {_ranks(config, here)}"
        raise InvalidArgument(message, field="device")
    if (count := torch.cuda.device_count()) < ranks:
        field = "data_parallel_size" if config.data_parallel_size > 1 else "tensor_parallel_size"
        message = f"{_ranks(config, here)} need a GPU each, and this machine has {count}"
        raise InvalidArgument(f"{field}: {message}", field=field)
    return f"cuda:{config.replica * here + local}"


def resolve_device(name: str) -> torch.device:
    """The device that a name means; "auto" is a GPU wherever torch finds one. A GPU has its index: of its calls torch
    lets some do without, and NCCL and `set_device` refuse it.

    Raises:
        InvalidArgument: there is no such device, or none of that kind on this machine.
    """
    try:
        device = torch.device(_fastest() if name == "auto" else name)
    except RuntimeError as error:
        raise InvalidArgument(f"device {name!r} is unknown; known are auto, cpu and cuda", field="device") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise InvalidArgument(f"device {name!r} is not on this machine", field="device")
    if (device.index or 0) and device.type == "cuda" and device.index >= (count := torch.cuda.device_count()):
        raise InvalidArgument(f"device {name!r} is not on this machine, which has {count} of them", field="device")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _fastest() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _ranks(config: EngineConfig, here: int) -> str:
    if config.data_parallel_size == 1:
        return f"{here} ranks"
    each = f" of {here} ranks" if here > 1 else ""
    return f"{config.data_parallel_size} replicas{each}"


WHOLE_MODEL = Shard()


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank that is ready to compute; `shape` is the whole model's. `adapters`: None where none may be loaded.
    `served`: what the matrices are kept as, where that is known. `draft`: what proposes tokens, on the rank that
    reports results."""

    config: EngineConfig
    context: BuildContext
    shape: DecoderShape
    attention: AttentionBackend
    runner: ModelRunner
    adapters: RankAdapters | None = None
    served: ServedForms | None = None
    draft: StepDrafter | None = None

    @property
    def loaded_adapters(self) -> RankAdapters:
        if self.adapters is None:
            raise RuntimeError("this engine takes no adapters")
        return self.adapters

    def unload_adapter(self, digest: str) -> None:
        """See `Executor.unload_adapter`."""
        if (adapter := self.loaded_adapters.held.pop(digest, None)) is not None:
            self.runner.forget_adapter(adapter)

    def close(self) -> None:
        """End its threads; no step may follow."""
        self.runner.close()
        if self.adapters is not None:
            self.adapters.close()

    def capacity(self, neighbours: int = 1) -> Capacity:
        """Sizes of this rank, and the memory left for its cache when all `neighbours` that share it have loaded."""
        shape = self.shape
        # A step takes memory beside weights and cache, and adapters may come.
        measured = self.context.device.type == "cuda" and self.context.shard.is_whole
        step = self._measured_step_bytes() if measured else self._estimated_step_bytes()
        lora = 0 if self.config.lora is None else self.config.lora.max_bytes // self.config.parallel.world
        free = _free_memory(self.context.device, neighbours, self.config) - step - lora
        machine = self._machine() if self.context.device.type == "cpu" else ""
        block_bytes = self.attention.block_bytes + (0 if self.draft is None else self.draft.attention.block_bytes)
        sizes = shape.vocab_size, self.context.max_positions, block_bytes
        return Capacity(*sizes, max(free, 0), machine, ahead=int(self.context.device.type != "cpu"))

    def _estimated_step_bytes(self) -> int:
        """Activations of a step's tokens, and logits of its rows or of a piece of a prompt (float32, three times:
        logits, probabilities, their sums)."""
        shape, tokens = self.shape, self.config.scheduler.max_num_batched_tokens
        activations = tokens * (8 * shape.hidden_size + 4 * shape.intermediate_size) * 4
        return activations + self.config.most_sampled * shape.vocab_size * 12

    def _measured_step_bytes(self) -> int:
        """What the worst step takes of a GPU, and what recorded steps keep: the activations of the largest of them, and
        what comes out of it, which all share."""
        runner, config, device = self.runner, self.config, self.context.device
        tokens, sampled = config.scheduler.max_num_batched_tokens, config.most_sampled
        adapted = config.lora is not None and runtime.serves(self.context.dtype, device)
        worst = _peak_bytes(device, lambda: runner.compute_worst_step(tokens, sampled, adapted))
        peaks = sum(_peak_bytes(device, graphs.compute_largest) for graphs in runner.all_graphs)
        return worst + peaks + sum(graphs.bytes for graphs in runner.all_graphs)

    def _machine(self) -> str:
        """Cores, threads, and the bound that memory sets a rank that is alone, for people."""
        threads = torch.get_num_threads()
        if library.level() is None and LEVEL_VARIABLE not in os.environ:
            log.warning("%s; to compile them: %s", library.describe(), library.BUILD_COMMAND)
        machine = f"{usable_cores()}; {threads} thread{'s' if threads > 1 else ''}; {library.describe()}"
        quantization = self.context.quantization
        kept = dtype_name(self.context.dtype) if quantization == "none" else quantization
        bound = measure_roofline(self.shape, kept, self.served) if self.context.shard.is_whole else None
        return machine if bound is None else f"{machine}; {bound}"


def load_rank(
    config: EngineConfig,
    shard: Shard = WHOLE_MODEL,
    progress: Callable[[float], None] = lambda _: None,
    found: CheckpointBuilder | None = None,
) -> LoadedRank:
    """Load this rank's share of the model. `progress` is called with the fraction of its bytes read so far. `found`:
    the checkpoint's builder, where it is not that of a directory.

    Computes on torch's threads as they are set; ranks of a stage must have the same number of them, for each chooses
    tokens by itself. The thread that loads is the one that computes: a GPU becomes its current one.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        InvalidArgument: the configuration does not fit it, its split or the machine.
    """
    if config.cpu_level != "auto":
        _use_level(config)
    found, block_size = found or checkpoint_builder(open_checkpoint(config.model)), config.cache.block_size
    context = _build_context(config, found, shard, progress)
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)  # of the thread: kernels, streams and events go by it, not by tensors
    _check_products(context)
    capable_backends(config.attention, context.device, context.dtype, block_size, config.cache.dtype)
    decoder, shape, targets, served = found.build(context)
    if config.lora is not None and targets is None:
        message = "enable_lora: this model is computed by transformers, where layers take no adapters"
        raise InvalidArgument(message, field="enable_lora")
    progress(1.0)
    attention = _create_attention(config, context, shard.local_shape(shape))
    adapters = None if config.lora is None or targets is None else RankAdapters(targets, config.lora)
    held = {} if adapters is None else adapters.held
    lines = 0 if context.device.type == "cpu" else config.scheduler.max_num_seqs  # recorded steps read them in place
    rows = RowStates(context.max_positions, block_size, context.device, held, lines)
    draft = _load_drafter(config, context, decoder, shape, rows) if shard.reports_results else None
    runner = ModelRunner(decoder, attention, rows, context.device, draft)
    if context.device.type == "cuda":
        record_decode_steps(config, context, runner, CudaRecorder(context.device))
    return LoadedRank(config, context, shape, attention, runner, adapters, served, draft)


def record_decode_steps(config: EngineConfig, context: BuildContext, runner: ModelRunner, record: Recorder) -> None:
    """Have the steps of a whole model on a GPU, and the passes of one that drafts, recorded by `record` if they can be.
    Rows with drafts have as many places as the attention takes, and adapters are in it where kernels add them."""
    if config.enforce_eager or not context.shard.is_whole:
        reason = "enforce_eager" if config.enforce_eager else "the model is split"
        log.info("decode steps are computed without CUDA graphs: %s", reason)
        return
    rows, draft = config.scheduler.max_num_seqs, runner.draft
    adapters = 0
    if config.lora is not None and runtime.serves(context.dtype, context.device):
        adapters = config.lora.max_loras
    obstacle = _unrecordable(runner.decoder, runner.attention)
    if obstacle is None:
        most = min(1 + config.most_drafts, runner.attention.recordable_places)
        buckets = GraphBuckets.of_limits(rows, context.max_positions, most, adapters)
        runner.graphs = DecodeGraphs(runner.compute_static, buckets, context.device, record)
    else:
        log.info("decode steps are computed without CUDA graphs: %s", obstacle)
    if not isinstance(draft, DraftModel):
        return
    obstacle = _unrecordable(draft.decoder, draft.attention)
    if obstacle is None:
        most = min(2, draft.attention.recordable_places)  # after drafts that were all right it lacks two tokens
        buckets = GraphBuckets.of_limits(rows, draft.longest, most)
        draft.graphs = DecodeGraphs(draft.compute_static, buckets, context.device, record)
    else:
        log.info("a draft model's passes are computed without CUDA graphs: %s", obstacle)


def _unrecordable(decoder: Decoder, attention: AttentionBackend) -> str | None:
    """Why steps of such a model cannot be recorded; None: they can."""
    if not isinstance(decoder, NativeDecoder):
        return "it is computed by transformers"
    if decoder.host_bound:
        return (
            "its experts have biases, adapters or weights that no grouped product takes, and each is computed by itself"
        )
    return None if attention.recordable_places else "the attention reads rows on the host"


def _create_attention(config: EngineConfig, context: BuildContext, shape: DecoderShape) -> AttentionBackend:
    sizes = shape.heads, shape.kv_heads, shape.head_dim, config.cache.block_size
    spec = CacheSpec(shape.attention, *sizes, context.dtype, context.device, config.cache.dtype)
    return create_backend(config.attention, spec)


def _load_drafter(
    config: EngineConfig, target: BuildContext, decoder: Decoder, shape: DecoderShape, rows: RowStates
) -> StepDrafter | None:
    """Load the model that drafts for a target of `shape`, if one does. Raises as `load_rank`."""
    speculation = config.speculation
    if speculation is None or not speculation.computes:
        return None
    if speculation.method == "draft_model":
        draft = _load_draft_model(config, speculation, target, shape, rows)
        # Behind a later step of the model, which waits for the host, a pass would wait for ever.
        alone = config.parallel.pipeline == 1 and not config.scheduler.ahead
        if alone and isinstance(decoder, NativeDecoder) and isinstance(draft.model, NativeDecoder):
            draft.model.compute_beside(decoder)
        return draft
    _check_head(config, speculation)
    if not isinstance(decoder, NativeDecoder) or not isinstance(shape, ModelSpec):
        message = f"speculative_config: {speculation.method} needs a model that is not computed by transformers"
        raise InvalidArgument(message, field="speculative_config")
    quantization = speculation.quantization or ("none" if target.quantization == "none" else "int8")
    context = BuildContext(target.dtype, target.device, target.max_positions, quantization=quantization)
    head: DraftHead
    if speculation.method == "mtp":
        head = MtpHead(open_checkpoint(config.model), shape, context, decoder)
    else:
        found = read_eagle3_config(speculation.model, shape)
        context = context._replace(max_positions=min(target.max_positions, found.spec.max_position))
        head = Eagle3Head(found, context, config.model)
    decoder.keep_states(head.target_layers)
    attention = _create_attention(config, context, head.spec)
    return HeadDrafter(head, attention, decoder, rows, context.max_positions, speculation.draws)


def _check_head(config: EngineConfig, speculation: SpeculationConfig) -> None:
    message = ""
    if config.parallel.pipeline > 1 or config.scheduler.ahead:
        name = "pipeline_parallel_size" if config.parallel.pipeline > 1 else "ahead"
        message = f"{speculation.method} needs the last step's hidden states, which {name} takes from it"
    elif speculation.method == "mtp" and config.parallel.tensor > 1:
        message = "mtp needs the whole LM head, which tensor_parallel_size splits"
    if message:
        raise InvalidArgument(f"speculative_config: {message}", field="speculative_config")


def _load_draft_model(
    config: EngineConfig, speculation: SpeculationConfig, target: BuildContext, shape: DecoderShape, rows: RowStates
) -> DraftModel:
    draft, found = _draft_builder(config)
    positions = min(target.max_positions, found.max_position)
    draft = msgspec.structs.replace(draft, max_model_len=positions, device=str(target.device))
    context = _build_context(draft, found, WHOLE_MODEL, lambda _: None)
    _check_products(context)
    decoder, own, _, _ = found.build(context)
    vocabulary = _map_vocabulary(config, draft.model, shape.vocab_size, own.vocab_size)
    if vocabulary is not None:
        limits = DraftLimits(positions, vocabulary=vocabulary._replace(own=vocabulary.own.to(target.device)))
    else:
        limits = DraftLimits(positions, own.vocab_size if own.vocab_size < shape.vocab_size else None)
    return DraftModel(decoder, _create_attention(config, context, own), rows, limits, speculation.draws)


def _draft_builder(config: EngineConfig) -> tuple[EngineConfig, CheckpointBuilder]:
    """The configuration of the draft model, whose checkpoint is read: what is not said of it is as the target's."""
    speculation = config.speculation
    assert speculation is not None
    checkpoint, quantization = open_checkpoint(speculation.model), str(speculation.quantization or "")
    if not quantization:
        quantization = "none" if checkpoint.stored_as or config.quantization in STORED_AS else config.quantization
    draft = msgspec.structs.replace(config, model=speculation.model, quantization=quantization, lora=None)
    return draft, checkpoint_builder(checkpoint)


def _map_vocabulary(config: EngineConfig, draft: str, tokens: int, own_tokens: int) -> VocabularyMap | None:
    """How a draft model's tokens become the target's; None where they are the same, but for the last ones of one of
    them. A checkpoint without a tokenizer is believed if it has as many tokens. Raises as `map_vocabularies`."""
    target, own = locate_checkpoint(config.tokenizer or config.model), locate_checkpoint(draft)
    try:
        vocabularies = [read_tokenizer(each)[0].get_vocab() for each in (target, own)]
    except NotFound:
        if tokens == own_tokens:
            return None
        message = f"speculative_config: {draft} has another number of tokens than {config.model}, and no tokenizer"
        raise InvalidArgument(message, field="speculative_config") from None
    both = min(tokens, own_tokens, *map(len, vocabularies))
    first, second = ({text: at for text, at in each.items() if at < both} for each in vocabularies)
    if first == second:
        return None
    if config.speculation is not None and config.speculation.use_heterogeneous_vocab is False:
        message = f"speculative_config: {draft} has another vocabulary than {config.model}"
        raise InvalidArgument(f"{message}, and use_heterogeneous_vocab is false", field="speculative_config")
    return map_vocabularies(target, own, tokens, own_tokens)


def check_rank_config(config: EngineConfig) -> str:
    """Refuse everything that `load_rank` would, short of reading weights; returns what only the weights can show, if
    anything. The devices of this machine are not looked at: the model may be served elsewhere.

    Raises:
        CheckpointError: as `load_rank`.
        InvalidArgument: the configuration does not fit the checkpoint.
    """
    found = checkpoint_builder(open_checkpoint(config.model))
    context = _build_context(msgspec.structs.replace(config, device="cpu"), found, WHOLE_MODEL, lambda _: None)
    if config.speculation is not None and config.speculation.method in ("eagle3", "mtp"):
        _check_head(config, config.speculation)
        target = open_checkpoint(config.model)
        if config.speculation.method == "mtp":
            check_mtp(target)
        else:
            read_eagle3_config(config.speculation.model, target.spec)
    if config.speculation is not None and config.speculation.method == "draft_model":
        draft, drafts = _draft_builder(config)
        plain = msgspec.structs.replace(draft, device="cpu", max_model_len=None)
        drafts.dry_run(_build_context(plain, drafts, WHOLE_MODEL, lambda _: None), ParallelConfig())
        sizes = (open_checkpoint(each).config.get("vocab_size", 0) for each in (config.model, draft.model))
        _map_vocabulary(config, draft.model, *sizes)
    return found.dry_run(context, config.parallel)


def _build_context(
    config: EngineConfig, found: CheckpointBuilder, shard: Shard, progress: Callable[[float], None]
) -> BuildContext:
    device, name = resolve_device(config.device), found.dtype if config.dtype == "auto" else config.dtype
    if name not in DTYPES:
        raise InvalidArgument(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}", field="dtype")
    wanted, longest, quantization = config.max_model_len, found.max_position, config.quantization
    if wanted is not None and not 1 <= wanted <= longest:
        message = f"max_model_len must be between 1 and the checkpoint's {longest}, got {wanted}"
        raise InvalidArgument(message, field="max_model_len")
    if quantization in STORED_AS and not (quantization == "fp8" and not open_checkpoint(config.model).stored_as):
        _check_stored_as(quantization, open_checkpoint(config.model))
        quantization = "none"
    if quantization not in ("none", "int8", "fp8", "int4"):
        message = f"quantization must be none, int8, fp8 or int4, got {quantization!r}"
        raise InvalidArgument(message, field="quantization")
    dtype, max_positions = getattr(torch, name), wanted or found.default_length
    whole_experts, lora_rank = config.parallel.whole_experts, 0 if config.lora is None else config.lora.max_rank
    directory = Path(config.cache_dir).expanduser()
    cache = open_packing_cache(directory, config.cache_max_bytes) if config.cache_dir else None
    split = shard, progress, quantization, whole_experts, cache
    return BuildContext(dtype, device, max_positions, *split, max_lora_rank=lora_rank)


def _check_products(context: BuildContext) -> None:
    """Refuse a precision that the device does not multiply in."""
    dtype, device = context.dtype, context.device
    if context.quantization == "int8" and not serves_int8(dtype, device):
        message = f"quantization int8 computes on {device} by Triton's kernels, which are not there"
        raise InvalidArgument(f"{message}: pip install '.[gpu]'", field="quantization")
    if context.quantization == "fp8" and not runtime.serves_fp8(dtype, device):
        message = "quantization fp8 computes on GPUs of compute capability 8.9 or more, by Triton's kernels"
        raise InvalidArgument(f"{message}, not on {device}", field="quantization")


def _check_stored_as(name: str, checkpoint: Checkpoint) -> None:
    """Refuse one of vLLM's names that says of the weights what they are not."""
    stored = checkpoint.stored_as
    if stored == STORED_AS[name]:
        return
    message = f"quantization {name} is what weights are stored as, and those of {checkpoint.directory} are "
    message += f"stored as {stored}" if stored else "plain floats: int8, fp8 and int4 quantise them"
    raise InvalidArgument(f"{message}; leave quantization out, and they are taken as they are", field="quantization")


def _use_level(config: EngineConfig) -> None:
    if (device := resolve_device(config.device)).type != "cpu":
        raise InvalidArgument(f"cpu_level is for the cpu, not for {device}", field="cpu_level")
    try:
        library.use_level(config.cpu_level)
    except ValueError as error:
        raise InvalidArgument(f"cpu_level {config.cpu_level}: {error}", field="cpu_level") from None


def _peak_bytes(device: torch.device, compute: Callable[[], object]) -> int:
    """The memory that `compute` takes of a GPU and gives back, as torch reserves it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    compute()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - before


def _free_memory(device: torch.device, neighbours: int, config: EngineConfig) -> int:
    """Bytes left to each of `neighbours`. Other replicas may be loading still, and other models have been promised
    memory: this engine has no more than was granted to it, what its ranks have taken already included."""
    if device.type == "cuda":
        free, granted = torch.cuda.mem_get_info(device)[0], config.gpu_memory
        taken = torch.cuda.memory_reserved(device) if granted is not None else 0
    else:
        free, granted, taken = available_memory(), config.host_memory, own_anonymous_memory()
    return free // neighbours if granted is None else min(free // neighbours, granted // neighbours - taken)
