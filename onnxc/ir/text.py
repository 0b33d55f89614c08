"""Graphs as text that a person can read and that parses back to the same graph.

    graph "main"
    symbol s0 >= 0
    dim s0 "batch"
    input %0 "x": float32[s0, 2]
    %1 = constant() {value=float32[2]{0.5, 1.0}}: float32[2]
    %2 "y" = add(%0, %1): float32[s0, 2]  # n0 Add "node_add" "model.py:12"
    output %2 "y"

Values are numbered in the order of the text; every string of the model is a JSON string. A missing input is
`-`, an unknown type `?`. The graphs that a node holds follow it, indented, between `region` and `end`. `=
...` after a type is the value's content where it is known as sizes. Constants of more than `INLINE` elements
are printed as a digest; `constants(graph)` gives the arrays that `from_text` needs to put them back.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onnxc.errors import InternalError, ModelError
from onnxc.ir import dtypes, expr
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Call, Dim, Expr, Sym
from onnxc.ir.graph import Graph, Node, Origin, Source, Value
from onnxc.ir.types import EmptyType, MapType, OptionalType, SequenceType, TensorType, Type, shape_within

INLINE = 64  # constants of up to this many elements are written out
_BARE = re.compile(r"[A-Za-z_]\w*(\.\w+)*(@\d+)?")


def to_text(graph: Graph, *, digests: bool = True) -> str:
    """The graph as text. Without `digests` (fast, for people) large constants are `{...}`, which does not
    parse.
    """
    return "\n".join(_Printer(digests).graph(graph, "graph")) + "\n"


def from_text(text: str, constants: Mapping[str, np.ndarray] | None = None) -> Graph:
    """The graph of a text. `constants` holds the arrays that it gives as digests. Raises ModelError where it
    fails.
    """
    parser = _Parser(text, constants or {})
    try:
        return parser.graph("graph")
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise parser.fail(f"something that makes sense ({error})") from error


def constants(graph: Graph) -> dict[str, np.ndarray]:
    """The arrays that the text gives as digests, by digest."""
    values = [value for node in graph.all_nodes() for value in node.attrs.values()]
    arrays = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    large = (x for x in (*graph.defaults.values(), *arrays) if isinstance(x, np.ndarray) and x.size > INLINE)
    return {digest(array): array for array in large}


def digest(array: np.ndarray) -> str:
    """A name for an array's content."""
    if array.dtype == object:
        return hashlib.sha256(json.dumps(array.ravel().tolist()).encode()).hexdigest()[:32]
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).hexdigest()[:32]


# ---------------------------------------------------------------- printing


