"""Strings, regular expressions and images on the host, as functions and in models."""

from __future__ import annotations

import io
import itertools
import random
import re
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxc
from onnxc.errors import LimitError, ModelError, OnnxcError, RunError, UnsupportedError
from onnxc.host import regex as expressions
from onnxc.host import text as text_functions
from onnxc.host.images import image_decoder
from onnxc.host.regex import Regex, regex_full_match
from onnxc.host.text import (
    from_strings,
    string_concat,
    string_equal,
    string_normalizer,
    string_split,
    tfidf_vectorizer,
    to_strings,
)


def text(*values: str) -> np.ndarray:
    return np.array(values, object)


def run(source: str, *inputs: Any, opset: int = 24) -> list[Any]:
    """The outputs of a graph in onnx's own syntax."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> g {source}')
    return list(onnxc.compile(model)(*inputs).values())


# ---------------------------------------------------------------- joining and splitting


def test_concat_and_equal_broadcast() -> None:
    x, y = text("a", "b").reshape(2, 1), text("", "ü", "a")
    assert string_concat(x, y).tolist() == [["a", "aü", "aa"], ["b", "bü", "ba"]]
    assert string_equal(x, y).tolist() == [[False, False, True], [False, False, False]]
    with pytest.raises(RunError, match=r"\[2\] and \[3\] do not broadcast"):
        string_concat(text("a", "b"), y)


def test_inputs_of_numpys_own_strings() -> None:
    """As onnxruntime takes them: `np.array(["a", "bc"])` is of dtype <U2."""
    for dtype in ("<U2", ">U2", np.dtypes.StringDType()):
        (y,) = run("(string[n] x) => (string[n] y) { y = StringConcat(x, x) }", np.array(["a", "bc"], dtype))
        assert y.dtype == object and y.tolist() == ["aa", "bcbc"]
    source = "(seq(string[n]) s) => (string[n] y) { y = ConcatFromSequence <axis = 0> (s) }"
    (y,) = run(source, [np.array(["a"]), np.array(["bc"], np.dtypes.StringDType())])
    assert y.tolist() == ["a", "bc"]
    with pytest.raises(OnnxcError, match="expects dtype float32"):
        run("(float[n] x) => (float[n] y) { y = Neg(x) }", np.array(["a"], np.dtypes.StringDType()))


@pytest.mark.parametrize(
    ("given", "options", "parts", "counts"),
    [
        (["a b", " c  d\te "], {}, [["a", "b", ""], ["c", "d", "e"]], [2, 3]),
        (["a.b.c", ""], {"delimiter": "."}, [["a", "b", "c"], ["", "", ""]], [3, 1]),
        (["a--b", "--"], {"delimiter": "--"}, [["a", "b"], ["", ""]], [2, 2]),
        (["a b c d", "a"], {"maxsplit": 1}, [["a", "b c d"], ["a", ""]], [2, 1]),
        (["a.b", "c"], {"delimiter": ".", "maxsplit": 0}, [["a.b"], ["c"]], [1, 1]),
        (["", " "], {}, [[], []], [0, 0]),
    ],
)
def test_split(given: list[str], options: dict[str, Any], parts: list[Any], counts: list[int]) -> None:
    found, length = string_split(text(*given), **options)
    assert found.tolist() == parts and length.tolist() == counts and length.dtype == np.int64


def test_splits_have_a_new_axis() -> None:
    parts, counts = string_split(np.empty((3, 0), object))
    assert parts.shape == (3, 0, 0) and counts.shape == (3, 0)
    parts, counts = string_split(np.array("a b", object))
    assert parts.tolist() == ["a", "b"] and counts.shape == () and counts == 2


# ---------------------------------------------------------------- normalization


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ["Monday", "É", "monday", "straße"]),
        ({"stopwords": ("monday",)}, ["É", "straße"]),
        ({"stopwords": ("monday",), "is_case_sensitive": 1}, ["Monday", "É", "straße"]),
        ({"case_change_action": "LOWER"}, ["monday", "é", "monday", "straße"]),
        ({"case_change_action": "UPPER", "stopwords": ("é",)}, ["MONDAY", "MONDAY", "STRASSE"]),
        ({"case_change_action": "UPPER", "stopwords": ("monday",), "is_case_sensitive": 1}, ["MONDAY", "É", "STRASSE"]),
    ],
)
def test_normalizer(options: dict[str, Any], wanted: list[str]) -> None:
    x = text("Monday", "É", "monday", "straße")
    assert string_normalizer(x, **options).tolist() == wanted
    assert string_normalizer(x[None], **options).tolist() == [wanted]


def test_normalizer_of_turkish() -> None:
    x = text("iI", "ıİ")
    assert string_normalizer(x, case_change_action="UPPER", locale="tr_TR").tolist() == ["İI", "Iİ"]
    assert string_normalizer(x, case_change_action="LOWER", locale="az-AZ.utf8").tolist() == ["iı", "ıi"]
    assert string_normalizer(x, case_change_action="UPPER", locale="en_US").tolist() == ["II", "Iİ"]


def test_normalizer_leaves_one_string() -> None:
    assert string_normalizer(text("a", "A"), stopwords=("a",)).tolist() == [""]
    assert string_normalizer(text("a", "A")[None], stopwords=("a",)).tolist() == [[""]]
    with pytest.raises(RunError, match=r"not \[2, 1\]"):
        string_normalizer(text("a", "b").reshape(2, 1))
    with pytest.raises(RunError, match="not 'TITLE'"):
        string_normalizer(text("a"), case_change_action="TITLE")


# ---------------------------------------------------------------- n-grams

GRAMS = {"min_gram_length": 1, "max_gram_length": 2, "ngram_counts": (0, 2), "ngram_indexes": (3, 0, 1, 2)}


def test_ngrams() -> None:
    pool = ("a", "b", "a", "b", "b", "c")  # a, b; a b, b c
    x = text("a", "b", "x", "c", "a", "b")
    found = tfidf_vectorizer(x, "TF", max_skip_count=0, pool_strings=pool, **GRAMS)
    assert found.tolist() == [2, 2, 0, 2] and found.dtype == np.float32
    skipping = tfidf_vectorizer(x, "TF", max_skip_count=1, pool_strings=pool, **GRAMS)
    assert skipping.tolist() == [2, 2, 1, 2]
    weights = (0.5, 2.0, 3.0, 4.0)
    scaled = tfidf_vectorizer(x, "TFIDF", max_skip_count=1, pool_strings=pool, weights=weights, **GRAMS)
    assert scaled.tolist() == [2 * 2.0, 2 * 3.0, 4.0, 2 * 0.5]
    once = tfidf_vectorizer(x, "IDF", max_skip_count=1, pool_strings=pool, weights=weights, **GRAMS)
    assert once.tolist() == [2.0, 3.0, 4.0, 0.5]


def test_ngrams_of_integers_by_row() -> None:
    x = np.array([[1, 2, 1], [2, 3, 3]], np.int32)
    found = tfidf_vectorizer(x, "TF", max_skip_count=0, pool_int64s=(1, 2, 1, 2, 2, 3), **GRAMS)
    assert found.tolist() == [[1, 1, 0, 2], [1, 0, 1, 0]]
    assert tfidf_vectorizer(x[:, :0], "TF", max_skip_count=0, pool_int64s=(1, 2, 1, 2, 2, 3), **GRAMS).shape == (2, 4)


@pytest.mark.parametrize("room", [text_functions.MOST_LISTED, 9, 0])
def test_ngrams_by_tables_and_by_search(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random pools, the widest integers among them, against counting one by one."""
    monkeypatch.setattr(text_functions, "MOST_LISTED", room)
    text_functions._trees.cache_clear()
    r = random.Random(room)
    for _ in range(100):
        items = [-(2**63), 2**63 - 1, 2**63 - 2, 0, *r.sample(range(-9, 9), 3)]
        grams = [{tuple(r.choices(items, k=n)) for _ in range(r.randrange(6))} for n in (1, 2, 3)]
        pool, starts = [i for same in grams for g in same for i in g], np.cumsum([0, *map(_items, grams)])[:3].tolist()
        x = np.array(r.choices([*items, 99], k=3 * 8), np.int64).reshape(3, 8)
        skips, count = r.randrange(3), sum(map(len, grams))
        wanted = np.zeros((3, max(count, 0)), np.float32)
        for at, gram in enumerate(g for same in grams for g in same):
            for step in range(1, 2 if len(gram) == 1 else skips + 2):
                for row, first in itertools.product(range(3), range(8 - (len(gram) - 1) * step)):
                    wanted[row, at] += tuple(x[row, first : first + (len(gram) - 1) * step + 1 : step].tolist()) == gram
        found = tfidf_vectorizer(x, "TF", 1, 3, skips, starts, list(range(count)), pool_int64s=pool)
        np.testing.assert_array_equal(found, wanted)


