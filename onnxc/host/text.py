"""Strings: joined, split, normalized, counted, compared, and numbers as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnxc.errors import LimitError, RunError
from onnxc.host.registry import host_function

Array = np.ndarray[Any, Any]
MOST_CHARACTERS = 1 << 28  # of a result, or elements: a loop may double strings


def strings(values: Iterable[str], shape: Sequence[int]) -> Array:
    """A string tensor of these elements, in row-major order."""
    found = list(values)
    out = np.empty(len(found), object)
    out[:] = found
    return out.reshape(tuple(shape))


def each(f: Callable[[str], str], x: Array) -> Array:
    """A function of every element."""
    return strings(map(f, x.ravel()), x.shape)


def _limit(count: int, what: str = "strings or characters") -> None:
    if count > MOST_CHARACTERS:
        raise LimitError(f"{count} {what} would be made; the limit is {MOST_CHARACTERS}")


def _broadcast(x: Array, y: Array) -> tuple[Array, Array]:
    try:
        a, b = np.broadcast_arrays(x, y)
    except ValueError as error:
        raise RunError(f"shapes {list(x.shape)} and {list(y.shape)} do not broadcast", cause=error) from error
    return a, b


@host_function
def string_concat(x: Array, y: Array) -> Array:
    """Each element of x with that of y behind it; numpy's broadcasting."""
    a, b = _broadcast(x, y)
    _limit(a.size)
    _limit(sum(map(len, a.ravel())) + sum(map(len, b.ravel())))
    return strings((s + t for s, t in zip(a.ravel(), b.ravel(), strict=True)), a.shape)


@host_function
def string_equal(x: Array, y: Array) -> Array:
    """Whether elements are the same string; numpy's broadcasting."""
    a, b = _broadcast(x, y)
    return np.array([s == t for s, t in zip(a.ravel(), b.ravel(), strict=True)], bool).reshape(a.shape)


@host_function
def string_split(x: Array, delimiter: str = "", maxsplit: int | None = None) -> tuple[Array, Array]:
    """The parts of each string, with a new last axis as long as the most parts (filled up with ""), and how many.

    Without a delimiter at runs of whitespace, none of which is left over at the ends. After `maxsplit` splits the rest
    of a string is its last part.
    """
    most = -1 if maxsplit is None else maxsplit
    parts = [s.split(delimiter or None, most) for s in x.ravel()]
    width = max(map(len, parts), default=0)
    _limit(width * len(parts))
    filled = (part for found in parts for part in [*found, *[""] * (width - len(found))])
    counts = np.array([len(found) for found in parts], np.int64)
    return strings(filled, (*x.shape, width)), counts.reshape(x.shape)


# ---------------------------------------------------------------- normalization


def _turkic(text: str, upper: bool) -> str:
    """Upper or lower case where i has a dot in both, and ı has none."""
    if upper:
        return text.replace("i", "İ").upper()
    return text.replace("I", "ı").replace("İ", "i").lower()


def _case(action: str, locale: str) -> Callable[[str], str]:
    """What changes a string's case: by Unicode's own rules, but for the two languages that have others."""
    if action not in ("LOWER", "UPPER", "NONE"):
        raise RunError(f"case_change_action is LOWER, UPPER or NONE, not {action!r}")
    if action == "NONE":
        return lambda text: text
    if re.split(r"[-_.@]", locale)[0].lower() in ("tr", "az"):
        return lambda text: _turkic(text, action == "UPPER")
    return str.upper if action == "UPPER" else str.lower


@host_function
def string_normalizer(
    x: Array, case_change_action: str = "NONE", is_case_sensitive: int = 0, locale: str = "en_US",
    stopwords: Sequence[str] = (),
) -> Array:  # fmt: skip
    """Without the stop words, in upper or lower case. [C] or [1, C]; one "" where nothing is left."""
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise RunError(f"StringNormalizer takes [C] or [1, C], not {list(x.shape)}")
    change = _case(case_change_action, locale)
    # Where case does not count it is folded by the action's own rule, or to lower case without one.
    compared = (lambda s: s) if is_case_sensitive else change if case_change_action != "NONE" else str.lower
    stops = {compared(word) for word in stopwords}
    kept = [change(s) for s in x.ravel() if compared(s) not in stops] or [""]
    return strings(kept, (*x.shape[:-1], len(kept)))


# ---------------------------------------------------------------- n-grams


