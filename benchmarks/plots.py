"""Figures and tables of the documentation, from results: python -m benchmarks.plots [RESULTS.json ...]

The files are what `python -m benchmarks.run` wrote; later ones go before earlier ones, model by model. What the
documentation shows is kept in docs/figures/results.json, which is read first (so without files, everything is drawn
anew from there). Then docs/figures/*.svg are drawn, and the tables between `<!-- results: NAME -->` and
`<!-- end -->` are written in README.md and docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo import HEADINGS, marks, over_faster, row, share_of_peak
from models.zoo import store
from onnxc.tools.bench import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
ROOFLINES = ("resnet50", "mobilenetv2", "unet", "bert", "whisper", "llama_decode")
LEAST_SHARE = 0.001  # of a model's time: smaller kernels are not kept
DIGITS = 4

Results = dict[str, Any]


# ---------------------------------------------------------------- results


def merged(results: Sequence[Results]) -> Results:
    """Later results over earlier ones: of `speed`, each model for itself; of the others, each part for itself.

    The marks of `speed` are over all models, and so made anew; kernel counts are left out.
    """
    whole: Results = {"machine": {}, "marks": [], "results": {}}
    for one in results:
        whole["machine"] = one["machine"] or whole["machine"]
        new = {(mark["of"], mark["name"]): mark for mark in one["marks"] if mark["of"] not in ("speed", "kernels")}
        whole["marks"] = [m for m in whole["marks"] if (m["of"], m["name"]) not in new] + list(new.values())
        for name, data in one["results"].items():
            whole["results"][name] = {**whole["results"].get(name, {}), **data}
    own = [{"of": "speed", **mark.to_dict()} for mark in marks(whole["results"].get("speed", {}))]
    return {**whole, "marks": own + whole["marks"]}


def compact(results: Results) -> Results:
    """What the documentation needs of results: no single kernels but those of a few models, few digits."""
    kept = {name: results["results"][name] for name in ("attention", "weights", "int8") if name in results["results"]}
    speed = results["results"].get("speed", {})
    kept["speed"] = {name: _without_kernels(speed[name], name in ROOFLINES) for name in store.NAMES if name in speed}
    kept["attention"] = {name: _without_kernels(data, False) for name, data in kept.get("attention", {}).items()}
    rounded: Results = _rounded({"machine": results["machine"], "marks": results["marks"], "results": kept})
    return rounded


def _without_kernels(data: dict[str, Any], keep: bool) -> dict[str, Any]:
    profile = data.get("profile")
    if not profile:
        return data
    small = {key: profile[key] for key in ("peaks", "total", "flops", "share_of_peak")}
    if keep:
        fields = ("kind", "label", "best", "reads", "writes", "flops", "pointwise")
        least = LEAST_SHARE * profile["total"]
        small["kernels"] = [{f: k[f] for f in fields} for k in profile["kernels"] if k["best"] >= least]
    return {**data, "profile": small}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- tables


def machine_table(results: Results) -> list[str]:
    """The machine in a sentence."""
    where = results["machine"]
    peaks, versions = where["peaks"], where["packages"]
    engines = ", ".join(f"{n} {versions[n]}" for n in ("onnxruntime", "openvino") if n in versions)
    rounds = {data["rounds"] for data in results["results"]["speed"].values() if "rounds" in data}
    return [
        f"{where['cpu']}, {peaks['threads']} threads: {peaks['flops'] / 1e9:.0f} GFLOP/s of float32 multiply-adds in"
        f" vectors of {peaks['lanes']}, {peaks['bandwidth'] / 1e9:.0f} GB/s read from memory; {where['compiler']};"
        f" {engines}; {' to '.join(str(n) for n in sorted({min(rounds), max(rounds)}))} rounds."
    ]


def summary_table(results: Results) -> list[str]:
    """Geometric means over the models and over the micro graphs."""
    speed = results["results"]["speed"]
    lines = _head(
        ["geometric mean of time ratios", "by onnxruntime's", "25 %", "by OpenVINO's", "25 %", "by the faster's"]
    )
    for title, names in (("models", store.MODELS), ("graphs of pointwise ops and reductions", store.MICRO_GRAPHS)):
        found = [speed[n] for n in names if "ratios" in speed.get(n, {})]
        cells = []
        for peer in ("onnxruntime", "openvino"):
            for which in ("best", "p25"):
                ratios = [d["ratios"][peer][which] for d in found if peer in d["ratios"]]
                cells.append(f"{geometric_mean(ratios):.2f}" if ratios else "")
        faster = [over_faster(d) for d in found]
        cells.append(f"{geometric_mean(faster):.2f}" if faster else "")
        lines.append(_line([f"{len(found)} {title}", *cells]))
    return lines


def speed_table(results: Results) -> list[str]:
    """A line for each model."""
    speed = results["results"]["speed"]
    return [*_head(HEADINGS), *(_line(row(name, data)) for name, data in speed.items() if "timings" in data)]


def marks_table(results: Results) -> list[str]:
    """The marks."""
    lines = _head(["mark", "reached", "limit", ""])
    for mark in results["marks"]:
        limit = f"{'at least ' if mark['at_least'] else ''}{mark['limit']:g} {mark['unit']}"
        cells = [mark["name"], f"{mark['value']:.3g} {mark['unit']}", limit, "met" if mark["met"] else "missed"]
        lines.append(_line([c.strip() for c in cells]))
    return lines


TABLES: dict[str, Callable[[Results], list[str]]] = {
    "machine": machine_table,
    "summary": summary_table,
    "speed": speed_table,
    "marks": marks_table,
}
_PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, results: Results) -> str:
    """The text with the tables at their places."""

    def table(place: re.Match[str]) -> str:
        return place[1] + "\n" + "\n".join(TABLES[place[2]](results)) + "\n\n" + place[3]

    return _PLACE.sub(table, text)


def _head(headings: Sequence[str]) -> list[str]:
    return [_line(headings), _line(["---", *["---:"] * (len(headings) - 1)])]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- figures

INK, GRID = "#333333", "#dddddd"
OWN, ORT, VINO = "#0072b2", "#e69f00", "#009e73"  # colours that stay apart for every eye (Okabe and Ito)
KINDS = {
    "matmul": OWN, "conv winograd": "#d55e00", "conv direct": ORT, "conv depthwise": "#cc79a7", "attention": VINO,
    "loops": "#56b4e9", "other": "#999999",
}  # fmt: skip


def _style() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "onnxc", "font.family": "sans-serif", "font.size": 9,
         "axes.edgecolor": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
         "axes.titlesize": 10, "axes.titleweight": "bold", "xtick.color": INK, "ytick.color": INK, "text.color": INK,
         "axes.labelcolor": INK, "grid.color": GRID, "grid.linewidth": 0.6, "legend.frameon": False}
    )  # fmt: skip
    import matplotlib.pyplot as plt

    return plt


def speed_figure(results: Results) -> Any:
    """Bars: onnxc's time by that of each peer."""
    plt = _style()
    speed = {n: d for n, d in results["results"]["speed"].items() if "ratios" in d}
    groups = [("Models", [n for n in store.MODELS if n in speed]),
              ("Pointwise ops and reductions", [n for n in store.MICRO_GRAPHS if n in speed])]  # fmt: skip
    groups = [(title, names) for title, names in groups if names]
    figure, axes = plt.subplots(
        len(groups), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(7.2, 1.2 + 0.3 * sum(len(names) for _, names in groups)),
        gridspec_kw={"height_ratios": [len(names) for _, names in groups]},
    )  # fmt: skip
    end = 1.1 * max([1.1, *(r["best"] for d in speed.values() for r in d["ratios"].values())])
    for (title, names), plot in zip(groups, axes[:, 0], strict=True):
        for offset, peer, colour, label in (
            (-0.2, "onnxruntime", ORT, "onnxruntime"),
            (0.2, "openvino", VINO, "OpenVINO"),
        ):
            shown = [(k, speed[n]["ratios"][peer]["best"]) for k, n in enumerate(names) if peer in speed[n]["ratios"]]
            places, ratios = [k + offset for k, _ in shown], [r for _, r in shown]
            plot.barh(places, ratios, 0.38, color=colour, label=label)
            for at, ratio in zip(places, ratios, strict=True):
                label_box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # over the line at 1
                plot.text(ratio + 0.01, at, f"{ratio:.2f}", va="center", fontsize=7, bbox=label_box)
        plot.axvline(1, color=INK, linewidth=1)
        plot.set_yticks(range(len(names)), [n.removeprefix("m_") for n in names])
        plot.set_ylim(len(names) - 0.5, -0.5)
        plot.tick_params(axis="y", length=0)
        plot.set_title(title, loc="left")
        plot.grid(axis="x")
    axes[0, 0].set_xlim(0, end)
    axes[0, 0].legend(loc="lower right", ncols=2, bbox_to_anchor=(1, 1), title=None)
    axes[-1, 0].set_xlabel("onnxc's time by the peer's (best times; left of 1, onnxc is faster)")
    return figure


