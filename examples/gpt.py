"""Trains a small GPT on the texts of Python's own help, and writes some more of them.

    python examples/gpt.py [--steps 2000] [--length 400] [--seed 0]

Everything is written against onnxc.array_api and onnxc.nn: one jitted function is a step of the training (forward,
backward, AdamW), another one writes text, a character at a time, in one program.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import onnxc
from onnxc import array_api as xp
from onnxc import nn, random

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16
RATE, WARM_UP, DECAY, DROPOUT = 3e-3, 20, 0.05, 0.05

TEXT = "\n\n".join(topics[name] for name in sorted(topics))
LETTERS = sorted(set(TEXT))
TOKENS = np.array([LETTERS.index(c) for c in TEXT], np.int32)


# ---------------------------------------------------------------- the model


def parameters(key: Any) -> dict[str, Any]:
    """Weights to begin with."""
    keys = iter(random.split(key, 2 + 4 * LAYERS))

    def drawn(*shape: int) -> Any:
        return random.normal(next(keys), shape, deviation=0.08)

    ones = xp.ones(WIDTH, dtype=xp.float32)

    def layer() -> dict[str, Any]:
        return {
            "norm_1": ones, "norm_2": ones, "qkv": drawn(WIDTH, 3 * WIDTH),
            "out": drawn(WIDTH, WIDTH), "up": drawn(WIDTH, 4 * WIDTH), "down": drawn(4 * WIDTH, WIDTH),
        }  # fmt: skip

    return {
        "tokens": drawn(len(LETTERS), WIDTH), "places": drawn(CONTEXT, WIDTH), "norm": ones,
        "layers": [layer() for _ in range(LAYERS)],
    }  # fmt: skip


def attended(p: dict[str, Any], x: Any) -> Any:
    """Causal attention of [batch, time, width]."""
    batch, time, _ = x.shape
    heads = xp.reshape(x @ p["qkv"], (batch, time, 3, HEADS, WIDTH // HEADS))
    q, k, v = xp.unstack(xp.permute_dims(heads, (2, 0, 3, 1, 4)))
    seen = nn.attention(q, k, v, causal=True)
    return xp.reshape(xp.permute_dims(seen, (0, 2, 1, 3)), x.shape) @ p["out"]


def scores(p: dict[str, Any], tokens: Any, key: Any = None) -> Any:
    """[batch, time] ints to scores of what follows, [batch, time, letters]; with a key for dropout."""
    keys = [None] * 2 * LAYERS if key is None else list(random.split(key, 2 * LAYERS))
    x = nn.embedding(tokens, p["tokens"]) + p["places"]
    for k, layer in enumerate(p["layers"]):
        x = x + dropped(attended(layer, nn.rms_norm(x, layer["norm_1"])), keys[2 * k])
        hidden = nn.gelu(nn.rms_norm(x, layer["norm_2"]) @ layer["up"])
        x = x + dropped(hidden @ layer["down"], keys[2 * k + 1])
    return nn.rms_norm(x, p["norm"]) @ p["tokens"].T


def dropped(x: Any, key: Any) -> Any:
    return x if key is None else nn.dropout(x, DROPOUT, key)


def loss(p: dict[str, Any], tokens: Any, key: Any) -> Any:
    return nn.cross_entropy(scores(p, tokens[:, :-1], key), tokens[:, 1:])


# ---------------------------------------------------------------- training and sampling


@onnxc.jit
def step(state: dict[str, Any], tokens: Any, key: Any, total: float) -> tuple[dict[str, Any], Any]:
    """One step of AdamW, with a warm-up and a cosine schedule."""
    count = state["count"] + 1.0
    value, grads = onnxc.value_and_grad(loss)(state["p"], tokens, key)
    rate = RATE * xp.minimum(count / WARM_UP, 0.55 + 0.45 * xp.cos(math.pi * count / total))
    m = onnxc.tree_map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = onnxc.tree_map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], grads)

    def moved(p: Any, m: Any, v: Any) -> Any:
        direction = m / (1 - 0.9**count) / (xp.sqrt(v / (1 - 0.99**count)) + 1e-8)
        return p - rate * (direction + DECAY * p)

    return {"p": onnxc.tree_map(moved, state["p"], m, v), "m": m, "v": v, "count": count}, value


def train(steps: int, seed: int = 0) -> tuple[dict[str, Any], list[float]]:
    """The parameters, and the loss of each step."""
    p = parameters(random.key(seed))
    zeros = onnxc.tree_map(xp.zeros_like, p)
    state = {"p": p, "m": zeros, "v": zeros, "count": xp.asarray(0.0, dtype=xp.float32)}
    rng = np.random.default_rng(seed)
    losses: list[float] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("compiling", total=steps)
        for k in range(steps):
            starts = rng.integers(0, len(TOKENS) - CONTEXT - 1, BATCH)
            tokens = np.stack([TOKENS[s : s + CONTEXT + 1] for s in starts])
            state, value = step(state, tokens, random.key(seed + k), np.float32(steps))
            losses.append(float(value))
            progress.update(task, advance=1, description=f"loss {np.mean(losses[-50:]):.3f}")
    return state["p"], losses


@onnxc.jit
def continued(p: dict[str, Any], tokens: Any, key: Any, temperature: float) -> Any:
    """Fills in [CONTEXT + n] tokens from the (CONTEXT + 1)st on, each drawn with the CONTEXT before it in view."""
    place = xp.arange(tokens.shape[0])

    def write(k: Any, tokens: Any) -> Any:
        seen = xp.take(tokens, xp.arange(CONTEXT) + k)
        found = scores(p, seen[None, :])[0, -1, :] / temperature
        drawn = random.categorical(random.fold_in(key, k), found)
        return xp.where(place == k + CONTEXT, xp.astype(drawn, xp.int32), tokens)

    return onnxc.fori_loop(0, tokens.shape[0] - CONTEXT, write, tokens)


def sample(p: dict[str, Any], length: int, seed: int = 0) -> str:
    """Text that goes on after the first letters of the help."""
    start = np.concatenate([TOKENS[:CONTEXT], np.zeros(length, np.int32)])
    found = continued(p, start, random.key(seed), 0.8).numpy()
    return "".join(LETTERS[t] for t in found)


def curve(losses: list[float], width: int = 60) -> str:
    """The losses as a line of bars, each the mean of a stretch."""
    means = [float(np.mean(part)) for part in np.array_split(losses, min(width, len(losses)))]
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * m / max(means)))] for m in means)
    return f"loss {means[0]:.2f} {bars} {means[-1]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--length", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    p, losses = train(options.steps, options.seed)
    console = Console()
    console.print(curve(losses))
    console.print(sample(p, options.length, options.seed), markup=False, highlight=False)


if __name__ == "__main__":
    main()
