"""Work that may fail on one rank alone (a disk, a file): its error is raised on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from colossal_nb.parallel import objects
from colossal_nb.parallel.batch import ranks_text
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.work import Released

Result = TypeVar("Result")
_KINDS = (FileNotFoundError, OSError, ValueError)


@dataclass(frozen=True)
class _Failure:
    """An error in a form that travels: the kind that the user may catch, `errno` of the system's, the text."""

    kind: str
    number: int | None
    text: str

    def error(self, where: str) -> Exception:
        kind = {each.__name__: each for each in _KINDS}.get(self.kind, RuntimeError)
        error = kind(f"{where}{self.text}")
        if isinstance(error, OSError):
            error.errno = self.number
        return error


@dataclass(frozen=True)
class _Outcome:
    result: Any = None
    failure: _Failure | None = None
    cause: Exception | None = None


def together(work: Callable[[], Result], group: Group, of: str) -> list[Result]:
    """Every rank's result, in the group's order. Raises the same error on all ranks where one fails. Collective.

    The work itself must not talk to other ranks.
    """
    outcome = _outcome(work)
    outcomes = [outcome]
    if group.size > 1:
        told = outcome.failure if outcome.failure is not None else outcome.result
        heard = objects.all_gather(told, group, of)
        outcomes = [_Outcome(failure=each) if isinstance(each, _Failure) else _Outcome(result=each) for each in heard]
    _raise([each.failure for each in outcomes], group, outcome.cause)
    return [cast("Result", each.result) for each in outcomes]


def alike(work: Callable[[], Result], group: Group, of: str) -> Result:
    """As `together`, of results that stay on their ranks: this rank's own."""
    outcome = _outcome(work)
    _raise(objects.all_gather(outcome.failure, group, of), group, outcome.cause)
    return cast("Result", outcome.result)


def _outcome(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(result=work())
    except Released:
        raise
    except Exception as error:
        return _Outcome(failure=_failure(root(error)), cause=error)


def root(error: Exception) -> Exception:
    """The system's error behind one: torch.save, cut short by a full disk, raises an error of its own on the way out.

    Raises the interrupt where that is what is behind it.
    """
    chain: list[BaseException] = [error]
    while (before := chain[-1].__context__) is not None:
        chain.append(before)
    interrupt = next((each for each in chain if isinstance(each, KeyboardInterrupt)), None)
    if interrupt is not None:
        raise interrupt from None
    if isinstance(error, _KINDS):
        return error
    return next((each for each in chain if isinstance(each, OSError)), error)


def _raise(failures: Sequence[_Failure | None], group: Group, cause: Exception | None) -> None:
    failed = [(rank, each) for rank, each in zip(group.ranks, failures, strict=True) if each is not None]
    if failed:
        first = failed[0][1]
        same = [rank for rank, each in failed if each == first]
        raise first.error("" if len(same) == group.size else f"on {ranks_text(same)}: ") from cause


def _failure(error: Exception) -> _Failure:
    kind = next((each.__name__ for each in _KINDS if isinstance(error, each)), "RuntimeError")
    if isinstance(error, OSError):
        return _Failure(kind, error.errno, system_text(error))
    text = str(error) if kind != "RuntimeError" or type(error) is RuntimeError else f"{type(error).__name__}: {error}"
    return _Failure(kind, None, text)


def system_text(error: OSError) -> str:
    """What the system says, without its number."""
    if not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
