"""Every error that onnxc raises on purpose.

All are :class:`OnnxcError`, and carry what is known of the place: the node, the shapes at hand and the cause.

>>> str(ShapeError("cannot broadcast", node="n17 Add", shapes={"a": (2, 3), "b": (4,)}))
'cannot broadcast [node n17 Add; a: (2, 3), b: (4,)]'
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

_QUOTED = r"""(?<!\w)(?:'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")(?!\w)"""
_WORDS = re.compile(rf"{_QUOTED}|\S{{300,}}", re.DOTALL)  # longer than the names and paths that people read
_MOST = 20_000  # characters of a message
_LINE = 4000  # of a line that shows more than one name
_SYMBOLS = re.compile(rf"{_QUOTED}|(?<![\w.@-])s\d+(?![\w.@-])", re.DOTALL)  # s0, s1, ...: open dims


def shortened(text: str) -> str:
    """A message without the middle of names that would fill the screen: a model's names may have megabytes.

    >>> len(shortened(f"no input {'x y' * 1000!r}"))
    212
    """
    return abridged(_WORDS.sub(lambda word: abridged(word[0]), text), _MOST)


def abridged(text: str, most: int = 300) -> str:
    """A name as messages show it where it stands without quotes: without its middle if it is too long."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 6 :]}"


def spelled(text: str) -> str:
    r"""What is no printable character as an escape, so that a name stays on its line.

    >>> spelled("a\x1b[31mb\n")
    'a\\x1b[31mb\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def one_line(text: str) -> str:
    r"""A text with names in it, as a line that a person reads: printable characters only, no more than fit a screen.

    >>> one_line("a\nb"), len(one_line("a\n" * 500_000))
    ('a\\nb', 203)
    """
    return abridged(shortened(spelled(abridged(text, _LINE))), _LINE)


@contextlib.contextmanager
def about_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Has an OSError name the file that it is about: that of a full disk does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


class OnnxcError(Exception):
    """The base of all errors of this package.

    Args:
        message: what went wrong, in a sentence.
        node: the node (its number and op type, or the model's name for it) where it went wrong.
        shapes: shapes by value name, as tuples of ints or symbolic dims.
        cause: the exception behind this one; also set as ``__cause__``.

    Attributes:
        partial: whether a program had changed some of the arrays that it updates in place when it failed.
        sizes: what the message calls open dims, by symbol: `{"s0": "batch"}`.
    """

    partial = False
    sizes: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        shapes: Mapping[str, Sequence[object]] | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.node = node
        self.shapes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        self.cause = cause
        if cause is not None:
            self.__cause__ = cause

    def __str__(self) -> str:
        where = [] if self.node is None else [f"node {self.node}"]
        if self.shapes:
            where.append(", ".join(f"{name}: {shape}" for name, shape in self.shapes.items()))
        text = f"{self.message} [{'; '.join(where)}]" if where else self.message
        named = _SYMBOLS.sub(lambda word: self.sizes.get(word[0], word[0]), text) if self.sizes else text
        return "\n".join(map(spelled, shortened(named).split("\n")))


class ModelError(OnnxcError):
    """The model is not valid: it does not parse, breaks a rule of ONNX, or names data that is not there."""


class UnsupportedError(OnnxcError):
    """The model is valid, but asks for something that onnxc cannot do yet."""


class NeedsContentError(UnsupportedError):
    """An op can be built only for known content of one of its inputs, and this is computed at run time.

    Args:
        message: as of every error.
        value: the value whose content is wanted (`onnxc.ir.graph.Value`).
    """

    def __init__(self, message: str, value: object) -> None:
        super().__init__(message)
        self.value = value


class NeedsSizesError(NeedsContentError):
    """An op can be built only for known sizes of its inputs: they decide about ranks, or about what is computed.

    Args:
        message: as of every error.
        dims: the sizes that are wanted (`onnxc.ir.expr.Dim`); none where it is enough to know which of them are 1.
    """

    def __init__(self, message: str, *dims: object) -> None:
        super().__init__(message, None)
        self.dims = dims


_MOST_SHOWN = 100  # nodes that a message lists


class UnsupportedOpError(UnsupportedError):
    """The model uses ops that onnxc does not have; all of them are listed.

    >>> print(UnsupportedOpError([("head/roi", "RoiAlign-16"), ("", "Foo-1 (com.acme)")]))
    2 nodes use ops that are not supported: RoiAlign-16 ('head/roi'), Foo-1 (com.acme) (unnamed)

    Args:
        missing: for each node its name and its op.
        hint: what the user can do about it.
    """

    def __init__(self, missing: Iterable[tuple[str, str]], hint: str = "") -> None:
        self.missing = list(missing)
        shown = self.missing[:_MOST_SHOWN]
        listed = ", ".join(f"{op} ({repr(node) if node else 'unnamed'})" for node, op in shown)
        listed += f" and {len(self.missing) - len(shown)} more" if len(shown) < len(self.missing) else ""
        count = len(self.missing)
        verb = "1 node uses an op that is" if count == 1 else f"{count} nodes use ops that are"
        super().__init__(f"{verb} not supported: {listed}{'; ' if hint else ''}{hint}")


class ShapeError(OnnxcError):
    """Shapes or types in the graph contradict each other."""


class InputError(OnnxcError):
    """A call's inputs have a wrong name, dtype, rank or size."""


class ArgumentError(InputError, TypeError, ValueError, OverflowError):
    """An argument of a function over arrays is not what it has to be. The array API standard leaves the class of such
    errors open: it may be caught as the one that Python would raise.
    """


class SizesError(InputError):
    """Dims of inputs meet inside the model with sizes that the program was not compiled for.

    Args:
        message, node: as of every error.
        symbols: names of the open dims of which the one that is 1 is computed: were they numbers, it could be
            broadcast.
    """

    def __init__(self, message: str, *, node: str | None = None, symbols: frozenset[str] = frozenset()) -> None:
        super().__init__(message, node=node)
        self.symbols = symbols


class TraceError(OnnxcError, TypeError):
    """A Python function does what cannot be traced: it asks for the content of an array that is not computed yet, or
    uses an array of a trace that has ended.
    """


class ToolchainError(OnnxcError):
    """No C++ compiler, or the compiler failed."""


class CacheError(OnnxcError):
    """The cache directory cannot be used."""


class PackageError(OnnxcError):
    """A saved model is damaged, or is not a saved model."""


class CpuError(OnnxcError):
    """A program needs CPU features that this machine lacks, or an unknown CPU level was asked for."""


class CudaError(OnnxcError):
    """A GPU cannot be used (its driver or a package is missing or too old, the model is for others), or it failed."""


class RunError(OnnxcError):
    """A program failed while it ran: an index out of bounds, an integer division by zero."""


class LimitError(OnnxcError):
    """Something is larger than the caps allow: a tensor, an arena, a constant."""


class InternalError(OnnxcError):
    """A fault of onnxc itself: please report it."""
