"""Strings: joined, split, normalized, counted, compared, and numbers as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from onnxc.errors import LimitError, RunError
from onnxc.host.registry import host_function

Array = np.ndarray[Any, Any]
MOST_LISTED = 1 << 18  # numbers that a pool of n-grams looks up in tables
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


def limit(count: int, what: str = "strings or characters") -> None:
    """Raises LimitError for a result of too many."""
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
    limit(a.size)
    limit(sum(map(len, a.ravel())) + sum(map(len, b.ravel())))
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
    limit(width * len(parts))
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
    if weights and len(weights) != len(ngram_indexes):
        raise RunError(f"{len(weights)} weights are given for {len(ngram_indexes)} n-grams")
    width = max(ngram_indexes, default=-1) + 1
    limit(width * (len(x) if x.ndim == 2 else 1), "counts")
    trees = _trees(tuple(pool_strings or pool_int64s), tuple(ngram_counts), tuple(ngram_indexes))
    items = trees.numbers(x if x.ndim == 2 else x.reshape(1, -1))
    counts = np.zeros((len(items), width), np.float32)
    length = items.shape[1]
    for n in sorted(n for n in trees.grams if min_gram_length <= n <= min(max_gram_length, length)):
        for step in range(1, 2 if n == 1 else min(max_skip_count + 1, (length - 1) // (n - 1)) + 1):
            rows, places = trees.found(items, n, step)
            counts += np.bincount(rows * width + places, minlength=counts.size).reshape(counts.shape)
    if mode == "IDF":
        counts = np.minimum(counts, 1)
    if mode != "TF" and weights:
        scales = np.ones(width, np.float32)
        for place, weight in zip(ngram_indexes, weights, strict=True):
            scales[place] = weight
        counts = counts * scales
    return counts if x.ndim == 2 else counts[0]


class _Among:
    """Where elements are in a sorted array of different keys; its length, where they are not in it. Keys that span less
    than `room` have a table.
    """

    def __init__(self, keys: Array, room: int) -> None:
        self.keys, self.low = keys, int(keys[0])
        span = int(keys[-1]) - self.low + 1
        self.table = np.full(span + 1, keys.size, np.int64) if span < room else None
        if self.table is not None:
            self.table[keys - self.low] = np.arange(keys.size)

    def __call__(self, x: Array) -> Array:
        if self.table is None:
            at = np.searchsorted(self.keys, x)
            return np.where(self.keys[np.minimum(at, self.keys.size - 1)] == x, at, self.keys.size)
        at = (x - self.low).view(np.uint64)  # what lies below the first key wraps around, and is far above the last
        return self.table.take(np.minimum(at, np.uint64(self.table.size - 1)).view(np.int64))


class _Trees:
    """The n-grams of a pool, to be found in many texts at once. The items of the pool have numbers, all others one."""

    def __init__(self, places: dict[tuple[Any, ...], int]) -> None:
        self.items = {item: k for k, item in enumerate(sorted({item for gram in places for item in gram}))}
        self.most, self.room = len(self.items) + 1, MOST_LISTED
        whole = self.items and all(isinstance(v, int) for v in self.items)
        self.whole = self._among(np.array(list(self.items), np.int64)) if whole else None
        self.grams: dict[int, dict[tuple[Any, ...], int]] = {}
        for gram, place in places.items():
            self.grams.setdefault(len(gram), {})[gram] = place
        self._trees: dict[int, tuple[list[_Among], Array]] = {}

    def _among(self, keys: Array) -> _Among:
        found = _Among(keys, self.room)
        self.room -= 0 if found.table is None else found.table.size
        return found

    def tree(self, n: int) -> tuple[list[_Among], Array]:
        """The steps through the tree of n-grams, and where each is counted.

        By its k-th item an n-gram comes from a branch of step k - 1 to another, whose number is that of branch * items
        + item among such numbers.
        """
        if n not in self._trees:
            numbers = np.array([[self.items[item] for item in gram] for gram in self.grams[n]], np.int64)
            steps, branch = list[_Among](), np.zeros(len(numbers), np.int64)
            for item in numbers.T:
                keys, branch = np.unique(branch * self.most + item, return_inverse=True)
                steps.append(self._among(keys))
            places = np.empty(len(numbers), np.int64)
            places[branch] = list(self.grams[n].values())
            self._trees[n] = steps, places
        return self._trees[n]

    def numbers(self, x: Array) -> Array:
        """The items of a tensor as numbers."""
        if self.whole is not None and x.dtype != object:
            return self.whole(x.astype(np.int64, copy=False))
        other = len(self.items)
        found = [self.items.get(v, other) for v in x.ravel().tolist()]
        return np.array(found, np.int64).reshape(x.shape)

    def found(self, items: Array, n: int, step: int) -> tuple[Array, Array]:
        """For each n-gram in rows of items that are `step` apart: its row, and where it is counted."""
        count = items.shape[1] - (n - 1) * step
        at = np.zeros((len(items), count), np.int64)
        steps, places = self.tree(n)
        for k, among in enumerate(steps):
            at = among(at * self.most + items[:, k * step : k * step + count])
        rows, columns = np.nonzero(at < len(places))
        return rows, places[at[rows, columns]]


@lru_cache(16)
def _trees(pool: tuple[Any, ...], starts: tuple[int, ...], indexes: tuple[int, ...]) -> _Trees:
    return _Trees(_ngrams(pool, starts, indexes))


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


def _all_shown(x: Array) -> list[str]:
    """`_shown` of a vector's elements; numpy writes those at once that it gives no exponent either."""
    size, most = np.abs(x), 10.0 ** (np.finfo(x.dtype).precision)
    texts = [t.removesuffix(".0") for t in x.astype("U").tolist()]
    for k in np.flatnonzero(~((size >= 1e-3) & (size < most))).tolist():
        texts[k] = _shown(x[k])
    return texts


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
        return strings(_all_shown(x.ravel()), x.shape)
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
_PLAIN = re.compile(r"[0-9.eE+-]*")
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


def _all_parsed(texts: list[str]) -> list[float]:
    """`_parsed` of each text: of characters that numbers have, Python's own rules are the same."""
    if _PLAIN.fullmatch("".join(texts)):
        with suppress(ValueError):  # `_parsed` says which one it is
            return list(map(float, texts))
    return list(map(_parsed, texts))


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
        return np.array([v != 0 for v in _all_parsed(values)], bool).reshape(x.shape)
    if to.kind in "iu" or "int" in to.name:
        return np.array([_parsed_whole(v, to) for v in values], np.object_).astype(to).reshape(x.shape)
    with np.errstate(over="ignore"):
        return np.array(_all_parsed(values), np.float64).astype(to).reshape(x.shape)
