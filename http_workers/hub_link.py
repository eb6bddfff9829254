"""The hub's end of a link, and how calls that come over it are answered with errors."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..api.http.error_responses import INTERNAL_SERVER_ERROR
from ..core.errors import CharoniaError, SentError
from ..core.native_calls import CONTROL_FLOW
from .link import FrameLink
from .messages import CallFailed, FromWorker, ResponseNotes, ToWorker

log = logging.getLogger(__name__)

HubLink = FrameLink[ToWorker, FromWorker]
"""The hub's end of a link."""


@contextmanager
def answering(
    link: HubLink, key: int, what: str, notes: Callable[[], ResponseNotes | None] = lambda: None
) -> Iterator[None]:
    """Answer the call `key` with the error that the block raises, if it does. `what` failed, for the log; `notes`: told
    beside an error that is meant for the client."""
    try:
        yield
    except CharoniaError as error:
        link.send(CallFailed(key, SentError.of(error), notes()))
    except CONTROL_FLOW:
        raise
    except BaseException:
        log.exception("%s", what)
        link.send(CallFailed(key, SentError.of(INTERNAL_SERVER_ERROR)))
