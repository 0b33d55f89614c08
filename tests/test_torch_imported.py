"""Modules that onnxc.from_torch imports itself, op by op: linear algebra, sizes that data decides, branches, loops."""

from __future__ import annotations

from typing import Any

import pytest

import onnxc
from onnxc.errors import UnsupportedError, UnsupportedOpError

torch = pytest.importorskip("torch")

from torch import linalg  # noqa: E402

from tests.torch_harness import close, fallbacks, fresh, imported, through  # noqa: E402

OPEN = torch.export.Dim.DYNAMIC


def same(x: Any, y: Any) -> list[Any]:
    """Of factors whose signs are open: their product, and whether columns are orthonormal."""
    return [x @ y, x.mH @ x]


def of_square(x: Any, y: Any, b: Any) -> list[Any]:
    """x [..., n, n], y [..., n, k], b [..., n] or [n]"""
    upper = {"upper": True}
    positive = x @ x.mH + torch.eye(x.shape[-1])
    factor = linalg.cholesky(positive)
    values, vectors = linalg.eigh(x)
    others, more = linalg.eigh(x, "U")
    return [
        linalg.inv(x), linalg.solve(x, y), linalg.solve(x, b), linalg.solve(x, y.mT, left=False), linalg.det(x),
        *linalg.slogdet(x), factor, linalg.cholesky(positive, **upper), linalg.cholesky_ex(-positive).info,
        torch.cholesky_solve(y, factor), torch.cholesky_solve(y, factor.mH, **upper), torch.cholesky_inverse(factor),
        linalg.solve_triangular(x, y, **upper), linalg.solve_triangular(x, y, upper=False, unitriangular=True),
        linalg.solve_triangular(x, y.mT, left=False, **upper),
        linalg.solve_triangular(x, y.mT, left=False, upper=False), values,
        *same(vectors * values[..., None, :], vectors.mH)[:1], others, *same(more, more.mH)[1:],
        linalg.eigvalsh(x), linalg.matrix_power(x, -2),
    ]  # fmt: skip


def of_any(x: Any) -> list[Any]:
    """x [..., m, n]"""
    q, r = linalg.qr(x)
    whole, tall = linalg.qr(x, "complete")
    u, s, v = linalg.svd(x, full_matrices=False)
    wide, _, high = linalg.svd(x)
    deficient = x @ x.mH @ x - linalg.vector_norm(x, dim=(-2, -1), keepdim=True) ** 2 * x
    return [
        *same(q, r), *same(whole, tall), linalg.qr(x, "r").R.abs(), s, linalg.svdvals(x), *same(u * s[..., None, :], v),
        *same(wide, wide.mH), *same(high, high.mH), linalg.pinv(x), linalg.pinv(x, atol=0.7), linalg.pinv(x, rtol=0.4),
        linalg.pinv(deficient, atol=0.1, rtol=1e-3), linalg.matrix_norm(x, 2), linalg.matrix_norm(x, "nuc"),
        linalg.cond(x),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_linear_algebra(dtype: Any) -> None:
    torch.manual_seed(0)
    square = [torch.randn(2, 5, n, dtype=dtype) for n in (5, 3, 1)]
    square[0] += 4 * torch.eye(5)
    square[2] = square[2][..., 0]
    close(imported(of_square, *square)(*square), of_square(*square))
    for shape in ((2, 5, 3), (3, 4)):
        x = torch.randn(shape, dtype=dtype)
        close(imported(of_any, x)(x), of_any(x))


def test_matrices_without_elements_and_open_batches() -> None:
    f, dynamic = of_square, tuple({0: OPEN} for _ in range(3))
    example = [torch.randn(3, *tail) for tail in ((3, 3), (3, 2), (3,))]
    model = imported(f, *example, dynamic_shapes=(dynamic,))
    for batch in (1, 0, 2):
        x = [torch.randn(batch, *t.shape[1:]) for t in example]
        close(model(*x), f(*x))
    none = [torch.ones(2, *tail) for tail in ((0, 0), (0, 2), (0,))]
    close(imported(f, *none)(*none), f(*none))


def test_matrices_without_an_answer() -> None:
    """A model cannot raise, as PyTorch does."""
    x = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    found = imported(lambda x: [linalg.inv(x), linalg.cholesky(-x), linalg.det(x), *linalg.slogdet(x)], x)(x)
    assert not found[0].isfinite().any() and found[1].isnan().all()
    close(found[2:], [torch.tensor(0.0), *linalg.slogdet(x)])
    with fresh(), torch.no_grad():
        compiled = through(linalg.inv)
        with pytest.raises(RuntimeError, match="singular"):
            compiled(x)
        assert "aten.linalg_inv_ex.default" in fallbacks()


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: linalg.inv_ex(x).info, r"result 1 of aten\.linalg_inv_ex"),
        (lambda x: linalg.lu(x), "linalg_lu"),
        (lambda x: linalg.eigvals(x), "linalg_eig"),
    ],
)
def test_linear_algebra_that_is_missing(f: Any, message: str) -> None:
    with pytest.raises(UnsupportedOpError, match=message):
        imported(f, torch.eye(3))


