"""A panic of a library in Rust is no `Exception`; as one of ours it says what failed."""

import asyncio

import pytest

from charonia.core.errors import Internal
from charonia.core.native_calls import CONTROL_FLOW, NativeCall


class PanicException(BaseException):
    """As pyo3's."""


def test_a_panic_becomes_an_error_that_says_what_failed() -> None:
    told = r"^the library failed: PanicException: index out of bounds$"
    with pytest.raises(Internal, match=told), NativeCall("the library failed"):
        raise PanicException("index out of bounds")


def test_so_does_an_error_of_no_class_of_its_own() -> None:
    with pytest.raises(Internal, match=r"^the library failed: no unknown token$"), NativeCall("the library failed"):
        raise Exception("no unknown token")


@pytest.mark.parametrize("kind", [*CONTROL_FLOW, asyncio.CancelledError, ValueError, TypeError])
def test_others_pass(kind: type[BaseException]) -> None:
    with pytest.raises(kind), NativeCall("the library failed"):
        raise kind


def test_a_long_reason_is_cut() -> None:
    with pytest.raises(Internal) as failed, NativeCall("it failed"):
        raise PanicException("x" * 100_000)
    assert len(failed.value.message) < 1000
