"""Epilogues that kernels of a program share.

A template is compiled once for each type of function object that it is given, and each lambda is a type of its own. The
epilogues of many layers differ only in names and in sizes: bias and SiLU behind 144 channels and behind 240. Such ones
are made by one function here, so that they are one type:

    static const auto closure0 = [](auto x0, auto x1, i64 n0) OX_LAMBDA {
      return [=](Px q, i64 c, vf acc, auto lanes) OX_LAMBDA {
        stl(x1 + (c + n0*q.i), acc + ldl(x0 + c, lanes), lanes);
      };
    };

and a kernel has `const auto epi = closure0(p0, p1, 144);`. A third to a half of the compile time of convolutional nets is
saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_HEAD = re.compile(r"^( *)const auto (\w+) = ((?:\w+\()?)\[=\]\((.*)\) OX_LAMBDA \{(.*)$")
_WORD = re.compile(r"(?<![\w.])(?<!->)[A-Za-z_]\w*")
_DEFINED = re.compile(r"(?<!return)(?<!else)(?<=[\w>]) [*&]*(?:const )?(?:__restrict )?([A-Za-z_]\w*)(?= = |\{|\[|;)")
_NUMBER = re.compile(r"(?<![\w.<])(?<!/ )(?<!% )(?<!, )\d+(?![\w.])")
_KNOWN = frozenset((
    "const", "auto", "for", "if", "else", "return", "void", "int", "float", "double", "bool", "char", "true", "false",
    "unsigned", "long", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64", "vf", "vd",
    "vi", "vl", "V", "VL", "INFINITY", "NAN",
))  # fmt: skip
_PARAMETERS = frozenset(("arg", "first", "last", "worker"))  # of every kernel


@dataclass(frozen=True)
class _Closure:
    """A lambda of a kernel that copies what it captures.

    Attributes:
        lines: of the kernel's text, the first and the one after the last.
        indent, name, around, parameters: of its head; `around` is a function that is called with it, or nothing.
        variables: what it captures.
        pieces, numbers: its body, with other names for the variables, between numbers that places are computed with.
    """

    lines: tuple[int, int]
    indent: str
    name: str
    around: str
    parameters: str
    variables: tuple[str, ...]
    pieces: tuple[str, ...]
    numbers: tuple[str, ...]

    @property
    def form(self) -> object:
        """Equal for those that one function can make."""
        return self.parameters, len(self.variables), self.pieces


@dataclass(frozen=True)
class Shared:
    """The kernels of a program with what they share.

    Attributes:
        kernels: their functions' texts.
        uses: for each the names of what it shares.
        definitions: by these names.
    """

    kernels: dict[str, str]
    uses: dict[str, tuple[str, ...]]
    definitions: dict[str, str]

    def defined_for(self, kernels: Iterable[str]) -> list[str]:
        """The definitions that some kernels need, in order."""
        wanted = {name for k in kernels for name in self.uses[k]}
        return [text for name, text in self.definitions.items() if name in wanted]


def shared(kernels: Mapping[str, str]) -> Shared:
    """Kernels whose epilogues are made by functions, where several are alike."""
    found = {name: _closures(text.split("\n")) for name, text in kernels.items()}
    alike: dict[object, list[_Closure]] = {}
    for closures in found.values():
        for closure in closures:
            alike.setdefault(closure.form, []).append(closure)
    makers = {
        form: _Maker(f"closure{k}", several)
        for k, (form, several) in enumerate((f, c) for f, c in alike.items() if len(c) > 1)
    }
    texts, uses = {}, {}
    for name, text in kernels.items():
        lines, used = text.split("\n"), []
        for closure in reversed(found[name]):
            maker = makers.get(closure.form)
            if maker is not None:
                lines[slice(*closure.lines)] = [maker.call(closure)]
                used.append(maker.name)
        texts[name], uses[name] = "\n".join(lines), tuple(dict.fromkeys(reversed(used)))
    return Shared(texts, uses, {m.name: m.definition() for m in makers.values()})


class _Maker:
    """The function that makes some closures, which are alike."""

    def __init__(self, name: str, closures: Sequence[_Closure]) -> None:
        self.name, self._first = name, closures[0]
        columns = list(zip(*(c.numbers for c in closures), strict=True))
        differing = dict.fromkeys(column for column in columns if len(set(column)) > 1)
        names = {column: f"n{k}" for k, column in enumerate(differing)}
        self._arguments = [columns.index(column) for column in differing]
        self._spelled = [names.get(column, column[0]) for column in columns]

    def call(self, closure: _Closure) -> str:
        """The statement of a kernel that makes its own."""
        given = ", ".join([*closure.variables, *(closure.numbers[k] for k in self._arguments)])
        end = ")" if closure.around else ""
        return f"{closure.indent}const auto {closure.name} = {closure.around}{self.name}({given}){end};"

    def definition(self) -> str:
        """The function."""
        one = self._first
        taken = [f"auto x{k}" for k in range(len(one.variables))] + [f"i64 n{k}" for k in range(len(self._arguments))]
        body = "".join(p + n for p, n in zip(one.pieces, [*self._spelled, ""], strict=True))
        return "\n".join([
            f"static const auto {self.name} = []({', '.join(taken)}) OX_LAMBDA {{",
            f"  return [=]({one.parameters}) OX_LAMBDA {{{body}", "  };", "};",
        ])  # fmt: skip


def _closures(lines: Sequence[str]) -> list[_Closure]:
    """Those of a kernel's lines that can be made elsewhere."""
    found = []
    for k, line in enumerate(lines):
        head = _HEAD.match(line)
        if head is None:
            continue
        indent, name, around, parameters, rest = head.groups()
        end = lines.index(f"{indent}}}{')' if around else ''};", k)
        body = "\n".join([rest, *(text.removeprefix(indent) for text in lines[k + 1 : end])])
        outside = {*_PARAMETERS, *_DEFINED.findall("\n".join(lines[:k]))}
        variables = _captured(body, parameters, outside)
        if variables is not None:
            pieces, numbers = _taken_apart(body, variables)
            found.append(
                _Closure((k, end + 1), indent, name, around, parameters, variables, tuple(pieces), tuple(numbers))
            )
    return found


