"""What became of a language model's prefix cache between two scrapes, whether it limits anything or not: how much of
the prompts came from where, what is held for whom, and what was refused."""

from collections.abc import Iterator, Mapping

import msgspec

from .scrape import ModelInterval
from .time_claims import percent


class CacheAccount(msgspec.Struct, frozen=True):
    """What a cache did of late, in a sentence with its numbers."""

    subject: str
    """prefixes, transfers or retention."""
    text: str
    evidence: Mapping[str, float] = {}


def cache_accounts(interval: ModelInterval) -> Iterator[CacheAccount]:
    """The accounts of which there is something to tell."""
    yield from _prefixes(interval)
    yield from _transfers(interval)
    yield from _retention(interval)


def _prefixes(interval: ModelInterval) -> Iterator[CacheAccount]:
    asked = interval.grown("charonia_prefix_cache_queries_total")
    if not asked:
        return
    hit = interval.grown("charonia_prefix_cache_hits_total")
    host = interval.grown("charonia_prefix_cache_host_hits_total")
    directory = interval.grown("charonia_prefix_cache_directory_hits_total")
    peers = interval.grown("charonia_kv_transfer_received_tokens_total")
    sources = {"the host's memory": host, "the directory": directory, "other servers": peers}
    parts = [f"{percent(hit / asked)} of {asked:,.0f} tokens of prompts were cached"]
    parts += [f"{count:,.0f} from {place}" for place, count in sources.items() if count]
    evidence = {"asked": asked, "hit": hit, "host": host, "directory": directory, "other_servers": peers}
    yield CacheAccount("prefixes", ", ".join(parts), evidence)


def _transfers(interval: ModelInterval) -> Iterator[CacheAccount]:
    def grown(name: str) -> float:
        return interval.grown(f"charonia_kv_transfer_{name}_total")

    names = "received", "received_bytes", "failed", "seconds", "sent", "sent_bytes", "expired", "dropped"
    evidence = {name: grown(name) for name in names}
    evidence |= {name: interval.gauge(f"charonia_kv_transfer_{name}") for name in ("waiting", "held_blocks")}
    parts = []
    if came := evidence["received"]:
        size = f"{evidence['received_bytes'] / 1e6:,.1f} MB in {evidence['seconds']:.2f} s"
        parts.append(f"{came:.0f} prompts came from other servers, {size}")
    if evidence["failed"]:
        parts.append(f"{evidence['failed']:.0f} did not come, or not whole, as the log says")
    if evidence["waiting"]:
        parts.append(f"{evidence['waiting']:.0f} requests wait for theirs")
    if evidence["sent"]:
        parts.append(f"{evidence['sent']:.0f} were fetched by others, {evidence['sent_bytes'] / 1e6:,.1f} MB")
    if evidence["held_blocks"]:
        parts.append(f"{evidence['held_blocks']:,.0f} blocks are held for others")
    if given_up := evidence["expired"] + evidence["dropped"]:
        why = f"{evidence['expired']:.0f} because nobody came in time"
        parts.append(f"{given_up:.0f} prompts were given up, {why}")
    if parts:
        yield CacheAccount("transfers", "; ".join(parts), evidence)


def _retention(interval: ModelInterval) -> Iterator[CacheAccount]:
    scopes, blocks = (interval.gauge(f"charonia_retained_{what}") for what in ("scopes", "blocks"))
    refused = interval.grown("charonia_retention_refused_blocks_total")
    displaced = interval.grown("charonia_retention_displaced_scopes_total")
    if scopes or refused or displaced:
        text = f"{scopes:.0f} scopes retain {blocks:,.0f} blocks that nothing runs with"
        text += f"; {refused:,.0f} blocks found no room in --kv-cache-retention-bytes" if refused else ""
        text += f"; {displaced:.0f} scopes made room for others" if displaced else ""
        evidence = {"scopes": scopes, "blocks": blocks, "refused_blocks": refused, "displaced_scopes": displaced}
        yield CacheAccount("retention", text, evidence)
