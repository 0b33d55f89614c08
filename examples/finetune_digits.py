"""Fine-tunes the shipped digit classifier to images that lie on their side, and checks the result in onnxruntime.

    python examples/finetune_digits.py [--epochs 6] [--out build/digits_sideways.onnx]

The data is scikit-learn's copy of the UCI handwritten digits (the ``dev`` extra has it), turned by 90 degrees, as a
camera that is mounted sideways would see them: of these the shipped model reads one in sixteen.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import onnxruntime
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import onnxc
from onnxc.training.losses import with_loss

MODEL = Path(__file__).parent.parent / "models/digits/digits.onnx"
BATCH = 64
WANTED = 0.95  # accuracy on images that were held out


def data() -> list[np.ndarray]:
    """Images and labels to train with, then those to test with."""
    digits = load_digits()
    images = np.rot90(digits.images, axes=(1, 2))[:, None].astype(np.float32) / 16
    x, test_x, y, test_y = train_test_split(
        np.ascontiguousarray(images), digits.target.astype(np.int64), test_size=0.2, stratify=digits.target,
        random_state=0,
    )  # fmt: skip
    return [x, y, test_x, test_y]


def accuracy(session: onnxruntime.InferenceSession, x: np.ndarray, y: np.ndarray) -> float:
    (scores,) = session.run(["logits"], {"image": x})
    return float((scores.argmax(1) == y).mean())


def finetune(epochs: int, out: Path) -> tuple[list[float], float, float]:
    """The loss of each step, and the accuracy on the held-out images before and after."""
    console = Console()
    x, y, test_x, test_y = data()
    before = accuracy(onnxruntime.InferenceSession(MODEL), test_x, test_y)
    turns = math.ceil(len(x) / BATCH)
    step = onnxc.compile_training(
        with_loss(MODEL), loss="loss", optimizer=onnxc.optim.AdamW(lr=3e-3),
        schedule=lambda k: 3e-3 * (1 + math.cos(math.pi * k / (epochs * turns))) / 2,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    losses: list[float] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=epochs * turns)
        for _ in range(epochs):
            for rows in np.array_split(rng.permutation(len(x)), turns):
                losses.append(float(step(image=x[rows], target=y[rows])["loss"]))
                progress.update(task, advance=1, description=f"loss {np.mean(losses[-turns:]):.3f}")
    console.print(curve(losses))
    out.parent.mkdir(parents=True, exist_ok=True)
    step.to_onnx(out, model=MODEL)
    return losses, before, accuracy(onnxruntime.InferenceSession(out), test_x, test_y)


def curve(losses: list[float], width: int = 60) -> str:
    """The losses as a line of bars, each the mean of a stretch."""
    means = [float(np.mean(part)) for part in np.array_split(losses, min(width, len(losses)))]
    top = max(means)
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * m / top))] for m in means)
    return f"loss {means[0]:.2f} {bars} {means[-1]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("build/digits_sideways.onnx"))
    options = parser.parse_args()
    _, before, after = finetune(options.epochs, options.out)
    print(f"read of the held-out images, by onnxruntime: {before:.1%} before, {after:.1%} after ({options.out})")
    if after < WANTED:
        raise SystemExit(f"expected {WANTED:.0%} at least")


if __name__ == "__main__":
    main()
