"""The time of a language model's sequences, charged to causes. The engine counts it by state in each step
(`charonia_sequence_seconds_total`); for an engine that does not, the phases of ended requests are used."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..core.eager_reason import EagerReason
from ..core.metrics import FetchDecision, SequenceState
from .roofline import StepRoofline
from .scrape import ModelInterval
from .time_claims import Cause, TimeClaim, percent

_OUTPUT_WEIGHT = 2.0
"""The prompt tokens that one generated token counts as, as in the engine's fair shares."""

_ANOTHER = 1.5
"""A roofline whose steps would take so many times longer than the real ones belongs to another model or machine."""

_EAGER: Mapping[str, str] = {
    EagerReason.NOT_CAPTURED: "without a graph yet",
    EagerReason.TOO_LARGE: "too large for a graph",
    EagerReason.PROMPT: "with parts of prompts",
    EagerReason.NOT_RECORDED: "of a model that is not recorded, as its log says,",
}
"""How each reason of `charonia_eager_steps_total` reads in a sentence."""

_MORE_CACHE = "--kv-cache-bytes or --kv-cache-memory-fraction up, --kv-cache-dtype int8, or more --data-parallel-size"


class TenantExcess(NamedTuple):
    """A tenant that took more than its fair share while others waited for `waited` seconds."""

    name: str
    took: float
    fair: float
    waited: float

    @property
    def fraction(self) -> float:
        """The part of what is beyond its fair share that it took, 0 to 1."""
        return (self.took - self.fair) / (1 - self.fair)


def llm_claims(interval: ModelInterval, loop_is_late: bool, roofline: StepRoofline | None) -> Iterator[TimeClaim]:
    """Tokens that lay unread are charged to the clients or, if `loop_is_late`, to the event loop that reads them."""
    spent = _state_seconds(interval)
    excess = _tenant_excess(interval)
    tenant = 0.0 if excess is None else excess.fraction
    yield from _queue_claims(interval, spent, 1 - tenant)
    if excess is not None:
        waits = sum(spent.get(state, 0.0) for state in ("no_row", "no_tokens", "no_blocks"))
        yield _tenant_claim(excess, waits * tenant)
    if waited := interval.grown("charonia_cache_directory_wait_seconds_total"):
        yield _directory_claim(interval, waited)
    if waited := interval.grown("charonia_kv_transfer_wait_seconds_total"):
        yield _transfer_claim(interval, waited)
    steps = interval.grown("charonia_step_seconds_count")
    computed = interval.grown("charonia_step_tokens_sum")
    recomputed = interval.grown("charonia_recomputed_tokens_total")
    running = spent.get("running", 0.0)
    lost = running * min(recomputed / computed, 1.0) if computed else 0.0
    yield from _preemption_claims(interval, spent.get("preempted", 0.0) + lost, recomputed)
    missed = interval.grown("charonia_state_missed_tokens_total")
    unspared = (running - lost) * min(missed / computed, 1.0) if computed else 0.0
    if missed:
        yield _snapshot_claim(interval, unspared, missed)
    lost += unspared
    answering = interval.grown("nv_inference_compute_output_duration_us") / 1e6
    behind = max(interval.grown("charonia_unread_seconds_total"), answering)
    yield _reader_claim(interval, behind, loop_is_late)
    yield from _preparation_claims(interval)
    yield from _step_claims(interval, max(running - lost - behind, 0.0), steps, roofline)


def _state_seconds(interval: ModelInterval) -> Mapping[str, float]:
    counted = interval.grown_by("charonia_sequence_seconds_total", "state")
    if counted:
        return counted
    phases = interval.grown("charonia_prefill_seconds_sum") + interval.grown("charonia_decode_seconds_sum")
    return {"running": phases, "no_row": interval.grown("charonia_queue_seconds_sum")}


def _tenant_excess(interval: ModelInterval) -> TenantExcess | None:
    """The tenant that took most beyond its share while others had to wait."""
    prompts = interval.grown_by("charonia_prompt_tokens_total", "tenant")
    generated = interval.grown_by("charonia_generation_tokens_total", "tenant")
    waited = interval.grown_by("charonia_tenant_waiting_seconds_total", "tenant")
    weights = interval.last_by("charonia_tenant_weight", "tenant")
    work = {name: prompts.get(name, 0.0) + _OUTPUT_WEIGHT * generated.get(name, 0.0) for name in weights}
    active = {name: weights[name] for name in weights if work[name] > 0 or waited.get(name, 0.0) > 0}
    total = sum(work.values())
    if len(active) < 2 or not total:
        return None
    excesses = []
    for name, weight in active.items():
        others = sum(seconds for other, seconds in waited.items() if other != name)
        excesses.append(TenantExcess(name, work[name] / total, weight / sum(active.values()), others))
    most = max(excesses, key=lambda excess: excess.fraction)
    return most if most.fraction > 0 and most.waited > 0 else None


