"""The page and the picture of a comparison of precisions: loss curves, the gap over the steps, the table."""

from __future__ import annotations

import html
import math
import os
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepwell.errors import UnsupportedError

if TYPE_CHECKING:
    from deepwell.parity import ParityResult, Run

# Okabe and Ito's colours, which readers with colour blindness can tell apart. BF16 has the colour of the text.
_COLORS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#a0a000", "#8060c0"]
_POINTS = 400

Curve = list[tuple[float, float]]  # (step, value)


def _smoothed(run: Run) -> list[float]:
    """Returns the running mean of the losses over a fiftieth of the run, NaN where a loss was not finite."""
    window = max(1, len(run.losses) // 50)
    values = [math.nan if loss is None else loss for loss in run.losses]
    means, total = [], 0.0
    for at, value in enumerate(values):
        total += value
        if at >= window:
            total -= values[at - window]
        if math.isnan(total):  # begins anew behind it
            total = math.fsum(values[max(0, at - window + 1) : at + 1])
        means.append(total / min(at + 1, window))
    return means


def _thinned(values: Sequence[float]) -> Curve:
    stride = max(1, len(values) // _POINTS)
    kept = list(range(0, len(values), stride))
    if kept and kept[-1] != len(values) - 1:
        kept.append(len(values) - 1)
    return [(at + 1, values[at]) for at in kept if math.isfinite(values[at])]


def _curves(result: ParityResult) -> tuple[dict[str, list[Curve]], dict[str, Curve], float]:
    """Returns for each precision the loss curves of its runs, the gap of its first run to BF16 in percent, and the
    largest gap that is worth its place in the chart."""
    losses: dict[str, list[Curve]] = {}
    gaps: dict[str, Curve] = {}
    reference = {run.seed: _smoothed(run) for run in result.of("bf16")}
    for variant in result.variants:
        runs = result.of(variant.name)
        losses[variant.name] = [_thinned(_smoothed(run)) for run in runs]
        if variant.name == "bf16" or not runs or runs[0].seed not in reference:
            continue
        pairs = zip(_smoothed(runs[0]), reference[runs[0].seed])
        gaps[variant.name] = _thinned([100 * (mine / theirs - 1) for mine, theirs in pairs])
    later = [
        abs(gap) for curve in gaps.values() for step, gap in curve if step > 0.1 * curve[-1][0]
    ]
    bars = [100 * variant.bar for variant in result.variants]
    # Short peaks are cut off, so that the rest can be read.
    usual = statistics.quantiles(later, n=50)[-1] if len(later) > 1 else max(later, default=0.0)
    return losses, gaps, 1.2 * max([usual, *bars, 0.01])


def _ticks(low: float, high: float) -> list[float]:
    """Returns four to nine round numbers from low to high."""
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-9) / 4))
    for factor in (5, 2):
        if (high - low) / (step * factor) >= 4:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, int(math.floor(high / step + 1e-9)) + 1)]


