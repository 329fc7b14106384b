"""Draws what length_study.py measured: speed over plain decoding against requests at once.

Usage: python benchmarks/length_plot.py RESULTS.json... --out FILE.svg

One panel a prompt set; of results with the same prompt set those of the first file count where two
have the same policy. Bars are from the least to the most of the rounds. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

# By what is verified: fixed widths in greys, our policies in colours, the bound dashed.
_STYLES: dict[str, dict[str, Any]] = {
    "survival": {"color": "#1f77b4", "linewidth": 2},
    "lookup": {"color": "#2ca02c", "linewidth": 2},
    "both": {"color": "#d62728", "linewidth": 2},
    "adaflash": {"color": "#9467bd", "linewidth": 2},
    "oracle": {"color": "black", "linestyle": "--"},
}
_GREYS = ("#bbbbbb", "#999999", "#777777", "#555555", "#333333")
_BAR = 0.97

Row = dict[str, Any]


def collect(files: list[list[Row]]) -> dict[str, dict[str, dict[int, Row]]]:
    """Rows by prompt set, policy and requests at once; plain decoding is the line at 1."""
    found: dict[str, dict[str, dict[int, Row]]] = {}
    for rows in files:
        for row in rows:
            if row["policy"] != "off":
                of_policy = found.setdefault(row["prompts"], {}).setdefault(row["policy"], {})
                of_policy.setdefault(row["concurrency"], row)
    return found


def draw(found: dict[str, dict[str, dict[int, Row]]], out: Path) -> None:
    """Write the picture; its form is that of the file's name."""
    mpl.rcParams["svg.hashsalt"] = "adaflash-batch"  # the same figures make the same file
    mpl.rcParams["svg.fonttype"] = "none"
    figure, panels = plt.subplots(
        1, len(found), figsize=(5.2 * len(found), 4.2), sharey=True, squeeze=False
    )
    for panel, (prompts, policies) in zip(panels[0], found.items(), strict=True):
        _draw_panel(panel, prompts, policies)
    panels[0][0].set_ylabel("speed over plain decoding")
    shown: dict[str, Any] = {}
    for panel in panels[0]:
        shown |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="center right", fontsize="small")
    figure.tight_layout(rect=(0.0, 0.0, 1.0 - 1.1 / figure.get_figwidth(), 1.0))
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def _draw_panel(panel: Any, prompts: str, policies: dict[str, dict[int, Row]]) -> None:
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.axhline(_BAR, color="black", linewidth=0.5, linestyle=":")
    greys = iter(_GREYS)
    for policy, rows in policies.items():
        style = dict(_STYLES.get(policy) or {"color": next(greys), "linewidth": 1})
        counts = sorted(rows)
        speeds = [rows[count]["speed"] for count in counts]
        below = [rows[count]["speed"] - rows[count]["low"] for count in counts]
        above = [rows[count]["high"] - rows[count]["speed"] for count in counts]
        panel.errorbar(
            counts,
            speeds,
            [below, above],
            label=policy,
            marker="o",
            markersize=3,
            capsize=2,
            **style,
        )
    every = sorted({count for rows in policies.values() for count in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(every, [str(count) for count in every])
    panel.set_xlabel("requests at once")
    panel.set_title(prompts)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    files = [json.loads(path.read_text(encoding="utf-8"))["results"] for path in options.results]
    draw(collect(files), options.out)


if __name__ == "__main__":
    main()
