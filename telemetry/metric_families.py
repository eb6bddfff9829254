"""The names, types and help of all metrics, and vLLM's names for the same quantities. Names are as on the wire,
counters with or without `_total`."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from ..core.metrics import Histogram, MetricFamily, QuantileSummary, Reading

log = logging.getLogger(__name__)

CHARONIA_FAMILIES = (
    MetricFamily(
        "charonia_requests_total", "counter", "Ended requests by outcome, and why where they were refused or broke"
    ),
    MetricFamily("charonia_requests_running", "gauge", "Sequences in the running set"),
    MetricFamily(
        "charonia_requests_waiting", "gauge", "Requests queued and not begun, by class; 9 stands for all below"
    ),
    MetricFamily("charonia_queue_age_seconds", "gauge", "Age of the oldest waiting request"),
    MetricFamily("charonia_kv_cache_usage_ratio", "gauge", "KV cache blocks in use, of all"),
    MetricFamily("charonia_prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache"),
    MetricFamily("charonia_prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache"),
    MetricFamily(
        "charonia_prefix_cache_host_hits_total", "counter", "Prompt tokens found in the prefix cache's host memory"
    ),
    MetricFamily(
        "charonia_prefix_cache_directory_hits_total", "counter", "Prompt tokens found in the prefix cache's directory"
    ),
    MetricFamily("charonia_cache_directory_reads_total", "counter", "Files of the cache's directory, by what was read"),
    MetricFamily("charonia_cache_directory_read_bytes_total", "counter", "Bytes read from the cache's directory"),
    MetricFamily("charonia_cache_directory_read_seconds_total", "counter", "Time of threads that read there"),
    MetricFamily("charonia_cache_directory_writes_total", "counter", "Files for the cache's directory, by their fate"),
    MetricFamily("charonia_cache_directory_written_bytes_total", "counter", "Bytes written to the cache's directory"),
    MetricFamily("charonia_cache_directory_write_seconds_total", "counter", "Time of threads that wrote there"),
    MetricFamily("charonia_cache_directory_evictions_total", "counter", "Files removed there to make room"),
    MetricFamily(
        "charonia_cache_directory_wait_seconds_total", "counter", "Time that requests waited for the cache's directory"
    ),
    MetricFamily(
        "charonia_cache_directory_fetches_total", "counter", "Requests whose prefix was in the cache's directory"
    ),
    MetricFamily("charonia_state_snapshots", "gauge", "Snapshots of recurrent states that prompts can begin with"),
    MetricFamily("charonia_state_host_snapshots", "gauge", "Snapshots of recurrent states in the host's memory"),
    MetricFamily("charonia_state_snapshot_evictions_total", "counter", "Snapshots that made room for others"),
    MetricFamily("charonia_state_snapshot_hits_total", "counter", "Sequences that began with a snapshot"),
    MetricFamily(
        "charonia_state_snapshot_host_hits_total", "counter", "Snapshots that came back from the host's memory"
    ),
    MetricFamily("charonia_retained_scopes", "gauge", "Scopes for which sessions retain cache"),
    MetricFamily("charonia_retained_blocks", "gauge", "Cache blocks that are retained and that no sequence holds"),
    MetricFamily(
        "charonia_retention_refused_blocks_total", "counter", "Blocks to be retained that the budget had no room for"
    ),
    MetricFamily("charonia_retention_displaced_scopes_total", "counter", "Scopes that ended to make room for others"),
    MetricFamily("charonia_cache_event_batches_total", "counter", "Batches of cache events that were published"),
    MetricFamily(
        "charonia_cache_event_batches_dropped_total",
        "counter",
        "Batches of cache events that were not published because too many waited",
    ),
    MetricFamily(
        "charonia_state_missed_tokens_total", "counter", "Prompt tokens computed though the cache had their blocks"
    ),
    MetricFamily("charonia_kv_transfer_held_blocks", "gauge", "Cache blocks held for servers that are to fetch them"),
    MetricFamily("charonia_kv_transfer_waiting", "gauge", "Requests that wait for blocks that another server computed"),
    MetricFamily("charonia_kv_transfer_sent_total", "counter", "Computed prompts that other servers fetched"),
    MetricFamily("charonia_kv_transfer_sent_bytes_total", "counter", "Bytes of computed prompts sent"),
    MetricFamily("charonia_kv_transfer_expired_total", "counter", "Computed prompts that nobody fetched in time"),
    MetricFamily(
        "charonia_kv_transfer_dropped_total", "counter", "Computed prompts given up for want of room, or of their peer"
    ),
    MetricFamily(
        "charonia_kv_transfer_received_total", "counter", "Prompts that came from the server that computed them"
    ),
    MetricFamily("charonia_kv_transfer_received_bytes_total", "counter", "Bytes of computed prompts received"),
    MetricFamily("charonia_kv_transfer_received_tokens_total", "counter", "Tokens of prompts that came"),
    MetricFamily("charonia_kv_transfer_failed_total", "counter", "Prompts that did not come, or not whole"),
    MetricFamily("charonia_kv_transfer_seconds_total", "counter", "Time of all fetches of prompts together"),
    MetricFamily("charonia_kv_transfer_wait_seconds_total", "counter", "Time that requests waited for prompts to come"),
    MetricFamily("charonia_preemptions_total", "counter", "Running sequences put back in line for want of blocks"),
    MetricFamily("charonia_grammars_compiled_total", "counter", "Grammars of requests that were compiled"),
    MetricFamily("charonia_grammar_compile_seconds_total", "counter", "Time that compiling grammars took"),
    MetricFamily("charonia_grammar_cache_hits_total", "counter", "Requests that found their grammar compiled"),
    MetricFamily("charonia_grammar_masks_total", "counter", "Masks made for tokens under a grammar"),
    MetricFamily("charonia_grammar_mask_seconds_total", "counter", "Time that making masks took"),
    MetricFamily("charonia_forced_tokens_total", "counter", "Tokens that were not sampled because they had to come"),
    MetricFamily("charonia_drafts_total", "counter", "Drafts of a sequence that a step verified"),
    MetricFamily("charonia_draft_tokens_total", "counter", "Tokens of drafts that were verified"),
    MetricFamily("charonia_accepted_tokens_total", "counter", "Tokens of drafts that were what the model chose"),
    MetricFamily("charonia_accepted_tokens_per_position_total", "counter", "Accepted tokens by their place in a draft"),
    MetricFamily("charonia_drafting_seconds_total", "counter", "Time that drafting took, a draft model's included"),
    MetricFamily("charonia_drafters_off", "gauge", "Drafters turned off because they raised or were too slow"),
    MetricFamily("charonia_eager_steps_total", "counter", "Steps that a GPU's kernels were launched for one by one"),
    MetricFamily("charonia_graph_capture_failures_total", "counter", "CUDA graphs that could not be captured"),
    MetricFamily("charonia_kv_cache_tokens", "gauge", "Tokens that the KV cache holds when it is full"),
    MetricFamily("charonia_tensor_parallel_exhausted", "gauge", "1: twice as many ranks could not share the model"),
    MetricFamily("charonia_recomputed_tokens_total", "counter", "Tokens computed again after a preemption"),
    MetricFamily("charonia_sequence_seconds_total", "counter", "Time of sequences in the engine, by their state"),
    MetricFamily("charonia_merged_tokens_total", "counter", "Tokens that came while others of a stream were unread"),
    MetricFamily("charonia_unread_seconds_total", "counter", "Time of streams whose readers were behind"),
    MetricFamily("charonia_tenant_waiting_seconds_total", "counter", "Time of requests in the engine's queue"),
    MetricFamily("charonia_tenant_weight", "gauge", "The weight of a tenant's fair share"),
    MetricFamily("charonia_prompt_tokens_total", "counter", "Prompt tokens of begun requests"),
    MetricFamily("charonia_generation_tokens_total", "counter", "Generated tokens"),
    MetricFamily("charonia_time_to_first_token_seconds", "histogram", "Arrival to first token"),
    MetricFamily("charonia_inter_token_latency_seconds", "histogram", "Time between two tokens of a request"),
    MetricFamily("charonia_request_seconds", "histogram", "Arrival to end of answered requests"),
    MetricFamily("charonia_queue_seconds", "histogram", "Time in the engine's queue"),
    MetricFamily("charonia_prefill_seconds", "histogram", "Begin of computation to first token"),
    MetricFamily("charonia_decode_seconds", "histogram", "First to last token of answered requests"),
    MetricFamily("charonia_step_seconds", "histogram", "Time of one engine step"),
    MetricFamily("charonia_step_tokens", "histogram", "Tokens computed in one engine step"),
    MetricFamily("charonia_step_sequences", "histogram", "Sequences in one engine step"),
    MetricFamily("charonia_core_restarts_total", "counter", "Engine cores that were lost and started again"),
    MetricFamily("charonia_frontends", "gauge", "Processes that take requests, one if the server's own does"),
    MetricFamily("charonia_frontends_auto", "gauge", "Frontends that --frontends auto has on this machine at most"),
    MetricFamily("charonia_frontend_restarts_total", "counter", "Frontends that were lost and started again"),
    MetricFamily("charonia_replicas_ready", "gauge", "Engine cores that serve now"),
    MetricFamily("charonia_adapters", "gauge", "Adapters that requests may name"),
    MetricFamily("charonia_adapters_held", "gauge", "Adapters in the engine's memory"),
    MetricFamily("charonia_adapters_held_bytes", "gauge", "What those take in each engine core"),
    MetricFamily("charonia_adapter_loads_total", "counter", "Adapters that were read, those read again included"),
    MetricFamily("charonia_adapter_evictions_total", "counter", "Adapters that made room in memory for another"),
    MetricFamily("charonia_adapter_sequences_total", "counter", "Sequences that were computed with an adapter"),
    MetricFamily("charonia_media_waiting", "gauge", "Images that are fetched, or wait to be decoded"),
    MetricFamily(
        "charonia_media_total", "counter", "Images of requests that were decoded, found, or refused in a queue"
    ),
    MetricFamily("charonia_media_seconds_total", "counter", "Time of images until they were decoded, waiting included"),
    MetricFamily("charonia_media_cache_bytes", "gauge", "Images that are kept as they were decoded and scaled"),
    MetricFamily("charonia_tower_running", "gauge", "Images that the tower computes or that wait for it"),
    MetricFamily("charonia_tower_images_total", "counter", "Images, sounds and texts that the tower has computed"),
    MetricFamily("charonia_tower_seconds_total", "counter", "Their time, waiting included"),
    MetricFamily("charonia_tower_batches_total", "counter", "Executions of the tower"),
    MetricFamily("charonia_tower_cache_queries_total", "counter", "Images of requests that have come to the tower"),
    MetricFamily("charonia_tower_cache_hits_total", "counter", "Those whose rows were kept"),
    MetricFamily("charonia_tower_shared_total", "counter", "Those that were being computed for another request"),
    MetricFamily("charonia_tower_cache_evictions_total", "counter", "Images whose rows made room for others'"),
    MetricFamily("charonia_tower_cache_bytes", "gauge", "Rows of images that are kept"),
    MetricFamily(
        "charonia_tower_aligned_windows_total", "counter", "Windows of sounds whose words have got their times"
    ),
    MetricFamily("charonia_tower_alignments_total", "counter", "Executions that found those"),
    MetricFamily("charonia_tower_alignment_seconds_total", "counter", "Their time"),
    MetricFamily("charonia_instance_restarts_total", "counter", "Instances that were lost and replaced"),
    MetricFamily("charonia_unbatched_requests_total", "counter", "Requests that were executed alone, by why"),
    MetricFamily("charonia_batches_total", "counter", "Batches that were executed, by why they took no more"),
    MetricFamily("charonia_batch_delay_seconds_total", "counter", "Time of requests that waited for others to join"),
    MetricFamily("charonia_execution_seconds_total", "counter", "Time that instances took for batches"),
    MetricFamily("charonia_reader_wait_seconds_total", "counter", "Time that instances waited for readers"),
    MetricFamily("charonia_instances", "gauge", "Instances that take requests"),
    MetricFamily("charonia_max_batch_size", "gauge", "Items that a batch may have; 0 for a model without batches"),
    MetricFamily("charonia_sequences_open", "gauge", "Sequences that have a slot of an instance"),
    MetricFamily("charonia_sequences_waiting", "gauge", "Sequences that have begun and for which no slot is free"),
    MetricFamily("charonia_sequence_slots", "gauge", "Sequences that may be open at a time, on all instances"),
    MetricFamily("charonia_event_loop_lag_seconds", "gauge", "Longest recent delay of an event loop"),
    MetricFamily("charonia_event_loop_delay_seconds", "histogram", "Delays of an event loop"),
    MetricFamily("charonia_event_loop_cpu_seconds_total", "counter", "CPU time of the event loop's thread"),
    MetricFamily("charonia_uptime_seconds", "gauge", "Time since the frontend started"),
    MetricFamily("charonia_start_time_seconds", "gauge", "When the frontend started, in Unix time"),
    MetricFamily("charonia_model_ready", "gauge", "1 where the model serves, 0 where it does not"),
    MetricFamily("charonia_memory_held_bytes", "gauge", "What the model holds of the host's memory, or of a GPU's"),
    MetricFamily("charonia_model_last_load_failed", "gauge", "1 where the last load failed, whatever serves, else 0"),
    MetricFamily("charonia_model_load_failures_total", "counter", "Loads of the model that failed"),
    MetricFamily("charonia_model_resident", "gauge", "1 where the version is in memory, else 0"),
    MetricFamily("charonia_on_demand_loads_total", "counter", "Loads of models that requests waited for"),
    MetricFamily("charonia_on_demand_evictions_total", "counter", "Models that made room in memory for another"),
    MetricFamily("charonia_on_demand_reloads_total", "counter", "Loads of models that had just made room for another"),
    MetricFamily("charonia_on_demand_waiting_requests", "gauge", "Requests that wait for a model to be loaded"),
    MetricFamily("charonia_load_wait_seconds_total", "counter", "Time of requests that waited for the model's load"),
    MetricFamily("charonia_route_requests_total", "counter", "Requests for the route that the version served"),
    MetricFamily("charonia_route_request_seconds", "histogram", "Whole requests for the route that were answered"),
    MetricFamily(
        "charonia_route_time_to_first_token_seconds", "histogram", "Those for text, from arrival to first token"
    ),
    MetricFamily("charonia_resource_limit", "gauge", "What there is of a resource of the rate limiter"),
    MetricFamily("charonia_resource_used", "gauge", "What instances that execute hold of it"),
    MetricFamily("charonia_resource_waiting", "gauge", "Instances that wait for it"),
    MetricFamily("charonia_repository_reachable", "gauge", "1 where the bucket was last listed, 0 while it is away"),
    MetricFamily("charonia_repository_listings_total", "counter", "How often the bucket was listed"),
    MetricFamily("charonia_model_cache_bytes", "gauge", "What --model-cache-dir holds"),
    MetricFamily("charonia_model_cache_downloaded_bytes_total", "counter", "Bytes of models that were downloaded"),
    MetricFamily("charonia_model_cache_evicted_bytes_total", "counter", "Bytes of models that made room for others"),
)

DURATION_FAMILIES = (
    MetricFamily(
        "nv_inference_request_duration_us", "counter", "Cumulative inference request duration in microseconds"
    ),
    MetricFamily("nv_inference_queue_duration_us", "counter", "Cumulative queuing duration in microseconds"),
    MetricFamily("nv_inference_compute_input_duration_us", "counter", "Cumulative input preparation in microseconds"),
    MetricFamily("nv_inference_compute_infer_duration_us", "counter", "Cumulative inference in microseconds"),
    MetricFamily("nv_inference_compute_output_duration_us", "counter", "Cumulative output extraction in microseconds"),
    MetricFamily(
        "nv_cache_hit_duration_per_model", "counter", "Cumulative lookups that found an answer, in microseconds"
    ),
    MetricFamily(
        "nv_cache_miss_duration_per_model", "counter", "Cumulative lookups without one and insertions, likewise"
    ),
)

SUMMARY_FAMILIES = (
    MetricFamily("nv_inference_request_summary_us", "summary", "Inference request duration in microseconds"),
    MetricFamily("nv_inference_queue_summary_us", "summary", "Queuing duration in microseconds"),
    MetricFamily("nv_inference_compute_input_summary_us", "summary", "Input preparation in microseconds"),
    MetricFamily("nv_inference_compute_infer_summary_us", "summary", "Inference in microseconds"),
    MetricFamily("nv_inference_compute_output_summary_us", "summary", "Output extraction in microseconds"),
    MetricFamily("nv_cache_hit_summary_per_model", "summary", "Lookups that found an answer in microseconds"),
    MetricFamily("nv_cache_miss_summary_per_model", "summary", "Lookups without one and insertions in microseconds"),
)

FIRST_RESPONSE_FAMILIES = (
    MetricFamily("nv_inference_first_response_histogram_ms", "histogram", "Arrival to first response in milliseconds"),
)

TRITON_FAMILIES = (
    MetricFamily("nv_inference_request_success", "counter", "Number of successful inference requests"),
    MetricFamily("nv_inference_request_failure", "counter", "Number of failed inference requests"),
    MetricFamily("nv_inference_count", "counter", "Number of inferences performed"),
    MetricFamily("nv_inference_exec_count", "counter", "Number of model executions performed"),
    *DURATION_FAMILIES,
    MetricFamily("nv_cache_num_hits_per_model", "counter", "Requests whose answer was kept"),
    MetricFamily("nv_cache_num_misses_per_model", "counter", "Requests whose answer was not"),
    MetricFamily("nv_inference_pending_request_count", "gauge", "Requests accepted and not yet begun"),
    MetricFamily("nv_model_load_duration_secs", "gauge", "Duration of the model's last load in seconds"),
    *SUMMARY_FAMILIES,
    *FIRST_RESPONSE_FAMILIES,
    MetricFamily("nv_trt_llm_request_metrics", "gauge", "Requests of a language model by what becomes of them"),
    MetricFamily("nv_trt_llm_kv_cache_block_metrics", "gauge", "Blocks of a language model's cache"),
    MetricFamily("nv_cpu_utilization", "gauge", "CPU utilization rate since the last scrape, 0.0 to 1.0"),
    MetricFamily("nv_cpu_memory_total_bytes", "gauge", "The host's memory in bytes"),
    MetricFamily("nv_cpu_memory_used_bytes", "gauge", "The host's memory in use in bytes"),
    MetricFamily("nv_gpu_utilization", "gauge", "GPU utilization rate, 0.0 to 1.0"),
    MetricFamily("nv_gpu_memory_total_bytes", "gauge", "The GPU's memory in bytes"),
    MetricFamily("nv_gpu_memory_used_bytes", "gauge", "The GPU's memory in use in bytes"),
    MetricFamily("nv_gpu_power_usage", "gauge", "What the GPU draws in watts"),
    MetricFamily("nv_gpu_power_limit", "gauge", "What the GPU may draw in watts"),
    MetricFamily("nv_energy_consumption", "counter", "The GPU's energy since the server's start in joules"),
    MetricFamily("nv_pinned_memory_pool_total_bytes", "gauge", "Pinned memory pool in bytes: there is none"),
    MetricFamily("nv_pinned_memory_pool_used_bytes", "gauge", "Pinned memory pool in use in bytes"),
)

_VLLM_NAMES = {
    "vllm:num_requests_running": "charonia_requests_running",
    "vllm:num_requests_waiting": "charonia_requests_waiting",
    "vllm:kv_cache_usage_perc": "charonia_kv_cache_usage_ratio",
    "vllm:prefix_cache_queries_total": "charonia_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "charonia_prefix_cache_hits_total",
    "vllm:num_preemptions_total": "charonia_preemptions_total",
    "vllm:spec_decode_num_drafts_total": "charonia_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total": "charonia_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "charonia_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "charonia_accepted_tokens_per_position_total",
    "vllm:prompt_tokens_total": "charonia_prompt_tokens_total",
    "vllm:generation_tokens_total": "charonia_generation_tokens_total",
    "vllm:request_success_total": "charonia_requests_total",
    "vllm:time_to_first_token_seconds": "charonia_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "charonia_inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "charonia_request_seconds",
    "vllm:request_queue_time_seconds": "charonia_queue_seconds",
    "vllm:request_prefill_time_seconds": "charonia_prefill_seconds",
    "vllm:request_decode_time_seconds": "charonia_decode_seconds",
    "vllm:iteration_tokens_total": "charonia_step_tokens",
    "vllm:time_per_output_token_seconds": "charonia_inter_token_latency_seconds",
}
"""vLLM's names, a former one of them too, -> ours."""

