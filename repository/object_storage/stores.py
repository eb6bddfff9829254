"""The objects of a bucket: listed, and read in ranges, each on the condition that the object is still the listed one.

fsspec's libraries make the clients and find the credentials; their own calls answer, since no interface of fsspec has
conditions. Calls block; clients live on fsspec's thread.
"""

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import datetime
from importlib import import_module
from time import sleep
from typing import Any, TypeVar

import msgspec

from ...core.errors import CharoniaError, InvalidArgument, Unavailable
from .locations import BucketLocation, CloudCredentials

T = TypeVar("T")

CONNECT_SECONDS, READ_SECONDS = 5, 20
"""How long a store may take to accept a connection, and to send the next bytes."""

_CALL_SECONDS = 300
TRIES = 4
FIRST_PAUSE = 0.2
"""Seconds before a call is tried again; doubled each time."""

_EXTRAS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "as": ("adlfs", "azure")}
_TALKATIVE = ("botocore", "aiobotocore", "s3fs", "gcsfs", "fsspec", "azure", "google", "urllib3")
"""Libraries that would log headers, and so signatures, at level DEBUG."""


class StoreUnavailable(Unavailable):
    """The store did not answer, or not as it should: another time it may."""


class StoreRefused(InvalidArgument):
    """The store answered that it will not: no such bucket, or not with these credentials."""


