import json
from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument
from charonia.repository.object_storage.locations import (
    CloudCredentials,
    find_credentials,
    is_bucket_url,
    parse_location,
)


@pytest.mark.parametrize(
    ("url", "endpoint", "bucket", "prefix"),
    [
        ("s3://bucket", "", "bucket", ""),
        ("s3://bucket/a/b/", "", "bucket", "a/b/"),
        ("s3://my.bucket.name/a", "", "my.bucket.name", "a/"),
        ("s3://127.0.0.1:9000/bucket/a", "http://127.0.0.1:9000", "bucket", "a/"),
        ("s3://localhost:9000/bucket", "http://localhost:9000", "bucket", ""),
        ("s3://https://store.example:443/bucket//a", "https://store.example:443", "bucket", "a/"),
        ("s3://http://store.example/bucket", "http://store.example", "bucket", ""),
        ("gs://bucket/a", "", "bucket", "a/"),
        ("as://account/container/a/b", "account", "container", "a/b/"),
        ("as://account.blob.core.windows.net/container", "account.blob.core.windows.net", "container", ""),
    ],
)
def test_tritons_spellings(url: str, endpoint: str, bucket: str, prefix: str) -> None:
    assert is_bucket_url(url)
    assert parse_location(url)[2:] == (endpoint, bucket, prefix)


@pytest.mark.parametrize("url", ["s3://", "s3://https://store.example:443/", "gs://", "as://account", "as:///a/b"])
def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"names no bucket: .*is how to"):
        parse_location(url)


@pytest.mark.parametrize("text", ["/models", "models", "s3", "s3:/bucket", "./s3://bucket"])
def test_directories_are_no_urls(text: str) -> None:
    assert not is_bucket_url(text)


def credentials_file(tmp_path: Path, **entries: object) -> dict[str, str]:
    (tmp_path / "credentials.json").write_text(json.dumps(entries))
    return {"TRITON_CLOUD_CREDENTIAL_PATH": str(tmp_path / "credentials.json")}


def test_the_longest_prefix_of_the_credentials_file_counts(tmp_path: Path) -> None:
    environment = credentials_file(
        tmp_path,
        s3={"": {"key_id": "all"}, "s3://b": {"key_id": "b"}, "s3://b/models": {"key_id": "models", "region": "eu"}},
        gs={"gs://b": "/keys/b.json"},
        **{"as": {"": {"account_str": "a", "account_key": "k"}}},
    )
    found = {
        url: find_credentials(parse_location(url), environment)
        for url in ("s3://b/models/x", "s3://b/modelsx", "s3://c", "gs://b/x", "gs://c", "as://x/y")
    }
    assert [value.key_id for value in found.values()] == ["models", "b", "all", "", "", ""]
    assert found["s3://b/models/x"].region == "eu"
    assert found["gs://b/x"].key_file == "/keys/b.json"
    assert not found["gs://c"].key_file
    assert (found["as://x/y"].account_str, found["as://x/y"].account_key) == ("a", "k")


def test_azures_variables_are_tritons() -> None:
    environment = {"AZURE_STORAGE_ACCOUNT": "a", "AZURE_STORAGE_KEY": "k", "AZURE_STORAGE_AUTH_TYPE": "default"}
    assert find_credentials(parse_location("as://a/b"), environment) == CloudCredentials(
        account_str="a", account_key="k", auth_type="default"
    )
    assert find_credentials(parse_location("s3://b"), environment) == CloudCredentials()


@pytest.mark.parametrize("text", ["{", '{"s3": {"": {"key_id": 987654}}}', '{"s4": {}}', '{"s3": "987654"}'])
def test_a_credentials_file_that_means_nothing_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"TRITON_CLOUD_CREDENTIAL_PATH: .*c.json is not understood") as refused:
        find_credentials(parse_location("s3://b"), {"TRITON_CLOUD_CREDENTIAL_PATH": str(tmp_path / "c.json")})
    assert "987654" not in str(refused.value)


def test_a_missing_credentials_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot read .*: No such file"):
        find_credentials(parse_location("s3://b"), {"TRITON_CLOUD_CREDENTIAL_PATH": str(tmp_path / "c.json")})
