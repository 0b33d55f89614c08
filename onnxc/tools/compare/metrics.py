"""How far two tensors are from each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxc.tools.compare.results import Metrics, Special

Array = np.ndarray[Any, Any]
QUANTILES = (0.5, 0.9, 0.99, 0.999)
SAMPLE = 1 << 16  # elements of which quantiles and histograms are made


def is_float(a: Array) -> bool:
    """Floats and complex numbers, those of ml_dtypes included (their integers have no inexact casts)."""
    return a.dtype.kind in "fc" or (a.dtype.kind == "V" and "float" in a.dtype.name)


def wide(a: Array) -> Array:
    """As float64, or complex128."""
    return np.asarray(a).astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def largest(a: Array) -> float:
    """The largest magnitude; 0 of nothing."""
    return float(np.abs(a).max(initial=0.0))


def largest_finite(a: Array) -> float:
    """The largest finite magnitude; 0 where there is none."""
    with np.errstate(all="ignore"):
        found = largest(a)
    return found if math.isfinite(found) else largest(a[np.isfinite(a)])


def distance(a: Array, b: Array) -> Array:
    """|a - b|; 0 where both are NaN or the same infinity, infinite where only one of them is."""
    with np.errstate(all="ignore"):
        error: Array = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), error, np.inf))


def unit(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next larger number: 2^-23 for float32. 0 for what is no float."""
    if dtype.kind == "c":
        return float(np.finfo(dtype).eps)
    if dtype.kind == "f" and dtype.isbuiltin == 1:
        return float(np.finfo(dtype).eps)
    if dtype.kind in "fV" and "float" in dtype.name:
        import ml_dtypes

        return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    return 0.0


def special(a: Array) -> Special:
    """The NaN and infinities of a tensor."""
    if not is_float(a):
        return Special()
    x = a if a.dtype.kind in "fc" else wide(a)
    finite = np.isfinite(x)
    if finite.all():
        return Special()
    nan, first = np.isnan(x), int(np.argmin(finite.reshape(-1)))
    infinite = ~finite & ~nan
    negative = int(np.count_nonzero(infinite & (x.real < 0)))
    where = tuple(int(i) for i in np.unravel_index(first, x.shape))
    return Special(int(np.count_nonzero(nan)), int(np.count_nonzero(infinite)) - negative, negative, where)


def measure(ours: Array, theirs: Array, *, logits: bool = False) -> Metrics:
    """All metrics of two tensors of one shape. With `logits`, also how often the largest elements are the same."""
    if not is_float(ours) or not is_float(theirs):
        return _exact_metrics(ours, theirs)
    a, b = wide(ours), wide(theirs)
    errors = distance(a, b)
    finite = np.isfinite(errors)
    some = errors if finite.all() else errors[finite]
    scale = largest_finite(b)
    top = float(some.max(initial=0.0))
    mismatches = int(errors.size - np.count_nonzero(finite))
    power, noise = _power(b), float(np.mean(np.square(some))) if some.size else 0.0
    worst = _place(errors)
    eps = max(unit(ours.dtype), unit(theirs.dtype))
    ulp = _ulps(_sampled(errors), _sampled(b), eps)
    at_worst = _ulps(errors[worst].reshape(-1), b[worst].reshape(-1), eps) if worst is not None else ulp
    zeros = (a == 0) & (b == 0)
    signs = int(np.count_nonzero(zeros & (np.signbit(a.real) != np.signbit(b.real))))
    tops = top_agreement(a, b) if logits else (None, None)
    return Metrics(
        max_abs=top,
        mean_abs=float(some.mean()) if some.size else 0.0,
        max_rel=top / (scale or 1.0),
        rms_rel=math.sqrt(noise / power) if power else math.sqrt(noise),
        abs_quantiles=_quantiles(some),
        ulp_max=float(max(ulp.max(initial=0.0), at_worst.max(initial=0.0))),
        ulp_quantiles=_quantiles(ulp),
        ulp_histogram=_histogram(ulp, errors.size),
        cosine=_cosine(a, b),
        snr_db=10 * math.log10(power / noise) if power > 0 and noise > 0 else None,
        mismatches=mismatches,
        zero_signs=signs,
        worst=worst,
        top1=tops[0],
        top5=tops[1],
        ours=special(ours),
        theirs=special(theirs),
    )


