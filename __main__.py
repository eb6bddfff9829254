"""Where `charonia` begins and ends. Imports nothing of it at first: a Ctrl-C is heard from the first moment on."""

import os
import sys


def main() -> None:
    """The `charonia` command."""
    _open_what_was_closed()
    try:
        from .cli.app import app

        status = app()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130  # what a shell makes of SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain once more at its end
        print("charonia: nobody reads the standard output any more", file=sys.stderr)
        status = 1
    sys.exit(status)


def _open_what_was_closed() -> None:
    """Standard streams that came closed lead nowhere; else the first sockets would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is its own
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode))  # noqa: SIM115


if __name__ == "__main__":
    main()
