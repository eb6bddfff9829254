"""The hub's end of a link, and how calls that come over it are answered with errors."""

import logging
from collections.abc import Callable

from ..api.http.error_responses import INTERNAL_SERVER_ERROR
from ..core.errors import CharoniaError, SentError
from ..core.native_calls import CONTROL_FLOW
from .link import FrameLink
from .messages import CallFailed, FromWorker, ResponseNotes, ToWorker

log = logging.getLogger(__name__)

HubLink = FrameLink[ToWorker, FromWorker]
"""The hub's end of a link."""


class AnsweredCall:
    """A block that answers the call `key`, if it raises, with that error. `what` failed, for the log; `notes`: told
    beside an error that is meant for the client. No generator, which would take a microsecond of every request."""

    __slots__ = ("_key", "_link", "_notes", "_what")

    def __init__(
        self, link: HubLink, key: int, what: str, notes: Callable[[], ResponseNotes | None] = lambda: None
    ) -> None:
        self._link = link
        self._key = key
        self._what = what
        self._notes = notes

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> bool:
        if error is None or isinstance(error, CONTROL_FLOW):
            return False
        if isinstance(error, CharoniaError):
            self._link.send(CallFailed(self._key, SentError.of(error), self._notes()))
        else:
            log.error("%s", self._what, exc_info=error)
            self._link.send(CallFailed(self._key, SentError.of(INTERNAL_SERVER_ERROR)))
        return True
