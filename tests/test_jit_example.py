"""examples/gpt.py, in a smaller size: it learns, and writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def gpt(monkeypatch):
    path = Path(__file__).parent.parent / "examples/gpt.py"
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"CONTEXT": 12, "WIDTH": 16, "HEADS": 2, "LAYERS": 1, "BATCH": 8}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_it_learns_and_writes(gpt):
    p, losses = gpt.train(60)
    assert losses[0] == pytest.approx(np.log(len(gpt.LETTERS)), abs=0.4)  # at first all letters are equally likely
    assert np.mean(losses[-10:]) < losses[0] - 0.8
    text = gpt.sample(p, 30)
    assert len(text) == 12 + 30 and gpt.TEXT.startswith(text[:12])
    assert text == gpt.sample(p, 30) != gpt.sample(p, 30, seed=1)
    assert len(gpt.step.explain_recompiles()) == len(gpt.continued.explain_recompiles()) == 1
    assert gpt.curve(losses).startswith("loss 4.")
