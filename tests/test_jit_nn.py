"""onnxc.nn against PyTorch, forward and gradient, in odd sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onnxc
from onnxc import nn
from onnxc.array.core import Array
from onnxc.errors import InputError


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


X, IMAGE = drawn(3, 5, 7), drawn(2, 6, 9, 7)
W, S, B = drawn(4, 3, 3, 2), drawn(7, seed=1), drawn(7, seed=2)
C = [drawn(6, seed=k) for k in range(3)] + [np.abs(drawn(6, seed=4)) + 0.5]
Q, K, V = drawn(2, 4, 5, 8), drawn(2, 2, 6, 8), drawn(2, 2, 6, 3)
LABELS = np.array([[0, 6, 2, -7, 1], [1, 1, -7, 4, 5], [6, 5, 4, 3, 2]])


def _attention(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def _batch_norm(x, *each):
    s, b, m, v = (t[:, None, None] for t in each)
    return (x - m) / torch.sqrt(v + 1e-5) * s + b


CASES = {
    "relu": (nn.relu, F.relu, [X]),
    "leaky_relu": (lambda x: nn.leaky_relu(x, 0.2), lambda x: F.leaky_relu(x, 0.2), [X]),
    "elu": (lambda x: nn.elu(x, 1.5), lambda x: F.elu(x, 1.5), [X]),
    "gelu": (nn.gelu, F.gelu, [X]),
    "gelu tanh": (lambda x: nn.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), [X]),
    "sigmoid": (nn.sigmoid, F.sigmoid, [X]),
    "silu": (nn.silu, F.silu, [X]),
    "softplus": (nn.softplus, F.softplus, [X]),
    "softmax": (lambda x: nn.softmax(x, 1), lambda x: F.softmax(x, 1), [X]),
    "log_softmax": (nn.log_softmax, lambda x: F.log_softmax(x, -1), [X]),
    "layer_norm": (nn.layer_norm, lambda x, s, b: F.layer_norm(x, (7,), s, b), [X, S, B]),
    "layer_norm two axes": (lambda x: nn.layer_norm(x, axis=1), lambda x: F.layer_norm(x, (5, 7)), [X]),
    "rms_norm": (nn.rms_norm, lambda x, s: F.rms_norm(x, (7,), s, 1e-5), [X, S]),
    "batch_norm": (nn.batch_norm, _batch_norm, [IMAGE, *C]),
    "batch_norm training": (
        lambda x, s, b, m, v: nn.batch_norm(x, s, b, m, v, training=True)[0],
        lambda x, s, b, m, v: F.batch_norm(x, None, None, s, b, training=True),
        [IMAGE, *C],
    ),
    "group_norm": (lambda x, *p: nn.group_norm(x, 3, *p), lambda x, *p: F.group_norm(x, 3, *p), [IMAGE, *C[:2]]),
    "conv": (
        lambda x, w, b: nn.conv(x, w, b, stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
        lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 0), (1, 2), 2),
        [IMAGE, W, drawn(4)],
    ),
    "conv same": (
        lambda x, w: nn.conv(x, w, padding="same"),
        lambda x, w: F.conv1d(F.pad(x, (1, 2)), w),
        [drawn(2, 3, 11), drawn(5, 3, 4)],
    ),
    "conv pairs": (
        lambda x, w: nn.conv(x, w, padding=[(2, 0), (0, 1)], groups=2),
        lambda x, w: F.conv2d(F.pad(x, (0, 1, 2, 0)), w, groups=2),
        [IMAGE, W],
    ),
    "conv_transpose": (
        lambda x, w: nn.conv_transpose(x, w, stride=2, padding=1, output_padding=1),
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1),
        [IMAGE, drawn(6, 4, 3, 3)],
    ),
    "max_pool": (lambda x: nn.max_pool(x, 3, 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1), [IMAGE]),
    "avg_pool": (
        lambda x: nn.avg_pool(x, (2, 3), padding=1),
        lambda x: F.avg_pool2d(x, (2, 3), padding=1, count_include_pad=False),
        [IMAGE],
    ),
    "attention": (nn.attention, _attention, [Q, K, V]),
    "attention causal": (
        lambda q, k, v: nn.attention(q, k, v, causal=True, scale=0.3),
        lambda q, k, v: _attention(q, k, v, is_causal=True, scale=0.3),
        [Q, K, V],
    ),
    "attention mask": (
        lambda q, k, v, m: nn.attention(q, k, v, m),
        lambda q, k, v, m: _attention(q, k, v, attn_mask=m),
        [Q[0], K[0], V[0], drawn(5, 6)],
    ),
    "attention one head": (nn.attention, F.scaled_dot_product_attention, [Q[0, 0], K[0, 0], V[0, 0]]),
    "embedding": (
        lambda t: nn.embedding(np.array([[1, 0], [3, 1]]), t),
        lambda t: F.embedding(torch.tensor([[1, 0], [3, 1]]), t),
        [drawn(4, 5)],
    ),
    "cross_entropy": (
        lambda x: nn.cross_entropy(x, np.abs(LABELS) % 7),
        lambda x: F.cross_entropy(x.mT, torch.tensor(np.abs(LABELS) % 7)),
        [X],
    ),
    "cross_entropy ignore": (
        lambda x: nn.cross_entropy(x, LABELS.T, axis=2, reduction="sum", ignore=-7),
        lambda x: F.cross_entropy(x.movedim(2, 1), torch.tensor(LABELS.T), reduction="sum", ignore_index=-7),
        [drawn(5, 3, 7)],
    ),
    "cross_entropy one row": (
        lambda x: nn.cross_entropy(x, np.int64(2), reduction="none"),
        lambda x: F.cross_entropy(x, torch.tensor(2), reduction="none"),
        [S],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name != "max_pool"])  # numpy is slow to find the places
def test_against_torch(interpreted, name):
    """Result and gradients of a weighted sum."""
    agree(name, lambda f, *xs: onnxc.vjp(f, *xs))


@pytest.mark.parametrize(
    "name", ["conv", "max_pool", "attention causal", "cross_entropy ignore", "batch_norm training"]
)
def test_compiled(name):
    """The same in one program."""

    def vjp(f, *xs):
        def back(weights):
            return onnxc.jit(lambda w, *xs: onnxc.vjp(f, *xs)[1](w))(weights, *xs)

        return onnxc.jit(f)(*xs), back

    agree(name, vjp)


def agree(name, vjp):
    ours, theirs, arrays = CASES[name]
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    expected = theirs(*tensors)
    weights = drawn(*expected.shape, seed=9)
    (expected * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    y, back = vjp(ours, *arrays)
    close(y, expected.detach().numpy())
    for g, t in zip(back(weights), tensors, strict=True):
        close(g, np.zeros(t.shape) if t.grad is None else t.grad.numpy())


def close(found, expected):
    assert found.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(found.numpy() / scale, expected / scale, atol=2e-5, rtol=2e-5)


def test_bool_mask_and_rows_that_see_nothing(interpreted):
    mask = np.array([[True, False, True], [False, False, False]])
    y = nn.attention(Q[0, 0, :2], K[0, 0, :3], V[0, 0, :3], mask).numpy()
    s = np.where(mask, Q[0, 0, :2] @ K[0, 0, :3].T / np.sqrt(8), -np.inf)[0]
    p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    np.testing.assert_allclose(y[0], p @ V[0, 0, :3], rtol=1e-5)
    assert not y[1].any()


def test_batch_norm_keeps_statistics(interpreted):
    _, mean, variance = nn.batch_norm(IMAGE, *C, training=True, momentum=0.75)
    np.testing.assert_allclose(mean.numpy(), 0.75 * C[2] + 0.25 * IMAGE.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance.numpy(), 0.75 * C[3] + 0.25 * IMAGE.var((0, 2, 3)), rtol=1e-4)


def test_ints_of_numpy_are_ints(interpreted):
    two = np.int64(2)
    pooled = nn.max_pool(nn.conv(IMAGE, W, stride=two, padding=np.int32(1), groups=two), two)
    np.testing.assert_array_equal(pooled, nn.max_pool(nn.conv(IMAGE, W, stride=2, padding=1, groups=2), 2))
    np.testing.assert_array_equal(nn.one_hot(LABELS, np.int64(9)), nn.one_hot(LABELS, 9))
    np.testing.assert_array_equal(nn.softmax(X, np.int64(0)), nn.softmax(X, 0))


def test_one_hot(interpreted):
    found = nn.one_hot(np.array([[2, 0], [-1, 3]], np.int32), 3, np.int8)
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found.numpy(), [[[0, 0, 1], [1, 0, 0]], [[0, 0, 0], [0, 0, 0]]])


def test_empty(interpreted):
    assert nn.gelu(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert nn.embedding(np.zeros((0,), np.int64), drawn(4, 5)).shape == (0, 5)
    assert nn.layer_norm(np.zeros((0, 3), np.float32)).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nn.relu(np.arange(3)), "int64"),
        (lambda: nn.layer_norm(X, S.astype(np.float64)), "float32, float64"),
        (lambda: nn.conv(X[0], W), r"\(5, 7\)"),
        (lambda: nn.conv(IMAGE, W, stride=(1, 2, 3)), "stride"),
        (lambda: nn.conv(IMAGE, W, padding="full"), "full"),
        (lambda: nn.conv(IMAGE, W, stride=True), "stride is an int"),
        (lambda: nn.softmax(X, axis=1.0), "axis is an int"),
        (lambda: nn.one_hot(LABELS, -1), "n is an int"),
        (lambda: nn.gelu(X, "erf"), "erf"),
        (lambda: nn.embedding(S, X), "ints"),
        (lambda: nn.cross_entropy(X, LABELS, reduction="max"), "reduction"),
        (lambda: nn.dropout(X, 1.0, onnxc.random.key(0)), "rate"),
        (lambda: nn.dropout(X, 0.5, 3), "key"),
        (lambda: nn.batch_norm(IMAGE, S, S, S, S), "channels"),
    ],
)
def test_wrong_arguments(interpreted, call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_dropout(interpreted):
    key = onnxc.random.key(3)
    x = np.ones((200, 100), np.float32)
    y = nn.dropout(x, 0.3, key)
    assert isinstance(y, Array)
    assert set(np.unique(y.numpy())) == {np.float32(0), np.float32(1) / np.float32(0.7)}
    assert abs((y.numpy() == 0).mean() - 0.3) < 0.02
    np.testing.assert_array_equal(y.numpy(), nn.dropout(x, 0.3, key).numpy())
    assert (y.numpy() != nn.dropout(x, 0.3, onnxc.random.key(4)).numpy()).any()
    assert nn.dropout(x, 0.3, key, training=False).numpy() is x
