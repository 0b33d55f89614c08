"""torch.compile(backend="onnxc"): layers and attention that PyTorch keeps whole."""

from __future__ import annotations

from typing import Any

import pytest

import onnxc

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

from tests.torch_harness import close, fallbacks, through  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreted_torch")


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers(norm_first: bool, activation: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, norm_first=norm_first, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, causal = torch.randn(3, 5, 8), torch.ones(5, 5).triu(1).bool()
    lacks = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
    with torch.no_grad():
        for given in ({}, {"mask": causal}, {"src_key_padding_mask": lacks}, {"mask": causal.float()}):
            torch._dynamo.reset()
            found, expected = through(net)(x, **given), net(x, **given)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not fallbacks()


def test_an_encoder_of_any_size() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    compiled = through(net, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 7), (7, 2)):
            x = torch.randn(batch, length, 8)
            close(compiled(x), net(x))
    (graph,) = onnxc.torch.report().graphs
    assert not graph.fallbacks and graph.compiles == 1


@pytest.mark.parametrize("layer", ["_native_multi_head_attention"])
def test_self_attention_that_is_called(layer: str) -> None:
    attention = getattr(torch.ops.aten, layer)
    x, lacks = torch.randn(2, 5, 8), torch.tensor([[0, 0, 0, 0, 1], [0, 1, 0, 1, 0]]).bool()
    params = torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8)

    def f(x: Any, lacks: Any) -> Any:
        plain = attention(x, x, x, 8, 2, *params)
        heads = attention(x, x, x, 8, 2, *params, None, True, False)
        return *plain, *heads, attention(x, x, x, 8, 2, *params, lacks, False, True, 1)[0]

    with torch.no_grad():
        close(through(f)(x, lacks), f(x, lacks))
    assert not fallbacks()


def _shifted(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score + (query - key) * 0.1 + head


@pytest.mark.parametrize("transposed", [False, True])
def test_attention_whose_scores_functions_change(transposed: bool) -> None:
    table = torch.randn(16, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")

    def f(q: Any, k: Any, v: Any) -> Any:
        biased = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i, j], scale=0.3)
        causal = flex_attention(q, k, v, score_mod=_shifted, block_mask=mask)
        shared = flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        return biased, causal.transpose(1, 2).reshape(2, 16, -1), shared

    given = torch.randn(3, 2, 16, 4, 8).transpose(2, 3) if transposed else torch.randn(3, 2, 4, 16, 8)
    with torch.no_grad():
        for found, expected in zip(through(f)(*given), f(*given), strict=True):
            close(found, expected)
            assert found.stride() == expected.stride()
    assert not fallbacks()


def test_such_attention_of_any_length() -> None:
    compiled = through(lambda q, k, v: flex_attention(q, k, v, score_mod=_shifted), dynamic=True)
    with torch.no_grad():
        for length in (5, 16, 33):
            q, k, v = torch.randn(3, 2, 4, length, 8)
            close(compiled(q, k, v), flex_attention(q, k, v, score_mod=_shifted))
    (graph,) = onnxc.torch.report().graphs
    assert not graph.fallbacks and graph.compiles == 1


def test_positions_of_a_given_number() -> None:
    def f(x: Any, n: int) -> Any:
        few, many = torch.nonzero_static(x > 0, size=n), torch.nonzero_static(x, size=4 * n, fill_value=-7)
        return few, many, torch.nonzero_static(x[:0], size=2), torch.nonzero_static(x[0, 0], size=0)

    compiled = through(f, dynamic=True)
    for n in (3, 5, 8):
        x = torch.randn(2, n)
        close(compiled(x, n), f(x, n))
    assert not fallbacks()


def test_slopes_that_are_drawn() -> None:
    """They are drawn in training alone, a number for each negative element: then PyTorch draws them."""

    def f(x: Any) -> Any:
        return F.rrelu(x), F.rrelu(x, 0.1, 0.5, training=True) * 2

    x, y = (torch.linspace(-3, 3, 7).requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    found = through(f)(x)
    torch.manual_seed(1)
    expected = f(y)
    close(found, expected)
    close(torch.autograd.grad(sum(found).sum(), x), torch.autograd.grad(sum(expected).sum(), y))
    assert fallbacks() == {"aten.rrelu_with_noise_functional.default"}


class _Attending(nn.Module):
    """Self-attention of two heads, whose scores a parameter changes; the mask is given, or made of lengths."""

    def __init__(self, mask: Any = None) -> None:
        super().__init__()
        self.project, self.slope, self.mask = nn.Linear(8, 24), nn.Parameter(torch.randn(2)), mask

    def forward(self, x: Any, lengths: Any = None) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.project(x).reshape(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = self.mask
        if lengths is not None:
            mask = create_block_mask(lambda b, h, i, j: j < lengths[b], batch, None, length, length, device="cpu")

        def sloping(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + self.slope[h] * (i - j)

        return flex_attention(q, k, v, score_mod=sloping, block_mask=mask, return_lse=True)


def test_such_attention_is_exported() -> None:
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    x = torch.randn(2, 16, 8)
    with torch.no_grad():
        for net, given in ((_Attending(), (x,)), (_Attending(causal), (x,)), (_Attending(), (x, torch.tensor([0, 5])))):
            for found, expected in zip(onnxc.from_torch(net, given)(*given), net(*given), strict=True):
                close(found, expected)


def test_such_attention_is_exported_for_any_size() -> None:
    net, (batch, length) = _Attending(), (torch.export.Dim("batch"), torch.export.Dim("length", max=128))
    shapes = {"x": {0: batch, 1: length}, "lengths": {0: batch}}
    model = onnxc.from_torch(net, (torch.randn(2, 16, 8), torch.tensor([0, 5])), dynamic_shapes=shapes)
    with torch.no_grad():
        for lengths in ([0, 16], [3, 9, 40]):
            given = torch.randn(len(lengths), max(lengths), 8), torch.tensor(lengths)
            for found, expected in zip(model(*given), net(*given), strict=True):
                close(found, expected)


def test_the_op_of_such_attention_stays_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a module is exported other threads call the op too."""
    kind, decompose, seen = type(torch.ops.higher_order.flex_attention), ExportedProgram.run_decompositions, []

    def watched(*args: Any) -> Any:
        seen.append(kind.__call__)
        return decompose(*args)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", watched)
    own = kind.__call__
    onnxc.from_torch(_Attending(), (torch.randn(2, 16, 8),))
    assert seen and set(seen) == {own}
