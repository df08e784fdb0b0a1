"""`--compare`, `%colossal compare`: one cell under several strategies, one table, one picture."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from colossal_nb.cluster.client import ClusterLost, RankFailed
from colossal_nb.notebook import names, summary
from colossal_nb.notebook.page import Page, say
from colossal_nb.plan.strategy import Strategy
from colossal_nb.run import Run
from colossal_nb.session import Session
from colossal_nb.views import comparison, comparison_svg


@dataclass(frozen=True)
class Compared:
    """What came of one strategy: its run, or why there was none."""

    strategy: Strategy
    run: Run | None = None
    refusal: str = ""

    @property
    def entry(self) -> comparison.Entry:
        if self.run is None:
            return comparison.Entry(str(self.strategy), reason=self.refusal)
        run = self.run
        title = run.title or str(run.strategy)
        return comparison.Entry(title, run.record, run.seconds, len(run.ranks), _reason(run), summary.limited_by(run))


def _reason(run: Run) -> str:
    """Why a run did not end well, in one line."""
    if run.status == "ok":
        return ""
    if run.status == "interrupted" or run.error is None:
        return "stopped"
    first, _, more = run.error.evalue.strip().partition("\n")
    said = f"{first} {more.strip().partition(chr(10))[0].lstrip('- ')}" if first.endswith(":") else first
    return f"{run.error.ename}: {said}" if said else run.error.ename


def compare(session: Session, page: Page, source: str, code: str, strategies: Sequence[Strategy],
            keep: Callable[[Run], None]) -> list[Compared]:
    """Run `code` under each strategy, freeing what it bound (`source`) before the next; a strategy that fails is a
    row, and the others run. Raises KeyboardInterrupt after the table of what was finished."""
    done: list[Compared] = []
    stopped, before = False, session.engines
    for number, strategy in enumerate(strategies):
        say(page, f"{number + 1} of {len(strategies)}: {strategy}")
        try:
            if any(each.run is not None for each in done):
                session.run(_forget(source)).wait()
            _one(session, code, strategy, keep, done)
        except KeyboardInterrupt:
            stopped = True
        before = before or session.engines             # the first row's start is no growth
        run = done[-1].run if done else None
        if stopped or (run is not None and run.status == "interrupted"):
            break
    if done:
        show(page, done, len(strategies))
        largest = next((each.strategy for each in done if each.strategy.needs == session.engines), None)
        for said in session.growth(before, largest) if largest is not None else []:
            say(page, said)
    if stopped:
        raise KeyboardInterrupt
    return done


def _one(session: Session, code: str, strategy: Strategy, keep: Callable[[Run], None], done: list[Compared]) -> None:
    """Adds to `done` before it waits, so that Stop loses nothing."""
    try:
        strategy.check()
        run = session.run(code, strategy)
    except (ValueError, RankFailed, ClusterLost, TimeoutError, OSError) as error:
        done.append(Compared(strategy, refusal=f"{type(error).__name__}: {' '.join(str(error).split())}"))
        return
    done.append(Compared(strategy, run))
    keep(run)
    run.wait()


def show(page: Page, done: Sequence[Compared], wanted: int) -> None:
    """The table, the picture, and whose variables remain."""
    found = comparison.tables([each.entry for each in done])
    said = comparison.sentence(found)
    whole, (head, lines) = summary.table(comparison.COLUMNS, comparison.rows(found)), comparison.memory(found)
    made_of = summary.table(head, lines) if lines else {}
    page.display({kind: "\n\n".join(filter(None, (text, made_of.get(kind)))) for kind, text in whole.items()})
    picture = comparison_svg.svg(found)
    figure = f'<figure style="margin:0.5em 0">{picture}<figcaption>{escape(said)}</figcaption></figure>'
    page.display({"text/plain": comparison.described(found), "text/html": figure,
                  "image/svg+xml": comparison_svg.alone(picture)})
    left = wanted - len(done)
    if left:
        say(page, f"stopped: {left} strateg{'y was' if left == 1 else 'ies were'} not run")
    ran = [each.run for each in done if each.run is not None]
    if ran:
        say(page, f"the ranks keep the variables of the last run, {ran[-1].title or ran[-1].strategy}")


def _forget(source: str) -> str:
    """Code that frees what the cell bound."""
    return (f"for _name in {names.binds(source)!r}:\n    globals().pop(_name, None)\n"
            "import gc as _gc; _gc.collect(); del _gc, _name")
