"""`onnxc tune`: which kernels are fastest on this machine."""

from __future__ import annotations

from onnxc.tools.options import AsJson, Given, Model, Seconds, Target, command, output, print_json, progress


@command
def tune(model: Model, given: Given, target: Target, tune_seconds: Seconds = None, as_json: AsJson = False) -> None:
    """Measure the kernels that a model can choose between.

    All later compiles take the fastest. The result is a readable file, tuning.json in the cache's folder; it counts on
    machines of the same kind, for the same --cpu and --threads or the same GPU, and for every model with kernels of the
    same shapes. Ctrl-C ends it, and what was measured is kept.

    \b
    Examples:
      onnxc tune model.onnx
      onnxc tune model.onnx --target cuda --dtype float16 --tune-seconds 120
      onnxc tune model.onnx --target cuda --record h200.json
    """
    from onnxc.tools import tune as tool

    with progress(f"tuning {model}") as tell:
        result = tool.tune(
            model,
            given.read(model, target.shapes),
            **target.keywords,
            dims=given.dims,
            seed=given.seed,
            seconds=tune_seconds,
            record=target.record,
            progress=tell,
        )
    if as_json:
        print_json(result.to_dict())
    else:
        output().print(result)
