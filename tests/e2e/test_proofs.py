"""The long proofs of bench/, in small: the same functions, against real servers. Nothing here judges a time."""

from pathlib import Path
from typing import Any

import pytest

from charonia.bench.load.driver import OK
from charonia.bench.server_process import ServerAddress, fetch_metrics
from charonia.processes.host import _LARGE

from ..proofs import (
    batches,
    bodies,
    disconnects,
    fairness,
    families,
    kills,
    large_answers,
    overload,
    pictures,
    pipelines,
    processes,
    python_models,
    soak,
)
from ..proofs import stalls as proof_stalls
from ..proofs.fake_load import fake_server
from ..proofs.neighbours import neighbours
from ..proofs.process_stats import read_server_stats


@pytest.fixture
def place(server: Any) -> ServerAddress:
    """The session's server, as the proofs know theirs."""
    (host, http), grpc, metrics = server.address, server.grpc_address, server.metrics_url
    ports = (http, int(grpc.rpartition(":")[2]), server.process.pid, int(metrics.rpartition(":")[2].split("/")[0]))
    return ServerAddress(host, *ports, Path(server.output))


async def test_wrong_requests_hurt_nobody(place: ServerAddress) -> None:
    cores, broken = read_server_stats(place).cores, bodies.tracebacks(place)
    found = await bodies.send_mutants(place, bodies.FuzzTargets("tiny"), range(80), seed=11)
    assert found.faults == []
    assert len(found.verdicts) == 80
    assert {"2xx", "4xx", "OK", "INVALID_ARGUMENT"} <= {verdict.answer for verdict in found.verdicts}
    assert bodies.tracebacks(place) == broken
    assert [core.pid for core in read_server_stats(place).cores] == [core.pid for core in cores]


ARENAS = 3 * _LARGE
"""Bytes that a process may keep of answers that are gone. glibc gives the free end of an arena back only from `_LARGE`
on (`map_large_blocks_separately`), and the pieces of an answer lie in the arenas of about three threads. 4 to 9 MiB are
usual; an answer that stays is 32."""


def test_large_answers_leave_no_memory_behind() -> None:
    size = 32 << 20
    with large_answers.large_server(size) as place:
        found = large_answers.run(place, size, 30, ARENAS)
    assert [each.partition(",")[0] for each in found.told] == ["200", "OK", *["200"] * 4, "400"]
    assert min(found.most.more_than(found.before)) > size // 2
    assert max(found.after.more_than(found.before)) <= ARENAS


def test_hostile_bodies_are_answered_or_refused(place: ServerAddress) -> None:
    stalls = list(proof_stalls.run_attacks(place, 128 << 10, 256 << 10))
    assert [stall for stall in stalls if stall.status == "500" or stall.status in ("UNKNOWN", "INTERNAL")] == []
    assert (
        {"200", "400", "404", "503", "INVALID_ARGUMENT", "NOT_FOUND"}
        >= {stall.status for stall in stalls}
        >= {"400", "404"}
    )
    assert len(stalls) > 90


async def test_nothing_stays_of_clients_who_leave() -> None:
    with disconnects.visited_server(frontends="2") as place:
        remains = await disconnects.run_disconnects(place, range(40), seed=11)
        assert remains.faults == []
        assert {"cancelled", "length"} <= remains.outcomes.keys()
        assert bodies.tracebacks(place) == []
        assert disconnects.shutdown_seconds(place) < float("inf")


def test_nobody_is_lost_with_a_core() -> None:
    with fake_server(kills.ENGINE) as place:
        aftermath = kills.run_kills(place, rate=24, kills=[1.5], patience=60)
    assert aftermath.faults == []
    assert len(aftermath.away) == aftermath.restarts == 1
    assert aftermath.answered
    assert aftermath.told


def test_a_batch_outlives_its_engine_and_its_server() -> None:
    result = batches.run_batches(240, [batches.BatchKill(30, "engine"), batches.BatchKill(30, "server")])
    assert result.faults == []
    assert result.waits


def test_models_come_and_go_while_their_processes_are_killed() -> None:
    with processes.serve_models([processes.COUNTING]) as place:
        fought = processes.load_and_unload(place, [processes.COUNTING], rounds=1)
    assert fought.faults == []
    assert fought.loaded + fought.failed == 1


async def test_python_models_are_killed_and_abandoned_and_nothing_is_left(started_children: None) -> None:
    with python_models.python_server() as place:
        proof = await python_models.prove(place, (120, 4, 40), seed=11)
    assert proof.faults == []
    assert proof.phases["requests"].ends == {"answered": 120}
    assert proof.phases["kills"].ends["answered"]
    assert all(phase.trends().keys() >= {"server"} for phase in proof.phases.values())


async def test_pipelines_are_abandoned_and_their_python_step_is_killed() -> None:
    with pipelines.pipeline_server(computes=False) as place:
        result = await pipelines.prove(place, "fake", pipelines.PipelineLoad(8, kills=2, every=0.7), seed=11)
    assert result.faults == []
    assert result.ends.keys() >= {"answered", "left"}


def test_sinks_and_unequal_heads_are_transformers(tmp_path: Path) -> None:
    """All at once: sinks in some layers, smaller values than keys, layers with heads of different numbers."""
    assert list(families.faults("mimo_v2_flash", tmp_path)) == []


async def test_everything_at_once_for_a_moment(place: ServerAddress) -> None:
    soaked = await soak.soak(place, "tiny", seconds=2, seed=11)
    assert soaked.faults == []
    assert {kind for kind, _ in soaked.verdicts} == set(soak._KINDS)
    assert all(value.mean > 0 for value in soaked.trends().values())


def test_an_overload_is_answered_or_refused() -> None:
    with fake_server(overload.ENGINE) as place:
        found = overload.overloaded(place, rate=100, seconds=0.5, highest=1.0)
    assert found.statuses == [overload.REFUSED, OK]
    assert len(overload.refusals(found.records)) > sum(record.status == OK for record in found.records)
    assert found.cost > 0


def test_a_quiet_tenant_is_served_beside_a_flood() -> None:
    with fake_server(fairness.ENGINE, *fairness.FLAGS) as place:
        assert fairness.quiet_tenant_ttft(place, 8, 40, seconds=0.5) > 0


def test_streams_go_on_beside_pictures() -> None:
    tiny = pictures.SeeingShape({"max_position_embeddings": 4096}, {}, {})
    texts = [[pictures.stream_body(f"{turn}, {number}.", tokens=3000) for turn in range(9)] for number in range(3)]
    bodies = [pictures.question(pictures.image_part((256, 192), number)) for number in range(4)]
    with pictures.seeing_server(tiny) as place, neighbours(place, texts, bodies, seconds=30) as load:
        before: list[float] = []
        while len(before) < len(texts):
            before += load.gaps()
        assert len(load.send_others()) == len(bodies)
        meanwhile = load.gaps()
        assert len(meanwhile) > 20 * len(texts)
        encoded = f'charonia_tower_images_total{{model="{pictures.NAME}",version="1"}} {len(bodies)}'
        assert encoded in fetch_metrics(place)
