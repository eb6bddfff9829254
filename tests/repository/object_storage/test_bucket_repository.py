"""Models of a bucket at moto's server, through a proxy that counts and spoils."""

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.cli.repository_check import print_check_report
from charonia.core.errors import InvalidArgument, NotFound, Unavailable
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.config_options import ConfigOptions
from charonia.repository.model_source import read_model
from charonia.repository.object_storage.bucket_repository import models_of
from charonia.repository.object_storage.object_cache import CacheFull
from charonia.repository.object_storage.stores import StoredObject, StoreRefused, StoreUnavailable
from charonia.routing.route import Route, RouteArm

from ...object_stores import BUCKET, Bucket
from ...proofs.fault_proxy import Fault, FaultProxy, ProxiedRequest

CONFIG = 'backend: "toy"\nversion_policy { latest { num_versions: 1 } }\n'

OpenServer = Callable[..., Any]


def reads(request: ProxiedRequest) -> bool:
    return not request.is_listing


def of(key: str) -> Callable[[ProxiedRequest], bool]:
    return lambda request: request.path.partition("?")[0].endswith(key)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def model(bucket: Bucket) -> Bucket:
    """A bucket with model `m`: two versions, of which the latest is served."""
    bucket.put("m/config.pbtxt", CONFIG)
    bucket.put("m/labels.txt", "a\nb\n")
    bucket.put("m/1/weights", b"1" * 2500)
    bucket.put("m/2/weights", bytes(range(250)) * 10)
    bucket.put("m/2/deep/er", b"x")
    bucket.put("m/2/empty", b"")
    return bucket


