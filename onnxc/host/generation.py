"""What the host does between two runs of a decoder: the bookkeeping of a beam search, and drawing of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxc.errors import RunError
from onnxc.host.registry import host_function

Array = np.ndarray[Any, Any]


@host_function
def ms_beam_step(
    best: Array, picks: Array, sequences: Array, kept: Array, lengths: Array, marks: Array, used: Array, done: Array,
    penalty: Array, words: int, end: int, fill: int, early: bool,
) -> tuple[Array, ...]:  # fmt: skip
    """Goes on with the best candidates that do not end, and keeps those that do.

    Args:
        best: sums of log-probabilities of twice as many candidates as there are beams, the best first [batch, 2 beams].
        picks: which they are: beam * words + word.
        sequences: the words of each beam so far [batch * beams, length].
        kept: finished sequences [batch, beams, most words], the best first; their lengths, marks [batch, beams], and
            how many there are [batch].
        done: of which inputs no better sequence is looked for [batch].
        penalty: the power of the length by which sums are divided.
        words: how many words there are; `end` ends a sequence, `fill` follows where one is done.
        early: stop when there are as many finished sequences as beams, not when none can become better.

    Returns:
        the sums, last words and rows of `sequences` of the beams to go on with [batch * beams], and what is kept.
    """
    batch, beams = marks.shape
    kept, lengths, marks, used, done = (v.copy() for v in (kept, lengths, marks, used, done))
    sums = np.zeros((batch, beams), np.float32)
    tokens = np.full((batch, beams), fill, np.int32)
    rows = np.zeros((batch, beams), np.int64)
    length = sequences.shape[1]
    for i in np.flatnonzero(~done):
        store = (kept[i], lengths[i], marks[i])
        taken = 0
        for j, (total, pick) in enumerate(zip(best[i], picks[i], strict=True)):
            row, word = i * beams + pick // words, pick % words
            if word == end:
                if j < beams:
                    used[i] = _keep(store, used[i], sequences[row], total, penalty)
                continue
            sums[i, taken], tokens[i, taken], rows[i, taken] = total, word, row
            taken += 1
            if taken == beams:
                break
        if used[i] == beams:
            hope = best.ravel()[i * beams : (i + 2) * beams].max()  # of which row, is onnxruntime's choice
            done[i] = early or marks[i, -1] >= _mark(hope, length, penalty)
    return sums.ravel(), tokens.ravel(), rows.ravel(), kept, lengths, marks, used, done


def _mark(total: Array, length: int, penalty: Array) -> Any:
    """What sequences of different lengths are compared by."""
    return np.float32(total / np.float32(length) ** penalty.reshape(()))


def _keep(store: tuple[Array, Array, Array], used: int, words: Array, total: Array, penalty: Array) -> int:
    """Puts a sequence in its place among the finished ones, if it is good enough; how many there are then."""
    kept, lengths, marks = store
    mark, at = _mark(total, len(words), penalty), used
    if used == len(marks):
        if mark <= marks[-1]:
            return used
        at -= 1
    else:
        used += 1
    while at > 0 and mark > marks[at - 1]:
        kept[at], lengths[at], marks[at] = kept[at - 1], lengths[at - 1], marks[at - 1]
        at -= 1
    kept[at, : len(words)], lengths[at], marks[at] = words, len(words), mark
    return used


@host_function
def ms_beam_result(
    sums: Array, sequences: Array, kept: Array, lengths: Array, marks: Array, used: Array, done: Array, penalty: Array,
    fill: int, count: int,
) -> tuple[Array, Array]:  # fmt: skip
    """The best sequences [batch, count, most words], filled up, and their marks, of :func:`ms_beam_step`'s last state.

    Beams that have not ended count as finished.
    """
    _, beams, most = kept.shape
    kept, lengths, marks, used = (v.copy() for v in (kept, lengths, marks, used))
    for i in np.flatnonzero(~done):
        store = (kept[i], lengths[i], marks[i])
        for row in range(i * beams, (i + 1) * beams):
            used[i] = _keep(store, used[i], sequences[row], sums[row], penalty)
    places = np.arange(most) < lengths[:, :count, None]
    return np.where(places, kept[:, :count], np.int32(fill)), np.ascontiguousarray(marks[:, :count])


MOST_WORDS = 4096  # of a sequence, as in onnxruntime


@host_function
def ms_greatest_length(most: Array, start: Array) -> Array:
    """A max_length that comes with the run."""
    if not start < most <= MOST_WORDS:
        raise RunError(f"the max_length is {most}; it is to be more than {start}, {MOST_WORDS} at most")
    return most


MULTIPLIER, MODULUS = 16807, 2**31 - 1  # of C++'s minstd_rand0


@host_function
def ms_draw_tokens(
    scores: Array, state: Array, share: float, least: int, filter_value: float, custom: bool
) -> tuple[Array, Array, Array]:
    """One word for each row of scores [batch, words], from the most probable ones whose probabilities are `share`.

    Returns the words, the scores with `filter_value` in the place of those of other words, and the generator's state.
    """
    order = np.argsort(-scores if custom else scores, axis=1, kind="stable")
    ranked = np.take_along_axis(scores, order, 1)
    e = np.exp(ranked - ranked.max(1, keepdims=True))
    total = np.cumsum(e / e.sum(1, keepdims=True, dtype=np.float32), axis=1, dtype=np.float32)
    out = np.zeros(scores.shape, bool)
    if custom:
        out[:, 1:] = total[:, :-1] > np.float32(share)
    else:
        out = total <= np.float32(1) - np.float32(share)
        out[:, max(scores.shape[1] - least, 1) :] = False
    filtered = scores.copy()
    dropped = np.zeros_like(out)
    np.put_along_axis(dropped, order, out, 1)
    filtered[dropped] = np.float32(filter_value)
    words, seed = np.empty(len(scores), np.int32), int(state.reshape(()))
    for row, values in enumerate(filtered):
        sums = np.cumsum(np.where(np.isfinite(values), np.exp(values.astype(np.float64) - values.max()), 0))
        place, seed = _uniform(seed)
        words[row] = min(np.searchsorted(sums, place * sums[-1], "right"), len(values) - 1)
    return words, filtered, np.asarray(seed, np.int64).reshape(state.shape)


def _uniform(seed: int) -> tuple[float, int]:
    """A number of [0, 1), and the next state, as C++'s uniform_real_distribution<double> takes it from minstd_rand0."""
    first = seed * MULTIPLIER % MODULUS
    second = first * MULTIPLIER % MODULUS
    span = MODULUS - 1
    return (float(first - 1) + float(second - 1) * span) / float(span * span), second
