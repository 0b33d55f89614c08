"""Spellings of steps on the host: functions of `onnxc.host` are ONNX ops, or a few of them.

Operands that are left out have an empty name.
"""

from __future__ import annotations

from onnx import TensorProto, helper

from onnxc.errors import UnsupportedError
from onnxc.export.common import Spelling
from onnxc.export.nodes import NodeWriter
from onnxc.export.types import type_proto
from onnxc.ir.graph import Node
from onnxc.ir.types import EmptyType, OptionalType, SequenceType


def _direct(op_type: str, *attrs: str) -> Spelling:
    """The op of the same meaning, with some of the function's options as attributes."""

    def spelling(w: NodeWriter, node: Node, xs: list[str]) -> list[str]:
        while xs and not xs[-1]:
            xs = xs[:-1]
        kept = {name: node.attrs[name] for name in attrs if node.attrs.get(name) not in (None, ())}
        return w.several(op_type, xs, len(node.outputs), **kept)

    return spelling


def _sequence_construct(w: NodeWriter, node: Node, xs: list[str]) -> str:
    if xs:
        return w.one("SequenceConstruct", *xs)
    t = node.output.type
    known = isinstance(t, SequenceType) and isinstance(t.element, EmptyType)
    return w.one("SequenceEmpty", dtype=t.element.dtype.onnx if known else TensorProto.FLOAT)  # type: ignore[union-attr]


def _cast(w: NodeWriter, node: Node, xs: list[str]) -> str:
    return w.cast(xs[0], node.output.dtype)


def _elements_at(w: NodeWriter, node: Node, xs: list[str]) -> str:
    flat = [w.one("Reshape", x, w.ints(-1)) for x in xs[1:]]
    return w.one("Gather", flat[0] if len(flat) == 1 else w.one("Concat", *flat, axis=0), xs[0], axis=0)


def _optional(w: NodeWriter, node: Node, xs: list[str]) -> str:
    if xs and xs[0]:
        return w.one("Optional", xs[0])
    t = node.output.type
    element = type_proto(t.element, w.dim_names) if isinstance(t, OptionalType) else None
    if element is None:
        raise UnsupportedError("an empty optional of unknown type cannot be written as ONNX")
    made = helper.make_node("Optional", [], [w.fresh()])
    made.attribute.append(helper.make_attribute("type", element))
    w.nodes.append(made)
    return str(made.output[0])


_TFIDF = (
    "mode", "min_gram_length", "max_gram_length", "max_skip_count", "ngram_counts", "ngram_indexes", "pool_int64s",
    "pool_strings", "weights",
)  # fmt: skip

HOST_SPELLINGS: dict[str, Spelling] = {
    "sequence_construct": _sequence_construct,
    "sequence_at": _direct("SequenceAt"),
    "sequence_insert": _direct("SequenceInsert"),
    "sequence_erase": _direct("SequenceErase"),
    "sequence_length": _direct("SequenceLength"),
    "sequence_concat": _direct("ConcatFromSequence", "axis", "new_axis"),
    "sequence_split": _direct("SplitToSequence", "axis", "keepdims"),
    "optional": _optional,
    "optional_get": _direct("OptionalGetElement"),
    "optional_has": _direct("OptionalHasElement"),
    "unique": _direct("Unique", "axis", "sorted"),
    "to_strings": _cast,
    "from_strings": _cast,
    "elements_at": _elements_at,
    "string_equal": _direct("Equal"),
    "string_concat": _direct("StringConcat"),
    "string_split": _direct("StringSplit", "delimiter", "maxsplit"),
    "regex_full_match": _direct("RegexFullMatch", "pattern"),
    "string_normalizer": _direct("StringNormalizer", "case_change_action", "is_case_sensitive", "locale", "stopwords"),
    "tfidf_vectorizer": _direct("TfIdfVectorizer", *_TFIDF),
    "image_decoder": _direct("ImageDecoder", "pixel_format"),
}
"""By the name of the function."""