def _items(grams: set[tuple[int, ...]]) -> int:
    return sum(map(len, grams))


def test_one_long_ngram_is_prepared_quickly() -> None:
    n = 100_000
    found = tfidf_vectorizer(np.arange(9), "TF", 1, n, 0, [0] * n, [0], pool_int64s=list(range(n)))
    assert found.tolist() == [0]


def test_pools_that_do_not_fit() -> None:
    with pytest.raises(RunError, match="2-grams cannot lie"):
        tfidf_vectorizer(text("a"), "TF", max_skip_count=0, pool_strings=("a", "b", "c"), **GRAMS)
    with pytest.raises(RunError, match="more n-grams than"):
        tfidf_vectorizer(text("a"), "TF", max_skip_count=0, pool_strings=tuple("abcdefghijklmn"), **GRAMS)


# ---------------------------------------------------------------- numbers as text


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_many_numbers_are_written_as_each_is_alone(dtype: Any) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(dtype)
    wide = 10 ** np.random.default_rng(0).uniform(-7, 17, 5000)
    edges = [999999, 1e6, 1e-3, 9.99e-4, 1e15, 1e16, 123456.7]
    with np.errstate(over="ignore"):
        x = np.concatenate([halves, wide.astype(dtype), -np.array(edges, dtype)])
    together = to_strings(x).tolist()
    assert together == [text_functions._shown(v) for v in x]
    np.testing.assert_array_equal(from_strings(text(*together), np.dtype(dtype).name), x)


