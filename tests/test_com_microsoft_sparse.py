"""SparseAttention, WordConvEmbedding and MurmurHash3 of com.microsoft against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import onnxc
from onnxc.errors import ModelError
from tests.ops_harness import Case, actual, build, check, feeds

rng = np.random.default_rng(29)
HEADS, KV, SIZE, ROOM, BLOCK = 4, 2, 16, 64, 16
F, I32 = np.float32, np.int32


def f32(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(F)


def layouts(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks below the diagonal, and the diagonal, as beginnings of rows and as columns."""
    n = ROOM // BLOCK
    chosen = np.tril(rng.random((count, n, n)) < 0.5) | np.eye(n, dtype=bool)
    rows = np.pad(chosen.sum(2).cumsum(1), ((0, 0), (1, 0))).astype(I32)
    columns = np.full((count, rows.max()), -1, I32)
    for row, layout in zip(columns, chosen, strict=True):
        found = np.nonzero(layout)[1]
        row[: len(found)] = found
    return rows, columns


def sparse(new: list[np.ndarray | None], caches: list[np.ndarray], blocks: Any, lengths: list[int], more: Any) -> Case:
    inputs = [*new, *caches, *blocks, np.array(max(lengths), I32), np.array(lengths, I32), *more]
    attrs = {"num_heads": HEADS, "kv_num_heads": KV, "sparse_block_size": BLOCK, "do_rotary": int(bool(more))}
    return Case("SparseAttention", inputs, attrs, domain="com.microsoft", outputs=3, const=[7], dynamic=False)


def right(case: Case) -> list[np.ndarray]:
    """What onnxruntime gives, whose caches are written in place."""
    session = ort.InferenceSession(build(case, False).SerializeToString(), providers=["CPUExecutionProvider"])
    kept = {k: v.copy() for k, v in feeds(case).items()}
    given = {k: ort.OrtValue.ortvalue_from_numpy(v) for k, v in kept.items()}
    binding = session.io_binding()
    for name, value in given.items():
        binding.bind_ortvalue_input(name, value)
    outputs = [o.name for o in session.get_outputs()]
    binding.bind_output(outputs[0])
    caches = [k for k, v in kept.items() if v.shape[2:] == (ROOM, SIZE)]
    for output, name in zip(outputs[1:], caches, strict=True):
        binding.bind_ortvalue_output(output, given[name])
    session.run_with_iobinding(binding)
    return [o.numpy().copy() for o in binding.get_outputs()]


@pytest.mark.parametrize(
    ("new", "lengths", "count", "packed", "rotary"),
    [(40, [40, 37], 2, False, True), (1, [40, 37], 2, True, False), (3, [23], 1, False, True)],
)
def test_sparse_attention(new: int, lengths: list[int], count: int, packed: bool, rotary: bool) -> None:
    """Each row as onnxruntime gives it alone: with others that are longer, it reads what it has not written."""
    batch = len(lengths)
    sizes = [HEADS + 2 * KV] if packed else [HEADS, KV, KV]
    given = [f32(batch, new, n * SIZE) for n in sizes] + [None] * (3 - len(sizes))
    caches, blocks = [f32(batch, KV, ROOM, SIZE) for _ in range(2)], layouts(count)
    more = [f32(ROOM, SIZE // 2), f32(ROOM, SIZE // 2)] if rotary else []
    got = actual(sparse(given, caches, blocks, lengths, more), False)
    for i, length in enumerate(lengths):
        fresh = min(new, length)
        alone = [None if x is None else x[i : i + 1, :fresh] for x in given]
        y, *held = right(sparse(alone, [c[i : i + 1] for c in caches], blocks, [length], more))
        np.testing.assert_allclose(got[0][i : i + 1, :fresh], y, 1e-5, 1e-5)
        for a, b in zip(got[1:], held, strict=True):
            np.testing.assert_allclose(a[i : i + 1, :, :length], b[:, :, :length], 1e-6, 1e-6)


def test_embeddings_of_characters() -> None:
    words = np.array([[3, 4, 5, 6, 7], [2, 1, 0, 0, 0], [5, 6, 7, 0, 0], [1, 0, 0, 0, 0]], I32)
    weights = [f32(4, 1, 3, 6), f32(4), f32(9, 6)]
    check(Case("WordConvEmbedding", [words, *weights], domain="com.microsoft", const=[1, 2, 3]))
    empty = Case("WordConvEmbedding", [words * 0, *weights], domain="com.microsoft", const=[1, 2, 3])
    assert not actual(empty, False)[0].any()
    with pytest.raises(ModelError, match="do not fit"):
        actual(Case("WordConvEmbedding", [words, *weights], {"embedding_size": 5}, domain="com.microsoft"), False)


@pytest.mark.parametrize("positive", [0, 1])
def test_hashes(positive: int) -> None:
    texts = np.array([["", "a", "ab", "abc"], ["abcd", "abcde", "h\u00e9llo", "\u20ac" * 9]], object)
    numbers = rng.integers(-(2**31), 2**31, (2, 4))
    for x, kind in ((texts, 8), (numbers.astype(I32), 6), (numbers * 12345, 7), (f32(2, 4), 1), (f32(2, 4) * 1e9, 11)):
        x = x.astype(np.float64) if kind == 11 else x
        node = helper.make_node("MurmurHash3", ["x"], ["y"], domain="com.microsoft", positive=positive, seed=77)
        ends = [("x", kind, ["n", "m"]), ("y", 12 if positive else 6, None)]
        info = [helper.make_tensor_value_info(*end) for end in ends]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        made: onnx.ModelProto = helper.make_model(
            helper.make_graph([node], "g", info[:1], info[1:]), opset_imports=opsets, ir_version=8
        )
        session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        got, wanted = onnxc.compile(made)(x=x)["y"], session.run(None, {"x": x})[0]
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
