"""`python -m can_train`, and the console script. From here on Ctrl-C ends the process in one line, also in the seconds
that imports take.
"""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Final

_STATUS: Final = 128 + signal.SIGINT


def main() -> None:
    """Entry point of the console script."""
    # Not where the signal is ignored: in the background of a shell, under nohup.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # The script `can-train` keeps the signal waiting until somebody handles it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        from can_train.cli.main import run

        run()
    finally:
        # Python's own end prints the exceptions of handlers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the process with 130, after a line about it."""
    # On a terminal, `^C` stands in the line, and a bar may have hidden the cursor.
    with suppress(OSError):
        os.write(2, b"\x1b[?25h\ninterrupted\n" if os.isatty(2) else b"interrupted\n")
    while frame is not None:
        # Imports turn an exception into another one, and Python prints an exception in `__del__` and goes on.
        if frame.f_code.co_filename.startswith("<frozen importlib.") or frame.f_code.co_name == "__del__":
            os._exit(_STATUS)
        frame = frame.f_back
    raise SystemExit(_STATUS)


if __name__ == "__main__":
    main()
