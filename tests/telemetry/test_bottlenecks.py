"""What is named first: of scrapes that the proof `explain` recorded of real servers, and of made ones at the edges."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.metrics import SequenceState
from charonia.telemetry.bottlenecks import Bottleneck, ModelReport, explain
from charonia.telemetry.roofline import StepRoofline
from charonia.telemetry.scrape import Interval, parse_scrape
from charonia.telemetry.time_claims import Cause

from ..proofs.explain import STATES, ServerState, first_named

RECORDED = Path(__file__).with_name("recorded")
MACHINE = RECORDED / "machine.json"


def recorded(name: str) -> tuple[str, str]:
    before, after = ((RECORDED / f"{name}.{when}.txt").read_text() for when in ("before", "after"))
    return before, after


@pytest.mark.parametrize(("name", "state"), STATES.items())
def test_each_state_is_named_first(name: str, state: ServerState) -> None:
    first = first_named(*recorded(name), state.model, MACHINE if state.server == "checkpoint" else None)
    assert (first.cause, state.word in first.text) == (state.cause, True), first.text
    assert first.turn or first.cause is Cause.IDLE


def test_every_cause_has_a_recorded_state() -> None:
    assert {state.cause for state in STATES.values()} == set(Cause)


def test_without_calibrates_file_nothing_is_said_of_the_machine() -> None:
    for name in ("decoding", "prompts"):
        first = first_named(*recorded(name), "checkpoint")
        assert (first.cause, "charonia calibrate" in first.turn) == (Cause.COMPUTATION, True)


def test_a_measured_machine_reads_for_the_first_token_and_computes_for_those_beside_it() -> None:
    measured = StepRoofline(products=((1, 0.02), (64, 0.032), (128, 0.064)), heads=((0, 0.0), (1, 0.01), (8, 0.024)))
    assert measured.reading_seconds(context=0) == pytest.approx(0.03)
    assert measured.arithmetic_seconds(tokens=1, samples=1) == 0
    assert measured.arithmetic_seconds(tokens=96, samples=8) == pytest.approx(96 * 0.028 / 95 + 8 * 0.014 / 7)
    formula = StepRoofline(weights=0.02, token=1e-3, head=1e-4, decode_context=1e-6)
    assert formula.reading_seconds(context=1000) == pytest.approx(0.021)
    hybrid = StepRoofline(weights=0.02, decode_context=1e-6, state=1e-4)
    assert hybrid.reading_seconds(context=1000, sequences=8) == pytest.approx(0.0218)
    assert formula.arithmetic_seconds(tokens=64, samples=10) == pytest.approx(0.065)


def reports_of(values: Mapping[str, float], seconds: float = 10.0, labels: str = "") -> list[ModelReport]:
    """Of a model that began with these samples; of names without a label it is the model's."""
    lines = [f"charonia_uptime_seconds {seconds}", 'charonia_model_ready{model="m",version="1"} 1']
    for name, value in values.items():
        family, _, more = name.partition("{")
        own = "" if family.startswith(("charonia_event_loop", "charonia_frontends")) else 'model="m",version="1",'
        lines.append(f"{family}{{{(own + more.rstrip('}')).rstrip(',')}}} {value}")
    return explain(Interval(None, parse_scrape("\n".join(lines) + "\n", "made")))


LANGUAGE = {'charonia_tenant_weight{tenant="a"}': 1.0, 'charonia_prompt_tokens_total{tenant="a"}': 10.0}


