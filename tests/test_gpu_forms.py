"""Kernels that have several forms, of which sizes choose when a model runs: one model, called with many sizes.

``pytest --target cuda`` runs these on this machine's GPU. Without one a process of its own runs them on a simulated
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.codegen.triton import convolution, matmul, product_tiles, scatter_sorted
from onnxc.codegen.triton.product_tiles import Blocks
from onnxc.planner import operands, recurrences
from tests import targets
from tests.targets import needs_triton
from tests.test_gpu_scatters import f32, in_order, ints, layers, parsed
from tests.test_triton_recurrence import given, network

ROOT = Path(__file__).resolve().parents[1]
on_gpu = pytest.mark.every_target


@needs_triton
def test_these_on_a_simulated_gpu() -> None:
    if targets.is_gpu():
        pytest.skip("they run on the GPU")
    command = [sys.executable, "-m", "pytest", "--target", "simulated", "-q", "-x", "-p", "no:cacheprovider", __file__]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def compiled(patch: pytest.MonkeyPatch, model: Any, limits: dict[Any, dict[str, Any]], **options: Any) -> Any:
    """A model, where these limits are smaller than they are."""
    if not targets.is_gpu():
        pytest.skip("needs a GPU as the target")
    with patch.context() as limited:
        for module, numbers in limits.items():
            for name, number in numbers.items():
                limited.setattr(module, name, number)
        return onnxc.compile(model, cache=False, **options)


@on_gpu
def test_scatters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted or not, and hot places or none; two of them by one index, whose sort outlives what is between them."""
    limits = {operands: {"SORTED": 64}, scatter_sorted: {"PART": 16}}
    model = compiled(monkeypatch, parsed(layers("m")).SerializeToString(), limits)
    for count, places in ((80, 9), (0, 9), (64, 9), (65, 1), (20, 9), (80, 2)):
        x, u, v, z = f32(9, 3), f32(count, 3), f32(count, 7), f32(9, 7)
        i, k = ints(0, places, count, 1), ints(0, places, count, 1)
        y, w = model(x=x, i=i, k=k, u=u, v=v, z=z).values()
        np.testing.assert_allclose(y, in_order("ScatterND", x, i, u, part=16), 1e-5, 1e-5)
        np.testing.assert_allclose(w, in_order("ScatterND", z, i, v + y.sum(), part=16), 1e-4, 1e-4)
        again = [*model(x=x, i=i, k=k, u=u, v=v, z=z).values()]
        assert [a.tobytes() for a in again] == [y.tobytes(), w.tobytes()]


@on_gpu
@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_recurrences(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """One kernel for all steps, or kernels for each."""
    bytes_ = network(op, "float32", "t", "b", 6, states=True)
    limits = {recurrences: {"LEAST_OPEN": 0, "MOST_OPEN": {"float32": 2000}}}
    model = compiled(monkeypatch, bytes_, limits)
    plain = compiled(monkeypatch, bytes_, {}, fusion=onnxc.FusionOptions(recurrence=False))
    for steps, batch in ((3, 5), (3, 70), (2, 5), (0, 70), (0, 5), (2, 0)):
        inputs = given(bytes_, t=steps, b=batch)
        for x, y in zip(model(*inputs).values(), plain(*inputs).values(), strict=True):
            np.testing.assert_allclose(x, y, 1e-6, 1e-6)


@on_gpu
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_products(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Tiles for few rows and for many, with what follows them."""
    dtype = np.float32 if kind == "float" else np.float16
    inputs = f"{kind}[m,256] x, {kind}[256,900] w, {kind}[m,900] r"
    text = f"g ({inputs}) => ({kind}[m,900] y) {{ p = MatMul(x, w)  y = Add(p, r) }}"
    limits = {product_tiles: {"FEW_ROWS": (16,)}}
    model = compiled(monkeypatch, parsed(text).SerializeToString(), limits)
    for rows in (0, 1, 17, 513):
        x, w, r = (v.astype(dtype) for v in (f32(rows, 256), f32(256, 900) / 16, f32(rows, 900)))
        (y,) = model(x, w, r).values()
        wanted = (x.astype(np.float64) @ w.astype(np.float64)).astype(dtype) + r
        np.testing.assert_allclose(y, wanted, 2e-3 if kind == "float16" else 1e-5, 2e-2 if kind == "float16" else 1e-5)


@on_gpu
@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("w", ["256,40", "2,256,40"])
def test_products_of_three_forms(monkeypatch: pytest.MonkeyPatch, kind: str, w: str) -> None:
    """At the most rows of each, and above; sums in parts, but in a batch."""
    dtype = np.float32 if kind == "float" else np.float16
    flat = w == "256,40"
    rows = "m,3" if flat else "2,m"
    text = f"g ({kind}[{rows},256] x, {kind}[{w}] w, {kind}[{rows},40] r) => ({kind}[{rows},40] y)"
    text += " { p = MatMul(x, w)  y = Add(p, r) }"
    few = [(Blocks(16, 32, 32, 2, 3, split=4 if flat else 1), 6), (Blocks(32, 16, 64, 4, 3), 24)]
    limits = {matmul: {"for_few_rows": lambda facts: few}}
    model = compiled(monkeypatch, parsed(text).SerializeToString(), limits)
    assert model.source.count("tl.dot(a, b") == 3
    for m in (0, 1, 2, 3, 8, 9, 24, 25, 50, 400):
        lead = (m, 3) if flat else (2, m)
        x, r = (f32(*lead, n).astype(dtype) for n in (256, 40))
        v = (f32(*map(int, w.split(","))) / 16).astype(dtype)
        (y,) = model(x, v, r).values()
        wanted = (x.astype(np.float64) @ v.astype(np.float64)).astype(dtype) + r
        np.testing.assert_allclose(y, wanted, 2e-3 if kind == "float16" else 1e-5, 2e-2 if kind == "float16" else 1e-5)


@on_gpu
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_convolutions(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Tiles for few images and for many."""
    dtype = np.float32 if kind == "float" else np.float16
    text = f"""g ({kind}[b,32,4,4] x, {kind}[96,32,3,3] w, {kind}[b,96,4,4] r) => ({kind}[b,96,4,4] y) {{
        c = Conv<pads = [1, 1, 1, 1]>(x, w)  y = Add(c, r) }}"""
    limits = {product_tiles: {"FEW_ROWS": (16,)}, convolution: {"UNKNOWN": (128, 1)}}
    model = compiled(monkeypatch, parsed(text).SerializeToString(), limits)
    for images in (0, 1, 2, 9, 20):
        x, w, r = (v.astype(dtype) for v in (f32(images, 32, 4, 4), f32(96, 32, 3, 3) / 16, f32(images, 96, 4, 4)))
        (y,) = model(x, w, r).values()
        padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        wanted = np.einsum("bchwij,ocij->bohw", windows, w.astype(np.float64)).astype(dtype) + r
        np.testing.assert_allclose(y, wanted, 2e-3 if kind == "float16" else 1e-5, 2e-2 if kind == "float16" else 1e-5)
