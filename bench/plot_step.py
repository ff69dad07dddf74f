"""Plots of what `bench_step.py --json` wrote.

    python bench/plot_step.py FILE.json [FILE.json ...] [--folder plots] [--backend NAME]

Writes PNGs: the time of a step over the batch with the floor of one read (one a dtype and
vocabulary), how many times longer rivals take, and what each feature costs. Later files add to
and replace what earlier ones hold. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Figure = dict[str, Any]
Shape = tuple[str, int]
"""dtype and vocabulary size"""
MARKERS = "os^Dv"


def load(paths: Iterable[Path]) -> tuple[list[Figure], list[Figure]]:
    """Timed figures and comparisons of all files, the last of each kind."""
    figures: dict[Any, Figure] = {}
    comparisons: dict[Any, Figure] = {}
    for path in paths:
        content = json.loads(path.read_text())
        for f in content["figures"]:
            if f["cold"]:
                key = tuple(f[k] for k in ("case", "contender", "group", "dtype", "batch", "vocab"))
                figures[key] = f
        for c in content["comparisons"]:
            comparisons[tuple(c[k] for k in ("what", "backend", "dtype", "batch", "vocab"))] = c
    return list(figures.values()), list(comparisons.values())


def _legend_beside(axes: Any) -> None:
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))


def median(figure: Figure) -> float:
    return float(figure["cold"]["median"])


def shapes_of(figures: Iterable[Figure]) -> list[Shape]:
    return sorted({(f["dtype"], f["vocab"]) for f in figures})


def best_backend(figures: Sequence[Figure]) -> str:
    """Of our backends the one with the least time in all at the shapes that every one has."""
    ours = [f for f in figures if f["group"] == "backend"]
    names = sorted({f["contender"] for f in ours})
    keys = {
        name: {(f["case"], f["dtype"], f["batch"], f["vocab"]): f for f in ours
               if f["contender"] == name} for name in names
    }  # fmt: skip
    if not keys:
        return ""
    shared = set.intersection(*(set(of) for of in keys.values()))
    return min(names, key=lambda n: sum(median(keys[n][k]) for k in shared))


def over_batch(figures: Iterable[Figure]) -> tuple[list[int], list[float]]:
    points = sorted((f["batch"], median(f)) for f in figures)
    return [b for b, _ in points], [t for _, t in points]


def file_name(*parts: object) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(str(p) for p in parts)).strip("-") + ".png"


class Plots:
    def __init__(self, pyplot: Any, folder: Path, backend: str) -> None:
        self.pyplot, self.folder, self.backend = pyplot, folder, backend
        self.written: list[Path] = []

    def _save(self, figure: Any, *name: object) -> None:
        path = self.folder / file_name(*name)
        figure.savefig(path, dpi=150, bbox_inches="tight")
        self.pyplot.close(figure)
        self.written.append(path)

    def _axes_over_batch(self, title: str, batches: Iterable[int], label: str) -> tuple[Any, Any]:
        figure, axes = self.pyplot.subplots(figsize=(7, 4.5))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted(set(batches))
        axes.set_xticks(ticks, [str(b) for b in ticks])
        axes.set(title=title, xlabel="rows", ylabel=label)
        axes.grid(alpha=0.3)
        return figure, axes

    def times(self, figures: Sequence[Figure], shape: Shape) -> None:
        """Classes of our backend over the batch, and the floor."""
        dtype, vocab = shape
        # Batches whose read was timed: of the classes, not the odd ones of single comparisons.
        here = [f for f in figures if (f["dtype"], f["vocab"]) == shape]
        batches = {f["batch"] for f in here if f["group"] == "read"}
        here = [f for f in here if f["batch"] in batches]
        ours = [f for f in here if f["contender"] == self.backend and f["group"] == "backend"]
        cases = [c for c in dict.fromkeys(f["case"] for f in ours)
                 if len({f["batch"] for f in ours if f["case"] == c}) > 1]  # fmt: skip
        if not cases:
            return
        figure, axes = self._axes_over_batch(
            f"{self.backend}: a step of {dtype} logits, V = {vocab}, cold",
            (f["batch"] for f in here),
            "microseconds",
        )
        for i, case in enumerate(cases):
            # Ten colours come again with another marker.
            points = over_batch(f for f in ours if f["case"] == case)
            axes.plot(*points, color=f"C{i % 10}", marker=MARKERS[i // 10], label=case)
        floor = over_batch(f for f in here if f["group"] == "read")
        axes.plot(*floor, color="black", linestyle="--", label="one read of the logits")
        _legend_beside(axes)
        self._save(figure, "time", dtype, vocab)

    def rivals(self, figures: Sequence[Figure], shape: Shape, case: str) -> None:
        """How many times longer rivals take than our backend, over the batch."""
        dtype, vocab = shape
        here = [f for f in figures if (f["dtype"], f["vocab"], f["case"]) == (dtype, vocab, case)]
        ours = {f["batch"]: median(f) for f in here
                if f["contender"] == self.backend and f["group"] == "backend"}  # fmt: skip
        theirs = [f for f in here if f["group"] == "rival" and f["batch"] in ours]
        ours = {b: us for b, us in ours.items() if b in {f["batch"] for f in theirs}}
        if not theirs:
            return
        figure, axes = self._axes_over_batch(
            f"{case}, {dtype}, V = {vocab}: time over that of {self.backend}", ours, "times longer"
        )
        for name in dict.fromkeys(f["contender"] for f in theirs):
            batches, took = over_batch(f for f in theirs if f["contender"] == name)
            ratios = [t / ours[b] for b, t in zip(batches, took, strict=True)]
            axes.plot(batches, ratios, marker="o", label=name)
        axes.axhline(1, color="black", linewidth=1)
        _legend_beside(axes)
        self._save(figure, "rivals", case, dtype, vocab)

    def features(self, comparisons: Sequence[Figure]) -> None:
        """What features, mixing and padding cost, as ratios, with their bars' limits."""
        ours = [c for c in comparisons if c["backend"] == self.backend]
        names = list(dict.fromkeys(c["what"] for c in ours))
        columns = sorted({(c["dtype"], c["vocab"], c["batch"]) for c in ours})
        if not names:
            return
        figure, axes = self.pyplot.subplots(figsize=(8, 0.5 * len(names) + 2))
        height = 0.8 / len(columns)
        for i, column in enumerate(columns):
            chosen = [c for c in ours if (c["dtype"], c["vocab"], c["batch"]) == column]
            places = [names.index(c["what"]) + i * height for c in chosen]
            label = f"{column[0]}, V = {column[1]}, {column[2]} rows"
            axes.barh(places, [c["ratio"] for c in chosen], height, label=label)
        for i, name in enumerate(names):
            limit = next((c["limit"] for c in ours if c["what"] == name and c["limit"]), None)
            if limit:
                axes.plot([limit] * 2, [i - 0.2, i + 0.8], color="black", linewidth=1.5)
        axes.axvline(1, color="grey", linewidth=1)
        axes.set_yticks([i + 0.3 for i in range(len(names))], names)
        axes.invert_yaxis()
        axes.set(title=f"{self.backend}: cost, as a ratio (black: the bar)", xlabel="ratio")
        _legend_beside(axes)
        self._save(figure, "features")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("plots"))
    parser.add_argument("--backend", help="of ours; default: the fastest")
    arguments = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        print("plot_step.py needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures, comparisons = load(arguments.files)
    backend = arguments.backend or best_backend(figures)
    if not any(f["contender"] == backend for f in figures):
        print(f"no figures of a backend {backend!r} in these files", file=sys.stderr)
        return 1
    arguments.folder.mkdir(parents=True, exist_ok=True)
    plots = Plots(pyplot, arguments.folder, backend)
    for shape in shapes_of(figures):
        plots.times(figures, shape)
        for case in dict.fromkeys(f["case"] for f in figures if f["group"] == "rival"):
            plots.rivals(figures, shape, case)
    plots.features(comparisons)
    print("\n".join(str(path) for path in plots.written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