def peak_figure(results: Results) -> Any:
    """Bars: the share of the machine's multiply-adds that each model's contractions use; dots for the peers."""
    plt = _style()
    speed = results["results"]["speed"]
    names = [n for n in store.MODELS if share_of_peak(speed.get(n, {"timings": []})) >= 0.01]
    figure, plot = plt.subplots(layout="constrained", figsize=(7.2, 0.9 + 0.25 * len(names)))
    places = range(len(names))
    plot.barh(places, [100 * share_of_peak(speed[n]) for n in names], 0.7, color=OWN, label="onnxc")
    for engine, label, colour, marker in (
        ("onnxruntime", "onnxruntime", ORT, "o"),
        ("openvino", "OpenVINO", VINO, "D"),
    ):
        shares = [100 * share_of_peak(speed[n], engine) or None for n in names]
        plot.plot(shares, places, marker, color=colour, label=label, markersize=5.5, markeredgecolor="white",
                  markeredgewidth=0.7)  # fmt: skip
    plot.axvline(100, color=INK, linewidth=1)
    plot.set_yticks(places, names)
    plot.set_ylim(len(names) - 0.4, -0.6)
    plot.tick_params(axis="y", length=0)
    plot.grid(axis="x")
    plot.legend(loc="lower right", ncols=3, bbox_to_anchor=(1, 1))
    plot.set_xlabel("% of the multiply-adds that the machine can do (convolutions counted as direct ones)")
    return figure


