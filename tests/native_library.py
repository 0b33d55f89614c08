"""Kernels of `codegen/cpp/include`, compiled alone: one library for all workers, since some take a minute."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from onnxc.codegen import cpp
from onnxc.runtime.toolchain import FUSED
from tests import compiled_before

INCLUDE = Path(cpp.__file__).parent / "include"
FLAGS = ("-O2", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", FUSED, "-fPIC", "-shared", "-Wno-psabi")


def native_library(session_folder: Path, source: str, flags: Sequence[str], after: Sequence[str] = ()) -> Path:
    """The shared library of a source; `after` are the flags that come behind it. Whoever asks first compiles it.

    Skips the test where there is no g++, or it does not know the CPU that a flag names.
    """
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    command = ["g++", *FLAGS, *flags, f"-I{INCLUDE}"]
    digest = hashlib.sha256(repr((command, after, source)).encode()).hexdigest()[:16]
    text, library = (session_folder / f"native-{digest}.{suffix}" for suffix in ("cpp", "so"))
    with (session_folder / f"native-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            text.write_text(source)
            made = library.with_suffix(".new")

            def compiled() -> bytes:
                built = subprocess.run(
                    [*command, "-o", str(made), str(text), *after], capture_output=True, text=True, check=False
                )
                if built.returncode and "-march" in built.stderr:
                    pytest.skip(f"the compiler does not know {' '.join(flags)}")
                assert built.returncode == 0, built.stderr
                return made.read_bytes()

            before = compiled_before.folder()
            made.write_bytes(before.native(source, command, after, compiled, INCLUDE) if before else compiled())
            made.rename(library)
    return library
