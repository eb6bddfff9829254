"""An event loop in a thread of its own, for callers of any thread and of any other event loop.

Knows nothing of models.
"""

import asyncio
import os
import queue
import selectors
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Generic, NamedTuple, TypeVar

from ..core.errors import Cancelled, InvalidArgument, ServerExiting, Unavailable

T = TypeVar("T")

_STOP_SECONDS = 60.0
"""How long a stopping program waits for its server's thread."""


class _TurnSelector(selectors.DefaultSelector):
    """A selector that gives `turn`, which the event loop's thread holds, away while it waits."""

    def __init__(self, turn: threading.Lock) -> None:
        super().__init__()
        self._turn = turn

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turn.release()
        try:
            return super().select(timeout)
        finally:
            self._turn.acquire()


class LoopThread:
    """The thread, from `start` to `stop`; it also stops when the interpreter begins to end. A process that was forked
    from this one has none of it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._forked = False
        self._turn = threading.Lock()
        self._gate = threading.RLock()
        """Held to hand something to the loop, so that nothing is handed to one that has stopped. A garbage collection
        may do so while its thread does already."""
        self._open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ident = 0
        self._close: Callable[[], Coroutine[Any, Any, None]] | None = None

    @property
    def running(self) -> bool:
        """Whether it takes calls."""
        return self._open

    def start(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the loop. `close` is run in it by `stop`, when all other tasks have ended."""
        self._close = close
        self._loop = asyncio.SelectorEventLoop(_TurnSelector(self._turn))
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._open = True
        _running.add(self)
        self._thread.start()

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        self._ident = threading.get_ident()
        with self._turn:
            try:
                loop.run_forever()
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.run_until_complete(loop.shutdown_default_executor())
                loop.close()
                _running.discard(self)

    def stop(self, wait: bool = True) -> None:
        """End all that runs in the loop, and the loop; returns when its thread has ended. Without `wait`, which is for
        garbage collections, at once. May be called again."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or self._forked:
            return
        with self._gate:
            was_open, self._open = self._open, False
        if was_open:
            loop.call_soon_threadsafe(self._begin_end)
        if wait and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def forget(self) -> None:
        """Called in a process that was forked from this one, which has no such thread."""
        self._open, self._forked = False, True

    def _begin_end(self) -> None:
        loop = asyncio.get_running_loop()
        self._ending = loop.create_task(self._end())
        self._ending.add_done_callback(lambda _: loop.stop())

    async def _end(self) -> None:
        assert self._close is not None
        others = asyncio.all_tasks() - {asyncio.current_task()}
        requests = {task for task in others if task.get_name() == _REQUEST}
        for task in requests:
            task.cancel(ServerExiting())
        await asyncio.gather(*requests, return_exceptions=True)
        await self._close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Have the loop call something; for any thread. Raises `Unavailable` where it does not run."""
        if not self._open:
            raise self.absence()
        with self._gate:
            if not self._open or self._loop is None:
                raise self.absence()
            self._loop.call_soon_threadsafe(callback, *arguments)

    def absence(self) -> Unavailable:
        """The error of a call that nothing is there to take."""
        if self._forked:
            return Unavailable("the server is another process's: a forked process has to start its own")
        return Unavailable("the server is not started" if self._loop is None else "the server was stopped")

    def call_between_turns(self, wait: bool, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call a function that may touch what belongs to the loop, and waits for nothing, in the calling thread while
        the loop stands still. Without `wait`, None while the loop computes. Raises as `call_soon`."""
        self.check_thread()
        if not self._open:
            raise self.absence()
        if not self._turn.acquire(wait):
            return None
        try:
            if not self._open:  # it was stopped meanwhile
                raise self.absence()
            return function(*arguments)
        finally:
            self._turn.release()

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the loop and wait for its result; an exception in the waiting thread, such as
        KeyboardInterrupt, cancels it."""
        self.check_thread()
        outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        call = _AwaitedCall(make, outcomes.put)
        self.call_soon(call.begin)
        try:
            outcome = outcomes.get()
        except BaseException:
            self._cancel(call)
            raise
        result: T = _unwrap(outcome)
        return result

    async def run_from_loop(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """As `run`, for a caller in another event loop, whose task's cancellation cancels it."""
        self.check_thread()
        future, deliver = _awaited()
        call = _AwaitedCall(make, deliver)
        self.call_soon(call.begin)
        try:
            outcome = await future
        except BaseException:
            self._cancel(call)
            raise
        result: T = _unwrap(outcome)
        return result

    def _cancel(self, call: "_AwaitedCall") -> None:
        with suppress(Unavailable):  # then it has ended
            self.call_soon(call.cancel)

    def check_thread(self) -> None:
        """Raises `InvalidArgument` in the loop's own thread, which must not wait for itself."""
        if threading.get_ident() == self._ident:
            raise InvalidArgument("this would wait for itself: the server's own event loop must not ask the server")


_REQUEST = "in-process request"
"""The name of the tasks that callers wait for."""

_running: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _stop_all() -> None:
    for thread in list(_running):
        thread.stop()


def _forget_all() -> None:
    for thread in list(_running):
        thread.forget()
    _running.clear()


os.register_at_fork(after_in_child=_forget_all)
# At `atexit` it would be too late: the interpreter has ended the executors by then that models unload with.
getattr(threading, "_register_atexit")(_stop_all)  # noqa: B009


class _Outcome(NamedTuple):
    """The end of a call, or of one step of a stream: a value, an error, or `ended` where a stream has no more."""

    value: Any = None
    error: BaseException | None = None
    ended: bool = False


def _unwrap(outcome: _Outcome) -> Any:
    value, error, _ = outcome
    del outcome
    if error is None:
        return value
    try:
        raise error
    finally:
        del error  # its traceback has this frame


def _error_of(error: BaseException) -> BaseException:
    """What the caller is to get of an error in the loop: a cancelled task is `Cancelled`, or the server's exit."""
    if not isinstance(error, asyncio.CancelledError):
        return error
    exiting = next((argument for argument in error.args if isinstance(argument, ServerExiting)), None)
    return exiting or Cancelled("the request was cancelled")


def _awaited() -> "tuple[asyncio.Future[_Outcome], Callable[[_Outcome], None]]":
    """A future of the running loop, and what sets it from another thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Outcome] = loop.create_future()

    def resolve(outcome: _Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    def deliver(outcome: _Outcome) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(resolve, outcome)

    return future, deliver


class _AwaitedCall:
    """A coroutine that a caller waits for; its methods are the loop's to call."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]], deliver: Callable[[_Outcome], None]) -> None:
        self._make, self._deliver = make, deliver
        self._task: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=_REQUEST)
        self._task.add_done_callback(self._end)

    async def _run(self) -> Any:
        return await self._make()  # which may raise: then it has an end, too

    def _end(self, task: "asyncio.Task[Any]") -> None:
        try:
            self._deliver(_Outcome(task.result()))
        except BaseException as error:
            self._deliver(_Outcome(error=_error_of(error)))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class BridgedStream(Generic[T]):
    """A stream of the loop, read by another thread or event loop. The loop goes on with it only when an item is asked
    for, so that a slow reader is one there, too. `close` frees everything; so does the end of the last reference."""

    def __init__(self, thread: LoopThread, make: Callable[[], AsyncGenerator[T, None]]) -> None:
        self._thread = thread
        self._pump = _Pump(make)
        self._ended = False

    def next_item(self) -> T:
        """Wait for the next item. Raises `StopIteration` after the last."""
        self._thread.check_thread()
        outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._ask(outcomes.put)
        return self._take(self._wait(outcomes), StopIteration)

    async def next_awaited(self) -> T:
        """As `next_item`, for a task of another event loop. Raises `StopAsyncIteration` after the last."""
        self._thread.check_thread()
        future, deliver = _awaited()
        self._ask(deliver)
        try:
            await asyncio.wait({future})
        except BaseException:
            self.close()
            raise
        return self._take(future.result(), StopAsyncIteration)

    def _ask(self, deliver: Callable[[_Outcome], None]) -> None:
        if self._ended:
            deliver(_Outcome(ended=True))
        else:
            self._thread.call_soon(self._pump.advance, deliver)

    def _wait(self, outcomes: "queue.SimpleQueue[_Outcome]") -> _Outcome:
        try:
            return outcomes.get()
        except BaseException:
            self.close()
            raise

    def _take(self, outcome: _Outcome, end: type[Exception]) -> T:
        self._ended = self._ended or outcome.ended or outcome.error is not None
        if outcome.ended:
            raise end
        item: T = _unwrap(outcome)
        return item

    def close(self) -> None:
        """Take no more of it: what it computes is cancelled. For any thread; may be called again."""
        self._end(self._pump.cancel)

    def interrupt(self) -> None:
        """Cancel it: its reader gets `Cancelled`. For any thread."""
        self._end(self._pump.interrupt, keep=True)

    def _end(self, how: Callable[[], None], keep: bool = False) -> None:
        if self._ended:
            return
        self._ended = not keep
        with suppress(Unavailable):  # it has ended with the server
            self._thread.call_soon(how)

    def __del__(self) -> None:
        if not self._ended:
            self.close()


class _Pump:
    """The loop's side of a `BridgedStream`."""

    def __init__(self, make: Callable[[], AsyncGenerator[Any, None]]) -> None:
        self._make = make
        self._task: asyncio.Task[None] | None = None
        self._deliver: Callable[[_Outcome], None] | None = None
        self._wanted: asyncio.Future[None] | None = None
        self._outcome: _Outcome | None = None
        """The end, which every later reader gets."""

    def advance(self, deliver: Callable[[_Outcome], None]) -> None:
        """Have the next item delivered."""
        if self._outcome is not None:
            deliver(self._outcome)
            return
        self._deliver = deliver
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=_REQUEST)
            self._task.add_done_callback(self._finish)
        elif self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def _run(self) -> None:
        async with aclosing(self._make()) as items:
            async for item in items:
                deliver, self._deliver = self._deliver, None
                assert deliver is not None
                deliver(_Outcome(item))
                del item
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted

    def _finish(self, task: "asyncio.Task[None]") -> None:
        try:
            task.result()
            self._outcome = _Outcome(ended=True)
        except BaseException as error:
            self._outcome = _Outcome(error=_error_of(error))
        if self._deliver is not None:
            deliver, outcome = self._deliver, self._outcome
            self._outcome = _Outcome(ended=True)  # an error's traceback may lead here
            deliver(outcome)

    def cancel(self) -> None:
        """Its reader has left."""
        self._deliver = None
        self.interrupt()

    def interrupt(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._outcome = _Outcome(error=Cancelled("the request was cancelled"))