def test_only_what_the_policy_serves_is_read(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    server = opened()
    assert server.repository.model_names() == ["m"]
    held = server.fetch()
    assert files(held.path) == {
        "config.pbtxt": CONFIG.encode(),
        "labels.txt": b"a\nb\n",
        "2/weights": bytes(range(250)) * 10,
        "2/deep/er": b"x",
        "2/empty": b"",
    }
    assert held.path.name == "m"
    assert not [request for request in proxy.requests if "/m/1/" in request.path]
    conditional = [request for request in proxy.requests if reads(request)]
    assert all({"if-match", "range"} <= request.headers.keys() for request in conditional)
    ranges = {request.headers["range"] for request in conditional if of("/m/2/weights")(request)}
    assert ranges == {"bytes=0-999", "bytes=1000-1999", "bytes=2000-2499"}


def test_prefixes_and_empty_version_folders(bucket: Bucket, opened: OpenServer) -> None:
    bucket.put("a/b/chain/config.pbtxt", 'platform: "ensemble"')
    bucket.put("a/b/chain/1/", b"")
    bucket.put("a/bc/other/1/x", b"")
    server = opened(path="/a/b")
    assert server.repository.model_names() == ["chain"]
    assert (server.fetch("chain").path / "1").is_dir()


def test_a_restart_with_a_warm_cache_lists_and_no_more(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    first = opened()
    marks = read_model(first.fetch().path, place="p").versions
    first.cache.close()
    proxy.requests.clear()
    second = opened()
    assert read_model(second.fetch().path, place="p").versions == marks
    assert (proxy.listings, proxy.reads) == (1, 0)


def test_a_directory_stays_until_the_last_drops_it(model: Bucket, opened: OpenServer) -> None:
    server = opened()
    one, same = server.fetch(), server.fetch()
    assert one is same
    one.drop()
    assert one.path.exists()
    same.drop()
    assert not one.path.exists()
    assert server.fetch().path.exists()


def test_a_new_version_becomes_another_directory(model: Bucket, opened: OpenServer) -> None:
    server = opened()
    old = server.fetch()
    before = read_model(old.path, place="p").versions
    model.put("m/3/weights", b"3")
    server.repository.refresh()
    new = server.fetch()
    assert files(new.path).keys() == {"config.pbtxt", "labels.txt", "3/weights"}
    assert read_model(new.path, place="p").versions != before
    assert (old.path / "2/weights").exists()


def test_stamps_change_with_an_object(model: Bucket, opened: OpenServer) -> None:
    server = opened()
    before = server.repository.stamps("m")
    server.repository.refresh()
    assert server.repository.stamps("m") == before
    model.put("m/labels.txt", "c\n")
    server.repository.refresh()
    assert server.repository.stamps("m") != before


@pytest.mark.parametrize(
    "fault",
    [Fault(reads, 2, status=500), Fault(reads, 2, status=503), Fault(reads, 2, cut=100), Fault(reads, 2, delay=0.05)],
    ids=["500", "503", "cut", "slow"],
)
def test_a_store_that_stumbles_is_asked_again(
    model: Bucket, opened: OpenServer, proxy: FaultProxy, fault: Fault
) -> None:
    server = opened()
    with proxy.fault(fault):
        assert files(server.fetch().path)["2/weights"] == bytes(range(250)) * 10


def test_what_came_before_a_break_is_not_read_again(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    server = opened()
    last = Fault(lambda request: request.headers.get("range") == "bytes=2000-2499", status=500)
    with proxy.fault(last), pytest.raises(StoreUnavailable, match="the store answered 500"):
        server.fetch()
    server.cache.close()
    proxy.requests.clear()
    other = opened()
    assert files(other.fetch().path)["2/weights"] == bytes(range(250)) * 10
    weights = [request.headers["range"] for request in proxy.requests if of("/m/2/weights")(request)]
    assert weights == ["bytes=2000-2499"]


def test_a_damaged_part_is_found_and_read_again(model: Bucket, opened: OpenServer, tmp_path: Path) -> None:
    """As a machine that lost its power may leave it."""
    server = opened()
    [found] = [stamp for stamp in server.repository.stamps("m") if stamp.key == "m/2/weights"]
    partial = server.cache.files.partial(server.repository._store, found)
    partial.write_bytes(b"?" * 2500)
    partial.with_suffix(".parts").write_bytes(b"\1\0\0")
    with pytest.raises(StoreUnavailable, match="object 'm/2/weights' is not what the store says it is"):
        server.fetch()
    assert files(server.fetch().path)["2/weights"] == bytes(range(250)) * 10


def test_another_etag_is_another_object(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    server = opened()
    with proxy.fault(Fault(of("/m/2/weights"), etag="0" * 32)), pytest.raises(Unavailable, match="changed 3 times"):
        server.fetch()
    assert server.fetch()


def test_no_version_mixes_two_uploads(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    """Whatever is written while a model is read, either all of it is read, or nothing."""
    server = opened()

    def upload() -> None:
        model.put("m/labels.txt", "new\n")
        model.put("m/2/weights", b"new" * 500)

    with proxy.fault(Fault(of("/m/2/weights"), 1, before=upload)):
        found = files(server.fetch().path)
    assert (found["labels.txt"], found["2/weights"]) == (b"new\n", b"new" * 500)


def test_a_listing_after_the_download_is_compared(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    """What has been read may have changed since, unseen by any condition."""
    server = opened()
    with proxy.fault(Fault(of("/m/2/weights"), 1, before=lambda: model.put("m/labels.txt", "late\n"))):
        assert files(server.fetch().path)["labels.txt"] == b"late\n"


def test_a_missing_version_is_refused_by_name(model: Bucket, opened: OpenServer) -> None:
    model.put("m/config.pbtxt", 'backend: "toy"\nversion_policy { specific { versions: 7 } }\n')
    server = opened()
    with pytest.raises(InvalidArgument, match="at least one version must be available"):
        server.fetch()
    with pytest.raises(NotFound, match="has no model 'other'"):
        server.fetch("other")


def test_no_bucket_and_no_leave_are_refused_at_the_start(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    with proxy.fault(Fault(status=403)), pytest.raises(StoreRefused, match=r"the store refuses it \(403"):
        opened()
    with proxy.fault(Fault(status=404)), pytest.raises(StoreRefused, match="there is no such bucket"):
        opened()


def test_an_object_that_may_not_be_read_is_named(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    server = opened()
    refusing = Fault(of("/m/2/weights"), status=403)
    with proxy.fault(refusing), pytest.raises(StoreRefused, match="object 'm/2/weights': the store refuses it"):
        server.fetch()


def test_while_the_store_is_away_what_is_cached_is_there(
    model: Bucket, opened: OpenServer, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened()
    first.fetch()
    first.cache.close()
    model.put("n/config.pbtxt", CONFIG)
    model.put("n/1/weights", b"n")
    opened().cache.close()
    with proxy.fault(Fault(status=503)):
        server = opened()
        assert not server.repository.reachable
        assert "is away; what is in the cache is served" in caplog.text
        assert server.repository.model_names() == ["m", "n"]
        assert files(server.fetch().path)["2/deep/er"] == b"x"
        with pytest.raises(StoreUnavailable, match=r"is away, and .* not in the cache, 'config.pbtxt'"):
            server.fetch("n")
        assert not server.repository.refresh()
    with caplog.at_level(logging.INFO):
        assert server.repository.refresh()
        assert server.repository.reachable
    assert "is back" in caplog.text
    assert server.fetch("n")


def test_a_store_that_was_never_read_is_unknown(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    with proxy.fault(Fault(status=503)):
        server = opened()
    assert not server.repository.is_known
    assert server.repository.model_names() == []


def test_the_budget_makes_room_and_spares_what_is_in_use(model: Bucket, opened: OpenServer) -> None:
    model.put("m/config.pbtxt", 'backend: "toy"')
    for name in "ab":
        model.put(f"{name}/1/weights", name.encode() * 3000)
    server = opened(budget=6500)
    a = server.fetch("a")
    server.fetch("b").drop()
    server.fetch("m").drop()  # what is left of b goes
    assert server.cache.totals.evicted_bytes == 3000
    assert server.cache.totals.held_bytes <= 6500
    model.put("c/1/weights", b"c" * 4000)
    server.repository.refresh()
    with pytest.raises(CacheFull, match=r"4000 bytes are to be read, and 3500 of 6500 bytes are left in the cache"):
        server.fetch("c")
    a.drop()
    assert server.fetch("c")


def test_a_version_larger_than_the_budget_is_refused_unread(
    model: Bucket, opened: OpenServer, proxy: FaultProxy
) -> None:
    server = opened(budget=2000)
    with pytest.raises(CacheFull, match="raise --model-cache-bytes"):
        server.fetch()
    assert not [request for request in proxy.requests if "/2/" in request.path]


def test_two_servers_share_a_directory(model: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    """What one has in use the other does not remove, until the first has gone."""
    one, other = opened(budget=3000), opened(budget=3000)
    one.fetch()
    model.put("c/1/weights", b"c" * 2900)
    other.repository.refresh()
    with pytest.raises(CacheFull):
        other.fetch("c")
    one.cache.close()
    assert other.fetch("c")
    assert stat.S_IMODE(other.cache.directory.stat().st_mode) == 0o700


def test_an_abandoned_server_holds_nothing(model: Bucket, opened: OpenServer) -> None:
    """One that was killed: its lock is gone, its links are still there."""
    one = opened()
    held = one.fetch()
    os.close(one.cache._lock)
    one.cache._lock = os.open("/dev/null", os.O_RDONLY)
    opened()
    assert not held.path.exists()


def test_a_directory_that_others_may_write_to_is_refused(model: Bucket, opened: OpenServer, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(InvalidArgument, match="nobody else may write to it"):
        opened()


def listed(*keys: str) -> list[StoredObject]:
    return [StoredObject(key=key, size=1, tag="t", modified=0.0) for key in keys]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["m/../../etc/passwd"], "would be outside"),
        (["m//1/x"], "would be outside"),
        (["m/./x"], "would be outside"),
        (["m/1/a\nb"], "control character"),
        (["m/1/a\0b"], "control character"),
        (["m/1/" + "x" * 256], "more than 255 bytes"),
        (["m/1/a", "m/1/a/b"], "'1/a' is a folder, too"),
        (["m/1/a", "m/1/a/"], "'1/a' is a folder, too"),
    ],
)
def test_keys_that_no_file_can_have_are_refused_by_name(keys: list[str], problem: str) -> None:
    found = models_of(listed("fine/1/x", *keys))
    assert problem in found["m"].problem
    assert not found["fine"].problem


def test_a_model_with_such_a_key_is_refused_alone(model: Bucket, opened: OpenServer) -> None:
    model.put("n/1/a\tb", b"x")
    server = opened()
    with pytest.raises(InvalidArgument, match=r"object 'n/1/a\\tb' has a control character in its name"):
        server.fetch("n")
    assert server.fetch("m")


def test_what_is_beside_models_is_none() -> None:
    assert not models_of(listed("readme.txt", ".hidden/1/x", "/x", "a\nb/1/x"))


def test_secrets_are_not_logged(
    model: Bucket, opened: OpenServer, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        server = opened()
        server.fetch()
        with proxy.fault(Fault(status=403)):
            server.repository.refresh()
    assert "secret-of-the-test" not in caplog.text
    assert "Signature" not in caplog.text
    assert "plain HTTP" in caplog.text


def test_many_versions_are_one_request(bucket: Bucket, opened: OpenServer, proxy: FaultProxy) -> None:
    for version in range(1, 11):
        for name in "abcde":
            bucket.put(f"m/{version}/{name}", name)
    bucket.put("m/config.pbtxt", 'backend: "toy"\nversion_policy { all {} }\n')
    server = opened()
    assert len(files(server.fetch().path)) == 51
    server.cache.close()
    proxy.requests.clear()
    opened().fetch()
    assert (proxy.listings, proxy.reads) == (1, 0)


ROUTES = "routes: {r: {arms: [{model: m, version: %d, weight: 1}]}}"


def test_routes_of_a_bucket_are_read_once_and_from_the_cache_while_it_is_away(
    model: Bucket, opened: OpenServer, proxy: FaultProxy
) -> None:
    server = opened()
    catalog = RepositoryCatalog(buckets=[server.repository])
    assert catalog.read_routes() == {}
    model.put("routes.yaml", ROUTES % 2)
    assert catalog.read_routes() == {}, "as it was last listed"
    catalog.refresh()
    assert server.repository.model_names() == ["m"]
    for _ in range(3):
        assert catalog.read_routes() == {"r": Route((RouteArm("m", 2, 1),))}
    assert len([request for request in proxy.requests if of("/routes.yaml")(request)]) == 1
    model.put("routes.yaml", ROUTES % 1)
    catalog.refresh()
    assert catalog.read_routes()["r"].arms[0].version == 1
    proxy.away = True
    catalog.refresh()
    assert catalog.read_routes()["r"].arms[0].version == 1
    restarted = RepositoryCatalog(buckets=[opened().repository])
    assert restarted.read_routes()["r"].arms[0].version == 1
    proxy.away = False
    model.put("routes.yaml", "routes: {r: {arms: []}}")
    catalog.refresh()
    with pytest.raises(InvalidArgument, match=r"/routes\.yaml: no arm has a weight above 0"):
        catalog.read_routes()
    model.put("routes.yaml", "#" * (2 << 20))
    catalog.refresh()
    with pytest.raises(InvalidArgument, match=r"routes\.yaml has 2097152 bytes, more than the 1048576"):
        catalog.read_routes()
    model.delete("routes.yaml")
    catalog.refresh()
    assert catalog.read_routes() == {}


def test_versions_that_routes_name_are_read_beside_those_of_the_policy(model: Bucket, opened: OpenServer) -> None:
    catalog = RepositoryCatalog(buckets=[opened().repository])
    fetched = catalog.fetch("m", lambda *_: None)
    assert fetched.directory is not None
    assert [version.number for version in catalog.read("m", None, fetched.directory).versions] == ["2"]
    catalog.routed_versions = lambda name: frozenset({1, 9})
    fetched = catalog.fetch("m", lambda *_: None)
    assert fetched.directory is not None
    source = catalog.read("m", None, fetched.directory)
    assert ([version.number for version in source.versions], source.routed) == (["1", "2"], {"1"})


def test_a_check_reads_a_bucket_as_a_server_does(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = 'input { name: "A" data_type: TYPE_FP32 dims: 1 } output { name: "B" data_type: TYPE_FP32 dims: 1 }'
    bucket.put("good/config.pbtxt", f'backend: "identity" {tensors}')
    bucket.put("good/1/x", b"x")
    bucket.put("wrong/config.pbtxt", "backend: 7")
    assert print_check_report([f"s3://{proxy.url}/{BUCKET}"], ConfigOptions(), tmp_path / "cache") == 1
    good, wrong = capsys.readouterr().out.splitlines()
    assert good == "good: good: identity, version 1"
    assert wrong.startswith("wrong: WRONG: failed to read text proto")
    assert files(tmp_path / "cache")