def _exact_metrics(a: Array, b: Array) -> Metrics:
    """Of integers, booleans and strings."""
    different = np.asarray(a != b)
    count = int(np.count_nonzero(different))
    if (a.dtype.kind not in "iub" and a.dtype.kind != "V") or b.dtype.kind not in "iubf":
        return Metrics(0.0, 0.0, 0.0, 0.0, mismatches=count, worst=_place(different.astype(np.float64)))
    x, y = a.astype(np.float64), b.astype(np.float64)
    errors = np.abs(x - y)
    top, scale = largest(errors), largest(y) or 1.0
    mean = float(errors.mean()) if errors.size else 0.0
    rms = math.sqrt(float(np.mean(np.square(errors)))) / (math.sqrt(_power(y)) or 1.0) if errors.size else 0.0
    return Metrics(top, mean, top / scale, rms, _quantiles(errors), mismatches=count, worst=_place(errors))


def _power(a: Array) -> float:
    finite = np.isfinite(a)
    some = a if finite.all() else a[finite]
    return float(np.mean(np.square(np.abs(some)))) if some.size else 0.0


def _ulps(errors: Array, reference: Array, eps: float) -> Array:
    """Distances in units in the last place of the reference's elements (finite ones)."""
    finite = np.isfinite(errors)
    some, at = errors[finite], np.abs(reference[finite])
    if not eps or not some.size:
        return np.zeros(some.shape)
    tiny = float(np.finfo(np.float32).tiny) if eps > 1e-10 else float(np.finfo(np.float64).tiny)
    at = np.where(np.isfinite(at), at, 0.0)
    step = np.exp2(np.floor(np.log2(np.maximum(at, tiny)))) * eps
    found: Array = some / step
    return found


def _sampled(a: Array) -> Array:
    return a.reshape(-1)[:: -(-a.size // SAMPLE)] if a.size > SAMPLE else a.reshape(-1)


def _quantiles(a: Array) -> dict[str, float]:
    if not a.size:
        return {}
    found = np.quantile(_sampled(a), QUANTILES)
    return {f"{q:g}": float(x) for q, x in zip(QUANTILES, found, strict=True)}


def _histogram(some: Array, count: int) -> dict[str, int]:
    """Elements by powers of two of their distance; of a sample of large tensors, scaled to all `count`."""
    if not some.size:
        return {}
    rounded = np.rint(np.minimum(some, 2.0**62)).astype(np.int64)
    bins = np.where(rounded == 0, 0, np.exp2(np.floor(np.log2(np.maximum(rounded, 1)))).astype(np.int64))
    keys, counts = np.unique(bins, return_counts=True)
    scale = count / some.size if count > SAMPLE else 1.0
    return {str(int(k)): round(float(c) * scale) for k, c in zip(keys, counts, strict=True)}


def _cosine(a: Array, b: Array) -> float | None:
    both = np.isfinite(a) & np.isfinite(b)
    x, y = (a, b) if both.all() else (a[both], b[both])
    with np.errstate(all="ignore"):
        norms = math.sqrt(float(np.square(np.abs(x)).sum()) * float(np.square(np.abs(y)).sum()))
        return float((x.conj() * y).sum().real / norms) if norms > 0 and math.isfinite(norms) else None


def _place(errors: Array) -> tuple[int, ...] | None:
    if not errors.size:
        return None
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(errors)), errors.shape))


def top_agreement(a: Array, b: Array) -> tuple[float | None, float | None]:
    """The share of rows whose largest element, and whose five largest as a set, are at the same places."""
    if a.ndim < 2 or a.shape[-1] < 2 or not a.size or a.dtype.kind == "c":
        return None, None
    x, y = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    first = float(np.mean(np.argmax(x, -1) == np.argmax(y, -1)))
    if a.shape[-1] <= 5:
        return first, None
    sets = [np.sort(np.argpartition(-rows, 4, -1)[:, :5], -1) for rows in (x, y)]
    return first, float(np.mean((sets[0] == sets[1]).all(-1)))
