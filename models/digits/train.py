"""Train the digit classifier and write digits.onnx and digits_test.npz beside this file.

    python -m models.digits.train

The data is scikit-learn's copy of the UCI handwritten digits: 1797 images of 8x8. A fifth is held out, in
equal shares of each class. Needs torch and scikit-learn (the ``dev`` extra); the seed is fixed, a run takes
about fifteen seconds, and the script refuses to write a model below 97 % on the held-out images.

The network is two blocks of convolution, batch norm and ReLU around a max pool, a third convolution, the mean
over the image, and a linear layer. Batch norms are written as they are, not folded into the convolutions:
folding them is the compiler's work.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from models.graph_builder import GraphBuilder

HERE = Path(__file__).parent
SEED = 0
EPOCHS = 40
BATCH = 64
MINIMUM_ACCURACY = 0.97
WIDTHS = (1, 16, 32, 64)

Images = np.ndarray[Any, np.dtype[np.float32]]
Labels = np.ndarray[Any, np.dtype[np.int64]]


class DigitNet(nn.Module):
    """[batch, 1, 8, 8] in [0, 1] to [batch, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(pairwise(WIDTHS))
        self.convs = nn.ModuleList(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False) for c_in, c_out in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c_out) for _, c_out in pairs)
        self.classifier = nn.Linear(WIDTHS[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = F.relu(norm(conv(x)))
            if index == 1:
                x = F.max_pool2d(x, 2)
        return self.classifier(x.mean((2, 3)))


def load_data() -> tuple[Images, Images, Labels, Labels]:
    """Training images, held-out images, training labels, held-out labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    split = train_test_split(images, labels, test_size=0.2, random_state=SEED, stratify=labels)
    return tuple(split)


def shift(images: Tensor) -> Tensor:
    """Move the whole batch by at most one pixel each way: the only augmentation."""
    down, right = (int(torch.randint(-1, 2, ())) for _ in range(2))
    padded = F.pad(images, (1, 1, 1, 1))
    return padded[:, :, 1 + down : 9 + down, 1 + right : 9 + right]


def train(images: Tensor, labels: Tensor) -> DigitNet:
    """AdamW under a one-cycle schedule."""
    torch.manual_seed(SEED)
    net = DigitNet()
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
            loss = F.cross_entropy(net(shift(images[batch])), labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def to_onnx(net: DigitNet) -> onnx.ModelProto:
    """Write the trained network node by node, so that the file is small and its names are plain."""
    g = GraphBuilder("digits")
    x = g.input("image", np.float32, ["batch", 1, 8, 8])
    for index, (conv, norm) in enumerate(zip(net.convs, net.norms, strict=True)):
        with g.scope(f"block{index}"):
            weight = g.constant("weight", array(conv.weight))
            statistics = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
            names = ("scale", "bias", "mean", "variance")
            folded = [g.constant(name, array(value)) for name, value in zip(names, statistics, strict=True)]
            x = g.op("Conv", x, weight, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
            x = g.op("Relu", g.op("BatchNormalization", x, *folded, epsilon=norm.eps))
            if index == 1:
                x = g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    weight = g.constant("classifier.weight", array(net.classifier.weight))
    bias = g.constant("classifier.bias", array(net.classifier.bias))
    g.output("logits", g.op("Gemm", x, weight, bias, transB=1), np.float32, ["batch", 10])
    return g.build()


def array(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().numpy()


def accuracy(model: onnx.ModelProto, images: Images, labels: Labels) -> float:
    """The share of images that onnxruntime classifies rightly with the model."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": images})
    return float((logits.argmax(1) == labels).mean())


def main() -> None:
    torch.set_num_threads(1)  # sums in one order, so that a run repeats
    train_images, test_images, train_labels, test_labels = load_data()
    net = train(torch.from_numpy(train_images), torch.from_numpy(train_labels))
    model = to_onnx(net)
    reached = accuracy(model, test_images, test_labels)
    print(f"accuracy on {len(test_labels)} held-out images: {reached:.2%}")
    if reached < MINIMUM_ACCURACY:
        raise SystemExit(f"below {MINIMUM_ACCURACY:.0%}: nothing was written")
    onnx.save(model, HERE / "digits.onnx")
    np.savez_compressed(HERE / "digits_test.npz", image=test_images, label=test_labels)
    for name in ("digits.onnx", "digits_test.npz"):
        print(f"{HERE / name}: {(HERE / name).stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
