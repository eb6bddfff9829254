"""API keys, and the tenants that they stand for. Only digests are kept: no key can be logged."""

import hmac
import math
import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ..core.errors import InvalidArgument, Unauthenticated

ENVIRONMENT = "CHARONIA_API_KEYS"
_SCHEME = "bearer "


class Tenant(NamedTuple):
    """The owner of a key: prefix cache, metrics and fair share go by it. `weight`: its share beside the others."""

    name: str = ""
    weight: float = 1.0


ANONYMOUS = Tenant()
"""The tenant of every request where no keys are set."""


class Keyring:
    """Every key there is; without any, every request is of `ANONYMOUS`."""

    def __init__(self, keys: Iterable[tuple[str, Tenant]] = ()) -> None:
        self._tenants = tuple((_digest(key), tenant) for key, tenant in keys)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def tenant_count(self) -> int:
        return len({tenant.name for _, tenant in self._tenants})

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of the key in an `authorization` header or metadata; as slow for a wrong key as for a right one.
        Raises `Unauthenticated` for an unknown key, or none."""
        if not self._tenants:
            return ANONYMOUS
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("no API key: send it as 'Authorization: Bearer <key>'")
        shown, owner = _digest(_key_of(authorization)), None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, shown):
                owner = tenant
        if owner is None:
            raise Unauthenticated("incorrect API key")
        return owner


def bearer(key: str) -> str:
    """The `authorization` header that has a key."""
    return f"Bearer {key}"


def same_key(authorization: str, key: str) -> bool:
    """Whether an `authorization` header has `key`, compared as slowly as any other."""
    return hmac.compare_digest(_digest(_key_of(authorization)), _digest(key.strip()))


def _key_of(authorization: str) -> str:
    return authorization[len(_SCHEME) :].strip() if authorization.lower().startswith(_SCHEME) else authorization


def load_keyring(flags: Sequence[str] = (), file: Path | None = None) -> Keyring:
    """The keys of the flags --api-key and --api-key-file and of the environment. Raises `InvalidArgument` if one is
    malformed (its place is named, never itself), given twice, or two disagree on a tenant."""
    placed = [(f"--api-key {number}", text) for number, text in enumerate(flags, 1)]
    if file is not None:
        try:
            lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"cannot read --api-key-file {file}: {error.__class__.__name__}") from None
        placed += [(f"{file}:{number}", text) for number, text in enumerate(lines, 1) if text]
    variable = os.environ.get(ENVIRONMENT, "").replace(",", " ").split()
    placed += [(f"{ENVIRONMENT} {number}", text) for number, text in enumerate(variable, 1)]
    keys: dict[str, Tenant] = {}
    weights: dict[str, float] = {}
    for place, text in placed:
        key, tenant = _parse(text, place)
        if key in keys:
            raise InvalidArgument(f"{place} repeats another key")
        if weights.setdefault(tenant.name, tenant.weight) != tenant.weight:
            raise InvalidArgument(f"{place} gives tenant '{tenant.name}' another weight")
        keys[key] = tenant
    return Keyring(keys.items())


def _parse(text: str, place: str) -> tuple[str, Tenant]:
    parts = text.split(":")
    if len(parts) > 3:
        raise InvalidArgument(f"{place} must be key, name:key or name:key:weight, without further colons")
    key = parts[0] if len(parts) == 1 else parts[1]
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidArgument(f"{place} must have a key of printable ASCII characters without spaces")
    # A key without a name is a tenant all the same; what it is called tells nothing of the key.
    name = parts[0] if len(parts) > 1 else f"key-{_digest(key).hex()[:8]}"
    if not name:
        raise InvalidArgument(f"{place} has an empty name")
    try:
        weight = float(parts[2]) if len(parts) == 3 else 1.0
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise InvalidArgument(f"{place} must have a weight that is a number above 0")
    return key, Tenant(name, weight)


def _digest(key: str) -> bytes:
    # Equal lengths: comparing them tells not even how long a key is.
    return sha256(key.encode(errors="surrogatepass")).digest()
