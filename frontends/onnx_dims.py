"""The sizes of a model's inputs: symbols for dynamic dims, and what `input_shapes` fixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

import onnx
from onnx import GraphProto, ValueInfoProto

from onnxc.errors import InputError, LimitError, ModelError
from onnxc.frontends.onnx_tensors import dtype_of, text
from onnxc.ir.dtypes import BY_ONNX
from onnxc.ir.expr import Dim, Sym
from onnxc.ir.types import MapType, OptionalType, SequenceType, TensorType, Type

MAX_DIM = 1 << 40

InputShapes = Mapping[str, Sequence["int | str | None"]]


class Dims:
    """The symbols of a model's dynamic dims: one for each name, one for each unnamed dim."""

    def __init__(self, graph: GraphProto, overrides: InputShapes) -> None:
        self.names: dict[str, str] = {}  # symbol -> the model's name of the dim
        self._symbols: dict[str, Dim] = {}
        self._fixed: dict[str, int] = {}
        self._overrides = plain_shapes(overrides)
        self._count = 0
        declared = {text(i.name): i for i in graph.input}
        unknown = sorted(set(overrides) - set(declared))
        if unknown:
            raise InputError(
                f"input_shapes names {', '.join(map(repr, unknown))}; the model's inputs are {list(declared)}"
            )
        for name, shape in self._overrides.items():
            self._fix(name, declared[name], shape)

    def _fix(self, name: str, info: ValueInfoProto, shape: Sequence[int | str | None]) -> None:
        """Takes note of the sizes given for named dims, which then hold for every input."""
        if any(isinstance(d, int) and not 0 <= d <= MAX_DIM for d in shape):
            raise InputError(f"input {name!r}: {tuple(shape)} has a size outside of 0 to 2**40")
        tensor = info.type.tensor_type
        if not tensor.HasField("shape"):
            return
        if len(shape) != len(tensor.shape.dim):
            raise InputError(f"input {name!r} has rank {len(tensor.shape.dim)}; input_shapes gives it {tuple(shape)}")
        for dim, size in zip(tensor.shape.dim, shape, strict=True):
            param = _dim_name(dim)
            if param and isinstance(size, int) and self._fixed.setdefault(param, size) != size:
                raise InputError(f"input_shapes gives the dim {param!r} the sizes {self._fixed[param]} and {size}")

    def type_of(self, info: ValueInfoProto) -> Type | None:
        """The type of a graph input; None where the model does not tell a tensor's rank."""
        return self._type(text(info.name), info.type, self._overrides.get(text(info.name)))

    def _type(
        self, name: str, declared: onnx.TypeProto, given: Sequence[int | str | None] | None = None
    ) -> Type | None:
        kind = declared.WhichOneof("value")
        if kind == "tensor_type":
            return self._tensor(name, declared.tensor_type, given)
        if given is not None:
            raise InputError(f"input_shapes names {name!r}, which is no tensor")
        if kind == "sequence_type":
            return SequenceType(self._type(name, declared.sequence_type.elem_type))
        if kind == "optional_type":
            return OptionalType(self._type(name, declared.optional_type.elem_type))
        if kind == "map_type":
            key, value = declared.map_type.key_type, declared.map_type.value_type.tensor_type.elem_type
            return MapType(dtype_of(key, f"input {name!r}"), dtype_of(value, f"input {name!r}"))
        raise ModelError(f"input {name!r} is a {(kind or 'value without a type').replace('_type', '')}, not a tensor")

    def _tensor(
        self, name: str, tensor: onnx.TypeProto.Tensor, given: Sequence[int | str | None] | None
    ) -> TensorType | None:
        dtype = dtype_of(tensor.elem_type, f"input {name!r}")
        if not tensor.HasField("shape"):
            return None if given is None else TensorType(dtype, tuple(self._symbol(d) for d in given))
        wanted = [None] * len(tensor.shape.dim) if given is None else list(given)
        return TensorType(dtype, tuple(self._dim(name, d, w) for d, w in zip(tensor.shape.dim, wanted, strict=True)))

    def _dim(self, name: str, dim: onnx.TensorShapeProto.Dimension, wanted: int | str | None) -> Dim:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            size = int(dim.dim_value)
            if size > MAX_DIM:
                raise LimitError(f"input {name!r} claims a dim of {size}")
            if isinstance(wanted, int) and wanted != size:
                raise InputError(f"input {name!r} has a dim of {size} in the model; input_shapes gives it {wanted}")
            return size
        param = _dim_name(dim)
        if param in self._fixed:
            return self._fixed[param]
        return self._symbol(wanted if wanted is not None else param or None)

    def _symbol(self, wanted: int | str | None) -> Dim:
        """A size as it is; the symbol of a name; a new symbol for a dim without one."""
        if isinstance(wanted, int):
            return wanted
        if wanted is None or wanted not in self._symbols:
            symbol = Sym(f"s{self._count}")
            if wanted is None:
                self._count += 1
                return symbol
            self._symbols[wanted] = symbol
            self.names[f"s{self._count}"] = wanted
            self._count += 1
        return self._symbols[wanted]