class _Printer:
    """Prints graphs; numbers the values as they come."""

    def __init__(self, digests: bool) -> None:
        self.digests = digests
        self.numbers: dict[int, int] = {}
        self.declared: set[str] = set()

    def graph(self, graph: Graph, word: str) -> Iterator[str]:
        yield f"{word} {json.dumps(graph.name)}"
        yield from self._symbols(graph)
        yield from (f"dim {symbol} {json.dumps(name)}" for symbol, name in graph.dim_names.items())
        yield from (f"metadata {json.dumps(k)} {json.dumps(v)}" for k, v in graph.metadata.items())
        for value in graph.inputs:
            yield f"input {self._define(value)}: {self._type(value)}"
        yield from (f"default {json.dumps(name)} = {self._attr(array)}" for name, array in graph.defaults.items())
        for node in graph.nodes:
            yield from self._node(node)
        for value, name in zip(graph.outputs, graph.output_names, strict=True):
            yield f"output {self._use(value)} {json.dumps(name)}"

    def _symbols(self, graph: Graph) -> Iterator[str]:
        """The symbols that this graph uses first, those of a range's end before the symbol itself."""
        for symbol in sorted(_graph_symbols(graph), key=lambda s: (len(s.key), s.key)):
            yield from self._symbol(symbol)

    def _symbol(self, symbol: expr.Symbol) -> Iterator[str]:
        if symbol.key in self.declared:
            return
        self.declared.add(symbol.key)
        for other in sorted(expr.symbols(symbol.hi), key=lambda s: s.key) if symbol.hi is not None else ():
            yield from self._symbol(other)
        yield f"symbol {symbol.key} >= {symbol.lo}" + (f" <= {symbol.hi}" if symbol.hi is not None else "")

    def _node(self, node: Node) -> Iterator[str]:
        inputs = ", ".join("-" if v is None else self._use(v) for v in node.inputs)
        attrs = ", ".join(f"{_word(k)}={self._attr(v)}" for k, v in node.attrs.items())
        outputs = ", ".join(map(self._define, node.outputs))
        types = "; ".join(map(self._type, node.outputs))
        call = f"{_word(node.op)}({inputs})" + (f" {{{attrs}}}" if attrs else "")
        yield (f"{outputs} = " if outputs else "= ") + f"{call}: {types}{_origin(node.origin)}"
        for region in node.regions:
            yield from ("  " + line for line in self.graph(region, "region"))
            yield "  end"

    def _define(self, value: Value) -> str:
        self.numbers[value.id] = len(self.numbers)
        return f"%{self.numbers[value.id]}" + (f" {json.dumps(value.name)}" if value.name else "")

    def _use(self, value: Value) -> str:
        number = self.numbers.get(value.id)
        return f"%{number}" if number is not None else f"%undefined_{value.id}"

    def _type(self, value: Value) -> str:
        text = "?" if value.type is None else repr(value.type)
        if value.data is None:
            return text
        if value.node is not None and value.node.op == "constant":
            return f"{text} = value"
        return f"{text} = {self._attr(tuple(value.data.ravel()))}"

    def _attr(self, value: Any) -> str:
        """An attribute's value."""
        if isinstance(value, (bool, np.bool_)):
            return "true" if value else "false"
        if isinstance(value, (int, np.integer)):
            return str(int(value))
        if isinstance(value, (float, np.floating)):
            return repr(float(value))
        if isinstance(value, str):
            return json.dumps(value)
        if value is None:
            return "none"
        if isinstance(value, (Expr, DType, TensorType)):
            return repr(value)
        if isinstance(value, (tuple, list)):
            items = ", ".join(map(self._attr, value)) + ("," if len(value) == 1 else "")
            return f"({items})" if isinstance(value, tuple) else f"[{items}]"
        if isinstance(value, np.ndarray):
            return self._array(value)
        raise InternalError(f"an attribute of type {type(value).__name__} has no text form (onnxc/ir/text.py)")

    def _array(self, array: np.ndarray) -> str:
        head = repr(TensorType(dtypes.from_numpy(array.dtype), array.shape))
        if array.size > INLINE:
            return f"{head}{{#{digest(array)}}}" if self.digests else f"{head}{{...}}"
        return f"{head}{{{_elements(array)}}}"


def _graph_symbols(graph: Graph) -> set[expr.Symbol]:
    found: set[expr.Symbol] = set()
    for value in graph.values():
        for dim in shape_within(value.type):
            found |= expr.symbols(dim)
        for dim in value.data.ravel() if value.data is not None and value.data.dtype == object else ():
            found |= expr.symbols(dim)
    for node in graph.nodes:
        for attr in node.attrs.values():
            for dim in attr if isinstance(attr, (tuple, list)) else (attr,):
                if isinstance(dim, Expr):
                    found |= dim.symbols()
    return found


