"""The configuration of one engine: small frozen values, parsed once from its options."""

from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from ..core.drafts import MAX_DRAFTS, DraftReport
from ..core.media_models import MediaConfig
from ..processes.host import usable_cores
from ..scheduler.config import SchedulerConfig
from .transfer_config import KVTransferConfig

LOGITS_PIECE = 64
"""Most places of a step whose logits are computed at once, sampled ones apart: with more of them a head is no faster,
and logits of a whole chunk would take more memory than all else in a step."""


DIRECTORY_BYTES = 50_000_000_000
"""Bytes of a cache's directory, where its configuration says nothing."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of keys and values, and of the states of layers that have some."""

    block_size: int = 16
    dtype: str = "auto"
    """The model's if "auto"; "int8" and "fp8" halve what bfloat16 takes."""
    memory_fraction: float | None = None
    """The cache's share of the memory that weights leave, unless `bytes` or `blocks` says exactly; None is the default
    of `share_of_free`."""
    gpu_utilization: float | None = None
    """The share of a GPU's whole memory that weights, steps and the cache may take; the cache takes what the others
    leave."""
    bytes: int | None = None
    blocks: int | None = None
    prefix_caching: bool = True
    host_bytes: int = 0
    """Bytes of the host's memory, over all ranks, for what the cache has no room for."""
    retention_bytes: int = 0
    """Bytes of the cache, over all ranks, that sessions may retain beyond its usual order."""
    state_fraction: float = 0.25
    """The part of the cache, and of `host_bytes`, for snapshots of recurrent states, if the model has any."""
    directory: str = ""
    """Where blocks and states are kept beyond this server, for it and others; "" keeps none."""
    directory_bytes: int | None = None
    """Bytes of all files there at most; None is `DIRECTORY_BYTES`."""
    layer_groups: bool = False
    """Whether layers with a window have blocks of their own, and give them up, for who plans by `Capacity.groups`."""

    def share_of_free(self, on_gpu: bool) -> float:
        """The share of the free memory that the cache takes. Other programs use the host's memory, and seldom a
        GPU's."""
        if on_gpu and self.gpu_utilization is not None:
            return 1.0
        return (0.9 if on_gpu else 0.5) if self.memory_fraction is None else self.memory_fraction


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one engine."""

    tensor: int = 1
    """Ranks that share every layer."""
    pipeline: int = 1
    """Stages that follow each other."""
    layers: tuple[int, ...] = ()
    """The layers of each stage; empty for as even as can be."""
    whole_experts: bool = False
    """A rank has some experts of a mixture whole, instead of a slice of each."""
    backend: str = "mp"
    """What places the ranks: "mp" as processes of this machine, "ray" on the machines of a cluster."""
    ray_address: str = ""
    """The cluster's address; "" is the one that Ray finds by itself."""

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline


class FakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fake executor's model and pace: a step takes `step_seconds`, and each token in it `token_seconds` more. A
    sequence has a recurrent state where that has `state_bytes`."""

    vocab_size: int = 32_000
    max_model_len: int = 2048
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    state_bytes: int = 0


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters of a model: `max_loras` different ones in a step, none with a rank above `max_rank`, and `max_bytes` of
    memory for all that one replica holds. `modules`: directories or hub ids, by name, of those to load before the
    model serves."""

    max_loras: int = 8
    max_rank: int = 64
    max_bytes: int = 1 << 30
    modules: dict[str, str] = {}


Quantization: TypeAlias = Literal[
    "none",
    "int8",
    "int4",
    "awq",
    "awq_marlin",
    "compressed-tensors",
    "fp8",
    "gguf",
    "gptq",
    "gptq_marlin",
    "mxfp4",
]