def declared_names(graph: GraphProto) -> dict[str, str]:
    """What a graph says of its values: by name the element type, as `onnxc.ir.types.element_name` spells it.

    The outputs count for more than `value_info`, as elsewhere. Raises ModelError for an element type that there is not.
    """
    infos = [(text(i.name), i) for i in (*graph.value_info, *graph.output)]
    return {name: said for name, info in infos if (said := _element_name(info.type, f"the value {name!r}")) != "?"}


def _element_name(declared: onnx.TypeProto, what: str) -> str:
    kind = declared.WhichOneof("value")
    if kind == "tensor_type" and declared.tensor_type.elem_type:
        return dtype_of(declared.tensor_type.elem_type, what).name
    if kind == "sequence_type":
        return f"sequence({_element_name(declared.sequence_type.elem_type, what)})"
    return "?"  # optionals may be what is in them; of maps and sparse tensors nothing is checked


def check_declared(info: ValueInfoProto, number: int, dims: Sequence[int]) -> None:
    """Raises ModelError where an initializer, of this element type and shape, is not what its graph input declares."""
    declared = info.type.tensor_type
    kind = info.type.WhichOneof("value")
    fits = kind is None or (kind == "tensor_type" and declared.elem_type in (0, number))
    if fits and declared.HasField("shape"):
        wanted = declared.shape.dim
        pairs = zip(wanted, dims, strict=False)
        fits = len(wanted) == len(dims) and all(d.dim_value == n for d, n in pairs if d.HasField("dim_value"))
    if not fits:
        shape = [d.dim_value if d.HasField("dim_value") else _dim_name(d) or "?" for d in declared.shape.dim]
        wanted_type = str(kind) if kind != "tensor_type" else _type_name(declared.elem_type)
        raise ModelError(
            f"the graph input {text(info.name)!r} is declared as {wanted_type} {shape}, but its initializer is "
            f"{_type_name(number)} {list(dims)}"
        )


def _type_name(number: int) -> str:
    return BY_ONNX[number].name if number in BY_ONNX else f"type {number}"


def plain_shapes(given: Mapping[str, Iterable[int | str | None]]) -> dict[str, list[int | str | None]]:
    """`input_shapes` with Python's integers, where numpy's were given. InputError for what is no shape by name."""
    return {name: _shape(name, shape) for name, shape in given.items()}


def _shape(name: object, given: object) -> list[int | str | None]:
    """One of them: sizes, names of dims, None."""
    if isinstance(name, str) and isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        dims = [int(d) if isinstance(d, Integral) else d for d in given]
        if all(d is None or isinstance(d, (int, str)) for d in dims):
            return dims
    raise InputError(f"input_shapes gives input {name!r} {given!r}; a shape is a list of sizes, names and None")


def _dim_name(dim: onnx.TensorShapeProto.Dimension) -> str:
    """The dim's name; empty for one such as "?", which exporters give to every dim that they do not know."""
    name = text(dim.dim_param)
    return name if any(c.isalnum() for c in name) else ""