class ObjectChanged(CharoniaError):
    """An object is gone, or is another one than was listed."""


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object as a listing has it. `key`: behind the repository's prefix. `tag`: what changes whenever the content
    does, an ETag or Google's generation. `modified`: seconds since 1970. `md5`: of the content, in hex, if the store
    says."""

    key: str
    size: int
    tag: str
    modified: float
    md5: str = ""


class ObjectStore(ABC):
    """One repository's objects. Any thread may call it."""

    def __init__(self, location: BucketLocation) -> None:
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        self.location = location
        self.encrypted: set[str] = set()
        """Keys of objects that were read, and whose ETags turned out to be no checksums of their content."""
        self._loop: asyncio.AbstractEventLoop = import_module("fsspec.asyn").get_loop()

    def list_objects(self) -> list[StoredObject]:
        """All objects of the repository.

        Raises:
            StoreUnavailable: the store is away.
            StoreRefused: there is no such bucket, or it may not be listed.
        """
        return self._call(self._list())

    def read(self, stored: StoredObject, start: int, end: int) -> bytes:
        """The bytes of an object from `start` to `end`.

        Raises:
            ObjectChanged: it is not the listed one any more.
            StoreUnavailable: the store is away, or sent something else.
            StoreRefused: it may not be read.
        """
        content = self._call(self._read(stored, start, end))
        if len(content) != end - start:
            raise StoreUnavailable(f"{self._of(stored)}: {len(content)} bytes came of {end - start}")
        return content

    def close(self) -> None:
        """Close its connections."""
        with suppress(StoreUnavailable):
            self._call(self._close())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(self._within_time(work), self._loop).result()
        except CharoniaError:
            raise
        except Exception as error:
            raise StoreUnavailable(f"{self.location.url}: {type(error).__name__}: {error}") from error

    async def _within_time(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wait_for(work, _CALL_SECONDS)

    def _of(self, stored: StoredObject) -> str:
        return f"{self.location.url}: object '{stored.key}'"

    def _refuse(self, status: int, code: str, stored: StoredObject | None) -> CharoniaError:
        """The error of an answer with this HTTP status, to a listing or to reading an object."""
        place = self.location.url if stored is None else self._of(stored)
        if stored is not None and status in (404, 412, 416):
            return ObjectChanged(f"{place} is not there any more as it was listed")
        if status == 404:
            return StoreRefused(f"{place}: there is no such bucket")
        if status in (401, 403):
            return StoreRefused(f"{place}: the store refuses it ({status} {code}): check the credentials")
        return StoreUnavailable(f"{place}: the store answered {status} {code}")

    @abstractmethod
    async def _list(self) -> list[StoredObject]: ...

    @abstractmethod
    async def _read(self, stored: StoredObject, start: int, end: int) -> bytes: ...

    @abstractmethod
    async def _close(self) -> None: ...


class S3Store(ObjectStore):
    """Amazon's, and others by their endpoints. Without credentials anywhere it is asked as anybody."""

    def __init__(self, location: BucketLocation, credentials: CloudCredentials) -> None:
        super().__init__(location)
        config: dict[str, Any] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 32,
        }
        if location.endpoint:
            config["s3"] = {"addressing_style": "path"}
        session = {"profile": credentials.profile} if credentials.profile else {}
        self._files: Any = import_module("s3fs").S3FileSystem(
            key=credentials.key_id or None,
            secret=credentials.secret_key or None,
            token=credentials.session_token or None,
            endpoint_url=location.endpoint or None,
            client_kwargs={"region_name": credentials.region} if credentials.region else {},
            config_kwargs=config,
            skip_instance_cache=True,
            **session,
        )
        self._finds_own = not (credentials.key_id or credentials.profile)
        self._asked = asyncio.Lock()

    async def _client(self) -> Any:
        async with self._asked:
            if self._finds_own:
                self._finds_own = False
                session = import_module("aiobotocore.session").AioSession()
                self._files.anon = await session.get_credentials() is None
        return await self._files.set_session()

    async def _close(self) -> None:
        if self._files._s3 is not None:
            await self._files._s3.close()

    async def _list(self) -> list[StoredObject]:
        client, (bucket, prefix) = await self._client(), self.location[-2:]
        objects: list[StoredObject] = []
        more: dict[str, str] = {}
        while True:
            async with self._translated(None):
                page = await client.list_objects_v2(Bucket=bucket, Prefix=prefix, **more)
            objects += [self._listed(entry, len(prefix)) for entry in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return objects
            more = {"ContinuationToken": page["NextContinuationToken"]}

    @staticmethod
    def _listed(entry: dict[str, Any], prefix: int) -> StoredObject:
        tag = entry["ETag"].strip('"')
        key, modified = entry["Key"][prefix:], entry["LastModified"].timestamp()
        # The ETag of what was put in parts is no checksum, and has a dash.
        return StoredObject(
            key=key, size=entry["Size"], tag=tag, modified=modified, md5=tag if len(tag) == 32 and tag.isalnum() else ""
        )

    async def _read(self, stored: StoredObject, start: int, end: int) -> bytes:
        client, place = await self._client(), self.location.prefix + stored.key
        wanted = {"Range": f"bytes={start}-{end - 1}", "IfMatch": f'"{stored.tag}"'}
        async with self._translated(stored):
            answer = await client.get_object(Bucket=self.location.bucket, Key=place, **wanted)
            if answer["ETag"].strip('"') != stored.tag:
                raise self._refuse(412, "", stored)
            if answer.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in answer:
                self.encrypted.add(stored.key)
            async with answer["Body"] as body:
                content: bytes = await body.read()
                return content

    @asynccontextmanager
    async def _translated(self, stored: StoredObject | None) -> AsyncIterator[None]:
        try:
            yield
        except import_module("botocore.exceptions").ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise self._refuse(status, error.response.get("Error", {}).get("Code", ""), stored) from None


class GoogleStore(ObjectStore):
    """Google's. STORAGE_EMULATOR_HOST names an emulator."""

    def __init__(self, location: BucketLocation, credentials: CloudCredentials) -> None:
        super().__init__(location)
        known = credentials.key_file or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        emulated = os.environ.get("STORAGE_EMULATOR_HOST")
        self._files: Any = import_module("gcsfs").GCSFileSystem(
            token="anon" if emulated else known or None,
            requests_timeout=READ_SECONDS,
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    async def _close(self) -> None:
        await (await self._files._set_session()).close()

    async def _list(self) -> list[StoredObject]:
        bucket, prefix = self.location[-2:]
        objects: list[StoredObject] = []
        more: dict[str, str] = {}
        while True:
            async with self._translated(None):
                page = await self._files._call("GET", "b/{}/o", bucket, prefix=prefix, json_out=True, **more)
            objects += [self._listed(entry, len(prefix)) for entry in page.get("items", ())]
            if "nextPageToken" not in page:
                return objects
            more = {"pageToken": page["nextPageToken"]}

    @staticmethod
    def _listed(entry: dict[str, Any], prefix: int) -> StoredObject:
        modified = datetime.fromisoformat(entry["updated"]).timestamp()
        md5 = b64decode(entry.get("md5Hash", "")).hex()
        size, tag = int(entry.get("size", 0)), str(entry["generation"])
        return StoredObject(key=entry["name"][prefix:], size=size, tag=tag, modified=modified, md5=md5)

    async def _read(self, stored: StoredObject, start: int, end: int) -> bytes:
        bucket, place = self.location.bucket, self.location.prefix + stored.key
        async with self._translated(stored):
            _, content = await self._files._call(
                "GET",
                "b/{}/o/{}",
                bucket,
                place,
                headers={"Range": f"bytes={start}-{end - 1}"},
                alt="media",
                ifGenerationMatch=stored.tag,
            )
            return bytes(content)

    @asynccontextmanager
    async def _translated(self, stored: StoredObject | None) -> AsyncIterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise self._refuse(404, "", stored) from None
        except (PermissionError, OSError) as error:
            if "Forbidden" in str(error) or isinstance(error, PermissionError):
                raise self._refuse(403, "Forbidden", stored) from None
            raise
        except import_module("gcsfs.retry").HttpError as error:
            raise self._refuse(int(error.code or 0), "", stored) from None


class AzureStore(ObjectStore):
    """Azure's Blob Storage. AZURE_STORAGE_CONNECTION_STRING goes before all else."""

    def __init__(self, location: BucketLocation, credentials: CloudCredentials) -> None:
        super().__init__(location)
        account, host = location.endpoint, None
        if "." in account:
            host, account = account, account.split(".", 1)[0]
        by_identity = credentials.auth_type in ("managed_identity", "default")
        self._files: Any = import_module("adlfs").AzureBlobFileSystem(
            account_name=credentials.account_str or account,
            account_host=host,
            account_key=None if by_identity else credentials.account_key or None,
            client_id=credentials.client_id or None,
            anon=False if by_identity or credentials.account_key else None,
            connection_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def _container(self) -> AbstractAsyncContextManager[Any]:
        container: AbstractAsyncContextManager[Any] = self._files.service_client.get_container_client(
            self.location.bucket
        )
        return container

    async def _close(self) -> None:
        await self._files.service_client.close()

    async def _list(self) -> list[StoredObject]:
        prefix = self.location.prefix
        async with self._translated(None), self._container() as container:
            return [self._listed(entry, len(prefix)) async for entry in container.list_blobs(name_starts_with=prefix)]

    @staticmethod
    def _listed(entry: Any, prefix: int) -> StoredObject:
        md5 = bytes(entry.content_settings.content_md5 or b"").hex()
        key = entry.name[prefix:]
        modified = entry.last_modified.timestamp()
        tag = entry.etag.strip('"')
        return StoredObject(key=key, size=entry.size, tag=tag, modified=modified, md5=md5)

    async def _read(self, stored: StoredObject, start: int, end: int) -> bytes:
        from azure.core import MatchConditions

        condition = {"etag": f'"{stored.tag}"', "match_condition": MatchConditions.IfNotModified}
        async with self._translated(stored), self._container() as container:
            blob = self.location.prefix + stored.key
            stream = await container.download_blob(blob, offset=start, length=end - start, **condition)
            return bytes(await stream.readall())

    @asynccontextmanager
    async def _translated(self, stored: StoredObject | None) -> AsyncIterator[None]:
        from azure.core.exceptions import HttpResponseError

        try:
            yield
        except HttpResponseError as error:
            raise self._refuse(error.status_code or 0, str(getattr(error, "error_code", "")), stored) from None


def retried(call: Callable[[], T], pause: Callable[[float], object] = sleep) -> T:
    """What the call returns, tried again while the store is away. Raises its last error."""
    for attempt in range(TRIES - 1):
        with suppress(StoreUnavailable):
            return call()
        pause(FIRST_PAUSE * 2**attempt)
    return call()


def open_store(location: BucketLocation, credentials: CloudCredentials) -> ObjectStore:
    """The store of a location. Nothing is asked of it yet.

    Raises:
        InvalidArgument: its library is not installed.
    """
    module, extra = _EXTRAS[location.scheme]
    try:
        import_module(module)
    except ImportError as error:
        message = f"model repository '{location.url}' needs {error.name or module}: pip install '.[{extra}]'"
        raise InvalidArgument(message) from None
    stores: dict[str, type[S3Store | GoogleStore | AzureStore]] = {"s3": S3Store, "gs": GoogleStore, "as": AzureStore}
    return stores[location.scheme](location, credentials)
