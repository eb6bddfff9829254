"""Errors of requests that were made for another request, as that one's client sees them."""

from ..core.errors import CharoniaError


def first_error(error: BaseException) -> BaseException:
    """The first error of a group, of tasks that failed side by side; another error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def with_model_name(model: str, error: CharoniaError) -> CharoniaError:
    """The same error, saying for which model it was asked: `model` is its kind and name."""
    error.message = f"in {model}, {error.message}"
    error.args = (error.message,)
    return error
