"""How far two tensors are from each other."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from onnxc.tools.compare.results import Metrics, Special
from onnxc.tools.compare.sums import Sums, sums

Array = np.ndarray[Any, Any]
QUANTILES = (0.5, 0.9, 0.99, 0.999)
SAMPLE = 1 << 14  # elements of which quantiles and histograms are made
_BINS = np.concatenate([[0.0], np.exp2(np.arange(63))])  # where those of a histogram begin
_EXPONENT = np.uint64(0x7FF0_0000_0000_0000)  # of a float64


def is_float(a: Array) -> bool:
    """Floats and complex numbers, those of ml_dtypes included (their integers have no inexact casts)."""
    return a.dtype.kind in "fc" or (a.dtype.kind == "V" and "float" in a.dtype.name)


def is_whole(a: Array) -> bool:
    """Integers, those of ml_dtypes included."""
    return a.dtype.kind in "iu" or (a.dtype.kind == "V" and "int" in a.dtype.name)


def wide(a: Array) -> Array:
    """As float64, or complex128."""
    return np.asarray(a).astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def largest(a: Array) -> float:
    """The largest magnitude; 0 of nothing, NaN where there is one."""
    if a.dtype.kind == "f" and a.size:  # without a copy
        top, low = float(a.max()), float(a.min())
        return top if math.isnan(top) else max(top, -low)
    return float(np.abs(a).max(initial=0.0))


def largest_finite(a: Array) -> float:
    """The largest finite magnitude; 0 where there is none."""
    with np.errstate(all="ignore"):
        found = largest(a)
    return found if math.isfinite(found) else largest(a[np.isfinite(a)])


def distance(a: Array, b: Array) -> Array:
    """|a - b|; 0 where both are NaN or the same infinity, infinite where only one of them is."""
    with np.errstate(all="ignore"):
        error: Array = np.asarray(np.subtract(a, b))
        error = np.abs(error, out=error) if error.dtype.kind == "f" else np.asarray(np.abs(error))
        if math.isfinite(error.max(initial=0.0)):  # then both are, everywhere
            return error
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), error, np.inf))


def unit(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next larger number: 2^-23 for float32. 0 for what is no float."""
    found = _limits(dtype)
    return 0.0 if found is None else float(found.eps)


def largest_of(dtype: np.dtype[Any]) -> float:
    """The largest finite number of a float dtype. 0 for what is no float."""
    found = _limits(dtype)
    return 0.0 if found is None else float(found.max)


