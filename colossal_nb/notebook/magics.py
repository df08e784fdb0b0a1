"""`%%colossal` and `%colossal`: what the user types becomes calls of the session, and what comes back is shown."""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import colossal_nb
from colossal_nb.cluster.client import ClusterLost, RankFailed
from colossal_nb.notebook import names, summary
from colossal_nb.notebook.arguments import CellArguments, read_cell, read_verb
from colossal_nb.notebook.comparing import compare
from colossal_nb.notebook.errors import fail, fail_for
from colossal_nb.notebook.files import written_together
from colossal_nb.notebook.fold import named, rank_list
from colossal_nb.notebook.output import CellOutput
from colossal_nb.notebook.page import KernelPage, Page, say
from colossal_nb.notebook.running import follow
from colossal_nb.plan.strategy import Strategy
from colossal_nb.run import Run
from colossal_nb.session.session import Session


@dataclass(frozen=True)
class PastCell:
    """A `%%colossal` cell that ran: `number` as in `In [number]`, `source` without its first line."""

    number: int
    source: str
    strategy: Strategy | None
    engines: int
    ok: bool


class Notebook:
    """The state of the magics in one kernel."""

    def __init__(self, shell: Any, session: Session, page: Page | None = None) -> None:
        self.shell = shell
        self.session = session
        self.page: Page = page or KernelPage(shell)
        self.cells: list[PastCell] = []
        self.numbers: dict[int, int] = {}
        """The ranks' numbers of cells -> the notebook's."""
        self.known: set[str] = set()
        """Names that all ranks are known to have."""

    # %%colossal
    def cell(self, line: str, source: str) -> None:
        """Run a cell on the ranks and show it; raises the cell's error."""
        if self._elsewhere("%%colossal"):
            return
        with plainly():
            arguments = read_cell(line)
            self._check_names(source, arguments.local)
            if arguments.compare:
                self.compare(source, line, arguments.compare, arguments.out)
                return
            run = self.run(source, line, arguments)
        if run.status == "ok":
            with plainly():
                for name in arguments.pull:
                    self.pull(name)
        if arguments.local:
            self.shell.run_cell(source, store_history=False)
        if run.status != "ok":
            fail_for(run, self.numbers)

    def run(self, source: str, line: str, arguments: CellArguments) -> Run:
        """One run, shown as it goes, with its summary line."""
        self._check_shown(arguments)
        with plainly("stopped before the cell ran on the ranks"):
            run = self.session.run(numbered(line, source), arguments.strategy, ranks=arguments.ranks,
                                   timeout_s=arguments.timeout_s, verify=arguments.verify)
        self._keep(run, arguments.out)
        output = CellOutput(run.ranks, self.page, bare=arguments.strategy is None, show_all=arguments.show_all,
                            only=arguments.only)
        follow(run, output, self.page)
        self._remember(run, source, arguments.strategy)
        for said in (written_together(run), summary.line(run)):
            if said:
                say(self.page, said)
        return run

    def compare(self, source: str, line: str, strategies: tuple[Strategy, ...], out: str = "") -> None:
        """The cell under each strategy, one table and one picture. What fails is a row of it: an error is raised where
        all failed (the first one's), or where the user stopped."""
        done = compare(self.session, self.page, source, numbered(line, source), strategies, self._keep)
        runs = [each.run for each in done if each.run is not None]
        if runs:
            self._remember(runs[-1], source, runs[-1].strategy)
        self._bind(out, runs)
        for run in runs:
            if run.status == "interrupted":
                fail_for(run, self.numbers)
        if not any(run.status == "ok" for run in runs):
            if done[0].run is None:
                raise ValueError(f"{done[0].strategy}: {done[0].refusal.partition(': ')[2]}")
            fail_for(done[0].run, self.numbers)

    # %colossal
    def line(self, line: str) -> None:
        """Carry out a verb."""
        if self._elsewhere("%colossal"):
            return
        with plainly():
            from colossal_nb.notebook.verbs import VERB_FUNCTIONS
            arguments = read_verb(line)
            VERB_FUNCTIONS[arguments.verb](self, arguments)

    def _elsewhere(self, what: str) -> bool:
        """Whether this is a thread while a cell runs on the ranks; says so (an error of a thread would be long)."""
        refused = self.session.busy and threading.current_thread() is not threading.main_thread()
        if refused:
            print(f"{what} came from a thread while a cell runs on the ranks, and did nothing: stop the cell, or wait "
                  f"for its end", file=sys.stderr)
        return refused

    def pull(self, name: str, rank: int = 0) -> None:
        """Bind a rank's variable here."""
        value = self.session.pull(name, rank)
        self.shell.user_ns[name] = value
        say(self.page, f"{name}: {type(value).__name__} from rank {rank}")

    def ranks_names(self, limit_s: float = 60.0) -> dict[int, dict[str, str]]:
        """rank -> name -> what it is; {} without engines. TimeoutError if a rank does not answer in time."""
        return self.session.names(limit_s)

    def last(self) -> PastCell:
        """The last `%%colossal` cell. ValueError if there was none."""
        if not self.cells:
            raise ValueError("no %%colossal cell has run yet")
        return self.cells[-1]

    def forget(self) -> None:
        """The ranks are new: nothing is known of their names."""
        self.known.clear()

    def _keep(self, run: Run, out: str = "") -> None:
        self.numbers[run.cell] = self.number
        setattr(colossal_nb, "last_run", run)  # noqa: B010  (a public name that has no value at import)
        self._bind(out, run)

    def _bind(self, out: str, value: object) -> None:
        if out:
            self.shell.user_ns[out] = value

    def _remember(self, run: Run, source: str, strategy: Strategy | None) -> None:
        self.cells.append(PastCell(self.number, source, strategy, len(run.ranks), run.status == "ok"))
        if any(error.ename in ("RankDied", "ClusterLost") for error in run.errors.values()):
            self.forget()
        elif run.status == "ok" and len(run.ranks) == run.world_size:
            self.known.update(names.binds(self.shell.transform_cell(source)))

    def _check_shown(self, arguments: CellArguments) -> None:
        """Refuse to show only ranks that will not run the cell: nothing would be seen of it."""
        strategy, engines = arguments.strategy, self.session.usual_engines
        if strategy is not None:
            engines = strategy.uses(max(self.session.engines, strategy.needs))
        ranks = arguments.ranks or range(engines)
        unknown = [rank for rank in arguments.only or () if rank not in ranks]
        if unknown:
            raise ValueError(f"--show {rank_list(unknown)}: this cell runs on {named(ranks)}")

    def _check_names(self, source: str, local: bool) -> None:
        """Stop before the ranks do: names that only the kernel has, all at once."""
        wanted = names.candidates(self.shell.transform_cell(source), self.here())
        if set(wanted) <= self.known:
            return
        having = [set(found) for found in self.ranks_names().values()]
        if self.session.engines and not having:  # no rank is free to say what it has
            return
        self.known = set.intersection(*having) if having else set()
        lacking = [name for name in wanted if name not in self.known]
        if lacking:
            some = {name for found in having for name in found}
            partly = [name for name in lacking if name in some]
            if partly:  # some ranks have it: what they do with it is the cell's business
                lacking = [name for name in lacking if name not in partly]
        if lacking:
            it = "it" if len(lacking) == 1 else "them"
            fail("NameError", f"the ranks do not have {', '.join(lacking)}, which this cell reads; the kernel does. "
                              f"Copy {it} with: %colossal push {' '.join(lacking)}")

    @property
    def number(self) -> int:
        """The number of the cell that runs now, as in `In [number]`."""
        return len(self.shell.history_manager.input_hist_parsed) - 1

    def here(self) -> dict[str, object]:
        """The kernel's own variables."""
        hidden = self.shell.user_ns_hidden
        return {name: value for name, value in self.shell.user_ns.items()
                if name not in hidden or hidden[name] is not value}


def numbered(line: str, source: str) -> str:
    """The cell as the ranks get it: its first line stays as a comment, so that line numbers are those of the page."""
    if source.lstrip().startswith("%%"):
        return source
    return f"# %%colossal {line.strip()}".rstrip() + "\n" + source


@contextmanager
def plainly(stopped: str = "stopped") -> Iterator[None]:
    """Errors meant for the user are shown as one sentence, without a traceback through this package.

    `stopped`: the sentence of an interrupt.
    """
    try:
        yield
    except (ValueError, NameError, RankFailed, ClusterLost, TimeoutError, OSError) as error:
        fail(type(error).__name__, str(error))
    except KeyboardInterrupt:
        fail("KeyboardInterrupt", stopped)


def describe_ranks(ranks: list[int], world_size: int) -> str:
    return "all ranks" if len(ranks) == world_size else named(ranks)


Verb = Callable[[Notebook, Any], None]
