"""How many files this process may have open: each connection is one. Knows nothing of connections."""

import logging
import resource

log = logging.getLogger(__name__)

_WANTED = 65536
_WARN_BELOW = 1024


def raise_open_file_limit(enough: int = _WANTED) -> int:
    """Raise the process's own limit to `enough`, or as near as it may; returns what it is then.

    Logs a warning where that is little: beyond it, connections are cut without a word.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    limit = enough if soft == resource.RLIM_INFINITY else soft
    if limit < _WARN_BELOW:
        log.warning("%d files may be open at once, connections included; ulimit -n raises that", limit)
    return limit
