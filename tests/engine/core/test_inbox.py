"""Requests and aborts come to the loop in the order in which clients mean them."""

import threading
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import numpy as np

from charonia.core.request import GuidedDecoding
from charonia.engine.core.grammar_pool import GrammarPool
from charonia.engine.core.inbox import Inbox, NewRequest
from charonia.engine.core.messages import AbortRequests, AddRequest
from charonia.engine.grammars.backend import CompiledGrammar, GrammarMatcher
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.sequence import SequenceSpec


class Compiled:
    warnings = ()
    size = 1

    def matcher(self) -> GrammarMatcher:
        return Mock(spec=GrammarMatcher)


class Backend:
    def compile(self, constraint: GuidedDecoding) -> CompiledGrammar:
        return Compiled()


class MeanwhileAborted(SimpleQueue[Any]):
    """A queue in front of which a client leaves while its request is put in."""

    def __init__(self, inbox: Inbox) -> None:
        super().__init__()
        self.leaving = threading.Thread(target=inbox.accept, args=(AbortRequests([1]),))
        self.taken = threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, NewRequest):
            self.leaving.start()
            self.leaving.join(0.2)
        super().put(item, block, timeout)
        self.taken.set()


def test_an_abort_never_comes_before_its_request() -> None:
    """Else the request would run to its end, and nobody read it."""
    pool = GrammarPool(Backend)
    inbox = Inbox(KVCacheManager(4, 4), grammars=pool)
    queue = inbox._queue = MeanwhileAborted(inbox)
    spec = SequenceSpec(key=1, prompt=np.array([1], np.int32), max_tokens=4)
    inbox.accept(AddRequest(spec, GuidedDecoding("regex", "a")))
    assert queue.taken.wait(30)
    queue.leaving.join(30)
    pool.close()
    assert [type(item) for item in inbox.take_all(busy=True)] == [NewRequest, AbortRequests]
