"""The recorder of an engine: can say whether it has anything to send, and forget what an abort has cut off."""
from __future__ import annotations

from colossal_nb.record.recorder import Recorder, Token


class RankRecorder(Recorder):
    """One per rank process, drained by the side thread and at the end of each cell."""

    @property
    def pending(self) -> bool:
        """Whether events wait to be sent."""
        return any(self._rows.values())

    def end(self, token: Token) -> None:
        """As the base; nothing for a slice that was forgotten."""
        if token in self._open:
            super().end(token)

    def forget_open(self) -> None:
        """Drop the open slices: an interrupt may land between the opening and whoever would close it."""
        self._open.clear()
        self._background.clear()
