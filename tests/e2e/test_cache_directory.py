"""Servers that share a directory of cached blocks, over HTTP: one computes, and is gone when the other begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import prometheus_client.parser

PROMPT = "the quick brown fox jumps over the lazy dog and goes home to sleep until it is day again " * 2
MODEL = "tiny"


def complete(server: Any, **body: object) -> dict[str, Any]:
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60).raise_for_status()
    return dict(answer.json())


def cached(answer: dict[str, Any]) -> int:
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def counters(server: Any) -> dict[tuple[str, str], float]:
    """What is told of the directory, by name and label."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    families = prometheus_client.parser.text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    own = [sample for sample in samples if "directory" in sample.name]
    return {(s.name, s.labels.get("outcome", s.labels.get("decision", ""))): s.value for s in own}


def test_a_server_begins_with_what_another_computed(
    serve: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    flags = str(checkpoint), "--served-model-name", MODEL, "--kv-cache-dir", str(tmp_path / "kv"), "--device", "cpu"
    with serve(*flags) as first:
        refused = complete(first, cache_hit_threshold=0.5)
        assert refused["choices"][0]["finish_reason"] == "cache_threshold"
        assert refused["choices"][0]["text"] == ""
        assert (refused["usage"]["completion_tokens"], cached(refused)) == (0, 0)
        computed = complete(first)
    with serve(*flags, "--cache-hit-threshold", "0.4") as second:
        warm = complete(second)
        assert warm["choices"][0]["text"] == computed["choices"][0]["text"]
        assert cached(warm) >= 0.4 * warm["usage"]["prompt_tokens"]
        other = {"prompt": "Another one " * 20}
        assert complete(second, **other)["choices"][0]["finish_reason"] == "cache_threshold"
        assert complete(second, **other, cache_hit_threshold=0)["choices"][0]["finish_reason"] != "cache_threshold"
        told = counters(second)
        assert told["charonia_cache_directory_reads_total", "read"] == cached(warm) // 16
        assert told["charonia_prefix_cache_directory_hits_total", ""] == cached(warm)
        assert told["charonia_cache_directory_fetches_total", "fetched"] == 1
        assert told["charonia_cache_directory_reads_total", "damaged"] == 0