def test_matrices_of_an_open_size() -> None:
    with pytest.raises(UnsupportedError, match="dynamic size"):
        imported(linalg.inv, torch.randn(3, 3), dynamic_shapes=(({0: OPEN, 1: OPEN},),))


# ---------------------------------------------------------------- sizes that data decides


def counted(x: Any, mask: Any, n: Any) -> list[Any]:
    """x [a, b], mask [a, b], n [a] not negative"""
    count = n.sum().item()
    torch._check(count >= 0)
    torch._check(count <= 40)
    y = x.clone()
    y[:, mask[0]] = -1
    return [
        x.nonzero(), *x.nonzero(as_tuple=True), x[mask], x[mask[:, 0]], x[:, mask[0]],
        torch.masked_select(x, mask[:, :1]), torch.masked_select(x[:, :1], mask), y, mask.argwhere(),
        torch.bincount(n), torch.bincount(n, minlength=9), torch.bincount(n, x[:, 0]), torch.repeat_interleave(n),
        torch.repeat_interleave(x, n, 0), x.new_ones(count) * count, x * n.max().item(), x[0].sum() * x[1, 0].item(),
        *torch.unique(n, return_inverse=True, return_counts=True), torch.unique(mask), *torch.unique(x.sign(), dim=0,
        return_inverse=True, return_counts=True), *torch.unique_consecutive(n, return_inverse=True, return_counts=True),
        torch.unique_consecutive(x.sign()),
    ]  # fmt: skip


def test_sizes_that_data_decides() -> None:
    def example(rows: int) -> list[Any]:
        x = torch.randn(rows, 3)
        return [torch.where(x < -0.5, 0, x), x > 0.3, torch.randint(0, 4, (rows,))]

    torch.manual_seed(0)
    args = example(5)
    model = imported(counted, *args, dynamic_shapes=(({0: OPEN}, {0: OPEN}, {0: OPEN}),))
    for x in (
        args,
        example(9),
        example(2),
        [torch.zeros(3, 3), torch.ones(3, 3) > 2, torch.zeros(3, dtype=torch.int64)],
    ):
        close(model(*x), counted(*x))


# ---------------------------------------------------------------- branches and loops


def branching(x: Any, n: Any) -> list[Any]:
    """x [a, b], n a number"""
    higher = torch._higher_order_ops

    def pooled(x: Any) -> Any:  # which PyTorch's exporter lacks
        return torch.nn.functional.adaptive_max_pool1d(x, 2)

    def turn(k: Any, y: Any) -> Any:
        return k + 1, torch.cond(y.mean() > 0, lambda y: y * 2 - k, lambda y: y / 3 + 1, (y,))

    found = torch.cond(x.sum() > 0, lambda x: pooled(x) + 1, lambda x: x[:, :2].cumsum(0), (x,))
    number, turned = higher.while_loop(lambda k, y: k < n, turn, (torch.zeros((), dtype=torch.int64), x))
    return [found, number, turned]


def repeating(x: Any) -> list[Any]:
    """x [a, b]"""
    higher = torch._higher_order_ops
    last, sums = higher.scan(lambda s, row: (s * 0.5 + row, s.exp()), torch.zeros(3), x)
    back, _ = higher.scan(lambda s, row: (s * 0.5 + row, s + 1), torch.zeros(3), x, reverse=True)
    return [last, sums, back, higher.map(lambda row, y: row.sort().values + y.sum(), x, x.sum(0))]


