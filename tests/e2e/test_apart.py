"""One server computes prompts and another one answers, behind the steps of llm-d's sidecar: the text is a single
server's, and no request is lost with the prefiller."""

import itertools
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from charonia.telemetry.scrape import parse_scrape

from ..proofs.apart import STEPS, run_kills
from .models import write_model
from .serving import Server, serving
from .sidecar import Sidecar

KINDS = {
    "int8": ("llama", {"kv_cache_dtype": "int8"}),
    "hybrid": ("qwen3.5", {}),
    "windows": ("gemma3", {}),
    "unlike": ("gemma4-small", {}),
}
"""By model: its checkpoint, and parameters. Layers of the last that see all have wider heads than those that slide."""
SALTS = map(str, itertools.count())
PROMPT = [*range(5, 300, 3), *range(6, 200, 2)]
TOKEN = "the secret of both servers"


def transfer(role: str, **limits: Any) -> str:
    extra = {"token": TOKEN, "timeout_seconds": 20, "piece_bytes": 4096, **limits}
    config = {"kv_connector": "CharoniaConnector", "kv_role": role, "kv_port": 0, "kv_connector_extra_config": extra}
    return json.dumps(config).replace('"', r"\"")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, making: ModuleType) -> Iterator[tuple[Server, Server]]:
    """A prefilling server of two frontends, and a decoding one, of the same models."""
    folder = tmp_path_factory.mktemp("apart")
    checkpoints = {
        name: making.write_checkpoint(folder / name, making.CONFIGS[kind]) for name, (kind, _) in KINDS.items()
    }
    arguments: list[list[str]] = []
    for role in ("kv_producer", "kv_consumer"):
        for name, (_, parameters) in KINDS.items():
            own = {"max_num_seqs": 4, "kv_cache_blocks": 128, "kv_transfer_config": transfer(role), **parameters}
            write_model(folder / role, name, checkpoints[name], **own)
        arguments.append(["--model-repository", str(folder / role), "--exit-timeout-secs", "5"])
    with (
        serving(folder / "p", *arguments[0], "--frontends", "2") as prefiller,
        serving(folder / "d", *arguments[1]) as decoder,
    ):
        yield prefiller, decoder
        assert decoder.stop() == 0, decoder.said
        assert "Traceback" not in decoder.said


def body(model: str, **more: Any) -> dict[str, Any]:
    """A prompt that no cache has yet."""
    return {"model": model, "prompt": PROMPT, "max_tokens": 12, "cache_salt": next(SALTS), **more}


def alone(server: Server, asked: dict[str, Any]) -> Any:
    """What one server answers."""
    answer = httpx.post(f"{server.url}/v1/completions", json=asked | {"cache_salt": next(SALTS)}, timeout=60)
    return answer.raise_for_status().json()["choices"]


def counted(server: Server, model: str, name: str) -> float:
    scrape = parse_scrape(httpx.get(server.metrics_url).text, "the server")
    return sum(scrape[f"charonia_kv_transfer_{name}"][model].values())


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 7, "n": 2, "logprobs": 2}])
def test_two_servers_say_what_one_says(apart: tuple[Server, Server], model: str, sampling: dict[str, Any]) -> None:
    prefiller, decoder = apart
    asked = body(model, **sampling)
    before = counted(decoder, model, "received_total")
    sidecar = Sidecar(prefiller.url, decoder.url)
    answer = sidecar.ask("/v1/completions", asked).raise_for_status().json()
    assert answer["choices"] == alone(decoder, asked)
    told = sidecar.prefilled["kv_transfer_params"]
    assert told.keys() >= {"remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"}
    assert told["do_remote_prefill"] is True
    assert len(told["remote_block_ids"]) == (len(PROMPT) - 1) // 16
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(PROMPT) - 1) // 16 * 16
    assert counted(decoder, model, "received_total") == before + 1
    assert counted(prefiller, model, "held_blocks") == 0


