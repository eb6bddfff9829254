"""URLs of repositories in object storage, and the credentials for them, as tritonserver has them.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_repository.md.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...core.errors import InvalidArgument

SCHEMES = ("s3", "gs", "as")
CREDENTIALS_FILE = "TRITON_CLOUD_CREDENTIAL_PATH"

_S3_ENDPOINT = re.compile(r"(?:(?P<protocol>https?)://)?(?P<host>[\w.-]+(?::\d+)?)/(?P<rest>.*)")


class BucketLocation(NamedTuple):
    """Where a repository's objects are. `endpoint`: URL of an S3-compatible store, empty for Amazon's; of Azure the
    account. `prefix`: the beginning of all keys, empty or with a slash at its end."""

    url: str
    scheme: str
    endpoint: str
    bucket: str
    prefix: str


class CloudCredentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What TRITON_CLOUD_CREDENTIAL_PATH says of one prefix: the first five of S3, the others of Azure; `key_file` of
    Google, whose entry is that alone. What is empty is left to the library's defaults."""

    key_id: str = ""
    secret_key: str = ""
    session_token: str = ""
    region: str = ""
    profile: str = ""
    account_str: str = ""
    account_key: str = ""
    auth_type: str = ""
    client_id: str = ""
    key_file: str = ""


class _CredentialFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    s3: dict[str, CloudCredentials] = {}
    gs: dict[str, str] = {}
    azure: dict[str, CloudCredentials] = msgspec.field(name="as", default_factory=dict)


def is_bucket_url(text: str) -> bool:
    return text.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def parse_location(url: str) -> BucketLocation:
    """Raises `InvalidArgument` for a URL without a bucket."""
    scheme, rest = url.split("://", 1)
    endpoint = ""
    if scheme == "s3" and (match := _S3_ENDPOINT.fullmatch(rest)) and (match["protocol"] or ":" in match["host"]):
        endpoint, rest = f"{match['protocol'] or 'http'}://{match['host']}", match["rest"]
    elif scheme == "as":
        endpoint, _, rest = rest.partition("/")
    bucket, *parts = [part for part in rest.split("/") if part] or [""]
    if not bucket or (scheme == "as" and not endpoint):
        wanted = {"s3": "s3://bucket/path, s3://host:port/bucket/path or s3://https://host:port/bucket/path"}
        wanted |= {"gs": "gs://bucket/path", "as": "as://account/container/path"}
        raise InvalidArgument(f"model repository '{url}' names no bucket: {wanted[scheme]} is how to")
    return BucketLocation(url, scheme, endpoint, bucket, "".join(f"{part}/" for part in parts))


def find_credentials(location: BucketLocation, environment: Mapping[str, str] = os.environ) -> CloudCredentials:
    """What the file of TRITON_CLOUD_CREDENTIAL_PATH says of the longest prefix of the location; else nothing.

    Raises:
        InvalidArgument: the file is not there, or means nothing; no message shows what is in it.
    """
    name = environment.get(CREDENTIALS_FILE)
    if not name:
        return _of_environment(location, environment)
    try:
        credentials = msgspec.json.decode(Path(name).read_bytes(), type=_CredentialFile)
    except OSError as error:
        raise InvalidArgument(f"{CREDENTIALS_FILE}: cannot read {name}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        place = str(error).partition(" - at ")[2] if isinstance(error, msgspec.ValidationError) else ""
        reason = f"an entry is not what it should be{f', at {place}' if place else ''}"
        raise InvalidArgument(f"{CREDENTIALS_FILE}: {name} is not understood: {reason}") from None
    google = {prefix: CloudCredentials(key_file=file) for prefix, file in credentials.gs.items()}
    entries = {"s3": credentials.s3, "gs": google, "as": credentials.azure}[location.scheme]
    fitting = [prefix for prefix in entries if _is_prefix(prefix, location)]
    return entries[max(fitting, key=len)] if fitting else _of_environment(location, environment)


def _is_prefix(prefix: str, location: BucketLocation) -> bool:
    """Whether a path in the credentials' file is the beginning of the location; an empty one is of all."""
    wanted, url = prefix.rstrip("/"), location.url.rstrip("/")
    return not wanted or url == wanted or url.startswith(f"{wanted}/")


def _of_environment(location: BucketLocation, environment: Mapping[str, str]) -> CloudCredentials:
    """Triton's variables whose names the libraries do not know."""
    if location.scheme != "as":
        return CloudCredentials()
    return CloudCredentials(
        account_str=environment.get("AZURE_STORAGE_ACCOUNT", ""),
        account_key=environment.get("AZURE_STORAGE_KEY", ""),
        auth_type=environment.get("AZURE_STORAGE_AUTH_TYPE", ""),
        client_id=environment.get("AZURE_STORAGE_CLIENT_ID", ""),
    )