def test_numbers_become_text_and_back() -> None:
    x = np.array([0, -0.0, 1, -1.5, 0.1, 314.125, 1e-7, 1e20, np.nan, np.inf, -np.inf], np.float32)
    shown = to_strings(x).tolist()
    assert shown == ["0", "-0", "1", "-1.5", "0.1", "314.125", "1e-7", "1e+20", "NaN", "INF", "-INF"]
    np.testing.assert_array_equal(from_strings(text(*shown), "float32"), x)
    for dtype in ("float16", "float64", "int8", "uint64", "bfloat16", "int4"):
        values = from_strings(text("0", "1", "-2" if dtype[0] != "u" else "2", "5"), dtype)
        np.testing.assert_array_equal(from_strings(to_strings(values), dtype), values)
    assert to_strings(np.array([True, False])).tolist() == ["1", "0"]
    assert to_strings(np.array([2**63 - 1, -(2**63)])).tolist() == [str(2**63 - 1), str(-(2**63))]


def test_text_becomes_numbers() -> None:
    given = text("+1.5", "1E3", ".5", "5.", "+inf", "-INF", "nan", "Infinity", " 7 ")
    wanted = [1.5, 1000, 0.5, 5, np.inf, -np.inf, np.nan, np.inf, 7]
    np.testing.assert_array_equal(from_strings(given, "float64"), wanted)
    assert from_strings(text("100.5", "-3", "1e3"), "int32").tolist() == [100, -3, 1000]
    assert from_strings(text("0", "2", "0.0"), "bool").tolist() == [False, True, False]
    for wrong, dtype in (("Hello", "float32"), ("1_000", "float32"), ("0x10", "int32"), ("", "int64"), ("256", "uint8"),
                         ("٣", "int32"), ("inf", "int32"), ("8", "int4")):  # fmt: skip
        with pytest.raises(RunError):
            from_strings(text(wrong), dtype)


