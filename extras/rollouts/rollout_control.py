"""The rollouts of routes: each goes on, or back, by itself, and on from where it was when the server starts again.

A rollout changes its route as requests do; whoever changes that route meanwhile ends it.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from ...core.errors import (
    CharoniaError,
    Conflict,
    InvalidArgument,
    NotFound,
    ServerExiting,
    describe_validation_error,
)
from ...core.extension_contracts import StateStore
from ...core.gateway import Administration
from ...core.metrics import Measurement, Reading
from ...core.request_context import RequestContext
from ...core.traffic import ChangeableRoutes
from ...routing.route import Route
from .rollout import Decision, RolloutPlan, RolloutWatch, pinned, share_of, with_share
from .rollout_entry import RolloutEntry, RolloutRecord, RolloutRecords, RolloutState

log = logging.getLogger(__name__)

_STATE = "rollouts"
_LOOKS_EVERY = 1.0
"""Seconds, while there is a rollout."""


class _RunningRollout:
    """A rollout's watch in its step, the version that it gave its route, and what was decided and is not kept yet."""

    def __init__(self, watch: RolloutWatch, version: int) -> None:
        self.watch = watch
        self.version = version
        self.repeats = 0
        self.due: RolloutRecord | None = None


class RolloutControl:
    """Starts rollouts, and turns them while `running`; lives in one event loop. `state`: where they are kept; without
    it no route can be changed, and so there are none."""

    def __init__(
        self,
        administration: Administration,
        state: StateStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._administration = administration
        self._state = state
        self._clock = clock
        kept = None if state is None else state.read(_STATE, RolloutRecords)
        self._records = dict((kept or RolloutRecords()).rollouts)
        self._any = asyncio.Event()  # a route has, or had, a rollout
        if self._records:
            self._any.set()
        self._running: dict[str, _RunningRollout] = {}
        self._decided: Counter[tuple[str, str]] = Counter()
        # A rollout that begins may have to load a model for minutes: it holds up no other.
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._keeping = asyncio.Lock()
        self._error = ""
        self._changes: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take up what was going on when the server ended, and go on with it during the block. Models are loaded by
        then: what they answer counts from here on."""
        task = asyncio.create_task(self._run(), name="rollouts")
        try:
            yield
        finally:
            for change in (task, *self._changes):
                change.cancel()
            await asyncio.gather(task, *self._changes, return_exceptions=True)

    def request_ended(self, context: RequestContext) -> None:
        """Count a request for a route in the step of its rollout."""
        running = self._running.get(context.route)
        if running is not None and context.end is not None and context.model_found:
            running.watch.observe(context)

    async def _run(self) -> None:
        while True:
            await self._any.wait()
            await self.advance()
            await asyncio.sleep(_LOOKS_EVERY)

    async def advance(self) -> None:
        """Look at each rollout, and do what is due. What cannot be kept on disk is tried again the next time."""
        for name in [name for name, record in self._records.items() if record.state is RolloutState.RUNNING]:
            if self._changing[name].locked():
                continue
            async with self._changing[name]:
                try:
                    await self._advance(name, self._records[name])
                    self._error = ""
                except CharoniaError as error:
                    if error.message != self._error:
                        log.error("the rollout of route '%s' cannot go on: %s", name, error.message)
                    self._error = error.message
                except Exception:
                    log.exception("the rollout of route '%s' cannot go on", name)

    async def _advance(self, name: str, record: RolloutRecord) -> None:
        running = self._running.get(name)
        stranger = self._stranger(name, record, running)
        if stranger:
            text = f"{stranger}, which ends the rollout"
            await self._apply(name, record.after(text, state=RolloutState.SUPERSEDED, reason=text))
        elif running is None:
            await self._apply(name, record.after(f"the server has started again: {_step(record)}"))
        else:
            running.due = running.due or self._decide(name, record, running)
            if running.due is not None:
                await self._apply(name, running.due)
            elif running.watch.repeats > running.repeats:
                self._decided[name, "again"] += 1
                running.repeats = running.watch.repeats
                record = record.after(f"again {_step(record)}: {running.watch.doubt}")
                await self._keep(name, record)
                _tell(name, record)

    def _stranger(self, name: str, record: RolloutRecord, running: _RunningRollout | None) -> str:
        """Who else has changed the route; empty for nobody."""
        try:
            route, version = self._route(name)
        except NotFound as error:
            return error.message
        own = record.is_own(route) if running is None else running.version == version
        return "" if own else f"route '{name}' was changed by {self._routes.entry(name).changed_by}"

    def _decide(self, name: str, record: RolloutRecord, running: _RunningRollout) -> RolloutRecord | None:
        """The record as it is to be from now on; None for no change."""
        decision, reason = running.watch.decide(self._clock())
        if decision is Decision.WAIT:
            return None
        self._decided[name, "on" if decision is Decision.GO_ON else "back"] += 1
        if decision is Decision.GO_BACK:
            return record.after(f"back after {_step(record)}: {reason}", state=RolloutState.BACK, reason=reason)
        if record.step + 1 == len(record.plan.steps):
            text = f"{record.plan.to.label} serves alone: {reason}"
            return record.after(text, state=RolloutState.FORWARD, reason=reason)
        on = msgspec.structs.replace(record, step=record.step + 1)
        return on.after(f"on to {_step(on)}: {reason}")

    async def _apply(self, name: str, record: RolloutRecord, expect: int | None = None) -> None:
        """Make the route what a record says, and keep that. May be done again, if it raises."""
        route = record.route
        running = self._running.get(name)
        version = 0
        if route is not None:
            version = await self._put(name, route, f"the rollout to {record.plan.to.label}", expect)
            if running is not None:
                running.version = version
        runs = record.state is RolloutState.RUNNING
        await self._keep(name, record if runs else msgspec.structs.replace(record, ended_at=time.time()))
        _tell(name, record)
        self._running.pop(name, None)
        if runs:
            watch = RolloutWatch(record.plan, record.step, self._clock())
            self._running[name] = _RunningRollout(watch, version)

    @property
    def _routes(self) -> ChangeableRoutes:
        return self._administration.route_control

    def _route(self, name: str) -> tuple[Route, int]:
        """A route as it is served, and its version. Raises `NotFound`."""
        entry = self._routes.entry(name)
        return msgspec.convert(entry.route, Route), entry.version

    async def _put(self, name: str, route: Route, who: str, expect: int | None = None) -> int:
        """Serve a route from now on; its version. Raises as `ChangeableRoutes.put_document`."""
        return (await self._routes.put_document(name, msgspec.to_builtins(route), who, expect)).version

    async def _run_to_completion(self, change: Coroutine[None, None, None]) -> None:
        """Change a rollout for a client: to the end, even if the client leaves meanwhile. Raises `ServerExiting` if the
        server exits before."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ServerExiting from None
            raise

    async def _keep(self, name: str, record: RolloutRecord | None) -> None:
        """Keep a route's record, or None. Raises `Internal`."""
        async with self._keeping:
            known = {**self._records, name: record}
            routes = {entry.name for entry in self._routes.entries()}
            kept = {
                known_name: other
                for known_name, other in known.items()
                if other is not None and (other.state is RolloutState.RUNNING or known_name in {name, *routes})
            }
            if self._state is not None:
                await asyncio.to_thread(self._state.write, _STATE, RolloutRecords(kept))
            self._records = kept
            self._any.set()
            self._decided = Counter({key: count for key, count in self._decided.items() if key[0] in kept})

    # For endpoints

    def rollout(self, name: str) -> RolloutEntry:
        """The last rollout of a route. Raises `NotFound` if there was none."""
        record = self._records.get(name)
        if record is None:
            self._routes.entry(name)
            raise NotFound(f"route '{name}' has had no rollout", field="name")
        running = self._running.get(name)
        plan = record.plan
        return RolloutEntry(
            name,
            plan.to.label,
            record.state,
            record.step,
            plan.steps,
            "" if running is None else running.watch.progress(self._clock()),
            record.reason,
            msgspec.to_builtins(plan),
            record.started_by,
            record.began_at,
            record.ended_at,
            record.events,
        )

    async def start(self, name: str, document: Any, who: str) -> RolloutEntry:
        """Begin a rollout of a route. `document`: its plan in JSON; `who` is told in the log.

        Raises:
            NotFound: no such route or version.
            InvalidArgument: it is no plan, or one for which the route would be refused.
            Conflict: the route has one already, or was changed at the same time.
            CharoniaError: as `ChangeableRoutes.put_document`, or it cannot be kept.
        """
        if not isinstance(document, dict):
            raise InvalidArgument("the rollout must be an object", field="to")
        await self._run_to_completion(self._start(name, document, who))
        return self.rollout(name)

    async def _start(self, name: str, document: Mapping[str, Any], who: str) -> None:
        route, version = self._route(name)
        async with self._changing[name]:
            last = self._records.get(name)
            if last is not None and last.state is RolloutState.RUNNING:
                raise Conflict(f"route '{name}' has a rollout to {last.plan.to.label} already: abort it first")
            plan = _plan(document, route)
            record = RolloutRecord(plan, self._checked(name, route, plan), who, time.time())
            begun = f"begun by {who}: {_step(record)}, every {plan.every:g} s, guard {plan.guard or 'none'}"
            record = record.after(begun)
            await self._keep(name, record)  # before the route changes: a server that ends now goes on with it
            try:
                await self._apply(name, record, version)
            except CharoniaError:
                await self._keep(name, last)
                if self._route(name)[0] != route:
                    await self._put(name, route, who)
                raise

    async def abort(self, name: str, who: str) -> RolloutEntry:
        """End the rollout that a route has, and go back. Raises `NotFound`, `Conflict` if none runs, and `Internal`."""
        await self._run_to_completion(self._abort(name, who))
        return self.rollout(name)

    async def _abort(self, name: str, who: str) -> None:
        self.rollout(name)
        async with self._changing[name]:
            record = self._records[name]
            if record.state is not RolloutState.RUNNING:
                raise Conflict(f"route '{name}' has no rollout that runs")
            if self._stranger(name, record, self._running.get(name)):
                raise Conflict(f"route '{name}' was changed since, which ends its rollout")
            text = f"aborted by {who}"
            await self._apply(name, record.after(text, state=RolloutState.ABORTED, reason=text))
            self._decided[name, "abort"] += 1

    def _checked(self, name: str, route: Route, plan: RolloutPlan) -> Route:
        """The route to go back to. An arm that is "the latest" has the number that it is now: else the rollout's
        version might be it."""
        to = plan.to
        first = plan.steps[0]
        latest = self._latest(to.model)
        if latest is None:
            raise NotFound(f"no version of model '{to.model}' is served, which '{to.label}' is to be of", field="to")
        try:
            before = pinned(route, to.model, latest)
            with_share(before, to, first)
        except ValueError as error:
            raise InvalidArgument(f"route '{name}': {error}") from None
        share = share_of(before, to)
        if share >= first:
            has = f"'{to.label}' has {share:g} % of route '{name}' already"
            more = "there is nothing to roll out" if share >= 100 else f"the first step must be more, not {first:g} %"
            raise InvalidArgument(f"{has}: {more}", field="steps")
        return before

    def _latest(self, model: str) -> int | None:
        """The latest version of a model that is served, None if none is, and for what is no model but a route."""
        if any(entry.name == model for entry in self._routes.entries()):
            return None
        try:
            return int(self._administration.model_config(model).version)
        except CharoniaError:
            return None

    def measure(self) -> Iterator[Measurement]:
        """The share of the new arm of each rollout that runs, and what was decided. Ways back are counted from 0 on:
        so the first one is an increase."""
        decided = Counter(self._decided)
        for name, record in self._records.items():
            if record.state is RolloutState.RUNNING:
                decided[name, "back"] += 0
                labels = {"model": record.plan.to.model, "version": str(record.plan.to.version)}
                percent = record.plan.steps[record.step]
                yield Measurement(labels, (Reading("charonia_rollout_share_ratio", percent / 100, {"route": name}),))
        for (name, decision), count in decided.items():
            labels = {"route": name, "decision": decision}
            yield Measurement(labels, (Reading("charonia_rollout_decisions_total", count),))


def _plan(document: Mapping[str, Any], route: Route) -> RolloutPlan:
    """The plan of a client, whose `to` is MODEL:VERSION, or the version of the model that the route stands for. Raises
    `InvalidArgument`."""
    to = document.get("to")
    model, _, number = to.rpartition(":") if isinstance(to, str) else ("", "", "")
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        raise InvalidArgument(f"to must be 'VERSION' or 'MODEL:VERSION', got {str(to)[:256]!r}", field="to")
    models = {arm.model for arm in route.arms if arm.weight}
    if not model and len(models) > 1:
        several = ", ".join(sorted(models))
        raise InvalidArgument(f"the route stands for several models, {several}: say MODEL:{number}", field="to")
    target = {"model": model or models.pop(), "version": int(number)}
    try:
        return msgspec.convert({**document, "to": target}, RolloutPlan)
    except msgspec.ValidationError as error:
        wrong = describe_validation_error(error)
        place = f"{wrong.path} " if wrong.path else ""
        raise InvalidArgument(f"the rollout: {place}{wrong}", field=wrong.path or "rollout") from None


def _tell(name: str, record: RolloutRecord) -> None:
    """Log what happened last."""
    level = logging.WARNING if record.state in (RolloutState.BACK, RolloutState.SUPERSEDED) else logging.INFO
    log.log(level, "rollout of route '%s' to %s: %s", name, record.plan.to.label, record.events[-1].text)


def _step(record: RolloutRecord) -> str:
    steps = record.plan.steps
    return f"step {record.step + 1} of {len(steps)}, {steps[record.step]:g} %"
