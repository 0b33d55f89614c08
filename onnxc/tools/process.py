"""Work in a process of its own: `Worker` starts it, commands it (see `onnxc.tools.messages`), and says how it died."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from onnxc.errors import RunError
from onnxc.tools.messages import Message, packed, read, send

# What this process imports, that one finds too; the working directory is no place to look unless it is one here.
_START = "import sys; module, *sys.path[:] = sys.argv[1:]; __import__(module, fromlist=['main']).main()"


class DiedError(RunError):
    """A worker ended in the middle of its work.

    Args:
        doing: what it was told to do.
        code: its exit status; the number of a signal, negated, where one ended it.
    """

    def __init__(self, doing: str, code: int) -> None:
        self.code = code
        super().__init__(f"the process died while it did {doing!r} ({self.how})")

    @property
    def how(self) -> str:
        """`SIGABRT`, or `exit status 3`"""
        if self.code >= 0:
            return f"exit status {self.code}"
        known = -self.code in [*signal.Signals]  # those of real time have no names but the first and the last
        return signal.Signals(-self.code).name if known else f"signal {-self.code}"


class Worker:
    """A worker process; a context manager that ends it.

    Args:
        environment: variables that it has, and this process does not.
        module: whose `main()` it runs. That of `onnxc.tools.worker` measures an engine.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, module: str = "onnxc.tools.worker") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, module, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C is for this process, which then ends the worker
        )

    def ask(self, do: str, **arguments: Any) -> Message:
        """One command and its answer. Raises RunError for what went wrong on the other side, with the error there as
        its cause, and DiedError where there is no other side any more.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        line, arrays = packed({"do": do, **arguments})
        try:
            send(self._process.stdin, line, arrays)
            answer = read(self._process.stdout)
        except (BrokenPipeError, EOFError):
            raise DiedError(do, self._process.wait()) from None
        except BaseException:  # Ctrl-C, say: whatever comes now would be the answer to another question
            self.kill()
            raise
        if "error" in answer:
            error = answer["error"]
            raise RunError(f"{error['name']}: {error['text']}", cause=_raised(**error))
        return answer

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()

    def close(self, patience: float = 5) -> None:
        """Ends the process; at once if it still works after so many seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already
        try:
            self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(5 if error is None else 0)


def _raised(module: str, name: str, text: str) -> Exception:
    """The other side's exception, in its own class where that takes a text alone."""
    try:
        kind = getattr(builtins if module == "builtins" else import_module(module), name)
        found = kind(text)
    except Exception:  # a class that is nested, is no name of its module, or takes other arguments
        found = None
    return found if isinstance(found, Exception) and str(found) == text else RuntimeError(f"{name}: {text}")