def test_casts_in_a_model() -> None:
    (y,) = run("(float[N] x) => (string[N] y) { y = Cast <to = 8> (x) }", np.array([1, 0.25], np.float32))
    assert y.tolist() == ["1", "0.25"]
    (z,) = run(
        "(string[N] x) => (int64[N] z) { t = Cast <to = 1> (x) u = Add(t, t) z = Cast <to = 7> (u) }", text("1.5", "-4")
    )
    assert z.tolist() == [3, -8] and z.dtype == np.int64


def test_strings_go_through_a_model() -> None:
    source = """(string[N] x, string[M] y) => (string[N] z, bool[M] e, float[K] s) {
        z = StringConcat(x, y)  m = RegexFullMatch <pattern = "a+b?"> (z)  e = Equal(x, y)
        f = Cast <to = 1> (m)  s = Mul(f, f)
    }"""
    z, e, s = run(source, text("a", "b"), text("b", "b"))
    assert z.tolist() == ["ab", "bb"] and e.tolist() == [False, True] and s.tolist() == [1, 0]


def test_pools_of_the_wrong_type() -> None:
    source = """(string[N] x) => (float[M] y) { y = TfIdfVectorizer <mode = "TF", min_gram_length = 1,
        max_gram_length = 1, max_skip_count = 0, ngram_counts = [0], ngram_indexes = [0], pool_int64s = [1]> (x) }"""
    with pytest.raises(ModelError, match="pool of integers"):
        run(source, text("a"))


# ---------------------------------------------------------------- regular expressions

YES = [
    ("", ""), ("abc", "abc"), ("a|bc", "bc"), ("(a|b)*", "abba"), ("a{2,3}", "aaa"), ("[a-c]+", "cab"), (".", "é"),
    ("[^a]", "b"), (r"\d+\.\d*", "12."), (r"\w+@\w+", "a_1@b"), ("(?i)straSSe", "STRAsse"), ("(?i)k", "\u212a"),
    (r"\bab\b", "ab"), ("^a$", "a"), ("(?m)a$\n^b", "a\nb"), ("(?s).", "\n"), (r"\Qa.b\E+", "a.bb"),
    (r"\x41\x{e9}", "Aé"),
    (r"\p{Lu}\pL", "Éa"), (r"[[:alpha:]_]*", "ab_"), (r"[\d\-x]", "-"), ("(?P<n>a)(?:b)", "ab"), ("a??b", "b"),
    ("(a*)*", "aaaa"), ("]", "]"), ("a{,2}", "a{,2}"), ("(?i:A)b", "ab"), (r"\PN", "x"), ("(|a)+", "aa"), ("[]a]", "]"),
]  # fmt: skip
NO = [
    ("abc", "abcd"), ("a", ""), (".", "\n"), ("a$", "a\n"), (r"\d", "٣"), (r"\w", "é"), (r"\s", "\xa0"),
    ("a{2}", "aaa"), (r"a\b", "ab"), ("(?i)(?-i)a", "A"), (r"\p{Lu}", "a"), ("[[:^digit:]]", "1"), ("(?i)i", "ı"),
    (r"(?i)\P{Ll}", "É"),
]  # fmt: skip
WRONG = [
    "(",
    ")",
    "a**",
    "*",
    "[",
    "[b-a]",
    r"\8",
    r"\1",
    "(?=a)",
    "a{1001}",
    "a{" + "9" * 5000 + "}",
    "a{3,2}",
    "[[:foo:]]",
    "{2}",
    "a{2}{3}",
    "(?<a",
    r"\x{110000}",
]


@pytest.mark.parametrize(("pattern", "string"), YES)
def test_matches(pattern: str, string: str) -> None:
    assert Regex(pattern).full_match(string)


@pytest.mark.parametrize(("pattern", "string"), NO)
def test_no_matches(pattern: str, string: str) -> None:
    assert not Regex(pattern).full_match(string)


@pytest.mark.parametrize("pattern", WRONG)
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(RunError, match="the regular expression"):
        Regex(pattern)