def _captured(body: str, parameters: str, outside: set[str]) -> tuple[str, ...] | None:
    """The variables of a kernel that a lambda's body reads; None where that is not sure."""
    own = {p.split()[-1].lstrip("*&") for p in parameters.split(", ")}
    defined = {m.start(1) for m in _DEFINED.finditer(body)}
    found: dict[str, None] = {}
    for word in _WORD.finditer(body):
        name, then = word.group(), body[word.end() : word.end() + 2]
        if name in own or name in _KNOWN:
            continue
        if word.start() in defined:
            if name in found:
                return None
            own.add(name)  # whatever an earlier lambda of the kernel calls so
        elif name in outside:
            found[name] = None
        elif not then.startswith(("(", "<", "{", "::")):
            return None
    return tuple(found)


def _taken_apart(body: str, variables: Sequence[str]) -> tuple[list[str], list[str]]:
    """A body with `x0`, `x1`, ... for its variables, and the numbers in it by which elements lie from where these point.

    Divisors stay, `x / 7` and `ox_div(x, 7)`: they are quick only where they are known. So do all that follow a comma,
    as later arguments of templates do.
    """
    names = {name: f"x{k}" for k, name in enumerate(variables)}
    spans = [span for name in variables for span in _places(body, name)]
    pieces, numbers, at = [], [], 0
    for number in _NUMBER.finditer(body):
        if any(begin <= number.start() < end for begin, end in spans):
            pieces.append(body[at : number.start()])
            numbers.append(number.group())
            at = number.end()
    pieces.append(body[at:])
    return [_WORD.sub(lambda m: names.get(m.group(), m.group()), piece) for piece in pieces], numbers


def _places(body: str, pointer: str) -> list[tuple[int, int]]:
    """Where a body has, in parentheses, how far from a pointer something lies."""
    found = []
    for match in re.finditer(rf"\b{pointer} \+ \(", body):
        depth, end = 1, match.end()
        while depth and end < len(body):
            depth += {"(": 1, ")": -1}.get(body[end], 0)
            end += 1
        found.append((match.end(), end))
    return found