def _queue_claims(interval: ModelInterval, spent: Mapping[str, float], part: float) -> Iterator[TimeClaim]:
    """The claims of waiting; `part` is the part of it that no tenant is to blame for."""
    state = SequenceState
    symptoms = {
        state.NO_ROW: ("requests wait until a running one ends", "--max-num-seqs up, or more --data-parallel-size"),
        state.NO_TOKENS: (
            "prompts wait for room in a step",
            "--max-num-batched-tokens up, a longer --target-itl-ms, or more --data-parallel-size",
        ),
        state.PARKED: ("requests wait for a prefix that others compute, or for adapters", "--max-loras up"),
    }
    waits = {queue_state: spent.get(queue_state, 0.0) for queue_state in symptoms}
    refused = sum(
        interval.grown("charonia_requests_total", outcome="rejected", reason=f"queue_full_{limit}")
        for limit in ("requests", "tokens")
    )
    symptom, turn = symptoms[max(waits, key=lambda queue_state: waits[queue_state])]
    running = interval.gauge("charonia_requests_running")
    waiting = interval.gauge("charonia_requests_waiting")
    why = f"{running:.0f} run and {waiting:.0f} wait"
    if refused:
        why += f", and {refused:.0f} were refused because the queue was full"
        turn += "; --max-queued-requests and --max-queued-tokens say how many may wait"
    evidence = {"running": running, "waiting": waiting, "refused": refused}
    yield TimeClaim(Cause.QUEUE, sum(waits.values()) * part, symptom, why, turn, evidence | _named(waits))
    usage = interval.gauge("charonia_kv_cache_usage_ratio")
    why = f"{percent(usage)} of {interval.gauge('charonia_kv_cache_tokens'):,.0f} tokens are in use, {why}"
    symptom = "requests wait for blocks of the cache"
    blocked = spent.get(state.NO_BLOCKS, 0.0) * part
    turn, evidence = _MORE_CACHE, evidence | {"usage": usage}
    if held := interval.gauge("charonia_kv_transfer_held_blocks"):
        why += f", and {held:,.0f} blocks are held for other servers"
        turn, evidence = f"hold_seconds down, or {turn}", evidence | {"held_blocks": held}
    yield TimeClaim(Cause.CACHE_FULL, blocked, symptom, why, turn, evidence)


def _named(waits: Mapping[SequenceState, float]) -> dict[str, float]:
    return {f"{state.value}_seconds": seconds for state, seconds in waits.items()}


def _tenant_claim(excess: TenantExcess, seconds: float) -> TimeClaim:
    name = f"tenant '{excess.name}'" if excess.name else "the tenant without a key"
    took = f"it took {percent(excess.took)} at a fair share of {percent(excess.fair)}"
    why = f"{took}, while others waited {excess.waited:.1f} s"
    turn = "weights of keys (name:key:weight); fewer --max-num-seqs free rows for others sooner, or another server"
    evidence = {"took": excess.took, "fair_share": excess.fair, "others_waited_seconds": excess.waited}
    return TimeClaim(Cause.TENANT, seconds, f"requests wait behind those of {name}", why, turn, evidence)


def _directory_claim(interval: ModelInterval, seconds: float) -> TimeClaim:
    """The time for which requests waited for files of the cache's directory."""
    fetched, computed, late, stalled = (
        interval.grown("charonia_cache_directory_fetches_total", decision=decision.value) for decision in FetchDecision
    )
    why = f"{fetched:.0f} got the blocks that they waited for, {late:.0f} were late"
    why += f", and {computed + stalled:.0f} did not wait, for it would not have paid"
    turn = "nothing: to compute them would take longer"
    if late or stalled:
        turn = "a faster disk or network for --kv-cache-dir, or none"
    evidence = {"fetched": fetched, "computed": computed, "late": late, "stalled": stalled}
    symptom = "requests wait for files of the cache's directory"
    return TimeClaim(Cause.QUEUE, seconds, symptom, why, turn, evidence)


