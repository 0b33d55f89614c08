"""Regular expressions of RE2's syntax, matched in time linear in the text: a model's pattern comes from a stranger.

A pattern is compiled to a nondeterministic automaton, whose states are run side by side, as RE2 does it. Classes and
assertions have RE2's meaning: \\d, \\s and \\w are ASCII, `$` without (?m) is the end of the text.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from onnxc.errors import LimitError, RunError, UnsupportedError
from onnxc.host.registry import host_function

MOST_LENGTH = 1 << 17  # of a pattern
MOST_STATES = 20_000
MOST_REPEATS = 1000  # RE2's own limit
MOST_DEPTH = 200
MOST_STEPS = 200_000_000  # states that one text goes through: some ten seconds
MOST_KEPT = 1 << 14  # characters that rows are followed by, and states in them

Ranges = tuple[tuple[int, int], ...]
_LAST = sys.maxunicode


def _of(text: str) -> Ranges:
    """Ranges such as ``a-zA-Z_``."""
    return tuple((ord(a[0]), ord(a[-1])) for a in re.findall(r".-.|.", text, re.DOTALL))


_DIGIT, _SPACE, _WORD = _of("0-9"), _of("\t\n\f\r "), _of("0-9A-Z_a-z")
_PERL = {"d": _DIGIT, "s": _SPACE, "w": _WORD}
_POSIX = {
    "alnum": _of("0-9A-Za-z"), "alpha": _of("A-Za-z"), "ascii": ((0, 127),), "blank": _of("\t "),
    "cntrl": ((0, 31), (127, 127)), "digit": _DIGIT, "graph": ((33, 126),), "lower": _of("a-z"), "print": ((32, 126),),
    "punct": ((33, 47), (58, 64), (91, 96), (123, 126)), "space": _of("\t-\r "), "upper": _of("A-Z"), "word": _WORD,
    "xdigit": _of("0-9A-Fa-f"),
}  # fmt: skip
_CONTROLS = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}


@dataclass(frozen=True)
class Set:
    """One character: of these ranges or Unicode categories, or (negated) of none of them."""

    ranges: Ranges = ()
    categories: tuple[tuple[str, bool], ...] = ()  # a prefix, and whether it is negated
    negated: bool = False
    folded: bool = False  # whether upper and lower case count as one

    def holds(self, c: str) -> bool:
        """Whether the character is one of these."""
        forms = _folds().get(c, (c,)) if self.folded else (c,)
        codes = [ord(form) for form in forms]
        held = any(low <= code <= high for code in codes for low, high in self.ranges)
        return (held or any(_in_category(forms, *category) for category in self.categories)) != self.negated


def _in_category(forms: Iterable[str], prefix: str, negated: bool) -> bool:
    return (prefix == "Any" or any(unicodedata.category(c).startswith(prefix) for c in forms)) != negated


@cache
def _folds() -> dict[str, tuple[str, ...]]:
    """The characters that count as one with a character where case does not count; those without such are left out."""
    groups: dict[str, list[str]] = {}
    for code in range(0x1F000):
        c = chr(code)
        upper = c.upper() if len(c.upper()) == 1 and c != "ı" else c
        groups.setdefault(upper.lower() if len(upper.lower()) == 1 else upper, []).append(c)
    return {c: tuple(group) for group in groups.values() if len(group) > 1 for c in group}


@dataclass(frozen=True)
class Flags:
    """What (?ims) switches."""

    fold: bool = False
    multiline: bool = False
    dot_all: bool = False


# ---------------------------------------------------------------- the automaton


@dataclass
class _State:
    """Goes on to `after`: with a character of `test`, or without one, where `test` is an assertion's name or None."""

    test: Set | str | None = None
    after: list[int] = field(default_factory=list)


class _Automaton:
    """States; the pieces of a pattern are pairs of a first and a last state."""

    def __init__(self) -> None:
        self.states: list[_State] = []

    def state(self, test: Set | str | None = None, after: Iterable[int] = ()) -> int:
        if len(self.states) >= MOST_STATES:
            raise LimitError(f"a regular expression needs more than {MOST_STATES} states")
        self.states.append(_State(test, list(after)))
        return len(self.states) - 1

    def piece(self, test: Set | str | None = None) -> tuple[int, int]:
        end = self.state()
        return self.state(test, [end]), end

    def joined(self, parts: list[tuple[int, int]]) -> tuple[int, int]:
        if not parts:
            return self.piece()
        for (_, end), (start, _) in pairwise(parts):
            self.states[end].after.append(start)
        return parts[0][0], parts[-1][1]

    def either(self, parts: list[tuple[int, int]]) -> tuple[int, int]:
        if len(parts) == 1:
            return parts[0]
        end = self.state()
        for _, last in parts:
            self.states[last].after.append(end)
        return self.state(None, [first for first, _ in parts]), end

    def repeated(self, make: Callable[[], tuple[int, int]], low: int, high: int | None) -> tuple[int, int]:
        """`low` to `high` times, or any number of times from `low` on."""
        parts = [make() for _ in range(low)]
        if high is None:
            first, last = make()
            end = self.state()
            self.states[last].after += [first, end]
            parts.append((self.state(None, [first, end]), end))
        for _ in range(0 if high is None else high - low):
            first, last = make()
            parts.append((self.state(None, [first, last]), last))
        return self.joined(parts)


