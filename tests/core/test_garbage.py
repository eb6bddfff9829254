"""The cycle collector while serving; each case in a process of its own."""

import subprocess
import sys

CASE = """
import gc, weakref
from charonia.core import garbage

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node), node

seen, kept = cycle()
garbage.settle()
assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] > 700
assert not any(each is kept for each in gc.get_objects()), "it is still looked at"
del kept
gc.collect()
assert seen() is not None
garbage.collect()
assert seen() is None, "a cycle from before was not freed"
"""


def test_what_lasts_is_left_alone_and_still_freed_when_it_goes() -> None:
    subprocess.run([sys.executable, "-c", CASE], check=True, timeout=60)
