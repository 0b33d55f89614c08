"""From generated source to machine code."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256

from onnxc.codegen.cpp.headers import INCLUDE
from onnxc.codegen.cpp.program import Program
from onnxc.errors import CacheError
from onnxc.fingerprint import code_digest
from onnxc.runtime.cache import Cache, digest
from onnxc.runtime.cpu import Level
from onnxc.runtime.library import NATIVE
from onnxc.runtime.toolchain import Compiler, Runs, Source, compile_library, compile_object, find_compiler

# Headers of which a part is compiled apart from programs (`ONNXC_APART` in vec.h), where the linker can leave out what
# a program does not use.
APART = (
    ("attention.h", "conv.h", "conv_dw.h", "matmul.h", "matmul_strassen.h", "tile.h")
    if sys.platform.startswith("linux")
    else ()
)

_INCLUDED = re.compile(r'^#include "(\w+\.h)"', re.MULTILINE)
_CITED = re.compile(r"^(\s*\{) // [0-9]+: [A-Za-z0-9, ]*$", re.MULTILINE)  # the nodes of a kernel, in a comment

# What takes half of the time where many vectors are read at places that data gives (binary searches in tables, say),
# and gains nothing there.
_MANY_GATHERS = 32
_GATHERING = ("-fno-gcse", "--param=sccvn-max-alias-queries-per-access=50")

_objects: dict[str, bytes] = {}  # of this process


class MachineCode:
    """Makes shared libraries of programs, and one of programs that differ only in the nodes that they cite: branches
    of an If, say. With a cache, that holds for other compiles too: models with other weights share their code.

    What of kernel templates depends on no kernel is compiled once, and linked to each library that uses it.
    """

    def __init__(self, cache: Cache | None = None) -> None:
        self.cache = cache
        self._made: dict[str, bytes] = {}
        self.runs = Runs()

    def of(self, program: Program, cpu: Level) -> bytes:
        """The library of a program."""
        sources = [_CITED.sub(r"\1", text) for text in program.sources]
        return self.library(sources, cpu, bare=not program.units)  # the code of users may need the C++ library

    def library(self, sources: Sequence[str], cpu: Level, bare: bool = True) -> bytes:
        """The library of C++ sources; `bare`: without the C++ library."""
        compiler = find_compiler(self.cache)
        target = [cpu.name, cpu.machine, cpu.flags, sorted(cpu.features)]
        key = digest("library", target, [compiler.identity, code_digest()], not bare, sources)
        if key not in self._made:
            self._made[key] = self._stored(key) or self._compiled(key, sources, cpu, compiler, bare)
        return self._made[key]

    def _stored(self, key: str) -> bytes | None:
        known = (self.cache.read(key) if self.cache is not None else None) or b""
        code = known[32:]
        return code if sha256(code).digest() == known[:32] else None

    def _store(self, key: str, code: bytes) -> None:
        if self.cache is not None:
            with contextlib.suppress(CacheError):  # the disk is full
                self.cache.put(key, [sha256(code).digest(), code])

    def _compiled(self, key: str, sources: Sequence[str], cpu: Level, compiler: Compiler, bare: bool) -> bytes:
        included = _included(sources)
        apart = [name for name in APART if name in included]
        with self._objects(apart, cpu, compiler) as objects:
            code = compile_library(
                [Source(f"part{k}.cpp", text, _own_flags(text, compiler)) for k, text in enumerate(sources)],
                include=[INCLUDE, NATIVE],
                flags=[*cpu.flags, *(["-DONNXC_APART=extern template"] if apart else [])],
                link_flags=[] if bare else ["-Wl,-z,defs"],
                objects=objects,
                bare=bare,
                compiler=compiler,
                runs=self.runs,
            )
        self._store(key, code)
        return code

    @contextlib.contextmanager
    def _objects(self, names: Sequence[str], cpu: Level, compiler: Compiler) -> Iterator[list[Future[bytes]]]:
        """The objects of headers in `APART`: those that are not known are compiled meanwhile."""
        with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool, self.runs.stopped_by_errors():
            yield [self._object(name, cpu, compiler, pool) for name in names]

    def _object(self, name: str, cpu: Level, compiler: Compiler, pool: ThreadPoolExecutor) -> Future[bytes]:
        target = [cpu.name, cpu.machine, cpu.flags, sorted(cpu.features)]
        key = digest("object", target, [compiler.identity, code_digest()], name)

        def made() -> bytes:
            source, include = Source("apart.cpp", _parts_apart(name)), [INCLUDE, NATIVE]
            code = compile_object(source, include=include, flags=cpu.flags, compiler=compiler, runs=self.runs)
            self._store(key, code)
            _objects[key] = code
            return code

        known = _objects.get(key) or self._stored(key)
        if known is None:
            return pool.submit(made)
        _objects[key] = known
        future: Future[bytes] = Future()
        future.set_result(known)
        return future


def _parts_apart(name: str) -> str:
    """What makes the object of a header: those that it includes have their own."""
    included = _INCLUDED.findall((INCLUDE / name).read_text(encoding="utf-8"))
    above = [f'#include "{x}"' for x in included if x in APART]
    others = ["#define ONNXC_APART extern template", *above, "#undef ONNXC_APART"] if above else []
    return "\n".join([*others, "#define ONNXC_APART template", f'#include "{name}"', ""])


def _own_flags(text: str, compiler: Compiler) -> tuple[str, ...]:
    """The flags that a source of a program has beside the others."""
    return _GATHERING if compiler.kind == "gcc" and text.count("ox_indices<") > _MANY_GATHERS else ()


def _included(sources: Sequence[str]) -> set[str]:
    """The headers of templates that sources include, themselves or by others."""
    found: set[str] = set()
    texts = [*sources]
    while texts:
        for name in _INCLUDED.findall(texts.pop()):
            if name not in found and (INCLUDE / name).is_file():
                found.add(name)
                texts.append((INCLUDE / name).read_text(encoding="utf-8"))
    return found


def build(program: Program, cpu: Level, cache: Cache | None = None) -> bytes:
    """The shared library of a program."""
    return MachineCode(cache).of(program, cpu)
