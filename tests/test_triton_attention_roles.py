"""Attention by warps with roles, on GPUs of sm_90: which keys a tile takes, when it is chosen, and its machine code.

There is no interpreter of Gluon: what these kernels compute is tested on a GPU (`tests/test_cuda_gpu.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.codegen.triton import program as triton_program
from onnxc.codegen.triton.attention_tiles import Facts, candidates
from onnxc.codegen.triton.program import Program
from tests.test_triton_attention import INF, Case, band, needs_triton, normal
from tests.triton_simulator import Request, program_of

LIBRARY = Path(triton_program.__file__).with_name("library_roles.py")


def laid_out(queries: int, keys: int, depth: int, shared: int = 1, heads: int = 2) -> Case:
    q = normal(1, heads * shared, queries, depth)
    return Case(q, *(normal(1, heads, keys, depth) for _ in range(2)))


def with_roles(case: Case, which: str = "roles=") -> tuple[Program, str]:
    """The program with the first such candidate, and its name."""
    data = case.model().SerializeToString()
    _, program = program_of(Request(data, [], architecture=90))
    (choice,) = (c.choice for c in program.calls if c.choice)
    number = next(k for k, name in enumerate(choice.candidates) if which in name)
    _, program = program_of(Request(data, [], architecture=90, candidate=number))
    return program, choice.candidates[number]


def placed(program: Program, tiles: int, numbers: dict[int, int], programs: int = 3) -> list[tuple[Any, ...]]:
    """What the kernel's own functions say of each tile, program by program."""
    (text,) = program.kernels.values()
    parts = [re.search(rf"def {name}.*?\n\n", text, re.DOTALL) for name in ("ox_own_span", "ox_own_place")]
    shared = re.findall(r"def ox_share.*?\n\n", LIBRARY.read_text() + "\n", re.DOTALL)
    gl = SimpleNamespace(maximum=max, minimum=min, num_programs=lambda _: programs)
    names: dict[str, Any] = {"gl": gl}
    exec("".join([*shared, *(part.group() for part in parts if part)]), names)
    found = []
    for pid in range(programs):
        gl.program_id = lambda _, pid=pid: pid
        found += [names["ox_own_place"](tile, numbers) for tile in range(*names["ox_own_span"]({0: tiles, **numbers}))]
    return found


