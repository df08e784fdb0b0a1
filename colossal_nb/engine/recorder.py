"""The recorder of an engine: a `Recorder` that can say whether it has anything to send."""
from __future__ import annotations

from colossal_nb.record.recorder import Recorder


class RankRecorder(Recorder):
    """One per rank process, drained by the side thread and at the end of each cell."""

    @property
    def pending(self) -> bool:
        """Whether events wait to be sent."""
        return any(self._rows.values())
