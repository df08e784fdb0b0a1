"""What did happen: events, the recorder that writes them, the record that keeps them, and what follows from it."""

from colossal_nb.record.events import Mark, Slice, group_axis, group_name, group_ranks, link_name
from colossal_nb.record.recorder import Recorder, Token
from colossal_nb.record.store import Record, RecordBuilder

__all__ = [
    "Mark", "Record", "RecordBuilder", "Recorder", "Slice", "Token", "group_axis", "group_name", "group_ranks",
    "link_name",
]  # fmt: skip
