#!/usr/bin/env bash
# `make demo`: the shipped model and a larger one through every command. BIN and OUT come from the Makefile.
set -euo pipefail

# Each command is shown before it runs; in bold on a terminal.
if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; else bold='' plain=''; fi
step() { printf '\n%s$ %s%s\n' "$bold" "$*" "$plain"; "$@"; }

digits=models/digits/digits.onnx
onnxc="$BIN/onnxc"

# The held-out file has the labels beside the images; the model takes the images only.
"$BIN/python" - "$OUT/digits_inputs.npz" <<'PY'
import sys

import numpy as np

np.savez(sys.argv[1], image=np.load("models/digits/digits_test.npz")["image"])
PY

echo "== 1. A small trained model: handwritten digits, 100 KB"
step "$onnxc" info "$digits"
step "$onnxc" compile "$digits" --output "$OUT/digits.onnxc"
step "$onnxc" run "$digits" --inputs "$OUT/digits_inputs.npz" --output "$OUT/digits_outputs.npz"
step "$onnxc" compare "$digits" --inputs "$OUT/digits_inputs.npz"
"$BIN/python" - "$OUT/digits_outputs.npz" <<'PY'
import sys

import numpy as np

logits = np.load(sys.argv[1])["logits"]
labels = np.load("models/digits/digits_test.npz")["label"]
print(f"right on {(logits.argmax(1) == labels).mean():.1%} of {len(labels)} held-out images")
PY

echo
echo "== 2. A larger one: BERT-base with random weights, 12 layers, 128 tokens"
[ -e "$OUT/bert.onnx" ] || step "$BIN/python" -m models.build bert --out "$OUT/bert.onnx"
step "$onnxc" compile "$OUT/bert.onnx" --output "$OUT/bert.onnxc"
step "$onnxc" compare "$OUT/bert.onnx"
"$onnxc" explain "$OUT/bert.onnxc" >"$OUT/bert.explain.txt"
head -n 3 "$OUT/bert.explain.txt"

echo
echo "== 3. Speed, onnxc and onnxruntime taking turns"
step "$onnxc" bench "$digits"
step "$onnxc" bench "$OUT/bert.onnx"

echo
echo "== Where things lie"
echo "compiled programs   $OUT/digits.onnxc, $OUT/bert.onnxc  (onnxc.load reads them; no compiler needed)"
echo "kernel report       $OUT/bert.explain.txt  (which nodes were fused into what, and why)"
echo "outputs             $OUT/digits_outputs.npz"