class _Chart:
    """An SVG chart of curves over steps."""

    width, height, left, bottom, top, right = 720, 300, 62, 34, 12, 12

    def __init__(self, title: str, steps: int, low: float, high: float) -> None:
        self.steps, self.low, self.high = steps, low, max(high, low + 1e-9)
        self.parts = [
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{html.escape(title)}">'
        ]
        for tick in _ticks(self.low, self.high):
            y = self._y(tick)
            self.parts.append(
                f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
            )
        for tick in _ticks(0, steps):
            self.parts.append(
                f'<text x="{self._x(tick):.1f}" y="{self.height - self.bottom + 18}" text-anchor="middle">{tick:.0f}</text>'
            )
        self.parts.append(
            f'<text x="{self.width - self.right}" y="{self.height - 2}" text-anchor="end">step</text>'
        )

    def _x(self, step: float) -> float:
        return self.left + step / self.steps * (self.width - self.left - self.right)

    def _y(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.height - self.bottom - share * (self.height - self.bottom - self.top)

    def curve(self, points: Curve, color: str, faint: bool = False) -> None:
        if points:
            path = " ".join(f"{self._x(step):.1f},{self._y(value):.1f}" for step, value in points)
            more = ' stroke-opacity="0.45"' if faint else ""
            self.parts.append(
                f'<polyline fill="none" stroke="{color}" stroke-width="1.6"{more} points="{path}"/>'
            )

    def level(self, value: float, color: str) -> None:
        y = self._y(value)
        self.parts.append(
            f'<line x1="{self.left}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}" '
            'stroke-dasharray="5 4"/>'
        )

    def text(self) -> str:
        return "\n".join([*self.parts, "</svg>"])


def _colors(result: ParityResult, of_reference: str) -> dict[str, str]:
    others = [variant.name for variant in result.variants if variant.name != "bf16"]
    found = {name: _COLORS[at % len(_COLORS)] for at, name in enumerate(others)}
    return {"bf16": of_reference, **found}


def _loss_range(losses: dict[str, list[Curve]]) -> tuple[float, float]:
    values = [value for curves in losses.values() for curve in curves for _, value in curve]
    if not values:
        return 0.0, 1.0
    # A diverging run must not flatten the others: the top is that of the first run of BF16.
    first = next(curve for curves in losses.values() for curve in curves if curve)
    top = max(value for _, value in first)
    low = min(values)
    return low - 0.03 * (top - low), top + 0.03 * (top - low)


def page(result: ParityResult) -> str:
    """Returns the page. It loads nothing."""
    losses, gaps, most = _curves(result)
    colors = _colors(result, "var(--ink)")
    steps = result.setup["settings"]["steps"]
    low, high = _loss_range(losses)
    chart = _Chart("training loss over steps", steps, low, high)
    for name in reversed(losses):
        for at, curve in enumerate(losses[name]):
            chart.curve(curve, colors[name], faint=at > 0)
    gap_chart = _Chart("gap of the training loss to BF16 in percent", steps, -most, most)
    gap_chart.level(0.0, "var(--ink)")
    for bar in sorted({variant.bar for variant in result.variants if variant.bar}):
        for sign in (-100, 100):
            gap_chart.level(sign * bar, "var(--soft)")
    for name, curve in gaps.items():
        gap_chart.curve(curve, colors[name])
    legend = "".join(
        f'<li><i style="background:{color}"></i>{html.escape(name)}</li>'
        for name, color in colors.items()
    )
    rows = "".join(_table_row(row, result) for row in result.rows)
    notes = "".join(
        f"<p><b>{html.escape(row.precision)}</b>: {html.escape(row.why)}</p>"
        for row in result.rows
        if row.why
    )
    setup = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in {
            **result.setup["settings"],
            **{key: result.setup[key] for key in ("device", "deepwell", "pytorch")},
        }.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Precisions compared with BF16</title>
<style>
:root {{ --ink: #1a1a1a; --soft: #8a8a8a; --line: #dddddd; --card: #ffffff; color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e8e8e8; --soft: #8f8f8f; --line: #3a3a3a; --card: #161616; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--card); max-width: 760px; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
td, th {{ text-align: right; padding: 3px 8px; border-bottom: 1px solid var(--line); }}
td:first-child, th:first-child, td:last-child, th:last-child {{ text-align: left; }}
.scroll {{ overflow-x: auto; }}
svg {{ width: 100%; height: auto; font-size: 12px; }}
svg text {{ fill: var(--ink); }}
.grid {{ stroke: var(--line); }}
ul {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 18px; }}
li i {{ display: inline-block; width: 14px; height: 3px; margin-right: 6px; vertical-align: middle; }}
</style>
</head>
<body>
<h1>Precisions compared with BF16</h1>
<p>Verdict: <b>{result.verdict}</b>. {html.escape(result.noise_told())}</p>
<div class="scroll"><table>
<tr><th>precision</th><th>seeds</th><th>held-out loss</th><th>perplexity</th><th>gap</th><th>training gap</th><th>bar</th><th>verdict</th></tr>
{rows}
</table></div>
{notes}
<h2>Training loss</h2>
<ul>{legend}</ul>
{chart.text()}
<p>Running means over a fiftieth of the steps. Other seeds of BF16 are faint.</p>
<h2>Gap of the training loss to BF16, percent</h2>
{gap_chart.text()}
<p>Of the same seed. Dashed: the bars.</p>
<h2>Setup</h2>
<div class="scroll"><table>{setup}</table></div>
</body>
</html>
"""


def _table_row(row: Any, result: ParityResult) -> str:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = [
        html.escape(row.precision),
        str(len(row.seeds)) if row.seeds else "-",
        shown(row.loss, ".4f"),
        shown(row.perplexity, ".2f"),
        shown(row.gap, "+.2%"),
        shown(row.training_gap, "+.2%"),
        f"{row.bar:.2%}" if row.bar else "-",
        html.escape(result.told(row)),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"


def picture(result: ParityResult, path: str | os.PathLike) -> None:
    """Draws both charts to a PNG file. Raises UnsupportedError if the package matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(
            "a picture in PNG needs the package matplotlib: pip install matplotlib"
        ) from None
    losses, gaps, most = _curves(result)
    colors = _colors(result, "#1a1a1a")
    figure = Figure(figsize=(8, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for name in reversed(losses):
        for at, curve in enumerate(losses[name]):
            label = name if at == 0 else None
            alpha = 0.45 if at else 1.0
            upper.plot(*zip(*curve), color=colors[name], label=label, alpha=alpha, linewidth=1.2)
    upper.set_ylim(*_loss_range(losses))
    upper.set_ylabel("training loss")
    upper.legend(reverse=True)
    for name, curve in gaps.items():
        lower.plot(*zip(*curve), color=colors[name], linewidth=1.2)
    lower.axhline(0.0, color="#1a1a1a", linewidth=0.8)
    for bar in sorted({variant.bar for variant in result.variants if variant.bar}):
        for sign in (-100, 100):
            lower.axhline(sign * bar, color="#8a8a8a", linestyle="--", linewidth=0.8)
    lower.set_ylim(-most, most)
    lower.set_ylabel("gap to BF16, percent")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(True, color="#dddddd")
    figure.savefig(path, format="png")