@given(
    spent=st.dictionaries(st.sampled_from(SequenceState), st.floats(0, 1e6), min_size=1),
    unread=st.floats(0, 1e6),
    tenants=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3), st.floats(0.1, 10)), max_size=3),
    loop=st.tuples(st.floats(0, 100), st.floats(0, 20)),
    again=st.floats(0, 1e5),
)
def test_shares_are_parts_of_one_whole(
    spent: dict[SequenceState, float],
    unread: float,
    tenants: list[tuple[float, float, float]],
    loop: tuple[float, float],
    again: float,
) -> None:
    values = {f'charonia_sequence_seconds_total{{state="{state}"}}': each for state, each in spent.items()} | LANGUAGE
    for number, (tokens, waited, weight) in enumerate(tenants):
        values[f'charonia_generation_tokens_total{{tenant="t{number}"}}'] = tokens
        values[f'charonia_tenant_waiting_seconds_total{{tenant="t{number}"}}'] = waited
        values[f'charonia_tenant_weight{{tenant="t{number}"}}'] = weight
    values |= {"charonia_unread_seconds_total": unread, "charonia_recomputed_tokens_total": again}
    values |= {"charonia_step_seconds_count": 10, "charonia_step_seconds_sum": 9, "charonia_step_tokens_sum": 1000}
    values |= {"charonia_event_loop_delay_seconds_sum": loop[0], "charonia_event_loop_delay_seconds_count": 100}
    values |= {"charonia_event_loop_cpu_seconds_total": loop[1], 'charonia_requests_total{outcome="stop"}': 5}
    [report] = reports_of(values)
    shares = [bottleneck.share for bottleneck in report.bottlenecks]
    assert shares == sorted(shares, reverse=True)
    assert all(0 < share <= 1 + 1e-9 for share in shares)
    # Causes of less than a hundredth are left out, and there are thirteen at most.
    assert 1 - 0.13 < sum(shares) < 1 + 1e-9
    assert len({bottleneck.cause for bottleneck in report.bottlenecks}) == len(shares)


def first_of(values: Mapping[str, float]) -> Cause:
    return reports_of(values)[0].bottlenecks[0].cause


def test_a_tenant_within_its_share_is_not_to_blame() -> None:
    waits = {'charonia_sequence_seconds_total{state="no_row"}': 50.0}
    two = {f'charonia_tenant_weight{{tenant="{name}"}}': weight for name, weight in (("a", 3.0), ("b", 1.0))} | {
        f'charonia_tenant_waiting_seconds_total{{tenant="{name}"}}': 25.0 for name in "ab"
    }
    fair = {f'charonia_generation_tokens_total{{tenant="{name}"}}': tokens for name, tokens in (("a", 75), ("b", 25))}
    unfair = {f'charonia_generation_tokens_total{{tenant="{name}"}}': tokens for name, tokens in (("a", 2), ("b", 98))}
    assert first_of(waits | two | fair) is Cause.QUEUE
    assert first_of(waits | two | unfair) is Cause.TENANT
    nobody_waits = {name: 0.0 for name in two if "waiting" in name}
    assert first_of(waits | two | unfair | nobody_waits) is Cause.QUEUE


def test_all_waits_for_a_loop_that_has_no_time_left() -> None:
    running = {'charonia_sequence_seconds_total{state="running"}': 9.0, **LANGUAGE}
    assert first_of(running) is Cause.COMPUTATION
    assert first_of(running | {"charonia_event_loop_cpu_seconds_total": 9.5}) is Cause.FRONTEND


def test_of_several_frontends_the_loop_that_is_late_is_named() -> None:
    running = {'charonia_sequence_seconds_total{state="running"}': 9.0, **LANGUAGE}
    cpu, lag = "charonia_event_loop_cpu_seconds_total", "charonia_event_loop_lag_seconds"
    loops = {f'{lag}{{frontend="{number}"}}': number / 100 for number in (1, 2, 10)} | {lag: 0.0, cpu: 1.0}

    def first(values: Mapping[str, float]) -> Bottleneck:
        return reports_of(running | loops | values)[0].bottlenecks[0]

    assert first({}).cause is Cause.COMPUTATION
    all_busy = first({f'{cpu}{{frontend="{number}"}}': 9.0 + number / 20 for number in (1, 2, 10)})
    assert (all_busy.cause, all_busy.share) == (Cause.FRONTEND, pytest.approx((9.05 + 9.1 + 9.5) / 30))
    assert "that of frontend 10 computes 95 % of the time" in all_busy.text
    assert "by 100 ms at most" in all_busy.text
    hub = first({cpu: 9.5, f'{cpu}{{frontend="1"}}': 9.2})
    assert (hub.cause, "the hub's event loop" in hub.text, hub.share) == (Cause.FRONTEND, True, pytest.approx(0.95))
    # One of three without time left: a third of the connections lie there.
    assert first({f'{cpu}{{frontend="2"}}': 10.0}).cause is Cause.COMPUTATION


