"""A model repository in a bucket: what its listing says, and the directories that models are read from.

Such a directory is made when a model loads: its config, the files beside its versions, and the versions that its policy
serves, as links into the cache. It never changes: another state of the bucket becomes another directory.
"""

import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TypeAlias

import msgspec

from ...core.backends import OnProgress
from ...core.errors import InvalidArgument, NotFound, Unavailable
from ...core.metrics import Measurement, Reading
from ...core.model import RawConfig
from ..model_source import VERSION_NAME, read_served_versions
from .download import WantedObject
from .locations import find_credentials, parse_location
from .object_cache import ObjectCache
from .stores import ObjectChanged, StoredObject, StoreRefused, StoreUnavailable, open_store, retried

log = logging.getLogger(__name__)

_CHANGES = 3
"""How often a model may change while it is read."""

_MAX_FILE_BYTES = 1 << 20
"""The most bytes of a file beside the models."""

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_MAX_PART_BYTES = 255


class BucketModel(NamedTuple):
    """A model as the listing has it: its `objects` by their paths in its directory, `folders` without any, and why it
    is none."""

    objects: dict[str, StoredObject]
    folders: set[str]
    problem: str = ""


Listing: TypeAlias = Mapping[str, BucketModel]


class ModelDirectory:
    """A directory with one state of a model, made of `model` and with the versions that `routed` asks for beside its
    policy. Whoever reads or serves from it holds it; the last one to drop it removes it."""

    def __init__(self, path: Path, model: BucketModel, routed: frozenset[int]) -> None:
        self.path, self.made_of = path, (model, routed)
        self._holders, self._lock = 1, threading.Lock()

    def hold(self) -> bool:
        """Whether it is still there, and now for one more."""
        with self._lock:
            self._holders += bool(self._holders)
            return self._holders > 0

    def drop(self) -> None:
        with self._lock:
            self._holders -= 1
            last = not self._holders
        if last:
            shutil.rmtree(self.path.parent, ignore_errors=True)


