"""Cases of products, convolutions, pools, norms, and resizing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.op_cases import KERNELS, f32, i64, ints, pos
from tests.ops_harness import Case


def contractions() -> Iterator[Case]:
    for a, b in [
        ((3, 4), (4, 5)),
        ((4,), (4,)),
        ((4,), (2, 4, 3)),
        ((2, 3, 4), (4,)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((0, 4), (4, 2)),
        ((2, 0), (0, 3)),
    ]:
        yield Case("MatMul", [f32(*a), f32(*b)])
    yield Case("MatMul", [ints(-5, 5, 3, 4, dtype=np.int32), ints(-5, 5, 4, 2, dtype=np.int32)])
    for c in ((3, 5), (5,), (3, 1), (), None):
        yield Case("Gemm", [f32(3, 4), f32(4, 5), None if c is None else f32(*c)])
    yield Case("Gemm", [f32(4, 3), f32(5, 4), f32(5)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0})
    yield Case("Gemm", [f32(3, 4), f32(4, 5), f32(5)], {"beta": 0.0}, opset=9)
    equations = [
        ("ij,jk->ik", (3, 4), (4, 5)),
        ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
        ("ij->ji", (3, 4)),
        ("ii->i", (4, 4)),
        ("ii", (4, 4)),
        ("ij->", (3, 4)),
        ("i,j->ij", (3,), (4,)),
        ("bhid,bhjd->bhij", (2, 3, 4, 5), (2, 3, 6, 5)),
        ("...ij,...jk->...ik", (2, 3, 4), (4, 5)),
        ("ij,j", (3, 4), (4,)),
        ("bn,anm,bm->ba", (2, 3), (5, 3, 4), (2, 4)),
        ("i...->...", (3, 4)),
        ("bij,bij->b", (2, 3, 4), (2, 3, 4)),
        ("abc,cd,de->abe", (2, 3, 4), (4, 5), (5, 2)),
        ("iij->j", (3, 3, 4)),
        ("...,...->...", (2, 3), (3,)),
        ("b...i,...i->b...", (2, 3, 4), (3, 4)),
        ("ab,ab->ab", (2, 3), (2, 3)),
        ("blq,bkl->bkq", (2, 3, 4), (2, 5, 3)),
        ("ij,kj->ik", (3, 1), (4, 5)),
    ]
    for equation, *given in equations:
        # onnxruntime refuses ellipses of different ranks
        oracle = "reference" if "..." in equation else "onnxruntime"
        yield Case(
            "Einsum",
            [f32(*s) for s in given],
            {"equation": equation},
            dynamic="ii" not in equation,
            oracle=oracle,
        )


def convolutions() -> Iterator[Case]:
    x, w, bias = f32(2, 4, 7, 8), f32(6, 4, 3, 3), f32(6)
    yield Case("Conv", [x, w], keep=KERNELS)
    yield Case("Conv", [x, w, bias], {"pads": [1, 0, 2, 1], "strides": [2, 1]}, keep=KERNELS)
    yield Case("Conv", [x, w, bias], {"dilations": [2, 2], "kernel_shape": [3, 3]}, keep=KERNELS)
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield Case("Conv", [x, w], {"auto_pad": auto, "strides": [2, 3]}, keep=KERNELS)
    yield Case("Conv", [x, f32(6, 2, 3, 2)], {"group": 2}, keep=KERNELS)
    yield Case("Conv", [x, f32(8, 1, 3, 3), f32(8)], {"group": 4, "pads": [1, 1, 1, 1]}, keep=KERNELS)
    yield Case("Conv", [f32(2, 3, 9), f32(4, 3, 4), f32(4)], {"strides": [2]}, keep=KERNELS)
    yield Case("Conv", [f32(1, 2, 5, 5, 5), f32(3, 2, 3, 3, 3)], {"pads": [1] * 6}, keep=KERNELS)
    x, w = f32(2, 4, 5, 6), f32(4, 3, 3, 3)
    yield Case("ConvTranspose", [x, w], keep=KERNELS)
    yield Case("ConvTranspose", [x, w, f32(3)], {"strides": [2, 3], "pads": [1, 0, 2, 1]}, keep=KERNELS)
    yield Case(
        "ConvTranspose",
        [x, w],
        {"strides": [2, 2], "output_padding": [1, 1], "pads": [1, 1, 1, 1]},
        keep=KERNELS,
    )
    yield Case("ConvTranspose", [x, w], {"dilations": [2, 2], "strides": [2, 1]}, keep=KERNELS)
    yield Case("ConvTranspose", [x, f32(4, 2, 3, 3), f32(4)], {"group": 2, "strides": [2, 2]}, keep=KERNELS)
    yield Case("ConvTranspose", [x, f32(4, 2, 1, 1)], {"strides": [2, 2], "pads": [1, 0, 0, 1]}, keep=KERNELS)
    yield Case("ConvTranspose", [x, f32(4, 2, 2, 2)], {"pads": [2, 2, 2, 1]}, keep=KERNELS)
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield Case("ConvTranspose", [x, w], {"auto_pad": auto, "strides": [2, 2]}, keep=KERNELS)
        yield Case("ConvTranspose", [x, w], {"auto_pad": auto, "strides": [5, 4]}, keep=KERNELS)
    yield Case("ConvTranspose", [x, w], {"strides": [2, 2], "output_shape": [10, 12]}, keep=KERNELS)
    yield Case(
        "ConvTranspose",
        [x, w],
        {"strides": [2, 2], "output_shape": [11, 14], "auto_pad": "SAME_UPPER"},
        keep=KERNELS,
    )
    yield Case("ConvTranspose", [f32(1, 2, 5), f32(2, 3, 4)], {"strides": [3]}, keep=KERNELS)
    beyond = {"strides": [3, 1], "pads": [2, 2, 0, 2], "output_padding": [2, 0]}  # more is cut off than there is
    yield Case("ConvTranspose", [f32(2, 2, 1, 8), f32(2, 1, 1, 1)], beyond, keep=KERNELS)
    beyond = {"strides": [3], "dilations": [3], "pads": [3, 0]}
    yield Case("ConvTranspose", [f32(2, 2, 1), f32(2, 1, 2)], beyond, keep=KERNELS)


def pools() -> Iterator[Case]:
    x = f32(2, 3, 7, 8)
    settings: list[dict[str, Any]] = [
        {"kernel_shape": [3, 2]},
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [3, 3], "strides": [2, 3], "ceil_mode": 1},
        {"kernel_shape": [3, 3], "strides": [3, 3], "pads": [1, 0, 1, 1], "ceil_mode": 1},
        {"kernel_shape": [2, 2], "strides": [3, 3], "ceil_mode": 1, "pads": [1, 1, 1, 1]},
        {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"kernel_shape": [3, 2], "auto_pad": "VALID"},
        {"kernel_shape": [2, 3], "dilations": [2, 2], "strides": [2, 1]},
        {
            "kernel_shape": [2, 2],
            "dilations": [3, 2],
            "strides": [2, 2],
            "ceil_mode": 1,
            "pads": [0, 1, 1, 0],
        },
    ]
    for attrs in settings:
        yield Case("MaxPool", [x], attrs)
        yield Case("MaxPool", [x], attrs, outputs=2)
        yield Case("LpPool", [x], {**attrs, "p": 3})
        for include in (0, 1):
            yield Case("AveragePool", [x], {**attrs, "count_include_pad": include})
            if "dilations" not in attrs and "ceil_mode" not in attrs:
                yield Case("AveragePool", [x], {**attrs, "count_include_pad": include}, opset=10)
    short = f32(1, 2, 2, 5)  # an axis of which no window is, by one element
    for name in ("MaxPool", "AveragePool", "LpPool"):
        yield Case(name, [short], {"kernel_shape": [3, 3], "pads": [0, 1, 0, 0]})
    yield Case("MaxPool", [x], {"kernel_shape": [2, 2], "storage_order": 1, "strides": [2, 2]}, outputs=2)
    yield Case("MaxPool", [ints(0, 255, 1, 2, 5, dtype=np.uint8)], {"kernel_shape": [3], "pads": [1, 1]})
    for low, dtype in ((0, np.uint8), (-128, np.int8)):  # the padding is nobody's maximum
        least = ints(low, low + 2, 2, 3, 9, 7, dtype=dtype)
        yield Case("MaxPool", [least], {"kernel_shape": [2, 3], "pads": [1, 1, 1, 1]}, outputs=2)
    hole = np.where(ints(0, 3, 2, 3, 9, 7) == 0, f32(2, 3, 9, 7), np.float32(-np.inf))
    yield Case("MaxPool", [hole], {"kernel_shape": [2, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}, outputs=2)
    yield Case("MaxPool", [f32(1, 2, 5)], {"kernel_shape": [2]}, opset=8)
    yield Case("AveragePool", [f32(1, 2, 4, 5, 6)], {"kernel_shape": [2, 2, 2], "pads": [1] * 6})
    for name in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"):
        yield Case(name, [x], opset=21)
        yield Case(name, [f32(1, 2, 5)], opset=21)
    indices = i64(0, 3, 11, 14).reshape(1, 1, 2, 2)
    yield Case("MaxUnpool", [f32(1, 1, 2, 2), indices], {"kernel_shape": [2, 2], "strides": [2, 2]})


def experimental() -> Iterator[Case]:
    """Of models before opset 10."""
    x = f32(1, 2, 5, 6)
    for across in (0, 1):
        for divided in (0, 1):
            attrs = {"across_channels": across, "normalize_variance": divided}
            yield Case("MeanVarianceNormalization", [f32(2, 3, 4, 5)], attrs, opset=7)
    for opset in (7, 9):
        yield Case("Affine", [x], {"alpha": 2.0, "beta": 0.3}, opset=opset)
        yield Case("Scale", [x], {"scale": -1.5}, opset=opset)
        yield Case("ScaledTanh", [x], {"alpha": 2.0, "beta": 0.3}, opset=opset)
        yield Case("ParametricSoftplus", [x * 30], {"alpha": 2.0, "beta": 0.3}, opset=opset)
        yield Case("ThresholdedRelu", [x], {"alpha": 0.3}, opset=opset)
        yield Case("ImageScaler", [x], {"scale": 2.0, "bias": [1.0, -3.0]}, opset=opset)
        yield Case("Crop", [x], {"border": [1, 2, 0, 1]}, opset=opset)
        yield Case("Crop", [x], {"border": [1, 2, 0, 0], "scale": [2, 4]}, opset=opset)
        yield Case("DynamicSlice", [x, i64(1, 2), i64(4, 9), i64(2, 3)], opset=opset, const=[1, 2, 3])


def norms() -> Iterator[Case]:
    x, c = f32(2, 6, 3, 4), [f32(6), f32(6), f32(6), pos(6)]
    for opset in (7, 9, 14, 15):
        yield Case("BatchNormalization", [x, *c], {"epsilon": 1e-3}, opset=opset, const=[1, 2, 3, 4])
    yield Case("BatchNormalization", [f32(5, 6), *c])
    yield Case("BatchNormalization", [x, *c], {"training_mode": 1}, opset=15, outputs=3)
    for opset in (7, 9, 13):
        yield Case("BatchNormalization", [x, *c], {"momentum": 0.7}, opset=opset, outputs=5)
    for axis in (-1, 1, 0):
        shape = x.shape[axis:] if axis else x.shape
        yield Case("LayerNormalization", [x, f32(*shape), f32(*shape)], {"axis": axis}, opset=17)
        yield Case("LayerNormalization", [x, f32(*shape)], {"axis": axis, "epsilon": 0.1}, opset=17, outputs=3)
        yield Case("RMSNormalization", [x, f32(*shape)], {"axis": axis}, opset=23)
    wide = f32(3, 8).astype(np.float64)  # with means in float32, as the standard has it
    yield Case("LayerNormalization", [wide, wide[0], wide[1]], opset=17, outputs=3)
    half = f32(3, 8).astype(np.float16)
    yield Case("LayerNormalization", [half, half[0], half[1]], opset=17)
    yield Case("RMSNormalization", [half, half[0]], opset=23)
    yield Case("InstanceNormalization", [x, f32(6), f32(6)], {"epsilon": 0.01})
    yield Case("InstanceNormalization", [f32(2, 3, 5), f32(3), f32(3)])
    yield Case("GroupNormalization", [x, f32(3), f32(3)], {"num_groups": 3}, opset=18, oracle="reference")
    yield Case("GroupNormalization", [x, f32(6), f32(6)], {"num_groups": 3}, opset=21)
    for size in (1, 3, 5):
        yield Case("LRN", [x], {"size": size, "alpha": 0.5, "bias": 2.0})
    for p in (1, 2):
        yield Case("LpNormalization", [x], {"axis": 1, "p": p})
    yield Case("MeanVarianceNormalization", [x])
    yield Case("MeanVarianceNormalization", [x], {"axes": [1, 2]})


def resizes() -> Iterator[Case]:
    x = f32(1, 2, 5, 6)
    sizes = [
        ([1, 1, 2, 2], None),
        ([1, 1, 0.6, 1.7], None),
        (None, [1, 2, 8, 3]),
        (None, [1, 2, 1, 12]),
        ([1, 1, 3, 0.5], None),
    ]
    coordinates = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"]
    for scales, target in sizes:
        tail = [
            None,
            None if scales is None else np.array(scales, np.float32),
            None if target is None else i64(*target),
        ]
        for how in coordinates:
            base = {"coordinate_transformation_mode": how}
            # onnxruntime takes the last corner's place from the size that is cut to a whole one.
            cut = how == "align_corners" and scales == [1, 1, 0.6, 1.7]
            common: dict[str, Any] = {"opset": 19, "const": [2, 3], **({"oracle": "reference"} if cut else {})}
            for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
                yield Case("Resize", [x, *tail], {**base, "nearest_mode": nearest}, **common)
            yield Case("Resize", [x, *tail], {**base, "mode": "linear"}, **common)
            yield Case("Resize", [x, *tail], {**base, "mode": "cubic"}, rtol=1e-4, **common)
            attrs = {**base, "mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5}
            yield Case("Resize", [x, *tail], attrs, rtol=1e-4, atol=1e-5, **common)
    roi = np.array([0, 0, 0.1, -0.2, 1, 1, 0.8, 1.3], np.float32)
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0}
    for mode in ("nearest", "linear"):
        yield Case("Resize", [x, roi, None, i64(1, 2, 7, 4)], {**crop, "mode": mode}, opset=13, const=[1, 3])
    for mode in ("linear", "cubic"):
        for scale in (0.6, 0.35):
            given = [x, None, np.array([1, 1, scale, scale], np.float32)]
            yield Case("Resize", given, {"mode": mode, "antialias": 1}, opset=18, const=[2], dynamic=False, rtol=1e-4)
        photo, attrs = [f32(1, 2, 61, 83), None, None, i64(1, 2, 23, 31)], {"mode": mode, "antialias": 1}
        yield Case("Resize", photo, attrs, opset=18, const=[3], dynamic=False, rtol=1e-4)
        yield Case("Resize", photo, {**attrs, "exclude_outside": 1}, opset=18, const=[3], dynamic=False, rtol=1e-4)
        for dtype in (np.uint8, np.int32):  # rounded after each axis; with weights that are exact, ties are ties
            whole = [ints(0, 256, 1, 2, 32, 20).astype(dtype), None, None, i64(1, 2, 16, 40)]
            yield Case("Resize", whole, attrs, opset=18, const=[3], dynamic=False)
    scales = np.array([1, 1, 1.5, 2], np.float32)  # the roi has no part in the size
    yield Case("Resize", [x, roi, scales], {**crop, "mode": "linear"}, opset=13, const=[1, 2])
    line = [f32(40), None, None, i64(9)]
    yield Case("Resize", line, attrs, opset=18, const=[3], dynamic=False, oracle="reference", rtol=1e-4)
    for policy in ("not_larger", "not_smaller"):
        attrs = {"axes": [2, 3], "keep_aspect_ratio_policy": policy}
        yield Case("Resize", [x, None, None, i64(7, 8)], attrs, opset=18, const=[3], dynamic=False)
    scales = np.array([1, 1, 2, 3], np.float32)
    for mode in ("nearest", "linear"):
        yield Case("Upsample", [x, scales], {"mode": mode}, opset=9, const=[1])
        yield Case("Resize", [x, np.array([1, 1, 0.6, 1.5], np.float32)], {"mode": mode}, opset=10, const=[1])
    yield Case("Upsample", [x], {"mode": "nearest", "scales": [1.0, 1.0, 2.0, 2.0]}, opset=7)
