"""A page that remembers what was shown, for tests of what the notebook writes."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossal_nb.notebook.output import CellOutput
from colossal_nb.run import Output


class FakePage:
    def __init__(self) -> None:
        self.writes: list[tuple[str, str]] = []
        self.displays: dict[str, str] = {}
        self.updates: dict[str, int] = {}
        self.cleared: list[bool] = []
        self.order: list[str] = []
        """Lines of text, and the ids of displays, as they came onto the page."""

    def write(self, stream: str, text: str) -> None:
        self.order += text.splitlines()
        self.writes.append((stream, text))

    def display(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, display_id: str = "",
                update: bool = False) -> None:
        key = display_id or f"#{len(self.displays)}"
        assert update == (key in self.displays)
        if not update:
            self.order.append(key)
        self.displays[key] = str(data.get("text/plain", sorted(data)))
        self.updates[key] = self.updates.get(key, 0) + 1

    def clear(self, wait: bool) -> None:
        self.cleared.append(wait)

    def text(self, stream: str = "stdout") -> str:
        return "".join(text for name, text in self.writes if name == stream)

    @property
    def whole(self) -> list[str]:
        """The page from top to bottom, displays in their last state."""
        return [self.displays.get(each, each) for each in self.order]

    @property
    def pictures(self) -> list[str]:
        return list(self.displays.values())


class Cell:
    """A cell on four ranks whose clock the test moves."""

    def __init__(self, ranks: int = 4, bare: bool = False, **options: Any) -> None:
        self.page = FakePage()
        self.ranks = ranks
        self.output = CellOutput(range(ranks), self.page, bare=bare, **options)
        self.now = 0.0

    def prints(self, rank: int, text: str, name: str = "stdout") -> Cell:
        self.output.add(Output(rank, "stream", self.now, name=name, text=text), self.now)
        return self

    def all_print(self, text: str, name: str = "stdout") -> Cell:
        for rank in range(self.ranks):
            self.prints(rank, text.replace("{rank}", str(rank)), name)
        return self

    def shows(self, rank: int, kind: str = "display", display_id: str = "", name: str = "", **data: str) -> Cell:
        bundle = {key.replace("_", "/"): value for key, value in data.items()}
        self.output.add(Output(rank, kind, self.now, name=name, data=bundle, display_id=display_id), self.now)
        return self

    def wait(self, seconds: float) -> Cell:
        self.now += seconds
        self.output.turn(self.now)
        return self

    def end(self) -> FakePage:
        self.output.turn(self.now)
        self.output.finish()
        return self.page
