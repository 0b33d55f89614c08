"""The headers of generated programs: each stands alone, and a program includes no more than it needs."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from onnxc.codegen.cpp.headers import INCLUDE, defined, headers_of
from onnxc.ir import dtypes
from onnxc.ir.types import TensorType
from onnxc.passes.prepare import prepare
from onnxc.primitives.builder import Builder
from onnxc.runtime.cpu import JUMPS_APART, level
from onnxc.runtime.library import NATIVE
from onnxc.runtime.toolchain import find_compiler
from tests.compile_harness import generate
from tests.native_library import native_library

HEADERS = sorted(path.name for path in INCLUDE.glob("*.h"))
OF_FUNCTIONS = sorted({header for headers in defined().values() for header in headers})


def included(name: str) -> set[str]:
    """A header, and those that it includes."""
    found, left = set[str](), [name]
    while left:
        one = left.pop()
        if one not in found and (INCLUDE / one).is_file():
            found.add(one)
            left += re.findall(r'^#include "(.*)"', (INCLUDE / one).read_text(), re.MULTILINE)
    return found


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_includes_what_it_names(name: str) -> None:
    """All definitions of a function: with some of them, a call might take one that is meant for other types."""
    code = re.sub(r"//.*|\box_(get|put)\(", "", (INCLUDE / name).read_text())  # these two: for types of their callers
    assert headers_of(code) <= included(name)


def test_a_definition_is_in_the_table() -> None:
    table = defined()
    assert {"v_exp", "v_mod", "v_quantize", "h_sum", "ox_half", "ox_index", "v_threefry", "v_sel"} <= set(table)
    assert table["v_exp"] == ("vexp.h",) and not headers_of("exp(v_unknown)")


def test_each_header_of_functions_compiles_alone(tmp_path: Path) -> None:
    """In one run of the compiler."""
    files = [tmp_path / f"{k}.cpp" for k in range(len(OF_FUNCTIONS))]
    for file, name in zip(files, OF_FUNCTIONS, strict=True):
        file.write_text(f'#include "{name}"\n')
    flags = [*(flag for flag in level().flags if flag != JUMPS_APART), f"-I{INCLUDE}", f"-I{NATIVE}"]
    flags += ["-std=c++17", "-fsyntax-only", "-Wno-psabi"]
    done = subprocess.run([*find_compiler().command, *flags, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_program_has_the_headers_of_its_functions() -> None:
    b = Builder()
    x, k = b.input(TensorType(dtypes.float32, (9,))), b.input(TensorType(dtypes.int64, (9,)))
    program = generate(prepare(b.graph([b.exp(x), b.one("mod", k, b.constant(np.array([3])))])), None, level())
    found = re.findall('#include "(.*)"', program.source)
    assert found == ["divisors.h", "program.h", "vec.h", "vexp.h", "vint.h"]


def test_a_divisor_is_exact(session_folder: Path) -> None:
    """By a product where both numbers have 32 bits at most, else by the machine's own division."""
    source = """#include "vec.h"
    extern "C" void divide(const i64 *n, const i64 *d, i64 *q, i64 *r, i64 count) {
      for (i64 k = 0; k < count; k++) { const ox_divisor by(d[k]); q[k] = by.quotient(n[k]); r[k] = by.rest(n[k]); }
    }"""
    library = ctypes.CDLL(str(native_library(session_folder, source, ["-DONNXC_VL=4"])))
    ends = [1, 2, 3, 7, 10, 641, 65535, 65537, 2**31 - 1, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 7]
    rng = np.random.default_rng(0)
    sizes = np.array([*ends, *rng.integers(1, 2**32, 300), *rng.integers(1, 1000, 300)])
    near = (sizes[:, None] * rng.integers(0, 2**31, 8) % 2**62 // sizes[:, None] * sizes[:, None]).ravel()
    numbers = np.array([*ends, 0, *rng.integers(0, 2**32, 40), *rng.choice(near, 300), *(rng.choice(near, 300) + 1)])
    n, d = (np.ascontiguousarray(v.ravel()) for v in np.meshgrid(np.abs(numbers), sizes))
    quotient, rest = np.empty_like(n), np.empty_like(n)
    library.divide(*(ctypes.c_void_p(v.ctypes.data) for v in (n, d, quotient, rest)), ctypes.c_int64(n.size))
    np.testing.assert_array_equal(quotient, n // d)
    np.testing.assert_array_equal(rest, n % d)