CACHE_INFO = "vllm:cache_config_info"
_LORA_INFO = "vllm:lora_requests_info"
_PASSED_ON = {CACHE_INFO, _LORA_INFO}

_FAMILY_BY_NAME = {family.name: family for family in CHARONIA_FAMILIES}
VLLM_FAMILIES = (
    *(
        MetricFamily(theirs, _FAMILY_BY_NAME[ours].kind, _FAMILY_BY_NAME[ours].help)
        for theirs, ours in _VLLM_NAMES.items()
    ),
    MetricFamily("vllm:request_prompt_tokens", "histogram", "Prompt tokens per answered request"),
    MetricFamily("vllm:request_generation_tokens", "histogram", "Generated tokens per answered request"),
    MetricFamily(CACHE_INFO, "gauge", "Tokens of a cache block, and how many blocks there are; the value is 1"),
    MetricFamily(_LORA_INFO, "gauge", "Adapters of running and of waiting requests, since the time that is the value"),
)

_PICKED_BY = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    CACHE_INFO,
    _LORA_INFO,
}
PICKER_FAMILIES = tuple(family for family in VLLM_FAMILIES if family.name in _PICKED_BY)
"""The families of vLLM's by which gateways pick a server, always shown."""

_VLLM_FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Our outcomes -> vLLM's `finished_reason`; it does not count the others."""


