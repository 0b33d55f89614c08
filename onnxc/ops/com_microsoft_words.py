"""onnxruntime's contrib operators of words: embeddings of their characters, and hashes."""

from __future__ import annotations

from onnxc.errors import ModelError, ShapeError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.ops.com_microsoft import MS
from onnxc.ops.common import static_dim
from onnxc.ops.conv import convolve, window_of
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import on_host


@op("WordConvEmbedding", 1, domain=MS)
def word_conv_embedding(
    b: Builder, words: Value, w: Value, bias: Value, table: Value, *, char_embedding_size: int = -1,
    conv_window_size: int = -1, embedding_size: int = -1,
) -> Value:  # fmt: skip
    """Words [n, characters], filled with 0, as the greatest of each filter over their characters [n, filters].

    w [filters, 1, window, size], table [characters, size]. A window lies within the word, but for that of a word which
    is shorter. Of a word without characters all are 0 (onnxruntime leaves that open).
    """
    if words.rank != 2 or w.rank != 4 or table.rank != 2:
        raise ShapeError(f"WordConvEmbedding takes words [n, characters], not {words.t}, {w.t} and {table.t}")
    filters, _, window, size = w.shape
    given = (embedding_size, filters), (conv_window_size, window), (char_embedding_size, size)
    if any(asked not in (-1, found) for asked, found in given) or table.shape[1] != size:
        raise ModelError(f"WordConvEmbedding: its attributes and {table.t} do not fit weights {w.t}")
    kernel = [static_dim(d, "the window of WordConvEmbedding") for d in (window, size)]
    count, length = words.shape
    image = b.reshape(b.gather(table, b.max(b.cast(words, dtypes.int64), 0), 0), (count, 1, length, size))
    y = convolve(b, image, w, window_of(image.shape[2:], kernel, None, None, None, "NOTSET"), 1)
    y = b.tanh(b.add(b.reshape(y, (count, filters, y.shape[2])), b.reshape(bias, (filters, 1))))
    there = b.lt(b.scalar(0, words.dtype), words)
    used = b.reduce("sum", b.cast(there, dtypes.int64), [1], True)
    used = b.where(b.slice(there, 1, 0, 1), used, 0)
    last = b.reshape(b.max(b.sub(used, window), 0), (count, 1, 1))
    most = b.reduce("max", b.where(b.le(b.iota(y.shape[2]), last), y, -1.0), [2])
    return b.where(b.eq(used, 0), 0.0, most)


@op("MurmurHash3", 1, domain=MS)
def murmur_hash_3(b: Builder, x: Value, *, positive: Flag = 1, seed: int = 0) -> Value:
    """MurmurHash3_x86_32 of each element: of the UTF-8 bytes of a string, or of a number's own."""
    if x.dtype not in (dtypes.string, *(dtypes.BY_NAME[n] for n in _HASHED)):
        raise ModelError(f"MurmurHash3 takes strings and numbers of 32 or 64 bits, not {x.t}")
    kind = TensorType(dtypes.BY_NAME["uint32" if positive else "int32"], x.shape)
    return on_host(b, "ms_murmur_hash", [x], [kind], seed=seed & 0xFFFFFFFF, positive=bool(positive))[0]


_HASHED = ("int32", "uint32", "int64", "uint64", "float32", "float64")
