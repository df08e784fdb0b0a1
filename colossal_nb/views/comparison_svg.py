"""The picture of a comparison: a row for each strategy; time, peak memory by category, bytes sent, bubble beside it."""

from __future__ import annotations

import math
import textwrap
import zlib
from collections.abc import Callable
from html import escape

import numpy as np

from colossal_nb.record.events import CATEGORIES
from colossal_nb.views import palette
from colossal_nb.views.comparison import PLURAL, Tables, described, present, rows, time_of
from colossal_nb.views.words import percent, size, step_time

NAMES, PANEL, GAP = 200, 180, 16
ROW, BAR, HEAD, FOOT = 38, 16, 34, 44
LETTERS, LINES = 25, 3  # of a name, in a line of its column, and how many lines
BARS_SHARE = 0.62  # of a panel's width: the rest is for the number behind the longest bar
LIGHT, DARK = "#1f1f1f", "#e8e8e8"
WIDTH = NAMES + 4 * (PANEL + GAP)


def svg(found: Tables) -> str:
    """Inline in a page it takes the page's colour of text; alone it follows the reader's light or dark scheme."""
    count = len(found["strategy"])
    said = described(found)
    prefix = f"cmp{zlib.crc32(repr(rows(found)).encode()):08x}"
    height = HEAD + count * ROW + FOOT
    held = present(found)
    what, times = time_of(found)
    panels = [
        _panel(found, 0, what, times, step_time, lambda at, x, y, w: _bar(x, y, w, "currentColor", 0.55)),
        _panel(found, 1, "peak memory of a rank", found["peak_bytes"], size, _stack(found, held, prefix)),
        _panel(found, 2, "bytes sent by all ranks", found["sent_bytes"], size,
               lambda at, x, y, w: _bar(x, y, w, palette.fill(prefix, "communication"))),
        _panel(found, 3, "bubble of the pipeline", found["bubble"], percent,
               lambda at, x, y, w: _bar(x, y, w, palette.fill(prefix, "idle")), most=1.0),
    ]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="{prefix}-t {prefix}-d" class="{prefix}" '
        f'style="width:100%;max-width:{WIDTH}px;height:auto" font-family="system-ui, sans-serif" font-size="12">'
        f'<title id="{prefix}-t">Comparison of strategies</title><desc id="{prefix}-d">{escape(said)}</desc>'
        f"<defs>{palette.patterns(prefix, sorted({*held, 'communication'}))}{palette.idle(prefix)}</defs>"
        f'<g fill="currentColor">{_names(found)}{"".join(panels)}{_failures(found)}'
        f"{_legend(held, prefix, height)}</g>"
        "</svg>"
    )


def alone(picture: str) -> str:
    """The same for a file or an image of its own, with its own colours of text."""
    rule = f"<style>svg{{color:{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{color:{DARK}}}}}</style>"
    return picture.replace("<defs>", f"{rule}<defs>", 1)


def _names(found: Tables) -> str:
    parts = []
    for at, name in enumerate(map(str, found["strategy"])):
        lines = textwrap.wrap(name, LETTERS) or [""]
        if len(lines) > LINES:
            rest = textwrap.shorten(" ".join(lines[LINES - 1 :]), LETTERS, placeholder=" ...")
            lines = [*lines[: LINES - 1], rest]
        letter = 12 if len(lines) == 1 else 10.5
        top = _y(at) + BAR / 2 + 4 - letter / 2 * (len(lines) - 1)
        spans = "".join(f'<tspan x="0" y="{top + letter * i:.1f}">{escape(line)}</tspan>'
                        for i, line in enumerate(lines))  # fmt: skip
        parts.append(f'<text font-weight="600" font-size="{letter}">{spans}<title>{escape(name)}</title></text>')
        parts.append(f'<path d="M0,{HEAD + at * ROW:.1f} H{WIDTH}" stroke="currentColor" stroke-opacity="0.18"/>')
    return "".join(parts)


def _y(at: int) -> float:
    return HEAD + at * ROW + (ROW - BAR) / 2


def _panel(
    found: Tables, number: int, title: str, values: np.ndarray, words: Callable[[float], str],
    draw: Callable[[int, float, float, float], str], most: float = 0.0,
) -> str:  # fmt: skip
    left = NAMES + number * (PANEL + GAP)
    parts = [f'<text x="{left}" y="20" fill-opacity="0.85">{escape(title)}</text>']
    ran = found["reason"] == ""
    known = [float(value) for value, ok in zip(values, ran, strict=True) if ok and not math.isnan(value)]
    longest = most or max(known, default=0.0) or 1.0
    for at, (value, ok) in enumerate(zip(values, ran, strict=True)):
        if not ok:
            continue
        middle = _y(at) + BAR / 2 + 4
        if math.isnan(value):
            parts.append(f'<text x="{left}" y="{middle:.1f}" fill-opacity="0.6">-</text>')
            continue
        width = BARS_SHARE * PANEL * float(value) / longest
        name = escape(f"{found['strategy'][at]}: {title} {words(float(value))}")
        parts.append(f"<g><title>{name}</title>{draw(at, left, _y(at), width)}</g>")
        parts.append(f'<text x="{left + width + 5:.1f}" y="{middle:.1f}">{escape(words(float(value)))}</text>')
    return "".join(parts)


def _bar(x: float, y: float, width: float, fill: str, opacity: float = 1.0, height: float = BAR) -> str:
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{fill}" '
            f'fill-opacity="{opacity}" stroke="currentColor" stroke-width="0.8"/>')  # fmt: skip


def _stack(found: Tables, held: list[str], prefix: str) -> Callable[[int, float, float, float], str]:
    def draw(at: int, x: float, y: float, width: float) -> str:
        parts, total = [], float(found["peak_bytes"][at]) or 1.0
        for name in held:
            count = float(found["categories"][at][CATEGORIES.index(name)])
            if count:
                own = width * count / total
                bar = _bar(x, y, own, palette.fill(prefix, name))
                said = f"{found['strategy'][at]}: {PLURAL[name]} {size(count)} of {size(total)}"
                parts.append(f"<g><title>{escape(said)}</title>{bar}</g>")
                x += own
        return "".join(parts)

    return draw


def _failures(found: Tables) -> str:
    parts = []
    for at, reason in enumerate(map(str, found["reason"])):
        if reason:
            short = textwrap.shorten(reason, 118, placeholder=" ...")
            parts.append(f'<text x="{NAMES}" y="{_y(at) + BAR / 2 + 4:.1f}" font-style="italic">no result: '
                         f"{escape(short)}<title>{escape(reason)}</title></text>")  # fmt: skip
    return "".join(parts)


def _legend(held: list[str], prefix: str, height: float) -> str:
    if not held:
        return ""
    x, y = float(NAMES), height - 22
    parts = [f'<text x="0" y="{y + 11:.1f}" fill-opacity="0.85">peak memory, by category:</text>']
    for name in held:
        parts.append(_bar(x, y, 16, palette.fill(prefix, name), height=14))
        parts.append(f'<text x="{x + 21:.1f}" y="{y + 11:.1f}">{PLURAL[name]}</text>')
        x += 21 + 7 * len(PLURAL[name]) + 10
    return "".join(parts)