def vllm_readings(readings: Iterable[Reading]) -> Iterator[Reading]:
    """The series that vLLM exports too, under its names: summed over the labels that it does not have."""
    sums: dict[tuple[str, ...], float] = {}
    for family, value, labels in readings:
        names = [theirs for theirs, ours in _VLLM_NAMES.items() if ours == family]
        finished = _VLLM_FINISHED_REASONS.get(labels["outcome"]) if "outcome" in labels else ""
        if isinstance(value, Histogram):
            if family.startswith("vllm:"):
                yield Reading(family, value)
            yield from (Reading(name, value) for name in names)
        elif family in _PASSED_ON:
            yield Reading(family, value, labels)
        elif names and finished is not None and not isinstance(value, QuantileSummary):
            key = names[0], finished, labels.get("position", "")
            sums[key] = sums.get(key, 0) + value
    for (name, finished, position), value in sums.items():
        yield Reading(name, value, {"finished_reason": finished, "position": position})


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_SWITCHES = {"counter_latencies": "counters", "summary_latencies": "summaries", "histogram_latencies": "histograms"}


class MetricsConfig(NamedTuple):
    """The kinds of latency metrics that are shown, and the `quantiles` of summaries. Triton's allowed errors are read
    and not needed: all are right to a hundredth."""

    counters: bool = True
    summaries: bool = False
    histograms: bool = False
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)

    @property
    def hidden(self) -> frozenset[str]:
        shown = (
            (self.counters, DURATION_FAMILIES),
            (self.summaries, SUMMARY_FAMILIES),
            (self.histograms, FIRST_RESPONSE_FAMILIES),
        )
        return frozenset(family.name for on, families in shown if not on for family in families)


