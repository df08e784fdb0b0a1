"""One fixed colour and one texture for each category of memory, everywhere; worst pair of the colours is told apart
with every kind of colour blindness (differences of at least 16), and the texture says the same without colour."""

from __future__ import annotations

COLOURS = {
    "parameter": "#0072B2", "gradient": "#E69F00", "optimizer": "#009E73", "activation": "#D55E00",
    "buffer": "#56B4E9", "communication": "#CC79A7", "temporary": "#F0E442", "unknown": "currentColor",
}  # fmt: skip
# Lines inside a tile of 6 x 6, over the colour.
TEXTURES = {
    "parameter": "", "gradient": "M0,6 L6,0", "optimizer": "M0,3 H6", "activation": "M3,0 V6",
    "buffer": "M0,0 L6,6", "communication": "M0,3 H6 M3,0 V6", "temporary": "M2.5,3 h1",
    "unknown": "M0,6 L6,0 M0,0 L6,6",
}  # fmt: skip
EDGE = "#1a1a1a"


def patterns(prefix: str, categories: list[str]) -> str:
    """Definitions of the fills of these categories, named by `fill`."""
    return "".join(
        f'<pattern id="{prefix}-{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{COLOURS[name]}"/>'
        + (f'<path d="{TEXTURES[name]}" stroke="{EDGE}" stroke-width="0.7" stroke-opacity="0.75" fill="none"/>'
           if TEXTURES[name] else "")
        + "</pattern>"
        for name in categories
    )  # fmt: skip


def idle(prefix: str) -> str:
    """The definition of the hatching that means: nothing is done here."""
    return (f'<pattern id="{prefix}-idle" width="6" height="6" patternUnits="userSpaceOnUse">'
            '<path d="M0,6 L6,0 M-1,1 L1,-1 M5,7 L7,5" stroke="currentColor" stroke-width="1.2"/>'
            "</pattern>")  # fmt: skip


def fill(prefix: str, name: str) -> str:
    """The fill of a category, or of `idle`."""
    return f"url(#{prefix}-{name})"
