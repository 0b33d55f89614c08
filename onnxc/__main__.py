"""Where the command line starts: `onnxc`, which is `python -m onnxc`."""

from __future__ import annotations

import os
import signal
from types import FrameType

_IMPORTING = "<frozen importlib"  # the files of Python's own import system


def interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: a KeyboardInterrupt, but the end at once while something is imported.

    There is nothing to put away then, and extensions end otherwise: onnx's and onnxruntime's abort, or crash, where an
    exception comes out of what their initialisation calls.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """The entry point. Ctrl-C is left alone where whoever started the process has it ignored, or handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    try:
        from onnxc.cli import main as run  # an interrupt of this import is one of a command, too

        run()
    except KeyboardInterrupt:  # between the import and the command, which has its own way
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