def roofline_figure(results: Results) -> Any:
    """The kernels of some models under the two roofs; the area of a dot is the kernel's part of the model's time."""
    plt = _style()
    speed = results["results"]["speed"]
    names = [n for n in ROOFLINES if "kernels" in speed.get(n, {}).get("profile", {})]
    rows = max(1, -(-len(names) // 2))
    figure, axes = plt.subplots(
        rows, 2, sharex=True, sharey=True, squeeze=False, layout="constrained", figsize=(7.2, 2.5 * rows + 0.5)
    )
    seen: set[str] = set()
    for name, plot in zip(names, axes.flat, strict=False):
        profile = speed[name]["profile"]
        peak, bandwidth = (profile["peaks"][key] / 1e9 for key in ("flops", "bandwidth"))
        reach = [0.05, peak / bandwidth, 2000]
        plot.plot(reach, [min(peak, bandwidth * x) for x in reach], color=INK, linewidth=1)
        for (family, size), points in _dots(profile).items():
            seen.add(family)
            x, y = zip(*points, strict=True)
            plot.plot(x, y, "o", color=KINDS[family], alpha=0.6, markersize=size, markeredgewidth=0)
        plot.set(xscale="log", yscale="log", xlim=(0.1, 1000), ylim=(peak / 100, 4 * peak))
        plot.minorticks_off()
        plot.set_title(name, loc="left")
        plot.grid()
    for plot in list(axes.flat)[len(names) :]:
        plot.set_visible(False)
    figure.supxlabel("operations for each byte read or written", fontsize=9)
    figure.supylabel("GFLOP/s", fontsize=9)
    handles = [plt.Line2D([], [], linestyle="", marker="o", color=KINDS[k], label=k) for k in KINDS if k in seen]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), columnspacing=1, handletextpad=0.1)
    return figure


def _dots(profile: dict[str, Any]) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Operations for a byte and GFLOP/s of each kernel, by kind and size of the dot (few sizes make small files)."""
    dots: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for kernel in sorted(profile["kernels"], key=lambda k: -k["best"]):
        work, nbytes = kernel["flops"] + kernel["pointwise"], kernel["reads"] + kernel["writes"]
        if work and nbytes:
            size = 3 + min(9, round((400 * kernel["best"] / profile["total"]) ** 0.5))
            dots.setdefault((_family(kernel["kind"]), size), []).append((work / nbytes, work / kernel["best"] / 1e9))
    return dots


def _family(kind: str) -> str:
    return next((family for family in KINDS if kind.startswith(family)), "other")


DRAWN: dict[str, Callable[[Results], Any]] = {
    "speed": speed_figure, "peak": peak_figure, "roofline": roofline_figure,
}  # fmt: skip


def draw(results: Results, folder: Path, kind: str = "svg") -> None:
    """All figures, as files of the folder."""
    for name, make in DRAWN.items():
        figure = make(results)
        options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 110}
        figure.savefig(folder / f"{name}.{kind}", **options)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS.json")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write nothing but PNG files, into this folder")
    parser.add_argument("--new", action="store_true", help="forget docs/figures/results.json")
    arguments = parser.parse_args()
    kept = FIGURES / "results.json"
    files = [*([] if arguments.new or not kept.exists() else [kept]), *arguments.results]
    if not files:
        parser.error("no results: run `python -m benchmarks.run` first, and name the file that it writes")
    results = compact(merged([json.loads(path.read_text()) for path in files]))
    if arguments.png:
        draw(results, arguments.png, "png")
        return
    FIGURES.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    draw(results, FIGURES)
    for page in PAGES:
        page.write_text(fill(page.read_text(), results))
    print(f"written: {FIGURES}, {', '.join(page.name for page in PAGES)}")


if __name__ == "__main__":
    main()