def test_a_chat_is_streamed_through_both(apart: tuple[Server, Server]) -> None:
    prefiller, decoder = apart
    chat = {
        "model": "hybrid",
        "messages": [{"role": "user", "content": "Once upon a time " * 8}],
        "max_completion_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Sidecar(prefiller.url, decoder.url).ask("/v1/chat/completions", chat | {"cache_salt": next(SALTS)})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    plain = {name: value for name, value in chat.items() if name not in ("stream", "stream_options")}
    whole = httpx.post(f"{decoder.url}/v1/chat/completions", json=plain | {"cache_salt": next(SALTS)}, timeout=60)
    assert text == whole.json()["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


@pytest.mark.parametrize(
    ("server", "params", "more", "words"),
    [
        (0, {"do_remote_decode": True}, {"stream": True}, "an answer that is not streamed"),
        (0, {"do_remote_decode": True, "do_remote_prefill": True}, {}, "can't both be true"),
        (0, {"do_remote_prefill": True}, {}, "remote_request_id is missing"),
        (1, {"do_remote_decode": True}, {}, "gives it no such role"),
        (1, {"do_remote_prefill": True, "remote_port": "x"}, {}, "remote_port must be"),
    ],
)
def test_what_means_nothing_is_refused_by_name(
    apart: tuple[Server, Server], server: int, params: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    answer = httpx.post(f"{apart[server].url}/v1/completions", json=body("int8", kv_transfer_params=params, **more))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "kv_transfer_params"


def test_a_client_that_leaves_waits_for_no_blocks(apart: tuple[Server, Server]) -> None:
    _, decoder = apart
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        told = {"do_remote_prefill": True, "remote_request_id": "x", "remote_host": host, "remote_port": port}
        asked = body("hybrid", kv_transfer_params=told)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{decoder.url}/v1/completions", json=asked, timeout=0.5)
        decoder.until(lambda: counted(decoder, "hybrid", "waiting") == 0)


def test_no_request_is_lost_with_the_prefiller(apart: tuple[Server, Server]) -> None:
    """It dies before it is asked, while it computes, between the two, and while its blocks are fetched."""
    prefiller, decoder = apart

    def kill() -> None:
        for core in prefiller.cores():
            with suppress(ProcessLookupError):
                os.kill(core, signal.SIGKILL)

    def revive() -> None:
        prefiller.until(lambda: prefiller.status("/v2/models/int8/ready") == 200)

    bodies = [body("int8", temperature=0.8, seed=number) for number in (1, 2, 3, 0)]
    result = run_kills(prefiller.url, decoder.url, kill, revive, bodies)
    assert result.faults == []
    assert set(result.kills) == set(STEPS)
    assert counted(decoder, "int8", "waiting") == 0


@pytest.mark.proof
def test_ranks_send_to_ranks_of_the_same_number(tmp_path: Path, making: ModuleType) -> None:
    """And a server with another number of them computes by itself, and says why."""
    checkpoint = making.write_checkpoint(tmp_path / "c", making.CONFIGS["llama"])
    for role, ranks in (("kv_producer", {"split": 2}), ("kv_consumer", {"split": 2, "whole": 1})):
        for name, number in ranks.items():
            own = {"kv_cache_blocks": 64, "kv_transfer_config": transfer(role), "tensor_parallel_size": number}
            write_model(tmp_path / role, name, checkpoint, **own)
    arguments = [["--model-repository", str(tmp_path / role)] for role in ("kv_producer", "kv_consumer")]
    with serving(tmp_path / "p", *arguments[0]) as prefiller, serving(tmp_path / "d", *arguments[1]) as decoder:
        asked = body("split", temperature=0)
        right = alone(decoder, asked)
        answer = Sidecar(prefiller.url, decoder.url).ask("/v1/completions", asked).raise_for_status().json()
        assert answer["choices"] == right
        assert counted(decoder, "split", "received_total") == 1
        asked = body("split", temperature=0, kv_transfer_params={"do_remote_decode": True})
        told = httpx.post(f"{prefiller.url}/v1/completions", json=asked).json()["kv_transfer_params"]
        asked |= {"model": "whole", "kv_transfer_params": told}
        other = httpx.post(f"{decoder.url}/v1/completions", json=asked, timeout=60).json()["choices"]
        assert other == alone(decoder, {**asked, "kv_transfer_params": None})
        assert counted(decoder, "whole", "failed_total") == 1
        assert "the prefiller has tensor 2" in decoder.said