@pytest.mark.parametrize(
    ("setting", "count", "auto", "advice"),
    [
        ("1", 1, 1, ""),
        ("auto", 1, 1, ""),
        ("1", 1, 4, "--frontends auto, which has up to 4 here, in place of 1"),
        ("auto", 1, 4, "--frontends auto has 1 of at most 4, the log says why it has no more, --frontends 4 has them"),
        ("auto", 2, 2, "--frontends auto has 2 of at most 2, a number may be larger"),
        ("2", 2, 4, "--frontends auto, which has up to 4 here, in place of 2"),
        ("4", 4, 4, "more --frontends, if cores are free"),
        ("2", 2, 1, "more --frontends, if cores are free"),
    ],
)
def test_what_more_frontends_take_is_said_by_the_flag_where_they_would_help(
    setting: str, count: int, auto: int, advice: str
) -> None:
    cpu, lag = "charonia_event_loop_cpu_seconds_total", "charonia_event_loop_lag_seconds"
    frontends = [f'{{frontend="{number + 1}"}}' for number in range(count)] if count > 1 else [""]
    loops = {f"{cpu}{frontend}": 9.8 for frontend in frontends} | {f"{lag}{frontend}": 0.1 for frontend in frontends}
    told = {f'charonia_frontends{{setting="{setting}"}}': float(count), "charonia_frontends_auto": float(auto)}
    running = {'charonia_sequence_seconds_total{state="running"}': 9.0, **LANGUAGE}
    first = reports_of(running | {lag: 0.0} | loops | told)[0].bottlenecks[0]
    assert (first.cause, "event loop" in first.text) == (Cause.FRONTEND, True)
    assert advice in first.turn
    assert bool(advice) == ("--frontends" in first.turn)


def test_a_hub_that_grew_has_the_connections_from_before() -> None:
    cpu, lag = "charonia_event_loop_cpu_seconds_total", "charonia_event_loop_lag_seconds"
    told = {'charonia_frontends{setting="auto"}': 2.0, "charonia_frontends_auto": 2.0}
    loops = {cpu: 9.8, lag: 0.1, f'{lag}{{frontend="1"}}': 0.0, f'{lag}{{frontend="2"}}': 0.0}
    running = {'charonia_sequence_seconds_total{state="running"}': 9.0, **LANGUAGE}
    first = reports_of(running | loops | told)[0].bottlenecks[0]
    assert "the hub's event loop" in first.text
    assert "clients whose connections are older than its frontends may connect again" in first.turn


def test_unread_tokens_are_the_loops_when_it_is_late() -> None:
    behind = {'charonia_sequence_seconds_total{state="running"}': 9.0, "charonia_unread_seconds_total": 8.0, **LANGUAGE}
    late = {"charonia_event_loop_delay_seconds_sum": 4.0, "charonia_event_loop_delay_seconds_count": 20}
    assert first_of(behind) is Cause.SLOW_CLIENT
    assert first_of(behind | late) is Cause.FRONTEND


def test_media_that_wait_are_named_before_texts() -> None:
    made_ready = {
        "nv_inference_compute_input_duration_us": 9e6,
        'charonia_sequence_seconds_total{state="running"}': 1.0,
    }
    images = {"charonia_media_seconds_total": 6.0, "charonia_tower_seconds_total": 1.0, "charonia_media_waiting": 5.0}
    texts = reports_of(made_ready | LANGUAGE)[0].bottlenecks[0]
    assert (texts.cause, "templates, tokens" in texts.text) == (Cause.FRONTEND, True)
    first = reports_of(made_ready | images | LANGUAGE)[0].bottlenecks[0]
    assert (first.cause, first.share) == (Cause.FRONTEND, pytest.approx(texts.share))
    assert "media are decoded and encoded" in first.text
    assert "decoding took 6.00 s and 5 wait, the tower 1.00 s" in first.text
    assert "--media-processes" in first.turn


