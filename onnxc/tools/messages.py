"""What a process and its worker say to each other over pipes: a line of JSON, and behind it arrays as they lie in
memory.

    write(stream, {"do": "run", "values": [x, ["a text", None]]})
    read(stream)["values"]                         # the same arrays, in memory of this process

`values` may be arrays of any dtype, and bytes, lists, maps, texts and numbers, as models have them. No more than one
array is copied at a time, and each is let go when it is written: results are not there twice.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import IO, Any

Message = dict[str, Any]


def serve_pipes(make: Callable[[], object]) -> None:
    """Answers what comes on standard input by what `make` gives (see `serve`). The real standard output is kept for
    answers, before any library is imported: nothing that one prints gets between them.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(make(), sys.stdin.buffer, answers)


def serve(state: object, commands: IO[bytes], answers: IO[bytes]) -> None:
    """Answers commands by the methods `do_...` of `state` until there are no more. An error is answered by its class
    and text.
    """
    while True:
        try:
            command = read(commands)
        except EOFError:
            return
        if command["do"] == "quit":
            return
        try:
            answer = packed(getattr(state, f"do_{command.pop('do')}")(**command))
        except Exception as error:  # the other side decides what it means
            kind = type(error)
            answer = packed({"error": {"module": kind.__module__, "name": kind.__qualname__, "text": str(error)}})
        del command  # its arrays
        send(answers, *answer)


def write(stream: IO[bytes], message: Message) -> None:
    """Sends a message. Raises TypeError, with nothing written, for values of other types."""
    send(stream, *packed(message))


def packed(message: Message) -> tuple[bytes, list[Any]]:
    """A message as its line, and the arrays that follow. Its list of values is emptied."""
    arrays: list[Any] = []
    if "values" in message:
        values = message["values"]
        message = {**message, "values": [_described(v, arrays) for v in values]}
        values.clear()
    return json.dumps(message).encode() + b"\n", arrays


def send(stream: IO[bytes], line: bytes, arrays: list[Any]) -> None:
    """Writes what `packed` gave."""
    stream.write(line)
    arrays.reverse()
    while arrays:
        stream.write(_as_bytes(arrays.pop()))
    stream.flush()


def read(stream: IO[bytes]) -> Message:
    """The next message. Raises EOFError where there is none."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError("no message, or a part of one")
    message: Message = json.loads(line)
    if "values" in message:
        message["values"] = [_made(row, stream) for row in message["values"]]
    return message


def _described(value: Any, arrays: list[Any]) -> Any:
    """A value as JSON; arrays of numbers go into `arrays`."""
    import numpy as np  # which a process that is measured may not have

    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return {"texts": [str(text) for text in value.reshape(-1).tolist()], "shape": value.shape}
        arrays.append(value)
        return {"dtype": _name(value.dtype), "shape": value.shape}
    if isinstance(value, (list, tuple)):
        return {"list": [_described(v, arrays) for v in value]}
    if isinstance(value, dict):
        return {"map": [(_plain(k), _plain(v)) for k, v in value.items()]}
    if isinstance(value, bytes):
        arrays.append(value)
        return {"bytes": len(value)}
    return {"plain": _plain(value)}


def _made(row: Message, stream: IO[bytes]) -> Any:
    """A value from its description, and what follows in the stream."""
    import numpy as np  # as above

    if "dtype" in row:
        found = np.empty(row["shape"], _dtype(row["dtype"]))
        if found.nbytes and stream.readinto(_as_bytes(found)) != found.nbytes:  # type: ignore[attr-defined]
            raise EOFError("a part of an array")
        return found
    if "bytes" in row:
        read_bytes = stream.read(row["bytes"])
        if len(read_bytes) != row["bytes"]:
            raise EOFError("a part of some bytes")
        return read_bytes
    if "texts" in row:
        found = np.empty(len(row["texts"]), object)
        found[:] = row["texts"]
        return found.reshape(row["shape"])
    if "list" in row:
        return [_made(v, stream) for v in row["list"]]
    return dict(row["map"]) if "map" in row else row["plain"]


def _plain(value: Any) -> Any:
    """What JSON has; a number of numpy's as Python's."""
    value = getattr(value, "item", lambda: value)()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _as_bytes(array: Any) -> memoryview:
    import numpy as np  # as above

    if isinstance(array, bytes):
        return memoryview(array)
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data


def _name(dtype: Any) -> str:
    own: str = dtype.str if dtype.isbuiltin != 2 else dtype.name  # those of ml_dtypes have a name alone
    return own


def _dtype(name: str) -> Any:
    if name[0] in "<>|=":
        return name
    import ml_dtypes  # which numpy alone does without

    return getattr(ml_dtypes, name)
