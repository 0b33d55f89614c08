"""GreedySearch, BeamSearch and Sampling of com.microsoft: the words are onnxruntime's, all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import onnxc
from onnxc.errors import ModelError, RunError, UnsupportedError
from tests.generation_models import gpt, light, model, t5
from tests.staging_harness import runtime

WORDS, END, FILL = 13, 3, 5
I32, F = np.int32, np.float32
COMMON = {"eos_token_id": END, "pad_token_id": FILL}
INT, FLOAT = 6, 1
PROMPTS = np.array([[7, 2, 9, 4], [FILL, FILL, 8, 2], [6, 6, 1, 12]], I32)


def check(made: onnx.ModelProto, *feeds: dict[str, Any]) -> list[np.ndarray]:
    """The same words, and scores that are near; one compiled model for all feeds. What the last one gave."""
    session, compiled = runtime(made), onnxc.compile(made)
    for given in feeds:
        got = [np.asarray(v) for v in compiled(**given).values()]
        for a, b in zip(got, session.run(None, given), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, 0 if a.dtype == I32 else 1e-4, 0 if a.dtype == I32 else 1e-4)
    return got


def masks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    allowed = (rng.random(WORDS) < 0.8).astype(I32)
    return {"allowed": allowed, "first": (rng.random((3, WORDS)) < 0.7).astype(I32)}


def test_greedy_search() -> None:
    constants = {"min": np.array([6], I32), "repetition": np.array([1.3], F)}
    attrs = {**COMMON, "no_repeat_ngram_size": 2, "decoder": gpt(1, WORDS, layers=2)}
    made = model("GreedySearch", ["ids", "max", *constants], constants, attrs, {"sequences": INT})
    check(made, *({"ids": PROMPTS, "max": np.array([n], I32)} for n in (12, 5)), {"ids": PROMPTS[:, 2:], "max": [9]})


def test_all_sequences_end_early() -> None:
    """What is behind the last end is filled; onnxruntime leaves it open."""
    given, outputs = {"ids": PROMPTS[:1], "max": np.array([16], I32)}, {"sequences": INT}
    attrs = {**COMMON, "decoder": light(0, WORDS)}
    (words,) = runtime(model("GreedySearch", ["ids", "max"], {}, attrs, outputs)).run(None, given)
    made = model("GreedySearch", ["ids", "max"], {}, attrs | {"eos_token_id": int(words[0, 7])}, outputs)
    compiled = onnxc.compile(made)
    got, right = compiled(**given)["sequences"], runtime(made).run(None, given)[0]
    length = np.flatnonzero(got[0] != FILL).max() + 2
    assert 4 < length <= 8
    np.testing.assert_array_equal(got[:, :length], right[:, :length])
    assert (got[:, length:] == FILL).all()
    with pytest.raises(RunError, match="max_length is 4"):
        compiled(ids=PROMPTS, max=np.array([4], I32))


def test_beam_search() -> None:
    constants = {
        "beams": np.array([3], I32), "count": np.array([2], I32), "power": np.array([0.7], F),
        "min": np.array([6], I32), "repetition": np.array([1.2], F), **masks(),
    }  # fmt: skip
    inputs = ["ids", "max", "min", "beams", "count", "power", "repetition", "allowed", "first"]
    attrs = {**COMMON, "no_repeat_ngram_size": 3, "decoder": light(2, WORDS)}
    outputs = {"sequences": INT, "marks": FLOAT, "scores": FLOAT}
    made = model("BeamSearch", inputs, constants, attrs, outputs)
    check(made, *({"ids": PROMPTS, "max": np.array([n], I32)} for n in (11, 5)))


def test_sampling() -> None:
    """Drawn words, too: the random numbers are onnxruntime's."""
    inputs = ["ids", "max", "", "", "", "", "mask", "", "seed"]
    attrs = {**COMMON, "decoder": light(4, WORDS), "temperature": 1.3, "top_p": 0.8}
    constants = {"mask": (PROMPTS != FILL).astype(I32), "seed": np.array([17], I32)}
    made = model("Sampling", inputs, constants, attrs, {"sequences": INT})
    check(made, {"ids": PROMPTS, "max": np.array([20], I32)})


@pytest.mark.parametrize("form", [(True, True, False), (False, False, True, True)])
def test_behind_an_encoder(form: tuple[bool, ...]) -> None:
    encoder, decoder = t5(3, WORDS, *form)
    constants = {k: np.array([v], I32) for k, v in {"min": 0, "beams": 2, "count": 2}.items()}
    constants["power"] = np.array([1.0], F)
    attrs = {**COMMON, "model_type": 1, "decoder_start_token_id": 2, "early_stopping": 1}
    attrs |= {"encoder": encoder, "decoder": decoder}
    made = model("BeamSearch", ["ids", "max", *constants], constants, attrs, {"sequences": INT, "marks": FLOAT})
    check(made, {"ids": PROMPTS, "max": np.array([8], I32)})


@pytest.mark.parametrize("op", ["BeamSearch", "WhisperBeamSearch"])
def test_sound(op: str) -> None:
    """An encoder of sound, as Whisper has it, and first words of its own. (onnxruntime's hidden states have their shape
    alone: the decoder only takes them.)
    """
    named = op == "BeamSearch"
    encoder, decoder = t5(4, WORDS, first=True, hidden=True, whole=False, sound=True)
    constants = {k: np.array([v], I32) for k, v in {"min": 0, "beams": 2, "count": 2}.items()}
    constants["power"] = np.array([1.0], F)
    attrs = {**COMMON, "decoder_start_token_id": 2, "encoder": encoder, "decoder": decoder}
    attrs |= {"model_type": 2} if named else {"no_timestamps_token_id": 4}
    given = ["sound", "max", *constants, *([""] * 4), "start"]
    made = model(op, given, constants, attrs, {"sequences": INT, "marks": FLOAT})
    sound = np.random.default_rng(1).standard_normal((3, 8, 5)).astype(F)
    check(made, {"sound": sound, "max": np.array([8], I32), "start": PROMPTS[:, :1]})
    if named:
        with pytest.raises(UnsupportedError, match="model_type 1 with decoder_input_ids"):
            onnxc.compile(model(op, given, constants, attrs | {"model_type": 1}, {"sequences": INT}))


def test_what_does_not_fit() -> None:
    attrs = {**COMMON, "decoder": light(1, WORDS)}
    known = {
        "max": np.array([10], I32),
        "beams": np.array([2], I32),
        "count": np.array([3], I32),
        "power": np.array([1.0], F),
    }
    given = ["ids", "max", "", "beams", "count", "power"]
    with pytest.raises(ModelError, match="3 sequences of 2 beams"):
        onnxc.compile(model("BeamSearch", given, known, attrs, {"sequences": INT, "marks": FLOAT}))
    with pytest.raises(ModelError, match="those of 14 words"):
        onnxc.compile(model("GreedySearch", ["ids", "max"], {}, {**attrs, "vocab_size": 14}, {"sequences": INT}))
    with pytest.raises(UnsupportedError, match="seed"):
        onnxc.compile(model("Sampling", ["ids", "max"], {}, attrs, {"sequences": INT}))
