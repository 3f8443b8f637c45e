"""Line and bar charts as inline SVG, so that a report is one file that needs no network."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 42
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#64748b", "#db2777")


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels. A logarithmic axis needs positive limits."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False

    def px(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, low))
        share = (at - low) / ((high - low) or 1.0)
        return self.start_px + share * (self.end_px - self.start_px)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            return [10.0**n for n in range(first, last + 1) if self.low <= 10.0**n <= self.high]
        step = nice_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def nice_step(rough: float) -> float:
    """The next of 1, 2, 5 x 10^n at or above `rough`."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))


def short(value: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:.3g}"


def lines(
    title: str, series: Mapping[str, Points], x_label: str, y_label: str, *, log_x: bool = False
) -> str:
    """One polyline per named series; the y axis starts at 0."""
    shown = {name: [p for p in points if p[0] > 0 or not log_x] for name, points in series.items()}
    xs = [x for points in shown.values() for x, _ in points] or [1.0]
    ys = [y for points in shown.values() for _, y in points] or [1.0]
    x_axis = Axis(min(xs), max(max(xs), min(xs) + 1e-9), LEFT, WIDTH - RIGHT, log_x)
    y_axis = Axis(0.0, max(ys) * 1.05 or 1.0, HEIGHT - BOTTOM, TOP)
    parts = [_frame(title, x_label, y_label), _grid(x_axis, y_axis)]
    for number, (name, points) in enumerate(shown.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_axis.px(x):.1f},{y_axis.px(y):.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        parts.append(_legend(number, name, colour))
    return _svg(parts)


def bars(title: str, values: Mapping[str, float], y_label: str) -> str:
    """One bar per name."""
    y_axis = Axis(0.0, max([*values.values(), 1e-9]) * 1.1, HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    parts = [_frame(title, "", y_label), _grid(None, y_axis)]
    for number, (name, value) in enumerate(values.items()):
        x, top = LEFT + number * room + room * 0.15, y_axis.px(value)
        centre = x + room * 0.35
        parts.append(
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{room * 0.7:.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}" fill="{COLOURS[0]}"/>'
            f'<text x="{centre:.1f}" y="{top - 4:.1f}" text-anchor="middle">{short(value)}</text>'
            f'<text x="{centre:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
            f"{html.escape(name)}</text>"
        )
    return _svg(parts)


def distribution(values: Sequence[float], points: int = 200) -> Points:
    """The share of values at or below each of up to `points` of them: a curve for `lines`."""
    ordered = sorted(values)
    count = len(ordered)
    picks = sorted({round(i * (count - 1) / max(1, points - 1)) for i in range(points)})
    return [(ordered[i], (i + 1) / count) for i in picks if 0 <= i < count]


def _svg(parts: Sequence[str]) -> str:
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="11" fill="#334155">{body}</svg>'
    )


def _frame(title: str, x_label: str, y_label: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text x="{LEFT}" y="16" font-size="13" font-weight="600">{html.escape(title)}</text>'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{html.escape(x_label)}</text>"
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        f"{html.escape(y_label)}</text>"
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#94a3b8"/>'
    )


def _grid(x_axis: Axis | None, y_axis: Axis) -> str:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.px(tick)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e2e8f0"/>'
            f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        )
    for tick in x_axis.ticks() if x_axis else ():
        assert x_axis is not None
        x = x_axis.px(tick)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
            f"{short(tick)}</text>"
        )
    return "".join(parts)


def _legend(number: int, name: str, colour: str) -> str:
    x, y = WIDTH - RIGHT - 150, TOP + 8 + number * 14
    return (
        f'<rect x="{x}" y="{y - 6}" width="12" height="3" fill="{colour}"/>'
        f'<text x="{x + 17}" y="{y}">{html.escape(name)}</text>'
    )