class BucketRepository:
    """The repository at `url`. Any thread may call it.

    Raises:
        InvalidArgument: the URL, the credentials' file or the installation is no good, or the store refuses.
    """

    def __init__(self, url: str, cache: ObjectCache) -> None:
        location = parse_location(url)
        self.url = url
        self._store = open_store(location, find_credentials(location))
        self.close = self._store.close
        """Close what leads to the store. The cache is the caller's."""
        self.cache = cache
        self._saved = cache.directory / f"{sha256(repr(location[1:]).encode()).hexdigest()[:40]}.listing"
        self._models: Listing | None = None
        self._beside: dict[str, StoredObject] = {}
        self._read: dict[str, tuple[StoredObject, Path]] = {}
        self._listed_at = -1.0
        self._lock = threading.Lock()
        self._directories: dict[str, ModelDirectory] = {}
        self.reachable = False
        self.listings = 0
        if location.endpoint.startswith("http://"):
            log.warning("model repository %s is read over plain HTTP: whoever is in between may change models", url)
        self.refresh()

    def refresh(self, since: float | None = None) -> bool:
        """List the bucket, unless a listing began after `since`, by the monotonic clock; whether it could be listed.

        While the store is away the last listing stands, be it of an earlier server.

        Raises:
            StoreRefused: the first time, there is no such bucket, or it may not be listed.
        """
        with self._lock:
            if since is not None and self._listed_at >= since:
                return self.reachable
            began, before = monotonic(), self.reachable
            try:
                objects = retried(self._store.list_objects)
            except (StoreUnavailable, StoreRefused) as error:
                if isinstance(error, StoreRefused) and self._listed_at < 0:
                    raise
                self.reachable = False
                if self._models is None:
                    self._read_saved()
                if before or self._listed_at < 0:
                    log.warning("model repository %s is away; what is in the cache is served: %s", self.url, error)
                self._listed_at = began
                return False
            if not before and self._listed_at >= 0:
                log.info("model repository %s is back", self.url)
            self.reachable, self._listed_at, self.listings = True, began, self.listings + 1
            self._take(objects)
            self._save(objects)
            return True

    def _take(self, objects: Sequence[StoredObject]) -> None:
        self._models = models_of(objects)
        self._beside = {stored.key: stored for stored in objects if "/" not in stored.key}

    def _read_saved(self) -> None:
        with suppress(OSError, msgspec.MsgspecError):
            self._take(msgspec.json.decode(self._saved.read_bytes(), type=list[StoredObject]))

    def _save(self, objects: Sequence[StoredObject]) -> None:
        written = msgspec.json.encode(objects)
        with suppress(OSError):
            if not self._saved.exists() or self._saved.read_bytes() != written:
                aside = self._saved.with_suffix(f".{threading.get_native_id()}")
                aside.write_bytes(written)
                aside.replace(self._saved)

    @property
    def is_known(self) -> bool:
        """Whether it was ever listed, be it by an earlier server."""
        return self._models is not None

    def model_names(self) -> list[str]:
        return sorted(self._models or ())

    def stamps(self, name: str) -> tuple[StoredObject, ...]:
        """What a model's objects are: equal as long as nothing changes."""
        return tuple(self._model(name).objects.values())

    def read_file(self, name: str) -> Path | None:
        """A small file beside the models, as the last listing has it; None if that has none. It stays there until the
        next call. Blocks while it is read.

        Raises:
            InvalidArgument: it is not small.
            CacheFull, StoreUnavailable, StoreRefused: see `ObjectCache.provide`.
        """
        for _ in range(_CHANGES):
            with suppress(ObjectChanged):
                return self._read_file(name)
            self.refresh(monotonic())
        raise Unavailable(f"{self.place(name)} changed {_CHANGES} times while it was read; try again")

    def _read_file(self, name: str) -> Path | None:
        stored, known = self._beside.get(name), self._read.get(name)
        if stored is None:
            return None
        if known is not None and known[0] == stored:
            return known[1]
        if stored.size > _MAX_FILE_BYTES:
            message = f"{self.place(name)} has {stored.size} bytes, more than the {_MAX_FILE_BYTES} that it may have"
            raise InvalidArgument(message)
        if not self.reachable and not self._has(stored):
            raise StoreUnavailable(f"{self.url} is away, and {name} is not in the cache")
        path = self.cache.new_tree() / name
        self.cache.provide(self._store, [WantedObject(stored, path)], lambda there, size: None)
        self._read[name] = stored, path
        if known is not None:
            shutil.rmtree(known[1].parent, ignore_errors=True)
        return path

    def fetch(
        self,
        name: str,
        override: RawConfig | None,
        config_name: str,
        on_progress: OnProgress,
        routed: frozenset[int] = frozenset(),
    ) -> ModelDirectory:
        """The directory of a model as it is now, with the versions that its config, or `override`, serves, and those
        that are `routed`; held for the caller. Blocks for as long as the download takes.

        Raises:
            NotFound: there is no such model.
            InvalidArgument: it cannot be one.
            CacheFull, StoreUnavailable, StoreRefused: see `ObjectCache.provide`.
        """
        for _ in range(_CHANGES):
            with suppress(ObjectChanged):
                return self._fetch(name, override, config_name, on_progress, routed)
            self.refresh(monotonic())
        raise Unavailable(f"model '{name}' of {self.url} changed {_CHANGES} times while it was read; try again")

    def _fetch(
        self, name: str, override: RawConfig | None, config_name: str, on_progress: OnProgress, routed: frozenset[int]
    ) -> ModelDirectory:
        """Raises `ObjectChanged` if something changes meanwhile."""
        model = self._model(name)
        began = monotonic()
        known = self._directories.get(name)
        if model.problem:
            raise InvalidArgument(f"model '{name}' of {self.url}: {model.problem}")
        if override is None and known is not None and known.made_of == (model, routed) and known.hold():
            return known
        directory = ModelDirectory(self.cache.new_tree() / name, model, routed)
        progress = _Progress(on_progress, began)
        try:
            read = self._provide(directory.path, model, (), progress)
            chosen = read_served_versions(directory.path, override, config_name, _versions(model), routed)
            read += self._provide(directory.path, model, [*map(str, chosen)], progress)
            if read:
                self._check_unchanged(name, model)
        except BaseException:
            directory.drop()
            raise
        progress.end(read)
        if override is None:
            self._directories[name] = directory
        return directory

    def _provide(self, path: Path, model: BucketModel, versions: Sequence[str], progress: "_Progress") -> int:
        """Put these versions, and what is beside versions, into the directory; the bytes that were read for it."""
        for folder in ("", *model.folders):
            if _is_served(f"{folder}/", versions):
                (path / folder).mkdir(parents=True, exist_ok=True)
        names = {name: stored for name, stored in model.objects.items() if _is_served(name, versions)}
        missing = [] if self.reachable else [name for name, stored in names.items() if not self._has(stored)]
        if missing:
            message = f"{self.url} is away, and {len(missing)} objects are not in the cache, '{missing[0]}' among them"
            raise StoreUnavailable(message)
        wanted = [WantedObject(stored, path / name) for name, stored in names.items()]
        return self.cache.provide(self._store, wanted, progress.on_bytes)

    def _has(self, stored: StoredObject) -> bool:
        return not stored.size or self.cache.files.entry(self._store, stored).exists()

    def _check_unchanged(self, name: str, model: BucketModel) -> None:
        """Raises `ObjectChanged` unless a listing after the download says the same: objects of two uploads must not
        be one version."""
        if not self.refresh(monotonic()) or self._model(name) != model:
            raise ObjectChanged(f"model '{name}' of {self.url} changed while it was read")

    def _model(self, name: str) -> BucketModel:
        if name not in (self._models or {}):
            raise NotFound(f"{self.url} has no model '{name}'")
        assert self._models is not None
        return self._models[name]

    def place(self, name: str) -> str:
        """Where a model is, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def measure(self) -> Measurement:
        readings = (
            Reading("charonia_repository_reachable", int(self.reachable)),
            Reading("charonia_repository_listings_total", self.listings),
        )
        return Measurement({"repository": self.url}, readings)


class _Progress:
    def __init__(self, on_progress: OnProgress, began: float) -> None:
        self._tell, self._began = on_progress, began

    def on_bytes(self, received: int, size: int) -> None:
        self._tell("downloading", min(received / size, 0.999), monotonic() - self._began, "")

    def end(self, read: int) -> None:
        if read:
            self._tell("downloading", 1.0, monotonic() - self._began, f"{read / 1e6:.1f} MB")


def models_of(objects: Sequence[StoredObject]) -> Listing:
    """The models of a listing, by name: what is in folders at its top."""
    models: dict[str, BucketModel] = {}
    for stored in objects:
        name, slash, path = stored.key.partition("/")
        if not slash or name.startswith(".") or not name or _UNPRINTABLE.search(name):
            continue
        model = models.setdefault(name, BucketModel({}, set()))
        if problem := _key_problem(path):
            models[name] = model._replace(problem=f"object {stored.key!r} {problem}")
        elif not path or path.endswith("/"):
            model.folders.add(path.rstrip("/"))
        else:
            model.objects[path] = stored
    return {name: _without_clashes(model) for name, model in models.items()}


def _key_problem(path: str) -> str:
    """Why no file can be called so; empty if one can."""
    parts = path.removesuffix("/").split("/") if path else []
    if any(part in ("", ".", "..") for part in parts):
        return "would be outside of the model's directory, or nowhere in it"
    if _UNPRINTABLE.search(path):
        return "has a control character in its name"
    if any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        return f"has a name of more than {_MAX_PART_BYTES} bytes"
    return ""


def _without_clashes(model: BucketModel) -> BucketModel:
    """A file cannot be a folder, too."""
    folders = {str(parent) for path in model.objects for parent in Path(path).parents} | model.folders
    clash = next((path for path in model.objects if path in folders), "")
    return model._replace(problem=f"object '{clash}' is a folder, too") if clash and not model.problem else model


def _versions(model: BucketModel) -> list[int]:
    first = {path.split("/", 1)[0] for path in (*(path for path in model.objects if "/" in path), *model.folders)}
    return sorted(int(part) for part in first if VERSION_NAME.fullmatch(part))


def _is_served(path: str, versions: Sequence[str]) -> bool:
    """Whether a file or folder is in one of these versions, or in none."""
    first, slash, _ = path.partition("/")
    return first in versions or not slash or not VERSION_NAME.fullmatch(first)


def open_buckets(urls: Sequence[str], directory: Path | None, budget: int | None) -> list[BucketRepository]:
    """The repositories at these URLs, over one cache in `directory`, by default in the user's cache directory, or where
    Triton's variables say. Raises as `BucketRepository` and `ObjectCache` do."""
    if not urls:
        return []
    named = [os.environ.get(f"TRITON_{cloud}_MOUNT_DIRECTORY") for cloud in ("AWS", "GCS", "AZURE")]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = directory or Path(next(filter(None, named), None) or Path(home) / "charonia" / "models")
    cache = ObjectCache(directory.expanduser().absolute(), budget)
    return [BucketRepository(url, cache) for url in dict.fromkeys(urls)]