# ---------------------------------------------------------------- the syntax

_REPETITION = r"[*+?]|\{([0-9]+)(?:(,)([0-9]*))?\}"
Make = Callable[[], "tuple[int, int]"]


class _Parser:
    """Reads a pattern; every method leaves `at` behind what it has read."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0
        self.automaton = _Automaton()
        self.depth = 0

    def fail(self, what: str) -> RunError:
        return RunError(f"the regular expression {self.pattern[:60]!r}: {what} (at {self.at})")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def match(self, expression: str) -> re.Match[str] | None:
        """What one of our own expressions finds here."""
        found = re.compile(expression).match(self.pattern, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def whole(self) -> Make:
        made = self.alternatives(Flags())
        if self.at < len(self.pattern):
            raise self.fail("a closing parenthesis without an opening one")
        return made

    def alternatives(self, flags: Flags) -> Make:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise LimitError(f"a regular expression has more than {MOST_DEPTH} groups in each other")
        branches: list[list[Make]] = [[]]
        while self.at < len(self.pattern) and not self.peek(")"):
            if self.take("|"):
                branches.append([])
                continue
            switched = self.switch(flags)
            if switched is not None:
                flags = switched
                continue
            branches[-1] += self.quoted(flags) or [self.times(self.atom(flags))]
        self.depth -= 1
        a = self.automaton
        return lambda: a.either([a.joined([make() for make in branch]) for branch in branches])

    def switch(self, flags: Flags) -> Flags | None:
        """(?i) and its like, which hold for the rest of the group."""
        found = self.match(r"\(\?([imsU]*)(?:-([imsU]+))?\)")
        return None if found is None else self.switched(flags, found[1], found[2])

    def switched(self, flags: Flags, on: str, off: str | None) -> Flags:
        names = {"i": "fold", "m": "multiline", "s": "dot_all"}  # U, which swaps greed, changes no match as a whole
        changes = {names[c]: True for c in on if c in names} | {names[c]: False for c in off or "" if c in names}
        return replace(flags, **changes)

    def quoted(self, flags: Flags) -> list[Make]:
        """\\Q...\\E: every character means itself. A repetition behind it is that of the last."""
        if not self.take("\\Q"):
            return []
        end = self.pattern.find("\\E", self.at)
        text = self.pattern[self.at : end if end >= 0 else len(self.pattern)]
        self.at = end + 2 if end >= 0 else len(self.pattern)
        parts = [self.one(Set(_of_character(c), folded=flags.fold)) for c in text]
        return [*parts[:-1], self.times(parts[-1])] if parts else [self.automaton.piece]

    def one(self, test: Set | str) -> Make:
        return lambda: self.automaton.piece(test)

    def times(self, make: Make) -> Make:
        """An atom with the repetition behind it."""
        while self.take("\\Q\\E"):
            pass
        found = self.match(_REPETITION)
        if found is None:
            return make
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0], (-1, None))
        if low < 0:
            low = self.times_of(found[1])
            high = low if found[2] is None else self.times_of(found[3]) if found[3] else None
            if high is not None and high < low:
                raise self.fail(f"{found[0]} is no repetition")
        self.take("?")  # the shortest first: the same matches as a whole
        if self.match(_REPETITION):
            raise self.fail("a repetition is repeated")

        def repeated() -> tuple[int, int]:
            return self.automaton.repeated(make, low, high)

        return self.times(repeated) if self.peek("\\Q\\E") else repeated

    def times_of(self, digits: str) -> int:
        """A number of repetitions; Python reads none of thousands of digits."""
        short = digits.lstrip("0") or "0"
        if len(short) > len(str(MOST_REPEATS)) or int(short) > MOST_REPEATS:
            raise self.fail(f"{{{digits[:20]}}} is no repetition (the most is {MOST_REPEATS})")
        return int(short)

    def atom(self, flags: Flags) -> Make:
        if self.peek("("):
            return self.group(flags)
        if self.peek("["):
            return self.one(self.bracket(flags))
        if self.take("."):
            return self.one(Set((), negated=True) if flags.dot_all else Set(_of("\n"), negated=True))
        if self.take("^"):
            return self.one("line start" if flags.multiline else "start")
        if self.take("$"):
            return self.one("line end" if flags.multiline else "end")
        if self.match(_REPETITION):
            raise self.fail("there is nothing to repeat")
        if self.peek("\\"):
            return self.one(self.escape(flags))
        c = self.pattern[self.at]
        self.at += 1
        return self.one(Set(_of_character(c), folded=flags.fold))

    def group(self, flags: Flags) -> Make:
        found = self.match(r"\((?:\?P?<\w+>|\?([imsU]*)(?:-([imsU]+))?:)?")
        assert found is not None
        if self.pattern.startswith("(?", found.start()) and found.end() == found.start() + 1:
            raise self.fail("RE2 has no such group")
        inner = flags if found[1] is None and found[2] is None else self.switched(flags, found[1] or "", found[2])
        made = self.alternatives(inner)
        if not self.take(")"):
            raise self.fail("a parenthesis is not closed")
        return made

    def escape(self, flags: Flags) -> Set | str:
        assertions = {"A": "start", "z": "end", "b": "word", "B": "no word"}
        name = self.pattern[self.at + 1 : self.at + 2]
        if name in assertions:
            self.at += 2
            return assertions[name]
        found = self.class_escape()
        return (
            replace(found, folded=flags.fold)
            if found is not None
            else Set(_of_character(self.character()), folded=flags.fold)
        )

    def class_escape(self) -> Set | None:
        """\\d, \\W, \\pL, \\P{Lu} and their like."""
        found = self.match(r"\\([dswDSW])")
        if found is not None:
            return Set(_PERL[found[1].lower()], negated=found[1].isupper())
        if self.peek("\\C"):
            raise UnsupportedError("\\C, a byte, in a regular expression is not supported")
        found = self.match(r"\\([pP])(?:\{(\^?)(\w+)\}|(\w))")
        if found is None:
            return None
        name, negated = found[3] or found[4], (found[1] == "P") != bool(found[2])
        if name != "Any" and not re.fullmatch(r"[CLMNPSZ][a-z]?", name):
            raise UnsupportedError(f"the class {found[0][:40]} of a regular expression is not supported")
        return Set((), ((name, negated),))

    def character(self) -> str:
        """One character, escaped or not."""
        found = self.match(r"\\x(?:([0-9A-Fa-f]{2})|\{([0-9A-Fa-f]{1,8})\})")
        if found is not None:
            return self.of_code(int(found[1] or found[2], 16))
        found = self.match(r"\\([0-7]{3}|0[0-7]{0,2})")
        if found is not None:
            return self.of_code(int(found[1], 8))
        found = self.match(r"\\([aftnrv])")
        if found is not None:
            return _CONTROLS[found[1]]
        found = self.match(r"\\([!-/:-@\[-`{-~])|([^\\])")
        if found is None:
            raise self.fail("RE2 has no such escape")
        return found[1] or found[2]

    def of_code(self, code: int) -> str:
        if code > _LAST:
            raise self.fail(f"there is no character {code:#x}")
        return chr(code)

    def bracket(self, flags: Flags) -> Set:
        """[abc], [^a-z], [[:alpha:]\\d]."""
        self.at += 1
        negated, ranges, categories, first = self.take("^"), list[tuple[int, int]](), list[tuple[str, bool]](), True
        while first or not self.peek("]"):
            first = False
            if self.at >= len(self.pattern):
                raise self.fail("a bracket is not closed")
            posix = self.match(r"\[:(\^?)(\w+):\]")
            if posix is not None:
                if posix[2] not in _POSIX:
                    raise self.fail(f"there is no class {posix[0]}")
                ranges += _complement(_POSIX[posix[2]]) if posix[1] else _POSIX[posix[2]]
                continue
            found = self.class_escape()
            if found is not None:
                ranges += _complement(found.ranges) if found.negated else found.ranges
                categories += found.categories
                continue
            low = high = self.character()
            if self.peek("-") and not self.pattern.startswith("-]", self.at):
                self.at += 1
                high = self.character()
            if ord(low) > ord(high):
                raise self.fail(f"the range {low}-{high} is empty")
            ranges.append((ord(low), ord(high)))
        self.at += 1
        return Set(tuple(ranges), tuple(categories), negated, flags.fold)


def _of_character(c: str) -> Ranges:
    return ((ord(c), ord(c)),)


def _complement(ranges: Ranges) -> list[tuple[int, int]]:
    out, at = [], 0
    for low, high in sorted(ranges):
        if at < low:
            out.append((at, low - 1))
        at = max(at, high + 1)
    return [*out, (at, _LAST)] if at <= _LAST else out


# ---------------------------------------------------------------- matching


class _Row:
    """States that are entered together, and for what comes next: the row that follows, and the steps that took."""

    def __init__(self, entered: frozenset[int]) -> None:
        self.entered = entered
        self.next: dict[str, tuple[_Row, int]] = {}
        self.ends: dict[str, bool] = {}  # whether a match may end here, between these two characters


class Regex:
    """A compiled pattern. What it learns of sets of states it keeps for the next text, as a deterministic automaton."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MOST_LENGTH:
            raise LimitError(f"a regular expression has {len(pattern)} characters; the limit is {MOST_LENGTH}")
        parser = _Parser(pattern)
        first, self._last = parser.whole()()
        self._states = parser.automaton.states
        self._asserts = any(isinstance(s.test, str) for s in self._states)
        self._first = _Row(frozenset([first]))
        self._rows = {self._first.entered: self._first}
        self._room = MOST_KEPT

    def full_match(self, text: str) -> bool:
        """Whether the pattern matches the text as a whole."""
        row, before, steps = self._first, "", 0
        for c in text:
            key = before + c if self._asserts else c
            row, count = row.next.get(key) or self._step(row, before, c, key)
            steps += count
            if steps > MOST_STEPS:
                raise LimitError(f"a regular expression and a text of {len(text)} characters take too many steps")
            if not row.entered:
                return False
            before = c
        return self._last in self._reached(row.entered, before, "")

    def matches(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the pattern is in a text, from left to right: the longest match of each place, behind the one before.

        Of an empty match the character behind it counts as seen.
        """
        at = steps = 0
        while at <= len(text):
            end, count = self._longest(text, at)
            steps += count
            if steps > MOST_STEPS:
                raise LimitError(f"a regular expression and a text of {len(text)} characters take too many steps")
            if end is not None:
                yield at, end
            at = at + 1 if end is None else max(end, at + 1)

    def _longest(self, text: str, start: int) -> tuple[int | None, int]:
        """Where the longest match from `start` on ends, and the steps that took."""
        row, end, steps = self._first, None, 0
        before = text[start - 1] if start else ""
        for at in range(start, len(text) + 1):
            c = text[at] if at < len(text) else ""
            key = before + "\n" + c if self._asserts else ""
            if key not in row.ends:
                row.ends[key] = self._last in self._reached(row.entered, before, c)
            end = at if row.ends[key] else end
            if not c:
                break
            key = before + c if self._asserts else c
            row, count = row.next.get(key) or self._step(row, before, c, key)
            steps += 1 + count
            if not row.entered or steps > MOST_STEPS:
                break
            before = c
        return end, steps

    def _step(self, row: _Row, before: str, c: str, key: str) -> tuple[_Row, int]:
        """The row behind a character."""
        here, held, after = self._reached(row.entered, before, c), dict[Set, bool](), set[int]()
        for k in here:
            test = self._states[k].test
            if isinstance(test, Set):
                if test not in held:
                    held[test] = test.holds(c)
                if held[test]:
                    after.update(self._states[k].after)
        entered = frozenset(after)
        found = self._rows.get(entered)
        self._room -= 1 if found is not None else 1 + len(entered)
        if self._room < 0:  # rows that are in use live on
            self._room, self._rows, self._first = MOST_KEPT, {}, _Row(self._first.entered)
        found = found or self._rows.setdefault(entered, _Row(entered))
        row.next[key] = found, len(here)
        return row.next[key]

    def _reached(self, begin: Iterable[int], before: str, after: str) -> set[int]:
        """The states that can be reached between two characters; either is empty at an end of the text."""
        found: set[int] = set()
        waiting = list(begin)
        while waiting:
            k = waiting.pop()
            if k in found:
                continue
            found.add(k)
            test = self._states[k].test
            if test is None or (isinstance(test, str) and _asserted(test, before, after)):
                waiting += self._states[k].after
        return found


def _asserted(name: str, before: str, after: str) -> bool:
    """Whether an assertion holds between two characters."""
    if name == "start":
        return not before
    if name == "end":
        return not after
    if name == "line start":
        return before in ("", "\n")
    if name == "line end":
        return after in ("", "\n")
    at_edge = _is_word(before) != _is_word(after)
    return at_edge if name == "word" else not at_edge


def _is_word(c: str) -> bool:
    return c != "" and c.isascii() and (c.isalnum() or c == "_")


@lru_cache(64)
def compiled(pattern: str) -> Regex:
    """The pattern as a matcher. RunError where it is not of RE2's syntax; UnsupportedError for Unicode scripts."""
    return Regex(pattern)


@host_function
def regex_full_match(x: np.ndarray, pattern: str = "") -> np.ndarray:
    """Whether each string matches the pattern as a whole, bool."""
    regex = compiled(pattern)
    return np.array([regex.full_match(s) for s in x.ravel()], bool).reshape(x.shape)
