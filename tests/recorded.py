"""What recorders wrote, read back; and rows as they write them."""

from typing import Any

from colossal_nb.record import Record, RecordBuilder
from colossal_nb.record.events import CATEGORIES


def record_of(*frames: bytes) -> Record:
    """One record of all frames."""
    builder = RecordBuilder()
    for frame in frames:
        builder.feed(frame)
    return builder.record()


def sample(rank: int, t: float, where: str = "device", basis: str = "hooks", **sizes: int) -> tuple[Any, ...]:
    """A row of memory; categories that are not named are empty."""
    return (rank, t, where, basis, *(sizes.get(category, 0) for category in CATEGORIES))