def _transfer_claim(interval: ModelInterval, seconds: float) -> TimeClaim:
    """The time for which requests waited for what another server computed of their prompts."""
    received, failed = (interval.grown(f"charonia_kv_transfer_{name}_total") for name in ("received", "failed"))
    fetching = interval.grown("charonia_kv_transfer_seconds_total")
    why = f"{received:.0f} prompts came, {failed:.0f} did not, and fetching took {fetching:.2f} s"
    turn = "a faster network between the servers, or prompts that are short computed where they are answered"
    if failed:
        turn = "the log, which says why prompts did not come"
    elif fetching < seconds / 2:  # several wait for one, or in the line
        turn = "most_fetches up, where the network has room"
    evidence = {"received": received, "failed": failed, "fetching_seconds": fetching}
    symptom = "requests wait for blocks that another server computed"
    return TimeClaim(Cause.QUEUE, seconds, symptom, why, turn, evidence)


def _preemption_claims(interval: ModelInterval, seconds: float, recomputed: float) -> Iterator[TimeClaim]:
    count = interval.grown("charonia_preemptions_total")
    if count or seconds:
        why = f"{count:.0f} preemptions, {recomputed:,.0f} tokens were computed again"
        turn = f"{_MORE_CACHE}; fewer --max-num-seqs, or --admission no_evict"
        evidence = {"preemptions": count, "recomputed_tokens": recomputed}
        symptom = "running sequences lose their cache and wait to go on"
        yield TimeClaim(Cause.PREEMPTIONS, seconds, symptom, why, turn, evidence)


def _snapshot_claim(interval: ModelInterval, seconds: float, missed: float) -> TimeClaim:
    """The time for prompt tokens whose blocks were cached, where layers keep states and none of them was kept there."""
    begun = interval.grown("charonia_state_snapshot_hits_total")
    evicted = interval.grown("charonia_state_snapshot_evictions_total")
    kept = interval.gauge("charonia_state_snapshots")
    tokens = f"{missed:,.0f} tokens of prompts had blocks and no state to go on from"
    why = f"{tokens}; {begun:.0f} sequences began with one of {kept:.0f} snapshots, and {evicted:.0f} made room"
    if evicted:
        turn = "--state-cache-fraction or --kv-cache-memory-fraction up, --kv-cache-host-bytes on a GPU, or more"
        turn += " --data-parallel-size"
    else:
        turn = "nothing: where prompts part a state is kept from the second on that has the beginning"
    evidence = {"missed_tokens": missed, "snapshot_hits": begun, "evictions": evicted, "snapshots": kept}
    evidence["host_snapshots"] = interval.gauge("charonia_state_host_snapshots")
    symptom = "prompts are computed though the cache has their blocks"
    return TimeClaim(Cause.NO_SNAPSHOT, seconds, symptom, why, turn, evidence)


def _reader_claim(interval: ModelInterval, seconds: float, loop_is_late: bool) -> TimeClaim:
    merged = interval.grown("charonia_merged_tokens_total")
    tokens = interval.grown("charonia_generation_tokens_total")
    why = f"{merged:,.0f} of {tokens:,.0f} tokens came while earlier ones were unread"
    evidence = {"merged_tokens": merged, "tokens": tokens}
    if loop_is_late:
        turn = "see the frontend: its loop reads the tokens"
        return TimeClaim(Cause.FRONTEND, seconds, "tokens wait for the frontend's loop", why, turn, evidence)
    turn = "the clients, or the network to them: the engine does not wait for readers"
    return TimeClaim(Cause.SLOW_CLIENT, seconds, "clients read more slowly than tokens come", why, turn, evidence)


def _preparation_claims(interval: ModelInterval) -> Iterator[TimeClaim]:
    """The time from arrival until the engine has the request, less that of the model's load: media's, then texts'."""
    took = interval.grown("nv_inference_compute_input_duration_us") / 1e6
    loads = interval.whole.grown("charonia_load_wait_seconds_total", model=interval.model.name)
    seconds = max(took - loads, 0.0)
    decoding, encoding = (interval.grown(f"charonia_{name}_seconds_total") for name in ("media", "tower"))
    if media := min(decoding + encoding, seconds):
        waiting, running = (interval.gauge(f"charonia_{name}") for name in ("media_waiting", "tower_running"))
        symptom = "media are decoded and encoded"
        turn = "smaller images, shorter sounds or sources; --media-processes up where they wait to be decoded"
        why = f"decoding took {decoding:.2f} s and {waiting:.0f} wait, the tower {encoding:.2f} s and has {running:.0f}"
        evidence = {"decoding_seconds": decoding, "media_waiting": waiting, "encoding_seconds": encoding}
        yield TimeClaim(Cause.FRONTEND, media, symptom, why, turn, evidence)
    texts = seconds - media
    symptom = "requests are made ready"
    turn = "shorter prompts and simpler schemas, or more cores for the frontend"
    yield TimeClaim(Cause.FRONTEND, texts, symptom, f"templates, tokens and grammars took {texts:.2f} s", turn)