def test_steps_without_graphs_are_a_cold_start_as_long_as_there_are_more_of_them() -> None:
    computed = {"charonia_step_seconds_count": 100, "charonia_step_seconds_sum": 9, "charonia_step_tokens_sum": 100}
    running = {'charonia_sequence_seconds_total{state="running"}': 9.0, **computed, **LANGUAGE}
    [report] = reports_of(running | {'charonia_eager_steps_total{reason="not_captured"}': 80})
    assert [(bottleneck.cause, bottleneck.share) for bottleneck in report.bottlenecks] == [
        (Cause.COLD_START, pytest.approx(0.8)),
        (Cause.COMPUTATION, pytest.approx(0.2)),
    ]


def test_launched_steps_are_told_with_their_share_and_reasons() -> None:
    computed = {"charonia_step_seconds_count": 100, "charonia_step_seconds_sum": 9, "charonia_step_tokens_sum": 100}
    running = {'charonia_sequence_seconds_total{state="running"}': 9.0, **computed, **LANGUAGE}
    launched = {"prompt": 30, "too_large": 10, "not_captured": 0, "not_recorded": 0}
    eager = {f'charonia_eager_steps_total{{reason="{reason}"}}': count for reason, count in launched.items()}
    [bottleneck] = reports_of(running | eager)[0].bottlenecks
    told = "40 % of them were launched kernel by kernel: with parts of prompts 30, too large for a graph 10"
    assert (bottleneck.cause, told in bottleneck.text) == (Cause.COMPUTATION, True)
    assert (bottleneck.evidence["eager_prompt"], bottleneck.evidence["eager_too_large"]) == (30, 10)
    failed = {"charonia_graph_capture_failures_total": 2, 'charonia_eager_steps_total{reason="not_captured"}': 50}
    first = reports_of(running | failed)[0].bottlenecks[0]
    assert (first.cause, "2 captures failed" in first.text) == (Cause.COLD_START, True)


@pytest.mark.parametrize("exhausted", [0, 1])
def test_a_model_that_no_more_ranks_can_share_is_not_advised_to_be_shared(exhausted: int) -> None:
    computed = {"charonia_step_seconds_count": 100, "charonia_step_seconds_sum": 9, "charonia_step_tokens_sum": 100}
    running = {'charonia_sequence_seconds_total{state="running"}': 9.0, **computed, **LANGUAGE}
    [report] = reports_of(running | {"charonia_tensor_parallel_exhausted": exhausted})
    assert ("--tensor-parallel-size" in report.bottlenecks[0].turn) is (not exhausted)


@pytest.mark.parametrize(("evicted", "turn"), [(7, "--state-cache-fraction"), (0, "nothing: where prompts part")])
def test_prompts_without_a_state_to_go_on_from_are_told_with_what_would_spare_them(evicted: int, turn: str) -> None:
    computed = {"charonia_step_seconds_count": 10, "charonia_step_seconds_sum": 9, "charonia_step_tokens_sum": 1000}
    running = {'charonia_sequence_seconds_total{state="running"}': 10.0, "charonia_recomputed_tokens_total": 500}
    states = {"charonia_state_missed_tokens_total": 800, "charonia_state_snapshot_evictions_total": evicted}
    begun = {"charonia_state_snapshot_hits_total": 3, "charonia_state_snapshots": 2}
    [report] = reports_of(running | computed | states | begun | LANGUAGE)
    shares = {bottleneck.cause: bottleneck.share for bottleneck in report.bottlenecks}
    assert shares == {
        Cause.PREEMPTIONS: pytest.approx(0.5),
        Cause.NO_SNAPSHOT: pytest.approx(0.4),
        Cause.COMPUTATION: pytest.approx(0.1),
    }
    [claim] = (bottleneck for bottleneck in report.bottlenecks if bottleneck.cause is Cause.NO_SNAPSHOT)
    assert claim.turn.startswith(turn)
    assert "800 tokens" in claim.text