def _word(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _origin(origin: Origin) -> str:
    if not origin:
        return ""
    sources = (f"n{s.number} {_word(s.op_type)} {json.dumps(s.name)} {json.dumps(s.line)}" for s in origin)
    return f"  # {'; '.join(sources)}"


def _elements(array: np.ndarray) -> str:
    """The elements as numbers, where those give the same bytes again, else the bytes."""
    flat = array.ravel()
    if array.dtype == object:
        return ", ".join(json.dumps(s) for s in flat)
    if flat.dtype.kind == "b":
        return ", ".join("1" if x else "0" for x in flat)
    words = [str(x) for x in flat] if flat.dtype.kind in "iuf" else [repr(x) for x in _as_numbers(flat)]
    if not all(_NUMBER.fullmatch(w) for w in words) or _numbers(words, flat.dtype).tobytes() != flat.tobytes():
        return f"0x{np.ascontiguousarray(flat).view(np.uint8).tobytes().hex()}"
    return ", ".join(words)


def _as_numbers(flat: np.ndarray) -> list[Any]:
    """Elements of a dtype that numpy does not print itself; complex numbers are left to their bytes."""
    try:
        return [] if flat.dtype.kind == "c" else flat.astype(np.float64).tolist()
    except (TypeError, ValueError):
        return []


_NUMBER = re.compile(r"-?(\d+(\.\d*)?([eE][+-]?\d+)?|inf)|nan")


def _numbers(words: Sequence[str], dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iu":
        return np.array([int(w) for w in words], dtype)
    if dtype.kind == "b":
        return np.array([w == "1" for w in words], dtype)
    wide = np.float64 if dtype == np.float64 or dtype not in (np.float32, np.float16) else dtype
    with np.errstate(over="ignore"):
        return np.array([float(w) for w in words], np.float64).astype(wide).astype(dtype)


# ---------------------------------------------------------------- parsing

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<value>%\d+)|(?P<hex>0x[0-9a-f]*)|(?P<digest>\#[0-9a-f]{32})"""
    r"""|(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>[A-Za-z_]\w*(?:\.\w+)*(?:@\d+)?)|(?P<mark>//|>=|<=|[^\s]))"""
)
Token = tuple[str, str]
_RESERVED: dict[str, Any] = {
    "true": True,
    "false": False,
    "none": None,
    "inf": float("inf"),
    "nan": float("nan"),
}


class _Parser:
    """A recursive descent over the lines of a text."""

    def __init__(self, text: str, constants: Mapping[str, np.ndarray]) -> None:
        self.lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        self.at = 0
        self.tokens: list[Token] = []
        self.constants = constants
        self.symbols: dict[str, Expr] = {}
        self.values: dict[str, Value] = {}

    # ------------------------------------------------------------ tokens

    def _line(self) -> str:
        """Takes the next line apart and returns its first token, which stays."""
        if self.at >= len(self.lines):
            return ""
        line, self.tokens, pos = self.lines[self.at][1].rstrip(), [], 0
        while pos < len(line):
            match = _TOKEN.match(line, pos)
            assert match is not None and match.lastgroup is not None
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            pos = match.end()
        self.tokens.reverse()
        return self.tokens[-1][1]

    def fail(self, wanted: str) -> ModelError:
        number = self.lines[min(self.at, len(self.lines) - 1)][0] if self.lines else 0
        got = self.tokens[-1][1] if self.tokens else "the end of the line"
        return ModelError(f"graph text, line {number}: expected {wanted}, found {got}")

    def _peek(self, *texts: str) -> bool:
        return bool(self.tokens) and self.tokens[-1][0] != "string" and self.tokens[-1][1] in texts

    def _kind(self) -> str:
        return self.tokens[-1][0] if self.tokens else ""

    def _accept(self, text: str) -> bool:
        if self._peek(text):
            self.tokens.pop()
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self.fail(repr(text))

    def _take(self, kind: str) -> str:
        if self._kind() != kind:
            raise self.fail(f"a {kind}")
        return self.tokens.pop()[1]

    def _string(self) -> str:
        return str(json.loads(self._take("string")))

    def _name(self) -> str:
        return self._string() if self._kind() == "string" else self._take("word")

    def _list(self, item: Callable[[], Any], end: str) -> list[Any]:
        """Items up to the end mark, separated by commas."""
        found = []
        while not self._accept(end):
            found.append(item())
            if not self._accept(",") and not self._peek(end):
                raise self.fail(f"',' or {end!r}")
        return found

    # ------------------------------------------------------------ lines

    def graph(self, word: str) -> Graph:
        self._line()
        self._expect(word)
        graph = Graph([], [], [], [], self._string())
        handlers = {
            "symbol": self._symbol, "dim": self._dim, "metadata": self._metadata, "input": self._input,
            "default": self._default, "output": self._output,
        }  # fmt: skip
        self.at += 1
        while first := self._line():
            if first == "end" and word == "region":
                self.at += 1
                return graph
            if self._kind() == "word" and first in handlers:
                self.tokens.pop()
                handlers[first](graph)
                self._end()
            else:
                self._node(graph)
        if word == "region":
            raise self.fail("'end'")
        return graph

    def _end(self) -> None:
        if self.tokens:
            raise self.fail("the end of the line")
        self.at += 1

    def _symbol(self, graph: Graph) -> None:
        name = self._take("word")
        self._expect(">=")
        sign = -1 if self._accept("-") else 1
        lo = sign * int(self._take("number"))
        self.symbols[name] = Sym(name, lo, self._size() if self._accept("<=") else None)

    def _dim(self, graph: Graph) -> None:
        symbol = self._take("word")
        graph.dim_names[symbol] = self._string()

    def _metadata(self, graph: Graph) -> None:
        key = self._string()
        line = self.lines[self.at][1].strip()
        graph.metadata[key] = json.loads(line[len("metadata ") + len(json.dumps(key)) + 1 :])
        self.tokens = []

    def _input(self, graph: Graph) -> None:
        value = self._define()
        self._expect(":")
        self._value_type(value)
        graph.inputs.append(value)

    def _default(self, graph: Graph) -> None:
        name = self._string()
        self._expect("=")
        graph.defaults[name] = self._attr()

    def _output(self, graph: Graph) -> None:
        graph.outputs.append(self._use())
        graph.output_names.append(self._string())

    def _node(self, graph: Graph) -> None:
        outputs = self._list(self._define, "=")
        op = self._name()
        self._expect("(")
        inputs = self._list(lambda: None if self._accept("-") else self._use(), ")")
        attrs = dict(self._list(self._pair, "}")) if self._accept("{") else {}
        self._expect(":")
        for i, value in enumerate(outputs):
            if i:
                self._expect(";")
            self._value_type(value, attrs.get("value"))
        origin = self._origin()
        self._end()
        regions = []
        while self._line() == "region":
            regions.append(self.graph("region"))
        graph.nodes.append(Node(op, inputs, outputs, attrs, regions, origin))

    def _pair(self) -> tuple[str, Any]:
        name = self._name()
        self._expect("=")
        return name, self._attr()

    def _origin(self) -> Origin:
        sources = []
        if self._accept("#"):
            while True:
                number = self._take("word")
                if not re.fullmatch(r"n\d+", number):
                    raise self.fail("a node number such as n17")
                sources.append(Source(int(number[1:]), self._name(), self._string(), self._string()))
                if not self._accept(";"):
                    break
        return tuple(sources)

    # ------------------------------------------------------------ values and types

    def _define(self) -> Value:
        number = self._take("value")
        if number in self.values:
            raise self.fail(f"a new value ({number} is defined twice)")
        self.values[number] = Value(None, self._string() if self._kind() == "string" else "")
        return self.values[number]

    def _use(self) -> Value:
        if self._kind() != "value" or self.tokens[-1][1] not in self.values:
            raise self.fail("a value that is defined")
        return self.values[self.tokens.pop()[1]]

    def _value_type(self, value: Value, constant: Any = None) -> None:
        value.type = self._type()
        if not self._accept("="):
            return
        if self._accept("value"):
            value.data = constant
            return
        content = self._attr()
        if not isinstance(content, tuple):
            raise self.fail("the content as a tuple")
        symbolic = any(isinstance(c, Expr) for c in content)
        tensor = value.type if isinstance(value.type, TensorType) else None
        data = np.empty(len(content), object if symbolic else np.int64 if tensor is None else tensor.dtype.numpy)
        data[:] = content
        rank = 1 if tensor is None else tensor.rank
        value.data = data.reshape(()) if rank == 0 else data

    def _type(self) -> Type | None:
        if self._accept("?"):
            return None
        for word, make in (("sequence", SequenceType), ("optional", OptionalType)):
            if self._accept(word):
                self._expect("(")
                element = self._type()
                self._expect(")")
                return make(element)
        if self._accept("nothing"):
            self._expect("(")
            dtype = self._dtype()
            self._expect(")")
            return EmptyType(dtype)
        if self._accept("map"):
            self._expect("(")
            key = self._dtype()
            self._expect(",")
            value = self._dtype()
            self._expect(")")
            return MapType(key, value)
        return TensorType(self._dtype(), self._shape())

    def _dtype(self) -> DType:
        name = self._take("word")
        if name not in dtypes.BY_NAME:
            raise self.fail(f"a dtype (not {name!r})")
        return dtypes.BY_NAME[name]

    def _shape(self) -> tuple[Dim, ...]:
        self._expect("[")
        return tuple(self._list(self._size, "]"))

    def _size(self) -> Dim:
        return self._as_size(self._sum())

    def _as_size(self, value: Any) -> Dim:
        if isinstance(value, bool) or not isinstance(value, (int, Expr)):
            raise self.fail(f"a size, not {value!r}, before this")
        return value

    # ------------------------------------------------------------ attributes and expressions

    def _attr(self) -> Any:
        if self._kind() == "string":
            return self._string()
        if self._accept("["):
            return self._list(self._attr, "]")
        if self._kind() == "word" and self.tokens[-1][1] in dtypes.BY_NAME:
            return self._typed()
        return self._sum()

    def _typed(self) -> DType | TensorType | np.ndarray:
        """A dtype, a type, or an array: what begins with the name of a dtype."""
        dtype = self._dtype()
        if not self._peek("["):
            return dtype
        shape = self._shape()
        return self._array(dtype, shape) if self._accept("{") else TensorType(dtype, shape)

    def _array(self, dtype: DType, shape: tuple[Any, ...]) -> np.ndarray:
        if self._kind() == "digest":
            name = self._take("digest")[1:]
            if name not in self.constants:
                raise self.fail(f"the constant {name} to be given to from_text")
            array = self.constants[name]
        elif self._kind() == "hex":
            array = np.frombuffer(bytes.fromhex(self._take("hex")[2:]), dtype.numpy).reshape(shape)
        elif dtype is dtypes.string:
            array = np.empty(math.prod(shape), object)
            array[:] = self._list(self._string, "}")
            return array.reshape(shape)
        else:
            return _numbers([str(n) for n in self._list(self._number, "}")], dtype.numpy).reshape(shape)
        self._expect("}")
        return array

    def _number(self) -> str:
        sign = "-" if self._accept("-") else ""
        return sign + (self._take("number") if self._kind() == "number" else self._take("word"))

    def _sum(self) -> Any:
        total = -self._product() if self._accept("-") else self._product()
        while self._peek("+", "-"):
            minus = self.tokens.pop()[1] == "-"
            term = self._product()
            total = total - term if minus else total + term
        return total

    def _product(self) -> Any:
        result = self._factor()
        while self._accept("*"):
            result = result * self._factor()
        return result

    def _factor(self) -> Any:
        if self._kind() == "number":
            text = self._take("number")
            return int(text) if text.isdigit() else float(text)
        if self._accept("("):
            return self._parenthesis()
        name = self._take("word")
        if name in _RESERVED:
            return _RESERVED[name]
        if name in ("max", "min") and self._accept("("):
            a, b = self._list(self._size, ")")
            return expr.of(Call(name, a, b))
        if name not in self.symbols:
            raise self.fail(f"a symbol that is declared (not {name!r})")
        return self.symbols[name]

    def _parenthesis(self) -> Any:
        """A tuple, an expression, or a division: calls are built as they stand, not simplified again."""
        if self._accept(")"):
            return ()
        first = self._attr()
        for mark, op in (("//", "floordiv"), ("%", "mod")):
            if self._accept(mark):
                second = self._size()
                self._expect(")")
                return expr.of(Call(op, self._as_size(first), second))
        if self._accept(")"):
            return first
        self._expect(",")
        return (first, *self._list(self._attr, ")"))