def _step_claims(
    interval: ModelInterval, seconds: float, steps: float, roofline: StepRoofline | None
) -> Iterator[TimeClaim]:
    """The time in which sequences are computed, by what steps spend it on."""
    took = interval.grown("charonia_step_seconds_sum")
    eager = interval.grown_by("charonia_eager_steps_total", "reason")
    if steps and (uncaptured := eager.pop(EagerReason.NOT_CAPTURED, 0)):
        cold = seconds * min(uncaptured / steps, 1.0)
        seconds -= cold
        symptom = "steps find no CUDA graph yet"
        why = f"{uncaptured:.0f} of {steps:.0f} steps were launched without one"
        turn = "--warm-up-graphs, or requests like yours before the server gets its traffic"
        if failed := interval.grown("charonia_graph_capture_failures_total"):
            why, turn = f"{why}, and {failed:.0f} captures failed", "see the log, which names what kept them"
        evidence = {"eager_steps": uncaptured, "steps": steps, "failed_captures": failed}
        yield TimeClaim(Cause.COLD_START, cold, symptom, why, turn, evidence)
    if not steps or not took:
        turn = "a faster machine, or more of them"
        yield TimeClaim(Cause.COMPUTATION, seconds, "requests are computed", "the engine tells no steps", turn)
        return
    tokens = interval.grown("charonia_step_tokens_sum") / steps
    rows = interval.grown("charonia_step_sequences_sum") / steps
    busy = min(took / interval.whole.seconds / max(interval.gauge("charonia_replicas_ready"), 1.0), 1.0)
    step_seconds = took / steps
    work = f"{tokens:.1f} tokens of {rows:.1f} sequences"
    why = f"steps of {1e3 * step_seconds:.2f} ms compute {work}, {percent(busy)} of the time"
    evidence = {"step_seconds": step_seconds, "tokens_per_step": tokens, "sequences_per_step": rows, "busy": busy}
    if launched := sum(eager.values()):
        reasons = ", ".join(f"{_EAGER.get(reason, reason)} {count:.0f}" for reason, count in eager.items() if count)
        why += f"; {percent(min(launched / steps, 1.0))} of them were launched kernel by kernel: {reasons}"
        evidence |= {f"eager_{reason}": count for reason, count in eager.items()}
    split = "" if interval.gauge("charonia_tensor_parallel_exhausted") else "--tensor-parallel-size, "
    faster = f"--quantization int8, --speculative-config, {split}or more --data-parallel-size"
    if roofline is None:
        turn = f"{faster}; with what charonia calibrate wrote, --machine tells memory bandwidth from arithmetic"
        yield TimeClaim(Cause.COMPUTATION, seconds, "sequences are computed", why, turn, evidence)
        return
    context = interval.gauge("charonia_kv_cache_usage_ratio") * interval.gauge("charonia_kv_cache_tokens")
    reading = roofline.reading_seconds(context, rows)
    multiplying = roofline.arithmetic_seconds(tokens, rows)
    if (least := max(reading, multiplying)) > _ANOTHER * step_seconds:
        another = f"--machine has the file of another model or machine, where such a step takes {1e3 * least:.2f} ms"
        yield TimeClaim(Cause.COMPUTATION, seconds, "sequences are computed", why, f"{faster}; {another}", evidence)
        return
    reads, works = min(reading / step_seconds, 1.0), min(multiplying / step_seconds, 1.0)
    evidence |= {"bandwidth_share": reads, "arithmetic_share": works}
    why = f"{why}; reading takes {percent(reads)} of it, arithmetic {percent(works)}"
    if reads >= works:
        symptom = "steps read weights and cache"
        turn = "--quantization int8 or int4, --kv-cache-dtype int8, or more rows"
        yield TimeClaim(Cause.MEMORY_BANDWIDTH, seconds * reads, symptom, why, turn, evidence)
    else:
        symptom = "steps multiply"
        turn = f"--quantization int8, {split}or more --data-parallel-size"
        yield TimeClaim(Cause.ARITHMETIC, seconds * works, symptom, why, turn, evidence)
    rest = seconds * (1 - max(reads, works))
    symptom = "steps take longer than reading and multiplying need"
    turn = "see `charonia doctor`, and --threads"
    if launched:
        turn = "faster cores, or fewer processes beside: the kernels of launched steps wait for the host"
    yield TimeClaim(Cause.COMPUTATION, rest, symptom, why, turn, evidence)
