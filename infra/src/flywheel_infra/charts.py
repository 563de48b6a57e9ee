"""Line charts as inline SVG: no script, colours from the page's own variables, so they follow dark mode."""

import math
from collections.abc import Sequence
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 30
POINTS_MAX = 400  # a phone has no more pixels across
SMOOTH_OVER = 0.04  # of the run: the width of the moving mean


def line_chart(curves: Sequence[tuple[str, Sequence[Point]]], label: str) -> str:
    """An SVG of curves over one pair of axes: raw values faint, their moving mean strong.

    Each curve comes with its class for the page's style. `label` is read out in the picture's place.
    Curves of fewer than two points are left out; the result is empty where none is left. The value axis is
    logarithmic where the values span more than one decade, else it starts at zero.
    """
    drawn = [(name, points) for name, points in curves if len(points) >= 2]
    if not drawn:
        return ""
    steps = [x for _, points in drawn for x, _ in points]
    first, last = min(steps), max(steps)
    least = min(y for _, points in drawn for _, y in points)
    most = max(_high([y for _, y in points]) for _, points in drawn)
    log = least > 0 and most / least > 10
    ticks = _log_ticks(least, most) if log else _linear_ticks(most)
    low, high = (ticks[0], ticks[-1])

    def place(point: Point) -> str:
        x = LEFT + (point[0] - first) / ((last - first) or 1) * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f},{row(point[1]):.1f}"

    def row(value: float) -> float:
        clipped = min(max(value, low), high)
        share = math.log(clipped / low) / math.log(high / low) if log else (clipped - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
    for tick in ticks:
        y = row(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{tick:g}</text>')
    for step, anchor in ((first, "start"), ((first + last) / 2, "middle"), (last, "end")):
        along = place((step, low)).partition(",")[0]
        parts.append(
            f'<text class="tick" x="{along}" y="{HEIGHT - 10}" text-anchor="{anchor}">{step:,.0f}</text>'
        )
    for name, points in drawn:
        raw, mean = thin(points, POINTS_MAX), thin(smooth(points), POINTS_MAX)
        parts.append(
            f'<g class="{escape(name)}"><polyline class="raw" points="{" ".join(map(place, raw))}"/>'
        )
        parts.append(f'<polyline class="mean" points="{" ".join(map(place, mean))}"/>')
        across, down = place(mean[-1]).split(",")
        parts.append(f'<circle class="dot" cx="{across}" cy="{down}" r="3.5"/></g>')
    return "".join([*parts, "</svg>"])


def smooth(points: Sequence[Point]) -> list[Point]:
    """Centred moving mean, narrower towards both ends so that it neither lags nor invents values."""
    reach = max(1, round(len(points) * SMOOTH_OVER / 2))
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    smoothed = []
    for index, (step, _) in enumerate(points):
        near = min(reach, index, len(points) - 1 - index)
        total = sums[index + near + 1] - sums[index - near]
        smoothed.append((step, total / (2 * near + 1)))
    return smoothed


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _high(values: Sequence[float]) -> float:
    """Top of the axis: the largest value after the first few, which alone would flatten the rest."""
    settled = values[min(3, len(values) // 2) :]
    return max(max(settled), 1e-12)


def _linear_ticks(high: float) -> list[float]:
    rough = high / 4
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    return [round(step * index, 12) for index in range(math.ceil(high / step - 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of each decade, thinned to whole decades where they are many; low and high lie within."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [round(m * 10.0**d, 12) for d in decades for m in (1, 2, 5)]
    begin = max(index for index, tick in enumerate(fine) if tick <= low * 1.0001)
    end = min(index for index, tick in enumerate(fine) if tick >= high * 0.9999)
    inside = fine[begin : end + 1]
    return inside if len(inside) <= 7 else [round(10.0**d, 12) for d in decades]
