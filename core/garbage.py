"""Python's cycle collector in processes that serve: what lasts is not looked at again and again.

Nearly everything is freed as its last reference goes; the collector is for cycles, which stay rare while serving, and
each of its rounds walks over what it could not free before.
"""

import gc

_THRESHOLDS = (20_000, 50, 100)
"""Objects that a young generation may gain before it is looked at, and how many rounds of it the older ones wait."""


def settle() -> None:
    """From now on it serves: leave alone what there is, and look less often."""
    gc.set_threshold(*_THRESHOLDS)
    collect()


def collect() -> None:
    """Free every cycle that nothing holds, those among what was left alone too."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