@pytest.mark.parametrize(("late", "turn"), [(0, "nothing: to compute"), (2, "a faster disk")])
def test_time_for_files_of_the_cache_is_told_with_what_came_of_it(late: int, turn: str) -> None:
    computed = {"charonia_step_seconds_count": 10, "charonia_step_seconds_sum": 2, "charonia_step_tokens_sum": 1000}
    running = {
        'charonia_sequence_seconds_total{state="running"}': 2.0,
        "charonia_cache_directory_wait_seconds_total": 6,
    }
    fetches = {
        f'charonia_cache_directory_fetches_total{{decision="{decision}"}}': number
        for decision, number in {"fetched": 5, "computed": 1, "late": late, "stalled": 0}.items()
    }
    [report] = reports_of(running | computed | fetches | LANGUAGE)
    first = report.bottlenecks[0]
    assert (first.cause, first.share) == (Cause.QUEUE, pytest.approx(0.75))
    assert first.turn.startswith(turn)
    assert f"5 got the blocks that they waited for, {late} were late, and 1 did not wait" in first.text


@pytest.mark.parametrize(
    ("failed", "fetching", "turn"), [(2, 5, "the log"), (0, 5, "a faster network"), (0, 1, "most_fetches up")]
)
def test_time_for_blocks_of_other_servers_is_told_with_what_came_of_it(failed: int, fetching: int, turn: str) -> None:
    computed = {"charonia_step_seconds_count": 10, "charonia_step_seconds_sum": 2, "charonia_step_tokens_sum": 1000}
    running = {'charonia_sequence_seconds_total{state="running"}': 2.0}
    transfers = {"wait_seconds": 6, "received": 5, "failed": failed, "seconds": fetching}
    counted = {f"charonia_kv_transfer_{name}_total": number for name, number in transfers.items()}
    [report] = reports_of(running | computed | counted | LANGUAGE)
    first = report.bottlenecks[0]
    assert (first.cause, first.share) == (Cause.QUEUE, pytest.approx(0.75))
    assert first.turn.startswith(turn)
    assert f"5 prompts came, {failed} did not, and fetching took {fetching}.00 s" in first.text


def test_blocks_that_are_held_for_others_are_told_where_some_lack() -> None:
    waits = {'charonia_sequence_seconds_total{state="no_blocks"}': 4.0, "charonia_kv_transfer_held_blocks": 30}
    [report] = reports_of(waits | LANGUAGE)
    first = report.bottlenecks[0]
    assert (first.cause, first.evidence["held_blocks"]) == (Cause.CACHE_FULL, 30)
    assert first.text.endswith("and 30 blocks are held for other servers")
    assert first.turn.startswith("hold_seconds down, or --kv-cache-bytes")


def test_what_became_of_the_cache_is_told_whatever_limits_the_model() -> None:
    prefixes = {"queries": 1000, "hits": 800, "host_hits": 200, "directory_hits": 100}
    transfers = {"received": 3, "received_tokens": 160, "received_bytes": 2e6, "seconds": 0.5, "failed": 1, "sent": 2}
    transfers |= {"sent_bytes": 1e6, "expired": 1, "dropped": 3}
    counted = {f"charonia_prefix_cache_{name}_total": number for name, number in prefixes.items()}
    counted |= {f"charonia_kv_transfer_{name}_total": number for name, number in transfers.items()}
    counted |= {"charonia_kv_transfer_waiting": 2, "charonia_kv_transfer_held_blocks": 40}
    counted |= {"charonia_retained_scopes": 4, "charonia_retained_blocks": 1200}
    counted |= {"charonia_retention_refused_blocks_total": 30, "charonia_retention_displaced_scopes_total": 1}
    [report] = reports_of(counted | LANGUAGE)
    assert [f"{account.subject}: {account.text}" for account in report.cache] == [
        "prefixes: 80 % of 1,000 tokens of prompts were cached, 200 from the host's memory, 100 from the directory, "
        "160 from other servers",
        "transfers: 3 prompts came from other servers, 2.0 MB in 0.50 s; 1 did not come, or not whole, as the log "
        "says; 2 requests wait for theirs; 2 were fetched by others, 1.0 MB; 40 blocks are held for others; "
        "4 prompts were given up, 1 because nobody came in time",
        "retention: 4 scopes retain 1,200 blocks that nothing runs with; 30 blocks found no room in "
        "--kv-cache-retention-bytes; 1 scopes made room for others",
    ]
    assert report.cache[1].evidence["held_blocks"] == 40
    [quiet] = reports_of(dict(LANGUAGE))
    assert quiet.cache == ()


