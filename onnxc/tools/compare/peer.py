"""The process in which onnxruntime runs, which ends itself over some models that are valid: then that is an error here.

    session = Session("m.onnx", {"level": "disabled"})
    session.run({"x": x})                          # raises DiedError, or RunError for what it raised

One process serves all sessions, from when the first is wanted until this process ends; one that died is followed by
another when there is something to do. Processes that are forked from this one have one of their own.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from onnxc.errors import RunError
from onnxc.tools.messages import Message
from onnxc.tools.process import Worker

SERVED_BY = "onnxc.tools.sessions"


class Peer:
    """The process; it is started by what is asked first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one conversation at a time; not taken twice, so that a finalizer can tell
        self._worker: Worker | None = None
        self._owner = os.getpid()
        self._shut: list[tuple[Worker, int]] = []  # sessions that nobody has any more

    def start(self) -> None:
        """Begins what takes a while: it imports onnxruntime."""
        with self._lock:
            self._started()

    def ask(self, do: str, asked: Worker | None = None, **arguments: Any) -> tuple[Worker, Message]:
        """The process that answered, and its answer. Raises LostError where that is no longer the process `asked`."""
        with self._lock:
            worker = self._started()
            if asked not in (None, worker):
                raise LostError("another process has taken its place")
            self._shut_all(worker)
            return worker, worker.ask(do, **arguments)

    def peak(self) -> int:
        """The most bytes that the process has had; 0 where there is none."""
        with self._lock:
            if self._worker is None:
                return 0
            try:
                return int(self._worker.ask("peak")["bytes"])
            except RunError:  # it has died meanwhile
                return 0

    def shut(self, worker: Worker, session: int) -> None:
        """Lets a session go: now, or with the next question if one is being asked (by this very thread, perhaps)."""
        if self._owner != os.getpid():
            return  # in a process that was forked from the one that talks to this one
        self._shut.append((worker, session))
        if not self._lock.acquire(blocking=False):
            return
        try:
            if worker is self._worker:
                self._shut_all(worker)
        except RunError:
            pass  # it died, and its sessions with it
        finally:
            self._lock.release()

    def end(self) -> None:
        """Ends the process, where there is one, at once: it has nothing to lose. A thread that still waits for an
        answer holds the lock, and is not waited for.
        """
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            if not self._lock.locked():
                worker.close()

    def _started(self) -> Worker:
        if self._worker is not None and not self._worker.alive:
            self._worker.close()
            self._worker = None
        if self._worker is None:
            try:
                self._worker = Worker(module=SERVED_BY)
            except OSError as error:
                raise RunError(f"no process for onnxruntime can be started: {error}") from error
        return self._worker

    def _shut_all(self, running: Worker) -> None:
        while self._shut:
            worker, session = self._shut.pop()
            if worker is running:
                running.ask("shut", session=session)


_peer = Peer()
atexit.register(lambda: _peer.end())


def peer() -> Peer:
    """This process's."""
    return _peer


def _forked() -> None:
    global _peer
    _peer = Peer()


os.register_at_fork(after_in_child=_forked)


class LostError(RunError):
    """A session is gone with its process."""


class Session:
    """A model, open in the process; as long as this object is there. `model` is a path, or a file's bytes.

    Raises RunError for what onnxruntime says, with its own exception as the cause.
    """

    def __init__(self, model: str | bytes, settings: Mapping[str, Any]) -> None:
        given = {"model": model} if isinstance(model, str) else {"values": [model]}
        self._worker, answer = peer().ask("open", settings=settings, place=_place(), **given)
        self._number: int = answer["session"]
        self._inputs: set[str] = set(answer["inputs"])
        weakref.finalize(self, peer().shut, self._worker, self._number).atexit = False

    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """The outputs; inputs that the model does not have are left out."""
        known = {n: a for n, a in given.items() if n in self._inputs}
        arguments = {"session": self._number, "names": list(known), "values": list(known.values())}
        found: list[Any] = peer().ask("run", self._worker, **arguments)[1]["values"]
        return found


def _place() -> str:
    """The working directory, where there is one."""
    try:
        return os.getcwd()
    except OSError:
        return ""