@needs_triton
@pytest.mark.parametrize(
    ("queries", "keys", "depth", "lower", "upper"),
    [
        (300, 500, 128, None, None),
        (512, 512, 128, None, 0),
        (500, 500, 64, None, 0),
        (300, 700, 64, None, 400),
        (600, 400, 128, None, -9),
        (600, 500, 64, -130, 40),
        (600, 300, 128, 20, None),
    ],
)
@pytest.mark.parametrize("which", ["roles=1", "roles=2"])
def test_which_keys_a_tile_takes(
    queries: int, keys: int, depth: int, lower: int | None, upper: int | None, which: str
) -> None:
    """All that a row sees are in its blocks, and the blocks that are not tested have no others."""
    case = laid_out(queries, keys, depth)
    if (lower, upper) != (None, None):
        case.masked(band(queries, keys, lower, upper, -INF), constant=True)
    program, name = with_roles(case, which)
    rows, step = (int(x) for x in re.findall(r"(?:rows|keys)=(\d+)", name))
    tiles = 2 * -(-queries // rows)
    apart = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    seen = (apart >= (-queries if lower is None else lower)) & (apart <= (keys if upper is None else upper))
    found = placed(program, tiles, {})
    assert sorted((row0, out) for row0, *_, out in found) == sorted(
        (row0, head * queries * depth) for head in range(2) for row0 in range(0, queries, rows)
    )
    for row0, start, blocks, tested, q_at, k_at, v_at, out in found:
        assert q_at == k_at == v_at == (out // (queries * depth),) and 0 <= start < keys and blocks >= 1
        own = seen[row0 : row0 + rows]
        assert not own[:, :start].any() and not own[:, start + blocks * step :].any()
        whole = (blocks - tested) * step
        assert 0 <= tested <= blocks and start + whole <= keys and own[:, start : start + whole].all()
        (text,) = program.kernels.values()
        assert "more=True" in text or tested <= 1
        assert "ends=True" in text or start + blocks * step <= keys


@needs_triton
def test_heads_that_share_keys() -> None:
    program, _ = with_roles(laid_out(256, 256, 128, shared=4))
    found = {(q, k, v) for _, _, _, _, q, k, v, _ in placed(program, 16, {})}
    assert found == {((h,), (h // 4,), (h // 4,)) for h in range(8)}


@needs_triton
@pytest.mark.parametrize(
    ("count", "heads", "programs"), [(8, 18, 33), (16, 9, 33), (5, 7, 132), (6, 3, 4), (1, 9, 4), (16, 3, 4)]
)
def test_causal_tiles_are_shared_out(count: int, heads: int, programs: int) -> None:
    """Each is one program's."""
    case = laid_out(128 * count, 128 * count, 128, heads=heads)
    case.masked(band(128 * count, 128 * count, None, 0, -INF), constant=True)
    program, _ = with_roles(case, "rows=128 keys=128 warps=8 stages=2 roles=2")
    found = placed(program, count * heads, {}, programs)
    assert sorted((out, row0) for row0, *_, out in found) == [
        (head * 128 * count * 128, row * 128) for head in range(heads) for row in range(count)
    ]


@needs_triton
def test_what_has_no_roles() -> None:
    """Masks that are read, heads of other sizes, float32, few queries, and everything without an architecture."""
    cases = [
        laid_out(256, 256, 96), laid_out(4, 256, 128), laid_out(256, 256, 128).masked(normal(1, 1, 256, 256), True),
        Case(*(normal(1, 2, 256, 128, dtype="float32") for _ in range(3))), laid_out(256, 256, 128),
    ]  # fmt: skip
    for number, case in enumerate(cases):
        architecture = 90 if number < 4 else 100
        _, program = program_of(Request(case.model().SerializeToString(), [], architecture=architecture))
        (choice,) = (c.choice for c in program.calls if c.choice)
        assert not any("roles" in name for name in choice.candidates)


def test_when_warps_have_roles() -> None:
    def first(queries: int, keys: int, heads: int, depth: int, causal: bool = False) -> int:
        return candidates(Facts(queries, keys, heads, depth, 16, causal, True, True))[0].roles

    assert first(1024, 1024, 64, 128) == first(1024, 1024, 64, 128, True) == first(4096, 4096, 64, 64) == 2
    assert first(1024, 1024, 64, 64) == first(1024, 1024, 64, 64, True) == first(16384, 16384, 16, 128, True) == 2
    assert first(16384, 16384, 16, 128) == 1
    assert first(1024, 1024, 4, 128) == first(512, 512, 64, 64) == 0
    assert first(140, 1024, 900, 128) == 0


@needs_triton
@pytest.mark.parametrize(
    ("queries", "keys", "depth", "shared", "lower", "upper", "rows", "threads"),
    [(512, 512, 128, 1, None, 0, 128, 384), (300, 500, 64, 4, -130, 40, 192, 512)],
)
def test_machine_code(
    queries: int, keys: int, depth: int, shared: int, lower: int | None, upper: int | None, rows: int, threads: int
) -> None:
    from onnxc.codegen.triton.cubin import KernelError, compile_program

    case = laid_out(queries, keys, depth, shared).masked(band(queries, keys, lower, upper, -INF), True)
    program, name = with_roles(case, f"rows={rows} keys=128 warps={rows // 16} stages=2 roles=")
    (image,) = compile_program(program, 90, 1)
    assert image.threads == threads and image.scratch > 0 and image.resident == int("roles=2" in name)
    with pytest.raises(KernelError, match="sm_90"):
        compile_program(program, 100, 1)


@needs_triton
def test_each_architecture_has_its_own() -> None:
    case = laid_out(512, 512, 128, shared=1, heads=40)
    model = onnxc.compile(case.model(), target="cuda:sm_80,sm_90", cache=False)
    assert "sm_90: rows=128 keys=128 warps=8 stages=2 roles=2" in " ".join(str(model.explain()).split())