def test_a_queue_for_slots_or_resources_is_told_as_such() -> None:
    queue = {"nv_inference_request_duration_us": 9e6, "nv_inference_queue_duration_us": 8e6, "charonia_instances": 1}
    [report] = reports_of(queue | {"charonia_sequences_waiting": 3})
    first = report.bottlenecks[0]
    assert (first.cause, first.text.partition(",")[0]) == (Cause.QUEUE, "sequences wait for a slot")
    assert "max_candidate_sequences" in first.turn
    text = "charonia_resource_waiting 2\n" + "".join(
        f'{name}{{model="m",version="1"}} {queue[name]}\n' for name in queue
    )
    text += 'charonia_uptime_seconds 5\ncharonia_model_ready{model="m",version="1"} 1\n'
    [report] = explain(Interval(None, parse_scrape(text, "made")))
    assert report.bottlenecks[0].turn.endswith("--rate-limit-resource, for which 2 instances wait")


def test_requests_of_several_items_could_share_batches_too() -> None:
    """Four at a time of eight items each, of which a batch of 64 has room for all, take one batch each."""
    seen = {"nv_inference_request_duration_us": 40e6, "nv_inference_queue_duration_us": 30e6}
    seen |= {"nv_inference_compute_infer_duration_us": 10e6, "charonia_execution_seconds_total": 10.0}
    seen |= {"nv_inference_exec_count": 125, "nv_inference_request_success": 125, "nv_inference_count": 1000}
    seen |= {
        "charonia_instances": 1,
        "charonia_max_batch_size": 64,
        'charonia_batches_total{reason="shapes_differ"}': 120,
    }
    seen |= {'charonia_batches_total{reason="what_a_later_version_knows"}': 125}
    [report] = reports_of(seen)
    assert [(bottleneck.cause, bottleneck.share) for bottleneck in report.bottlenecks[:2]] == [
        (Cause.BATCHING, pytest.approx(0.5625)),
        (Cause.COMPUTATION, pytest.approx(0.25)),
    ]


def test_an_ensemble_is_told_to_look_at_its_models() -> None:
    [report] = reports_of({"nv_inference_request_duration_us": 9e6})
    assert [(bottleneck.cause, bottleneck.turn) for bottleneck in report.bottlenecks] == [
        (Cause.COMPUTATION, "explain those")
    ]


def test_an_engine_that_counts_no_states_is_judged_by_its_phases() -> None:
    phases = {"charonia_queue_seconds_sum": 8.0, "charonia_prefill_seconds_sum": 1.0, **LANGUAGE}
    assert first_of(phases) is Cause.QUEUE


def test_requests_for_nothing_and_models_that_are_not_there() -> None:
    [report] = reports_of({'charonia_requests_total{outcome="rejected"}': 3})
    assert report.bottlenecks[0].cause is Cause.IDLE
    assert "3 were refused" in report.bottlenecks[0].text
    text = 'charonia_uptime_seconds 5.0\ncharonia_model_ready{model="m",version="1"} 0\n'
    [report] = explain(Interval(None, parse_scrape(text, "made")))
    assert report.bottlenecks[0].cause is Cause.COLD_START
    [report] = explain(Interval(None, parse_scrape(text + "charonia_on_demand_loads_total 0\n", "made")))
    assert report.bottlenecks[0].cause is Cause.IDLE