def test_patterns_of_a_stranger() -> None:
    assert not Regex("(a*)*" * 20 + "b").full_match("a" * 300)  # a matcher that goes back would never end
    with pytest.raises(LimitError, match="states"):
        Regex("((((a{100}){100}){100}){100})")
    with pytest.raises(LimitError, match="groups in each other"):
        Regex("(" * 5000 + ")" * 5000)
    for pattern in (r"\p{Greek}", r"\C"):
        with pytest.raises(UnsupportedError):
            Regex(pattern)


def test_what_looks_like_a_repetition() -> None:
    """Digits of other scripts, and no least number: characters, as any."""
    for pattern in ("a{٣}", "a{,3}", "a{2", "a{}"):
        assert Regex(pattern).full_match(pattern) and not Regex(pattern).full_match("aaa")
    assert Regex("a{0003,}").full_match("aaaa")


def test_shapes_of_matches() -> None:
    assert regex_full_match(np.empty((2, 0), object), "a").shape == (2, 0)
    assert regex_full_match(text("a", "b").reshape(2, 1), "a").tolist() == [[True], [False]]


@pytest.mark.parametrize("kept", [expressions.MOST_KEPT, 5])
def test_what_an_automaton_keeps_changes_no_answer(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expression for many texts, as Python's own module says; also where little of it is kept."""
    monkeypatch.setattr(expressions, "MOST_KEPT", kept)
    r = random.Random(kept)
    for pattern in (r"(a|b)*a.{3}", r"\b(a+ ?)*\b", r"^a?b*$|\Bb", r"(?m:^a$\n?)+", r"((a|ab)(c|bcd))*"):
        own, python = Regex(pattern), re.compile(pattern.replace("$|", r"\Z|"))
        for _ in range(400):
            given = "".join(r.choices("aabcd \n", k=r.randrange(9)))
            assert own.full_match(given) == (python.fullmatch(given) is not None), (pattern, given)


@pytest.mark.parametrize("pattern, given", [
    ("(a*)*b", "a" * 50_000), ("(a|aa)+$", "a" * 50_000 + "b"), ("(x+x+)+y", "x" * 50_000),
    ("((a{0,30}){0,30})*b", "a" * 2000), (".*a.{14}", "ab" * 3000), (r"(.|\b)*", "".join(map(chr, range(33, 9000)))),
])  # fmt: skip
def test_hostile_expressions_take_steps_by_the_length_of_a_text(pattern: str, given: str) -> None:
    own = Regex(pattern)
    own.full_match(given)
    assert sum(len(row.next) + len(row.entered) for row in own._rows.values()) <= 2 * expressions.MOST_KEPT


# ---------------------------------------------------------------- images


def encoded(pixels: np.ndarray, format: str) -> np.ndarray:
    image = pytest.importorskip("PIL.Image")
    with io.BytesIO() as file:
        image.fromarray(pixels).save(file, format=format)
        return np.frombuffer(file.getvalue(), np.uint8)


@pytest.mark.parametrize("format", ["BMP", "PNG", "TIFF", "PPM", "JPEG2000"])
def test_images(format: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    stream = encoded(pixels, format)
    np.testing.assert_array_equal(image_decoder(stream), pixels)
    np.testing.assert_array_equal(image_decoder(stream, "BGR"), pixels[:, :, ::-1])
    assert image_decoder(stream, "Grayscale").shape == (5, 7, 1)


def test_images_of_other_modes_become_rgb() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    np.testing.assert_array_equal(image_decoder(encoded(pixels, "PNG")), np.repeat(pixels[:, :, None], 3, 2))


def test_what_is_no_image_is_empty() -> None:
    stream = encoded(np.zeros((9, 9, 3), np.uint8), "PNG")
    for broken in (stream[:40], np.arange(50, dtype=np.uint8), stream[:0]):
        assert image_decoder(broken).shape == (0, 0, 3)
    assert image_decoder(stream[:40], "Grayscale").shape == (0, 0, 1)
    with pytest.raises(OnnxcError, match="uint8"):
        image_decoder(np.zeros((2, 2), np.uint8))


def test_an_image_that_claims_to_be_huge() -> None:
    header = b"P5 70000 70000 255\n"
    with pytest.raises(LimitError, match="too large"):
        image_decoder(np.frombuffer(header, np.uint8))
