"""Numbers for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes for people: `412 MiB`, `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """`3.2 s`, `2 min 5 s`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def step_time(seconds: float) -> str:
    """Of one training step: `34 ms`, `1.2 s`."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else duration(seconds)


def percent(share: float) -> str:
    """`20%`."""
    return f"{share * 100:.0f}%"