def _limits(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "c" or (dtype.kind == "f" and dtype.isbuiltin == 1):
        return np.finfo(dtype)
    if dtype.kind in "fV" and "float" in dtype.name:
        return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return None


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
    ours, theirs = np.asarray(ours, order="C"), np.asarray(theirs, order="C")
    found = sums(ours, theirs) if ours.dtype.kind == theirs.dtype.kind == "f" else None
    return _finite_metrics(found, ours, theirs, logits) if found is not None else _any_metrics(ours, theirs, logits)


def _finite_metrics(found: Sums, ours: Array, theirs: Array, logits: bool) -> Metrics:
    """Of real numbers that are all finite."""
    a, b = wide(_sampled(ours)), wide(_sampled(theirs))
    errors, eps = np.abs(a - b), max(unit(ours.dtype), unit(theirs.dtype))
    ulp = np.sort(_ulps(errors, b, eps))
    at_worst = _ulps(np.array([found.top]), wide(theirs.reshape(-1)[found.worst : found.worst + 1]), eps)
    tops = top_agreement(ours, theirs) if logits else (None, None)
    norms = math.sqrt(found.ours) * math.sqrt(found.theirs)
    return Metrics(
        max_abs=found.top,
        mean_abs=found.total / ours.size,
        max_rel=found.top / (found.scale or 1.0),
        rms_rel=math.sqrt(found.noise / (found.theirs or ours.size)),
        abs_quantiles=_quantiles(np.sort(errors)),
        ulp_max=float(max(ulp[-1], at_worst[0])),
        ulp_quantiles=_quantiles(ulp),
        ulp_histogram=_histogram(ulp, ours.size),
        cosine=min(found.product / norms, 1.0) if norms > 0 else None,
        snr_db=10 * math.log10(found.theirs / found.noise) if found.theirs > 0 and found.noise > 0 else None,
        zero_signs=found.zero_signs,
        worst=tuple(int(i) for i in np.unravel_index(found.worst, ours.shape)),
        top1=tops[0],
        top5=tops[1],
    )


def _any_metrics(ours: Array, theirs: Array, logits: bool) -> Metrics:
    """Of floats, some of which may be NaN or infinite, and of complex numbers."""
    a, b = wide(ours), wide(theirs)
    errors = distance(a, b)
    worst = _place(errors)
    top = float(errors[worst]) if worst is not None else 0.0  # a NaN would be, and there is none
    some, mismatches = errors, 0
    if not math.isfinite(top):
        some = errors[np.isfinite(errors)]
        top, mismatches = float(some.max(initial=0.0)), errors.size - some.size
    scale = largest_finite(b)
    power, noise = _power(b), _power(some)
    eps = max(unit(ours.dtype), unit(theirs.dtype))
    ulp = np.sort(_ulps(_sampled(errors), _sampled(b), eps))
    at_worst = _ulps(errors[worst].reshape(-1), b[worst].reshape(-1), eps) if worst is not None else ulp
    tops = top_agreement(a, b) if logits else (None, None)
    return Metrics(
        max_abs=top,
        mean_abs=float(some.mean()) if some.size else 0.0,
        max_rel=top / (scale or 1.0),
        rms_rel=math.sqrt(noise / power) if power else math.sqrt(noise),
        abs_quantiles=_quantiles(np.sort(_sampled(some))),
        ulp_max=float(max(ulp.max(initial=0.0), at_worst.max(initial=0.0))),
        ulp_quantiles=_quantiles(ulp),
        ulp_histogram=_histogram(ulp, errors.size),
        cosine=_cosine(a, b),
        snr_db=10 * math.log10(power / noise) if power > 0 and noise > 0 else None,
        mismatches=mismatches,
        zero_signs=_zero_signs(a, b),
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
    if a.dtype.kind not in "iubV" or b.dtype.kind not in "iubfV":
        return Metrics(0.0, 0.0, 0.0, 0.0, mismatches=count, worst=_place(different.astype(np.float64)))
    x, y = a.astype(np.float64), b.astype(np.float64)
    errors = np.abs(x - y)
    top, scale = largest(errors), largest(y) or 1.0
    mean = float(errors.mean()) if errors.size else 0.0
    rms = math.sqrt(float(np.mean(np.square(errors)))) / (math.sqrt(_power(y)) or 1.0) if errors.size else 0.0
    return Metrics(
        top, mean, top / scale, rms, _quantiles(np.sort(_sampled(errors))), mismatches=count, worst=_place(errors)
    )


def _zero_signs(a: Array, b: Array) -> int:
    """Zeros of both whose signs differ."""
    zeros = b == 0
    if not zeros.any():
        return 0
    return int(np.count_nonzero(zeros & (a == 0) & (np.signbit(a.real) != np.signbit(b.real))))


def _squares(a: Array) -> float:
    """The sum of the squared magnitudes."""
    flat = a.reshape(-1)
    return _dot(flat, flat)


def _dot(x: Array, y: Array) -> float:
    """The real part of the product of two vectors. Not by BLAS, whose threads wait awake for more."""
    return float(np.einsum("i,i->", x.conj(), y).real)


def _power(a: Array) -> float:
    """The mean of the squared magnitudes of what is finite."""
    total = _squares(a)
    if not math.isfinite(total):
        a = a[np.isfinite(a)]
        total = _squares(a)
    return total / a.size if a.size else 0.0


def _ulps(errors: Array, reference: Array, eps: float) -> Array:
    """Distances in units in the last place of the reference's elements (finite ones)."""
    at = np.abs(reference)
    if not (np.isfinite(errors).all() and np.isfinite(at).all()):
        finite = np.isfinite(errors)
        errors, at = errors[finite], at[finite]
        at = np.where(np.isfinite(at), at, 0.0)
    if not eps or not errors.size:
        return np.zeros(errors.shape)
    tiny = float(np.finfo(np.float32).tiny) if eps > 1e-10 else float(np.finfo(np.float64).tiny)
    step = (np.maximum(at, tiny).view(np.uint64) & _EXPONENT).view(np.float64)  # the power of two below
    with np.errstate(over="ignore"):  # a huge distance from a tiny number
        found: Array = errors / (step * eps)
    return found


def _sampled(a: Array) -> Array:
    return a.reshape(-1)[:: -(-a.size // SAMPLE)] if a.size > SAMPLE else a.reshape(-1)


def _quantiles(a: Array) -> dict[str, float]:
    """Of sorted numbers, between the two that are next to each."""
    if not a.size:
        return {}
    found = {}
    for q in QUANTILES:
        place = q * (a.size - 1)
        low, high = float(a[math.floor(place)]), float(a[math.ceil(place)])
        found[f"{q:g}"] = low + (high - low) * (place % 1)
    return found


def _histogram(some: Array, count: int) -> dict[str, int]:
    """Elements by powers of two of their distance, which are sorted; of a sample of large tensors, scaled to all
    `count`.
    """
    if not some.size:
        return {}
    rounded = np.rint(np.minimum(some, 2.0**62))
    counts = np.diff(np.searchsorted(rounded, _BINS), append=some.size)
    scale = count / some.size if count > SAMPLE else 1.0
    return {str(int(k)): round(float(c) * scale) for k, c in zip(_BINS, counts, strict=True) if c}


def _cosine(a: Array, b: Array) -> float | None:
    x, y = a.reshape(-1), b.reshape(-1)
    with np.errstate(all="ignore"):
        power = _squares(x) * _squares(y)
        if not math.isfinite(power):
            both = np.isfinite(x) & np.isfinite(y)
            x, y = x[both], y[both]
            power = _squares(x) * _squares(y)
        norms = math.sqrt(power) if power == power else math.nan
        return min(_dot(x, y) / norms, 1.0) if norms > 0 and math.isfinite(norms) else None


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