def parse_metrics_config(words: Iterable[str]) -> MetricsConfig:
    """The settings of --metrics-config, given any number of times as `<setting>=<value>`.

    Raises:
        InvalidArgument: a setting or value is unknown; the message names the flag.
    """
    config = MetricsConfig()
    for word in words:
        name, _, value = word.partition("=")
        if name in _SWITCHES and value.lower() in _BOOLEANS:
            switched: dict[str, Any] = {_SWITCHES[name]: _BOOLEANS[value.lower()]}
            config = config._replace(**switched)
        elif name == "summary_quantiles":
            config = config._replace(quantiles=_read_quantiles(value))
        else:
            settings = ", ".join((*(f"{switch}=true|false" for switch in _SWITCHES), "summary_quantiles=0.5:0.05,..."))
            raise InvalidArgument(f"--metrics-config {word}: expected one of {settings}")
    return config


def _read_quantiles(value: str) -> tuple[float, ...]:
    """The quantiles of `<quantile>:<error>,...`, or the default ones. As in tritonserver, a wrong pair is logged and
    left out."""
    quantiles = []
    for pair in value.strip('"').split(","):
        quantile, _, error = pair.partition(":")
        try:
            numbers = [float(quantile), float(error)]
        except ValueError:
            numbers = []
        if numbers and all(0 <= number <= 1 for number in numbers):
            quantiles.append(numbers[0])
        else:
            log.error(
                "--metrics-config summary_quantiles: Invalid option: [%s]. Expected format is <quantile>:<error>, "
                "each from 0 to 1; it is left out",
                pair,
            )
    return tuple(quantiles) or MetricsConfig().quantiles