def test_branches_and_loops() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    model = imported(branching, x, torch.tensor(3))
    for args in ((x, torch.tensor(3)), (-x, torch.tensor(0)), (x.abs(), torch.tensor(7)), (-x.abs(), torch.tensor(1))):
        close(model(*args), branching(*args))
    rows = torch.randn(5, 3)
    close(imported(repeating, rows)(rows), repeating(rows))
    with fresh(), torch.no_grad():
        close(through(repeating)(rows), repeating(rows))


@pytest.mark.parametrize("right", [False, True])
def test_places_in_rows_with_nan(right: bool) -> None:
    """PyTorch halves the row, and what it finds depends on where it looks."""
    nan = torch.nan

    def f(rows: Any, x: Any) -> Any:
        return torch.searchsorted(rows, x, right=right)

    for row in ([0.0, 1.0, nan], [0.0, nan, nan], [-1.0, 0.0, 1.0, 1.0, nan], [nan]):
        args = torch.tensor(row), torch.tensor([-2.0, 0.0, 1.0, 1.5, nan])
        close(imported(f, *args)(*args), f(*args))


def test_tails_of_denormal_size() -> None:
    p = torch.tensor([1e-310, 1e-315, 2.3e-308, 1e-300], dtype=torch.float64)
    close(imported(torch.special.ndtri, p)(p), torch.special.ndtri(p))


@pytest.mark.parametrize("ends", [[2, 2, 7, 9], [0, 9, 9, 9], [9, 9, 9, 9], [2, 4, 7, 9], [1, 2, 3, 5]])
def test_products_of_groups_of_rows(ends: list[int]) -> None:
    """As transformers' mixtures of experts have them: groups of any sizes, empty ones, and rows after the last, which
    are zero.
    """
    pytest.importorskip("transformers.integrations.moe")
    x, matrices, of = torch.randn(9, 8), torch.randn(4, 8, 16), torch.tensor(ends, dtype=torch.int32)
    f = torch.ops.transformers.grouped_mm_fallback
    close(imported(f, x, matrices, of)(x, matrices, of), f(x, matrices, of))


def test_products_of_open_numbers_of_rows() -> None:
    """PyTorch's own op; one model for no row, for fewer than groups, and for many."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("an op of PyTorch 2.10")
    f = torch.nn.functional.grouped_mm
    ends = {5: [1, 4, 5], 2: [0, 1, 2], 40: [30, 31, 40], 0: [0, 0, 0]}
    whole = {n: torch.randint(-3, 4, (n, 8)).bfloat16() for n in ends}  # so that sums are exact
    matrices = torch.randint(-3, 4, (3, 8, 16)).bfloat16()
    given = {n: (whole[n], matrices, torch.tensor(of, dtype=torch.int32)) for n, of in ends.items()}

    def grouped(x: Any, matrices: Any, ends: Any) -> Any:
        return f(x, matrices, offs=ends)

    model = imported(grouped, *given[5], dynamic_shapes=(({0: OPEN}, None, None),))
    for args in given.values():
        assert torch.equal(model(*args), grouped(*args))


def test_mode_takes_memory_of_the_row_not_of_its_square() -> None:
    class Mode(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.mode(x, -1)

    x = torch.randint(0, 50, (2, 4000), generator=torch.Generator().manual_seed(0))
    model = onnxc.from_torch(Mode(), (x,))
    assert model(x)[0].tolist() == torch.mode(x, -1).values.tolist()
    assert model.explain().memory.arena < 100 * x.numel() * 8


def test_slices_that_end_before_the_last_of_an_open_dim() -> None:
    def f(x: Any) -> Any:
        return x.diff(dim=0), x[: x.shape[0] - 2], x[1 : x.shape[0] - 1]

    model = imported(f, torch.arange(12).reshape(6, 2), dynamic_shapes=(({0: torch.export.Dim("n")},),))
    for n in (2, 3, 7):
        x = torch.randint(0, 9, (n, 2))
        for found, expected in zip(model(x), f(x), strict=True):
            assert found.equal(expected)


def test_complex_numbers_or_others() -> None:
    def f(z: Any) -> Any:
        return z.reshape(-1).cumprod(0), torch.where(z.real > 0, z, 1.5), torch.where(z.real > 0, 2j, z)

    z = torch.randn(2, 3, dtype=torch.complex64)
    close(imported(f, z)(z), f(z))
