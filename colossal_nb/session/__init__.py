"""Who asks: the session of this kernel takes cells and gives runs."""
from __future__ import annotations

from colossal_nb.session.session import Session, Status, current

__all__ = ["Session", "Status", "current"]
