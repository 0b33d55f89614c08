"""Texts taken apart into tokens, by what separates them or by what they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxc.host.regex import compiled
from onnxc.host.registry import host_function
from onnxc.host.text import limit, strings

Array = np.ndarray[Any, Any]


@host_function
def ms_tokenize(
    x: Array, least: int, mark: bool, pad: str, separators: list[str] | None = None, token: str | None = None
) -> Array:
    """The tokens of each string along a new last axis, with `pad` behind those of strings that have fewer.

    Tokens are what lies between the separators, each of them a regular expression that cuts what the one before it
    left, or what the expression `token` finds; each character is one without any. Tokens of fewer than `least`
    characters are left out. With `mark`, "\\x02" stands before the tokens of a string and "\\x03" behind them.
    """
    rows = []
    for text in x.ravel():
        found = [t for t in _tokens(text, separators, token) if len(t) >= least]
        rows.append(["\x02", *found, "\x03"] if mark else found)
    width = max(map(len, rows), default=0)
    limit(width * len(rows))
    return strings((t for row in rows for t in [*row, *[pad] * (width - len(row))]), (*x.shape, width))


def _tokens(text: str, separators: list[str] | None, token: str | None) -> list[str]:
    if token is not None:
        return [text[begin:end] for begin, end in compiled(token).matches(text)]
    if not separators:
        return list(text)
    pieces = [text]
    for separator in separators:
        pieces = [part for piece in pieces for part in _between(piece, separator)]
    return pieces


def _between(text: str, separator: str) -> list[str]:
    """What lies between the matches; an empty one takes the character behind it."""
    parts, at = [], 0
    for begin, end in compiled(separator).matches(text):
        parts.append(text[at:begin])
        at = max(end, begin + 1)
    return [*parts, text[at:]]
