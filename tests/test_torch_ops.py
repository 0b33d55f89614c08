"""The rules for ATen ops against eager PyTorch, on PyTorch's own samples (OpInfo).

`python tests/torch_opinfo.py` runs all ops; here are those that models are made of, interpreted by numpy, and a few
compiled.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's lists of samples import it")

from torch.nn import functional  # noqa: E402

from onnxc.torch import program  # noqa: E402
from tests.torch_harness import close, fallbacks, fresh, imported, through  # noqa: E402
from tests.torch_opinfo import Interpreted, checked  # noqa: E402

POINTWISE = (
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_not", "ceil", "clamp",
    "copysign", "cos", "cosh", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "floor_divide", "fmax", "fmin",
    "fmod", "ge", "gt", "hypot", "isinf", "isnan", "le", "log", "log10", "log1p", "log2", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul", "ne", "neg", "pow", "reciprocal",
    "remainder", "round", "rsqrt", "rsub", "sigmoid", "sign", "signbit", "sin", "sinh", "sqrt", "sub", "tan", "tanh",
    "trunc", "where", "masked_fill",
)  # fmt: skip
MOVING = (
    "as_strided", "cat", "clone", "constant_pad_nd", "diagonal", "expand", "fill", "flip", "full_like", "permute",
    "repeat", "reshape", "select", "select_scatter", "slice", "slice_scatter", "diagonal_scatter", "split",
    "split_with_sizes", "squeeze", "stack", "t", "transpose", "tril", "triu", "unbind", "unfold", "unsqueeze",
    "view", "arange", "eye", "roll", "rot90", "tile", "meshgrid",
)  # fmt: skip
REDUCING = (
    "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "cumsum", "logsumexp", "max", "mean", "min", "norm",
    "prod", "sort", "std", "sum", "topk", "var", "var_mean",
)  # fmt: skip
INDEXING = [
    "gather",
    "index_add",
    "index_copy",
    "index_put",
    "index_select",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "take_along_dim",
    "masked_scatter",
    "histc",
    "put",
]
ORDERS = (
    "bucketize", "cummax", "cummin", "index_reduce", "kthvalue", "logcumsumexp", "median", "mode", "nanmedian",
    "quantile", "searchsorted",
)  # fmt: skip
SPECIAL = (
    "digamma", "erfc", "erfinv", "frexp", "i0", "lgamma", "mvlgamma", "nextafter", "special.erfcx", "special.i0e",
    "special.i1", "special.i1e", "special.log_ndtr", "special.ndtri", "special.spherical_bessel_j0",
)  # fmt: skip
NETWORKS = (
    "addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "matmul", "mm", "mv", "log_softmax", "softmax",
    "nn.functional.adaptive_avg_pool2d", "nn.functional.avg_pool2d", "nn.functional.batch_norm",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d", "nn.functional.elu",
    "nn.functional.embedding", "nn.functional.gelu", "nn.functional.glu", "nn.functional.grid_sample",
    "nn.functional.group_norm", "nn.functional.hardswish", "nn.functional.instance_norm", "nn.functional.interpolate",
    "nn.functional.layer_norm", "nn.functional.leaky_relu", "nn.functional.linear", "nn.functional.max_pool2d",
    "nn.functional.bilinear", "nn.functional.mish", "nn.functional.multilabel_margin_loss", "nn.functional.pad",
    "nn.functional.pixel_shuffle", "nn.functional.relu",
    "nn.functional.rms_norm", "nn.functional.scaled_dot_product_attention", "nn.functional.silu",
    "nn.functional.softplus", "nn.functional.upsample_bilinear", "nn.functional.upsample_nearest",
)  # fmt: skip
FOURIER = ("fft.fft", "fft.fftn", "fft.hfft", "fft.irfft2", "fft.rfftn", "stft", "view_as_complex", "polar")
DISTANCES = ["cdist", "nn.functional.pdist", "nn.functional.embedding_bag"]
# Whose backward graphs have ops of their own.
DERIVED = (
    "cdist", "masked_scatter", "nn.functional.adaptive_avg_pool2d", "nn.functional.avg_pool2d",
    "nn.functional.conv2d", "nn.functional.conv_transpose2d", "nn.functional.embedding_bag",
    "nn.functional.grid_sample", "nn.functional.interpolate", "nn.functional.layer_norm", "nn.functional.max_pool2d",
    "nn.functional.pad", "nn.functional.pdist", "nn.functional.scaled_dot_product_attention", "prod", "fft.fftn",
    "fft.irfft", "stft", "logcumsumexp", "median", "digamma", "nn.functional.bilinear",
    "nn.functional.multilabel_margin_loss",
)  # fmt: skip
COMPLEX = (
    "abs", "add", "addmm", "all", "angle", "any", "atan", "cat", "conj", "cumprod", "cumsum", "div", "dot", "eq",
    "exp", "exp2", "fill", "imag", "index_fill", "index_put", "index_select", "log", "log10", "log2", "masked_fill",
    "masked_scatter", "mm", "mul", "mv", "new_empty_strided", "nn.functional.pad", "pow", "prod", "real", "reciprocal",
    "rsqrt", "rsub", "scatter_add", "sgn", "sigmoid", "sin", "sqrt", "sub", "sum", "tan", "tanh", "transpose", "var",
    "vdot", "view_as_real", "where",
)  # fmt: skip
# Where some samples are no graph that can be compiled: data decides about sizes, or memory is no dense tensor.
PARTLY = {"as_strided", "index_put", "gather", "norm", "nn.functional.avg_pool2d", "nn.functional.pad"}
COMPILED = ("atan2", "floor_divide", "topk", "var", "index_select", "nn.functional.max_pool2d")


@pytest.mark.parametrize("name", [*POINTWISE, *MOVING, *REDUCING, *INDEXING, *NETWORKS, *DISTANCES, *FOURIER])
def test_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)
    outcome = checked(name, most=4)
    assert not outcome.wrong and not outcome.failed and not outcome.breaks
    assert not outcome.fallbacks or name in PARTLY or outcome.draws


@pytest.mark.parametrize("name", [*ORDERS, *SPECIAL])
def test_two_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)
    outcome = checked(name, most=2)
    assert outcome.samples and not outcome.wrong and not outcome.failed and not outcome.fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_functions_at_the_ends(dtype: Any) -> None:
    """Infinities, NaN, zeros of both signs, denormals, where series meet, and where exponentials end."""
    of, signs = torch.special, torch.tensor([1, -1])
    sizes = [0, 1e-42, 1e-8, 1e-3, 0.3, 0.5, 0.9999, 1, 1.5, 2, 2.5, 7.999, 8, 8.001, 20.6, 27, 88, 171.3, 1e5, 3e38]
    x = (torch.tensor([*sizes, torch.inf, torch.nan], dtype=dtype)[:, None] * signs).flatten()
    functions = {
        f.__name__: f
        for f in (torch.erfc, torch.erfinv, torch.lgamma, torch.digamma, of.erfcx, of.ndtri, of.i0, of.i0e, of.i1,
                  of.i1e, of.spherical_bessel_j0, of.log_ndtr)
    }  # fmt: skip
    found = imported(lambda x: {name: f(x) for name, f in functions.items()}, x)(x)
    for name, f in functions.items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(found[name], f(x), equal_nan=True, rtol=1e-5, atol=1e-7, msg=message)


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)
    outcome = checked(name, most=4, dtype=torch.complex64)
    assert outcome.samples and not outcome.wrong and not outcome.failed and not outcome.breaks
    assert not outcome.fallbacks


def test_ops_of_complex_numbers_that_pytorch_cannot_take_apart() -> None:
    """Its decomposition of `nan_to_num` fails, where eager PyTorch has an answer."""
    x = torch.complex(torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf, 2.0]))
    close(through(lambda x: x.nan_to_num() * 2)(x), x.nan_to_num() * 2)


@pytest.mark.parametrize("name", DERIVED)
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)
    outcome = checked(name, most=3, gradient=True)
    assert outcome.samples and not outcome.wrong and not outcome.failed and not outcome.breaks
    assert not outcome.fallbacks or outcome.draws


def test_means_of_windows_of_an_open_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)
    pools = [torch.nn.AdaptiveAvgPool2d((2, 3)), torch.nn.AdaptiveAvgPool2d((5, 1))]
    with fresh():
        compiled = through(lambda x: [pool(x) for pool in pools], dynamic=True, options={"fallback": False})
        for size in ((5, 7), (9, 4), (2, 3), (11, 13)):
            x = torch.randn(2, 3, *size, requires_grad=True)
            expected, found = [pool(x) for pool in pools], compiled(x)
            close(found, expected)
            (wanted,), (grad,) = (torch.autograd.grad(sum((y**3).sum() for y in ys), x) for ys in (expected, found))
            close(grad, wanted)


def test_windows_of_pools_to_an_open_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        half = (x.shape[2] // 2, x.shape[3] // 3)
        return [
            *functional.adaptive_max_pool2d(x, (3, 2), return_indices=True),
            functional.adaptive_avg_pool2d(x, half),
        ]

    monkeypatch.setattr(program, "compile", Interpreted)
    with fresh():
        compiled = through(f, dynamic=True, options={"fallback": False})
        for size in ((5, 7), (9, 4), (3, 3), (11, 13)):
            x = torch.randn(2, 3, *size, requires_grad=True)
            expected, found = f(x), compiled(x)
            close(found, expected)
            ends = [(ys[0] ** 3).sum() + (ys[2] ** 3).sum() for ys in (expected, found)]
            wanted, grad = (torch.autograd.grad(end, x)[0] for end in ends)
            close(grad, wanted)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nn.functional.max_pool2d", "int32"), ("nn.functional.max_pool2d", "int64"),
        ("nn.functional.embedding_bag", "bfloat16"), ("grid_sampler_3d", "float16"), ("gcd", "int64"), ("lcm", "uint8"),
        ("scatter_reduce", "int32"), ("scatter_reduce", "bool"), ("median", "uint8"), ("cummax", "bool"),
        ("searchsorted", "int64"), ("logcumsumexp", "float64"),
    ],
)  # fmt: skip
def test_samples_of_other_dtypes(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)
    outcome = checked(name, most=2, dtype=getattr(torch, dtype))
    assert outcome.samples and not outcome.wrong and not outcome.failed


ROW, FIVE, BEFORE = torch.ones(1, 4), torch.ones(5, 4), torch.tensor([-1])
REFUSED = {
    "embedding": lambda: torch.nn.functional.embedding(BEFORE, FIVE),
    "embedding_bag": lambda: torch.nn.functional.embedding_bag(BEFORE[None], FIVE),
    "index_select": lambda: FIVE.index_select(0, BEFORE),
    "gather": lambda: FIVE.gather(0, BEFORE[None]),
    "scatter": lambda: FIVE.scatter(0, BEFORE[None], 1.0),
    "scatter_add": lambda: FIVE.scatter_add(0, BEFORE[None], ROW),
    "index_add": lambda: FIVE.index_add(0, BEFORE, ROW),
    "index_copy": lambda: FIVE.index_copy(0, BEFORE, ROW),
    "index_add of another shape": lambda: FIVE.index_add(0, BEFORE + 1, ROW[:, :1]),
    "max of nothing": lambda: FIVE[:0].max(),
    "complex": lambda: torch.complex(FIVE, FIVE.double()),
    "masked_scatter": lambda: FIVE.masked_scatter(FIVE.byte(), FIVE),
}


@pytest.mark.parametrize("f", REFUSED.values(), ids=REFUSED)
def test_what_pytorch_refuses(f: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative indices above all, which count from the end for other ops."""
    monkeypatch.setattr(program, "compile", Interpreted)
    with fresh(), torch.no_grad():
        with pytest.raises((RuntimeError, IndexError)):
            f()
        with pytest.raises(Exception):  # noqa: B017 numpy's, where a compiled program has its own
            through(f)()


