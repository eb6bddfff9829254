"""`charonia rollout`: starts a rollout of a route of a server that runs, and shows how it goes."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter
from rich.console import Console
from rich.status import Status
from rich.text import Text

from ...api.server_client import ServerRefused, check_url, fetch, parse_header
from ...core.errors import InvalidArgument, Unavailable
from .rollout_entry import RolloutState

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LOOKS_EVERY = 1.0
_LOOK_SECONDS = 30.0
_LOAD_SECONDS = 3600.0
_PATIENCE = 300.0
"""Seconds that a server may not answer, because it starts again, say."""


def rollout(
    name: str,
    /,
    *,
    to: str = "",
    steps: str = "1,5,25,100",
    every: str = "5m",
    min_requests: int = 300,
    guard: str = "error_rate < 1 %",
    url: str = "http://localhost:8000",
    header: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    detach: Annotated[bool, Parameter(negative=())] = False,
    status: Annotated[bool, Parameter(negative=())] = False,
    abort: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Bring a new version to more and more of a route's requests, or back, and watch until it has ended; the status is
    0 if the version serves alone then, 1 if not. The server steers it: it goes on if this command is ended.

    Parameters
    ----------
    name
        The route.
    to
        VERSION of the model that the route stands for, or MODEL:VERSION.
    steps
        Per cent of the requests that the version gets, one step after the other; the last is 100.
    every
        How long a step lasts, such as 30s, 5m or 1h; longer if the version has fewer requests.
    min_requests
        Requests of the version that a step lasts for, at least.
    guard
        What must hold, such as 'error_rate < 1 %, p99 < 1.2x, ttft_p95 < 800ms'; x: of what the others have.
    url
        The server.
    header
        A header that the server wants, as NAME: VALUE; may be given several times.
    detach
        Start it, and watch nothing.
    status
        Say how the route's last rollout goes, or ended.
    abort
        End the rollout that runs, and go back.
    """
    if bool(to) + status + abort != 1:
        raise InvalidArgument("nothing to do: say one of --to VERSION, --status and --abort")
    watcher = RolloutWatcher(url, header, name)
    if status or abort:
        return watcher.abort() if abort else watcher.print_status()
    watcher.start(rollout_plan(to, steps, every, min_requests, guard))
    return 0 if detach else watcher.watch()


def rollout_plan(to: str, steps: str, every: str, min_requests: int, guard: str) -> Mapping[str, Any]:
    """The body that starts a rollout, from the command's flags. Raises `InvalidArgument`."""
    duration = _DURATION.fullmatch(every.strip())
    if duration is None:
        raise InvalidArgument(f"--every must be a duration such as 30s, 5m or 1h, got '{every}'")
    try:
        percents = [float(step) for step in steps.split(",")]
    except ValueError:
        raise InvalidArgument(f"--steps must be per cents apart by commas, such as 1,5,25,100, got '{steps}'") from None
    seconds = float(duration[1]) * _UNITS[duration[2] or "s"]
    return {"to": to, "steps": percents, "every": seconds, "min_requests": min_requests, "guard": guard}


class RolloutWatcher:
    """Shows what happens to the rollout of one route, each event once. `headers`: as flags have them.

    Raises `InvalidArgument` if `url` or a header has another form.
    """

    def __init__(self, url: str, headers: Sequence[str], name: str) -> None:
        check_url(url)
        self._headers = {key: value for header in headers for key, value in parse_header(header).items()}
        self._url = f"{url.rstrip('/')}/v2/routes/{quote(name, safe='')}/rollout"
        self._name = name
        self._shown = 0.0
        self._console = Console(highlight=False, soft_wrap=True)

    def start(self, plan: Mapping[str, Any]) -> None:
        """Raises `InvalidArgument` if the server refuses, `Unavailable` if it does not answer."""
        self._show(self._ask(json.dumps(plan).encode()))

    def print_status(self) -> int:
        """Print what there is to say of the last rollout; 0 if it runs or went forward."""
        rollout = self._ask()
        self._show(rollout)
        if rollout["state"] == RolloutState.RUNNING:
            self._console.print(_progress(rollout), markup=False)
            return 0
        return self._end(rollout)

    def abort(self) -> int:
        """Raises as `start`."""
        self._show(self._ask(method="DELETE"))
        return 0

    def watch(self) -> int:
        """Show what happens until the rollout has ended; 0 if it went forward. Raises `Unavailable` if the server does
        not answer for a while."""
        try:
            with self._console.status("") as line:
                rollout = self._wait_for_end(line)
        except KeyboardInterrupt:
            self._console.print(f"the rollout goes on: charonia rollout {self._name} --status, or --abort")
            return 130
        return self._end(rollout)

    def _wait_for_end(self, line: Status) -> Mapping[str, Any]:
        answered = time.monotonic()
        while True:
            try:
                rollout = self._ask()
            except Unavailable as error:
                if time.monotonic() > answered + _PATIENCE:
                    raise
                line.update(Text(f"no answer, asked again: {error.message}"))
            else:
                answered = time.monotonic()
                self._show(rollout)
                if rollout["state"] != RolloutState.RUNNING:
                    return rollout
                line.update(Text(_progress(rollout)))
            time.sleep(_LOOKS_EVERY)

    def _ask(self, body: bytes | None = None, method: str | None = None) -> Mapping[str, Any]:
        try:
            # What changes the rollout may have to wait for a model to be loaded.
            seconds = _LOAD_SECONDS if body or method else _LOOK_SECONDS
            answer: Mapping[str, Any] = json.loads(fetch(self._url, self._headers, body, method, seconds))
        except ServerRefused as error:
            if error.status >= 500 and error.status != 501:
                raise
            raise InvalidArgument(error.reason) from None
        except ValueError as error:
            raise Unavailable(f"{self._url}: {error}") from None
        return answer

    def _show(self, rollout: Mapping[str, Any]) -> None:
        """The events that are new."""
        for event in rollout["events"]:
            if event["at"] > self._shown:
                self._shown = event["at"]
                at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
                self._console.print(f"{at}  {event['text']}", markup=False)

    def _end(self, rollout: Mapping[str, Any]) -> int:
        forward = rollout["state"] == RolloutState.FORWARD
        said = f"{rollout['to']} serves alone" if forward else f"{rollout['to']}: {rollout['state']}"
        self._console.print(f"route {self._name}: {said}", markup=False)
        return 0 if forward else 1


def _progress(rollout: Mapping[str, Any]) -> str:
    step = rollout["step"]
    steps = rollout["steps"]
    return f"step {step + 1} of {len(steps)}, {steps[step]:g} %: {rollout['progress'] or 'begins again'}"
