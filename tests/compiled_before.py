"""What an earlier run of the tests compiled of the same text. Of a run's time most is the C++ compiler's.

An entry's key is all that tells one compile from another: sources, the content of the headers, flags, the compiler, the
module that calls it, what it reads in the environment, and this machine's features. `make test KEEP=1` reads and writes
them; without it, and in tests of compiling itself (the fixture `fresh_cache`), everything is compiled.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from onnxc.compiler import machine_code
from onnxc.runtime import library, toolchain
from onnxc.runtime.cache import Cache, digest
from onnxc.runtime.cpu import machine_features

FOLDER = Path(__file__).parent.parent / "build" / "compiled"
LIMIT = 1 << 30  # bytes: of a whole run there are some hundred millions
READ_BY_COMPILERS = (
    "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX",
)  # fmt: skip
_TOLD = frozenset({"headers", "include", "flags", "link_flags", "objects", "bare", "compiler", "jobs", "timeout"})


class CompiledBefore:
    """`compile_library` and `compile_object` of the toolchain, by way of a folder."""

    def __init__(self, root: Path) -> None:
        self._cache = Cache(root, limit=LIMIT)

    def library(self, sources: Sequence[toolchain.Source], **options: Any) -> bytes:
        """As `compile_library`."""
        key = _key("library", sources, options)
        return self.kept(key, lambda: toolchain.compile_library(sources, **options))

    def object(self, source: toolchain.Source, **options: Any) -> bytes:
        """As `compile_object`."""
        return self.kept(_key("object", [source], options), lambda: toolchain.compile_object(source, **options))

    def native(
        self, source: str, command: Sequence[str], after: Sequence[str], make: Callable[[], bytes], include: Path
    ) -> bytes:
        """What g++ makes of a source, called as a command with these arguments after the source."""
        info = os.stat(os.path.realpath(shutil.which(command[0]) or command[0]))
        key = digest("native", source, list(command), list(after), [info.st_size, info.st_mtime_ns])
        return self.kept(digest(key, folder_digest(include), surroundings()), make)

    def kept(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The bytes of a key; made, where there are none that are whole."""
        known = self._cache.read(key) or b""
        if known[:32] == sha256(known[32:]).digest():
            return known[32:]
        made = make()
        self._cache.put(key, [sha256(made).digest(), made])
        return made

    @contextmanager
    def installed(self) -> Iterator[None]:
        """All compiles of this process go by way of the folder."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine_code, "compile_library", self.library)
            patch.setattr(machine_code, "compile_object", self.object)
            patch.setattr(library, "compile_library", self.library)
            yield


@functools.cache
def folder() -> CompiledBefore | None:
    """What earlier runs compiled; None where this one is to compile everything."""
    return CompiledBefore(FOLDER) if os.environ.get("ONNXC_TESTS_KEEP") else None


def compile_anew(patch: pytest.MonkeyPatch) -> None:
    """To its end a test compiles what it compiles."""
    patch.setattr(machine_code, "compile_library", toolchain.compile_library)
    patch.setattr(machine_code, "compile_object", toolchain.compile_object)
    patch.setattr(library, "compile_library", toolchain.compile_library)


def _key(kind: str, sources: Sequence[toolchain.Source], options: dict[str, Any]) -> str:
    assert options.keys() <= _TOLD, f"a key does not say what {sorted(options.keys() - _TOLD)} is"
    compiler = options.get("compiler") or toolchain.find_compiler()
    return digest(
        kind,
        [[source.name, source.text] for source in sources],
        dict(options.get("headers") or {}),
        [folder_digest(path) for path in options.get("include", ())],
        [list(options.get("flags", ())), list(options.get("link_flags", ())), options.get("bare", True)],
        [sha256(made.result()).hexdigest() for made in options.get("objects", ())],
        [compiler.command, compiler.identity],
        surroundings(),
    )


def surroundings() -> list[Any]:
    """What compiles depend on beside what they are given."""
    return [_module_digest(), sorted(machine_features()), [os.environ.get(name) for name in READ_BY_COMPILERS]]


@functools.cache
def _module_digest() -> str:
    return sha256(Path(toolchain.__file__).read_bytes()).hexdigest()


@functools.cache
def folder_digest(folder: Path) -> str:
    """Of the names and contents of a folder's files."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return digest([[path.name, sha256(path.read_bytes()).hexdigest()] for path in files])
