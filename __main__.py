"""Where `charonia` begins and ends. Imports nothing of it at first: a Ctrl-C is heard from the first moment on."""

import atexit
import errno
import os
import sys

_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    """The `charonia` command."""
    _open_what_was_closed()
    try:
        from .processes import gc_tuning

        gc_tuning.collect_less_often()
        from .engine.core.prepared_core import prepare_core

        prepare_core(sys.argv[1:])
        from .cli.app import app

        status = app()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130  # what a shell makes of SIGINT
    except BrokenPipeError:
        status = _unheard("nobody reads the standard output any more")
    except OSError as error:
        if error.errno not in _FULL:
            raise
        status = _unheard(f"cannot write: {os.strerror(error.errno)}")
    atexit._run_exitfuncs()
    os._exit(status or 0)  # a model that hangs in a thread would hold the interpreter up at its end, or bring it down


def _unheard(why: str) -> int:
    """Say so; the status to exit with. What is left unwritten goes nowhere, or Python would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"charonia: {why}", file=sys.stderr)
    return 1


def _open_what_was_closed() -> None:
    """Standard streams that came closed lead nowhere; else the first sockets would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is its own
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode))  # noqa: SIM115


if __name__ == "__main__":
    main()