def test_indices_that_count_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)
    x, rows = torch.randn(5, 4), torch.tensor([-1, 0])

    def f(x: Any, rows: Any) -> Any:
        taken = torch.take_along_dim(x, rows[:, None], 0)
        filled = x.index_fill(0, rows, 2.0), x.T.index_fill(-1, rows[0], x[0, 0])
        return x[rows], x.index_put((rows,), torch.ones(4)), taken, filled

    with fresh(), torch.no_grad():
        close(through(f)(x, rows), f(x, rows))


@pytest.mark.parametrize("name", COMPILED)
def test_samples_compiled(name: str) -> None:
    outcome = checked(name, most=2)
    assert outcome.samples and not outcome.wrong and not outcome.failed and not outcome.fallbacks


def test_all_and_any_of_no_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)
    x = torch.zeros(0, 3)
    with fresh(), torch.no_grad():
        close(through(lambda x: (x.all(0), x.any(0), x.all(), x.any(), x.all(1)))(x),
              (x.all(0), x.any(0), x.all(), x.any(), x.all(1)))  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_whole_numbers_wrap_as_eager_ones(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)
    x = torch.arange(-50, 50).to(getattr(torch, dtype))
    y = torch.tensor([3, 7, 9, 1, 100]).to(x.dtype).repeat(20)

    def f(x: Any, y: Any) -> Any:
        return torch.lcm(x, y), torch.gcd(x, y), x**y, x**5, 3**y

    with fresh(), torch.no_grad():
        for found, expected in zip(through(f)(x, y), f(x, y), strict=True):
            assert found.dtype == expected.dtype and torch.equal(found, expected)
        assert not fallbacks()


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_filters_against_aliasing(mode: str, align: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)

    def f(x: Any) -> Any:
        style = {"mode": mode, "align_corners": align, "antialias": True}
        sizes = ((7, 3), (1, 12), (5, 2))
        scaled = functional.interpolate(x, scale_factor=(1.7, 0.6), **style)
        return *(functional.interpolate(x, size, **style) for size in sizes), scaled

    with fresh():
        x, z = (torch.randn(2, 3, 5, 8, generator=torch.manual_seed(0), requires_grad=True) for _ in range(2))
        found, expected = through(f)(x), f(z)
        close(found, expected)
        for results in (found, expected):
            sum((y * y.detach().cos()).sum() for y in results).backward()  # type: ignore[union-attr]
        close(x.grad, z.grad)
        assert not fallbacks()


def test_running_sums_of_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the nearest number, but for its own rounding."""
    monkeypatch.setattr(program, "compile", Interpreted)
    x = torch.randn(2, 50_000, generator=torch.manual_seed(0))
    with fresh(), torch.no_grad():
        found = through(lambda x: x.cumsum(1))(x)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, x.double().cumsum(1).float(), rtol=2e-7, atol=0)


def test_tensors_of_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile", Interpreted)

    def f(x: Any) -> Any:
        triangles = torch.tril_indices(3, 4, 1), torch.triu_indices(4, 3, -1, dtype=torch.int32)
        return *triangles, torch.fft.fftfreq(5), torch.fft.fftfreq(8, 0.3) + x, torch.fft.rfftfreq(7, 2.0)

    x = torch.randn(8)
    with fresh(), torch.no_grad():
        for found, expected in zip(through(f)(x), f(x), strict=True):
            assert found.dtype is expected.dtype
            close(found, expected)
        assert not fallbacks()
