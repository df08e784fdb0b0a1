"""How the members of a group come together: each finds the others in a store, and either all are connected or none.

A member that fails half-way, or a message that is lost while the connections are made, would leave the others waiting
for good: no call has begun that could be aborted.
"""

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

from colossal_nb.parallel import compat

# How long the first attempt to connect may take once all members have come; each further one gets twice as long. All of
# them are over before a wait in which all ranks are is taken for lost (60 s), which says less.
LIMIT_S = 15.0
ATTEMPTS = 2
_GLANCE_S = 0.02
_VERDICT, _MADE, _AGAIN = "verdict", "made", "again"


class PatientStore(compat.Store):  # type: ignore[misc]
    """A store whose waits look at `check` while they wait, so that an abort reaches a rank that waits for others."""

    def __init__(self, store: Any, prefix: str, check: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._prefix, self.check_alive = store, prefix, check

    def within(self, prefix: str) -> "PatientStore":
        """The same store for keys under a further prefix."""
        return PatientStore(self._store, self._prefix + prefix, self.check_alive)

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(self._prefix + key))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Return when all keys are there; raises what `check` raises."""
        self.wait_until(lambda: self.check(keys))

    def wait_until(self, fact: Callable[[], bool]) -> None:
        """Return when something is true; raises what `check` raises."""
        pause_s = 0.0002
        while not fact():
            self.check_alive()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._prefix + key for key in keys]))

    def decide(self, key: str, value: str) -> str:
        """Whoever comes first decides; returns what it has decided."""
        return bytes(self._store.compare_set(self._prefix + key, "", value)).decode()


def together(connect: Callable[[PatientStore], Any], store: PatientStore, index: int, size: int) -> Any:
    """What `connect` returns, when it has succeeded on all members in one attempt.

    `connect` takes a store of its own for each attempt; one that takes too long on any member is given up on all, and
    left behind in its thread. Raises what `connect` or the store's `check` raises, TimeoutError after some attempts.
    """
    limits_s = [LIMIT_S * 2**attempt for attempt in range(ATTEMPTS)]
    for attempt, limit_s in enumerate(limits_s):
        place = store.within(f"attempt{attempt}/")
        made = _patiently(connect, place, limit_s)
        if made:
            place.set(f"{_MADE}{index}", "")
            _wait_for_all(place, size)
        if place.decide(_VERDICT, _MADE if made else _AGAIN) == _MADE:
            return made[0]
    tried = ", ".join(f"{limit_s:g} s" for limit_s in limits_s)
    raise TimeoutError(f"{size} ranks did not come to be connected with each other within {tried}")


def _wait_for_all(place: PatientStore, size: int) -> None:
    """Until all are connected, or one has given up."""
    everybody = [f"{_MADE}{index}" for index in range(size)]
    place.wait_until(lambda: place.check([_VERDICT]) or place.check(everybody))


def _patiently(connect: Callable[[PatientStore], Any], place: PatientStore, limit_s: float) -> list[Any]:
    """[what it returns], or [] when it takes too long."""
    made: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(connect(place))
        except BaseException as error:
            errors.append(error)

    helper = threading.Thread(target=run, daemon=True, name="connect")
    helper.start()
    end = time.monotonic() + limit_s
    while helper.is_alive() and time.monotonic() < end:
        helper.join(_GLANCE_S)
        place.check_alive()
    if errors:
        raise errors[0]
    return made