@host_function
def tfidf_vectorizer(
    x: Array, mode: str, min_gram_length: int, max_gram_length: int, max_skip_count: int,
    ngram_counts: Sequence[int], ngram_indexes: Sequence[int], pool_int64s: Sequence[int] = (),
    pool_strings: Sequence[str] = (), weights: Sequence[float] = (),
) -> Array:  # fmt: skip
    """How often each n-gram of a pool is in x, [C] or a batch [N, C]: float32 [max(ngram_indexes) + 1] for each row.

    The items of an n-gram may lie up to `max_skip_count` others apart, all equally far; single items count once. IDF
    counts 1 at most; it and TFIDF multiply by `weights`.
    """
    if x.ndim > 2:
        raise RunError(f"TfIdfVectorizer takes [C] or [N, C], not {list(x.shape)}")
    pool: Sequence[Any] = pool_strings or pool_int64s
    places = _ngrams(pool, ngram_counts, ngram_indexes)
    longest = max(map(len, places), default=0)
    if weights and len(weights) != len(ngram_indexes):
        raise RunError(f"{len(weights)} weights are given for {len(ngram_indexes)} n-grams")
    width = max(ngram_indexes, default=-1) + 1
    _limit(width * (len(x) if x.ndim == 2 else 1), "counts")
    scales = np.ones(width, np.float32)
    for k, weight in enumerate(weights):
        scales[ngram_indexes[k]] = weight
    rows = (x if x.ndim == 2 else x.reshape(1, -1)).tolist()
    counts = np.zeros((len(rows), width), np.float32)
    for row, items in enumerate(rows):
        for n in range(max(1, min_gram_length), min(max_gram_length, longest, len(items)) + 1):
            for step in range(1, 2 if n == 1 else min(max_skip_count + 1, (len(items) - 1) // (n - 1)) + 1):
                for first in range(len(items) - (n - 1) * step):
                    at = places.get(tuple(items[first : first + (n - 1) * step + 1 : step]))
                    if at is not None:
                        counts[row, at] += 1
    if mode == "IDF":
        counts = np.minimum(counts, 1)
    if mode != "TF":
        counts = counts * scales
    return counts if x.ndim == 2 else counts[0]


def _ngrams(pool: Sequence[Any], starts: Sequence[int], indexes: Sequence[int]) -> dict[tuple[Any, ...], int]:
    """The n-grams of a pool, which has those of one item first, then those of two..., and where each is counted."""
    found: dict[tuple[Any, ...], int] = {}
    number = 0
    for n, (start, stop) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        if not 0 <= start <= stop <= len(pool) or (stop - start) % n:
            raise RunError(f"the pool's {n}-grams cannot lie in [{start}, {stop}) of {len(pool)} items")
        for at in range(start, stop, n):
            if number >= len(indexes) or indexes[number] < 0:
                raise RunError(f"the pool has more n-grams than the {len(indexes)} of ngram_indexes")
            found.setdefault(tuple(pool[at : at + n]), indexes[number])
            number += 1
    return found


# ---------------------------------------------------------------- numbers as text


def _shown(value: Any) -> str:
    """A float as text: as few digits as tell it from its neighbours, without an exponent where it is not far from 1."""
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "-INF" if value < 0 else "INF"
    size = abs(float(value))
    if size != 0 and not 1e-5 <= size < 1e16:
        return np.format_float_scientific(value, trim="-", exp_digits=1)
    return np.format_float_positional(value, trim="-")


@host_function
def to_strings(x: Array) -> Array:
    """Numbers as text: 3, 0.5, 1e-7, NaN, INF, -INF; bools as 1 and 0."""
    if x.dtype == object:
        return x
    if x.dtype.kind in "iu":
        return strings(map(str, x.ravel().tolist()), x.shape)
    if x.dtype.kind == "b":
        return strings(("1" if v else "0" for v in x.ravel()), x.shape)
    if x.dtype.kind == "f":
        return strings(map(_shown, x.ravel()), x.shape)
    if x.dtype == ml_dtypes.bfloat16:
        return strings((_shown_narrow(v) for v in x.ravel()), x.shape)
    kind = np.dtype(x.dtype).name
    wide = x.astype(np.int64 if "int" in kind else np.float32)
    return to_strings(wide)


def _shown_narrow(value: Any) -> str:
    """A bfloat16 as text, with as few digits as tell it from its neighbours."""
    wide = np.float32(value)
    if not np.isfinite(wide):
        return _shown(wide)
    texts = (f"{float(wide):.{digits}g}" for digits in range(1, 10))
    short = next(t for t in texts if np.float32(float(t)).astype(ml_dtypes.bfloat16) == value)
    return _shown(np.float64(short))


_SPECIAL = {"inf": np.inf, "+inf": np.inf, "-inf": -np.inf, "infinity": np.inf, "+infinity": np.inf,
            "-infinity": -np.inf, "nan": np.nan, "+nan": np.nan, "-nan": np.nan}  # fmt: skip
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


def _parsed(text: str) -> float:
    found = _SPECIAL.get(text.strip().lower())
    if found is not None:
        return found
    if not _NUMBER.fullmatch(text.strip()):
        raise RunError(f"{text[:40]!r} is no number")
    return float(text)


def _parsed_whole(text: str, dtype: np.dtype[Any]) -> int:
    """An integer; what is written as a fraction, or with an exponent, is cut off."""
    value = int(text) if _WHOLE.fullmatch(text.strip()) and len(text) < 100 else _parsed(text)
    if not np.isfinite(value):
        raise RunError(f"{text[:40]!r} is no integer")
    limits = np.iinfo(dtype) if dtype.kind in "iu" else ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    if not limits.min <= int(value) <= limits.max:
        raise RunError(f"{text[:40]!r} does not fit into {np.dtype(dtype).name}")
    return int(value)


@host_function
def from_strings(x: Array, dtype: str) -> Array:
    """Text as numbers: plain and scientific notation; INF, +INF, -INF and NaN in upper or lower case.

    `dtype` is numpy's name. A text that is no number, or does not fit, is a RunError. For bool, zero is false.
    """
    to = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = list(x.ravel())
    if to.kind == "b":
        return np.array([_parsed(v) != 0 for v in values], bool).reshape(x.shape)
    if to.kind in "iu" or "int" in to.name:
        return np.array([_parsed_whole(v, to) for v in values], np.object_).astype(to).reshape(x.shape)
    with np.errstate(over="ignore"):
        return np.array([_parsed(v) for v in values], np.float64).astype(to).reshape(x.shape)