SpeculationMethod: TypeAlias = Literal[
    "ngram", "suffix", "custom", "draft_model", "eagle3", "mtp", "oracle", "random", "synthetic"
]
SPECULATION_METHODS: tuple[str, ...] = get_args(SpeculationMethod)


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What drafts, and how, by vLLM's names. `suffix_decoding_...` are explained at `SuffixDrafter`,
    whose defaults are vLLM's.

    Raises:
        ValueError: fewer at most than at least; a method lacks what it needs, or has what is another's.
    """

    method: SpeculationMethod
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAFTS)] = 4
    """The most of a sequence that a step verifies."""
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Tokens at its end that "ngram" looks up, at least `prompt_lookup_min`; one of the two alone is both."""
    suffix_decoding_max_tree_depth: Annotated[int, msgspec.Meta(ge=2, le=1024)] | None = None
    suffix_decoding_max_cached_requests: Annotated[int, msgspec.Meta(ge=0)] | None = None
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(gt=0, le=1024)] | None = None
    suffix_decoding_min_token_prob: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    path: str = ""
    """The file of "custom", whose class is made with `keys`."""
    keys: dict[str, Any] = {}
    record: str = ""
    """The file of "oracle" and "synthetic"."""
    synthetic_acceptance_rates: tuple[float, ...] = ()
    """How often "synthetic" is right, by place."""
    model: str = ""
    """The checkpoint directory or hub id of a "draft_model", or of an "eagle3" head."""
    draft_tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    """Taken from vLLM's users: one rank computes, whatever it says."""
    quantization: Literal["none", "int8", "int4"] | None = None
    """The drafting model's; None: the target's, unless its matrices are quantised already."""
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    """Whether it proposes the likeliest tokens, or those that a request's sampling chooses."""
    use_heterogeneous_vocab: bool | None = None
    """Whether a draft model may have another vocabulary than its target, as it may by default."""

    def __post_init__(self) -> None:
        if self.method in ("draft_model", "eagle3") and not self.model:
            raise ValueError(f"model is missing: {self.method} needs a checkpoint")
        if self.method == "mtp" and self.model:
            raise ValueError("model is for other methods: with mtp layers of the model's own checkpoint draft")
        of_models = self.model, self.draft_tensor_parallel_size, self.quantization, self.draft_sample_method
        if any(of_models) and not self.computes:
            raise ValueError(f"no model drafts with the method {self.method}")
        if self.method in ("eagle3", "mtp") and self.quantization == "int4":
            raise ValueError("quantization of a head is none or int8")
        if self.use_heterogeneous_vocab is not None and self.method != "draft_model":
            raise ValueError("use_heterogeneous_vocab is for a draft_model alone")
        if (self.method == "custom") != bool(self.path):
            raise ValueError("path is for the method custom, and needed there")
        if self.keys and self.method != "custom":
            raise ValueError("keys is no key")
        if self.method != "suffix" and any(value is not None for value in self._suffix_values):
            raise ValueError(f"keys of the method suffix are not for {self.method}")
        least, most = self.lookup_range
        if least > most:
            raise ValueError(f"prompt_lookup_min {least} exceeds prompt_lookup_max {most}")
        if self.method in ("oracle", "synthetic") and not self.record:
            raise ValueError(f"method {self.method} needs a record")

    @property
    def computes(self) -> bool:
        """Whether a model drafts, beside the target."""
        return self.method in ("draft_model", "eagle3", "mtp")

    @property
    def _suffix_values(self) -> tuple[int | float | None, ...]:
        depth = self.suffix_decoding_max_tree_depth
        remembered = self.suffix_decoding_max_cached_requests
        return depth, remembered, self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob

    @property
    def suffix_limits(self) -> dict[str, Any]:
        """The limits of `SuffixDrafter` that are given."""
        names = "depth", "remembered", "factor", "least_probability"
        given = zip(names, self._suffix_values, strict=True)
        return {name: value for name, value in given if value is not None}

    @property
    def draws(self) -> bool:
        return self.draft_sample_method == "probabilistic"

    @property
    def lookup_range(self) -> tuple[int, int]:
        """The fewest and the most tokens to look up: 5 where neither is given, as in vLLM."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or 5, most or least or 5


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The publishing of what the cache holds, by vLLM's names."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """None: zmq, where events are enabled."""
    endpoint: str = "tcp://*:5557"
    """The address of the publishing socket: bound if it names any address (* or ::), ipc or inproc, else connected. A
    replica adds its number to the port."""
    replay_endpoint: str | None = None
    """Where missed batches are asked for, bound; None: nowhere. A replica adds its number to the port."""
    buffer_steps: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 10_000
    """Batches that can be asked for again."""
    hwm: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 100_000
    """Batches that wait for a slow subscriber at most; then it misses some. 0: any number."""
    max_queue_size: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 100_000
    """Batches that wait for the publishing thread at most; then they are dropped, and counted."""
    topic: str = ""
    """llm-d wants kv@<pod>@<model>."""
    events: Literal["map", "array"] = "map"
    """How an event is written; array is for readers of vLLM before 0.24. Not vLLM's."""

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, *filter(None, [self.replay_endpoint])):
            replica_endpoint(endpoint, 0)

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def replica_endpoint(endpoint: str, replica: int) -> str:
    """The address of a replica's socket: its number is added to the port, or to the name of a local socket.

    Raises:
        ValueError: it has neither.
    """
    transport, _, address = endpoint.partition("://")
    if transport in ("ipc", "inproc") and address:
        return f"{endpoint}_dp{replica}" if replica else endpoint
    host, _, port = address.rpartition(":")
    if transport != "tcp" or not host or not port.isdecimal() or not 0 < int(port) + replica < 65536:
        raise ValueError(f"an endpoint is tcp://HOST:PORT, ipc://PATH or inproc://NAME, got {endpoint!r}")
    return f"tcp://{host}:{int(port) + replica}"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of our own: what it computes, on what, and for how many."""

    model: str
    """Checkpoint directory or hub id."""
    tokenizer: str = ""
    """Another directory or hub id, to read the tokenizer from."""
    chat_template: str = ""
    """A file or a template in place of the checkpoint's own."""
    tool_call_parser: str = "auto"
    """How calls of tools are written in answers, "auto" as the template says."""
    reasoning_parser: str = "auto"
    """How reasoning is written in answers, "auto" as the template says."""
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32."""
    quantization: str = "none"
    """none, int8, fp8 or int4: matrices become 8-bit or 4-bit while they are loaded."""
    cache_dir: str = ""
    """Directory where packed weights are kept; "" keeps none."""
    cache_max_bytes: int = 50_000_000_000
    """Packed weights that are kept at most."""
    device: str = "auto"
    cpu_level: str = "auto"
    """auto, or one of `LEVELS` in cpu/library.py, which the machine must have."""
    attention: str = "auto"
    executor: str = "auto"
    """`inline` computes in the core process, `ranks` in processes of their own, `auto` in the core while one rank of
    this machine is enough; `fake` counts (next token = last + 1), to measure everything around the engine."""
    threads: int = 0
    """The threads of each replica; 0 means every usable core, divided over the replicas, and the client fills it in
    then."""
    batch_invariance: bool = False
    """On a GPU products are computed in an order of sums that their rows do not decide; on a CPU they always are."""
    recurrence_chunks: bool = False
    """On a GPU prompts in bf16 go through recurrences by chunks of 16 tokens: cuts of prompts decide on last bits."""
    few_row_kernel: str = "auto"
    """on, off, or auto: on a GPU products of few rows in half precision are computed by a kernel of ours where it is
    measured to be faster."""
    dependent_launch: bool = False
    """On GPUs of compute capability 9.0 and more, kernels are launched while those before them end."""
    enforce_eager: bool = False
    """A GPU's steps are launched kernel by kernel, without graphs."""
    warm_up_graphs: bool = True
    """The graphs of usual steps are captured before the model is ready."""
    graph_prompt_tokens: int = 2048
    """Steps with parts of prompts have graphs up to so many tokens."""
    ahead_given: bool = False
    """The scheduler's `ahead` was configured; otherwise the device says how many steps it wants to be ahead."""
    data_parallel_size: int = 1
    """Engine cores behind the model's name, each with the cache and sequences that are configured here."""
    replica: int = 0
    """The number of this one of them, which the client fills in."""
    host_memory: int | None = None
    """Bytes of the host's memory that a replica may take, weights included, which the client fills in; None is whatever
    is free."""
    gpu_memory: int | None = None
    """Likewise of each GPU's memory, where it computes on some."""
    max_model_len: int | None = None
    """None is the checkpoint's own. Overrides the scheduler's number once it is known."""
    max_queued_requests: int = 512
    max_queued_tokens: int = 1_048_576
    """Prompt tokens that may wait."""
    default_request_timeout: float = 0.0
    """Seconds that a request may take that says nothing else; 0 is no limit."""
    target_tenants: tuple[str, ...] = ()
    """The tenants whose requests may have targets of their own, `*` for all."""
    cache: CacheConfig = CacheConfig()
    parallel: ParallelConfig = ParallelConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    fake: FakeConfig = FakeConfig()
    lora: LoraConfig | None = None
    """None where no adapter may be loaded."""
    speculation: SpeculationConfig | None = None
    """None where nothing is drafted."""
    kv_events: KVEventsConfig | None = None
    """None where nobody is told what the cache holds."""
    kv_transfer: KVTransferConfig | None = None
    """None where prompts are computed and answered by one server."""
    media: MediaConfig = MediaConfig()
    """For a model that sees."""
    per_request_spec_decode_metrics: DraftReport = "none"
    """What answers tell of their drafts."""

    @property
    def most_drafts(self) -> int:
        """Tokens that a step may draft for a sequence; those with predictions may have more."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def most_sampled(self) -> int:
        """Places of a step that may be sampled: memory is left for their logits."""
        sampled = self.scheduler.max_num_seqs * (1 + self.most_drafts)
        return max(min(sampled, self.scheduler.max_num_batched_tokens), LOGITS_PIECE)

    def split(self, threads: int, memory: int) -> "list[EngineConfig]":
        """The configuration of each replica's core on a host with `threads` to compute with and `memory` bytes free.
        Shares are even, so that caches are alike whichever core loads first or restarts."""
        count = self.data_parallel_size
        if count == 1:
            return [self]
        shared = replace(self, threads=self.threads or max(1, threads // count), host_memory=memory // count)
        return [replace(shared, replica=number) for number in range(count)]

    def threads_each(self, ranks: int = 1) -> int:
        """The threads of each of `ranks` that share a machine."""
        return max(1, (self.threads or usable_cores().threads) // ranks)
