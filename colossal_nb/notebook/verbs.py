"""What each word after `%colossal` does."""
from __future__ import annotations

import pickle
from collections import defaultdict
from keyword import iskeyword
from pathlib import Path
from typing import Any

import colossal_nb
from colossal_nb.cluster import parcel
from colossal_nb.notebook import help as helps
from colossal_nb.notebook import summary
from colossal_nb.notebook.arguments import VerbArguments, plain
from colossal_nb.notebook.export import ExportCell, lacks, script
from colossal_nb.notebook.fold import named, rank_list
from colossal_nb.notebook.magics import Notebook, Verb, describe_ranks
from colossal_nb.notebook.options import VERBS
from colossal_nb.notebook.page import say
from colossal_nb.notebook.report import report_on
from colossal_nb.notebook.typed import forgive
from colossal_nb.plan.strategy import Strategy
from colossal_nb.run import Run
from colossal_nb.session import Status
from colossal_nb.session.pushing import pickler


def start(notebook: Notebook, arguments: VerbArguments) -> None:
    _no_words(arguments)
    before = notebook.session.engines
    wanted = arguments.options.get("-n")
    if wanted is not None and wanted < before:
        raise ValueError(f"{before} engines run already; fewer need %colossal stop first (their variables are lost)")
    say(notebook.page, _engines(notebook.session.start(wanted)))


def status(notebook: Notebook, arguments: VerbArguments) -> None:
    _no_words(arguments)
    state = notebook.session.status()
    say(notebook.page, _engines(state))
    if state.members:
        rows = [(str(rank), str(pid), _does(notebook, state, rank)) for rank, pid, _phase in state.members]
        notebook.page.display(summary.table(("rank", "process", "state"), rows))
    lost: dict[str, list[int]] = defaultdict(list)
    for death in state.deaths[state.told:]:
        lost[death.how].append(death.rank)
    for how, ranks in lost.items():
        say(notebook.page, f"{named(sorted(set(ranks)))} {'was' if len(set(ranks)) == 1 else 'were'} lost: {how}")
    if state.told:
        say(notebook.page, f"{state.told} process{'es' * (state.told > 1)} ended before the last cell or restart")


def _does(notebook: Notebook, state: Status, rank: int) -> str:
    """What a rank does, for people."""
    phase, doing = {each[0]: each[2] for each in state.members}[rank], state.doing.get(rank)
    if phase != "ready" or doing is None or doing.free:
        return phase
    if not doing.answers:
        return "does not answer"
    where = f", {doing.where}" if doing.where else ""
    return f"still in cell {notebook.numbers.get(doing.cell, doing.cell)}{where} (since {doing.since_s:.0f} s)"


def _engines(state: Status) -> str:
    if not state.engines:
        return "no engines run; the first %%colossal cell starts them" + (" (warmed up)" if state.warm else "")
    threads = f"{state.threads} thread{'s' * (state.threads != 1)} each"
    return f"{state.engines} engine{'s' * (state.engines != 1)}, {threads}"


def stop(notebook: Notebook, arguments: VerbArguments) -> None:
    _no_words(arguments)
    ran = notebook.session.engines
    notebook.session.stop()
    notebook.forget()
    say(notebook.page, f"stopped {ran} engine{'s' * (ran != 1)}" if ran else "no engines run")


def restart(notebook: Notebook, arguments: VerbArguments) -> None:
    _no_words(arguments)
    if not notebook.session.engines:
        raise ValueError("no engines run; %colossal start starts them")
    notes = notebook.session.restart(arguments.options.get("--rank"))
    notebook.forget()
    for note in notes or [f"{notebook.session.engines} new engines; the variables of the old ones are gone"]:
        say(notebook.page, note)


def push(notebook: Notebook, arguments: VerbArguments) -> None:
    wanted = _names(arguments, "push", "batch model_config")
    here = notebook.shell.user_ns
    lacking = [name for name in wanted if name not in here]
    if lacking:
        raise NameError(f"there is no {', '.join(lacking)} here to push")
    try:
        notes = notebook.session.push({name: here[name] for name in wanted})
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ValueError(_not_pushed({name: here[name] for name in wanted}, error)) from error
    notebook.known.update(wanted)
    say(notebook.page, f"pushed {', '.join(wanted)} to {notebook.session.engines} ranks")
    for note in notes:
        say(notebook.page, note)


def _not_pushed(values: dict[str, Any], error: Exception) -> str:
    """Which of the values cannot travel, and why."""
    for name, value in values.items():
        try:
            parcel.needs(value, pickler)
        except Exception as reason:
            return f"{name} cannot be copied to the ranks: {reason}; push what it is made from, or make it in a cell"
    return f"{', '.join(values)} could not be copied to the ranks: {error}"


def pull(notebook: Notebook, arguments: VerbArguments) -> None:
    for name in _names(arguments, "pull", "losses"):
        notebook.pull(name, arguments.options.get("--rank") or 0)


def report(notebook: Notebook, arguments: VerbArguments) -> None:
    _no_words(arguments)
    report_on(_last_run(), notebook.page)


def who(notebook: Notebook, arguments: VerbArguments) -> None:
    _no_words(arguments)
    state = notebook.session.status()
    if not state.engines:
        say(notebook.page, "no engines run, so there are no variables")
        return
    for rank, doing in state.doing.items():
        if not doing.free:
            say(notebook.page, f"rank {rank}: {_does(notebook, state, rank)}; its variables cannot be seen")
    found = notebook.ranks_names()
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, variables in sorted(found.items()):
        for name, what in variables.items():
            alike[name, what].append(rank)
    if not alike:
        say(notebook.page, "the ranks have no variables")
        return
    rows = [(name, what, describe_ranks(ranks, len(found))) for (name, what), ranks in sorted(alike.items())]
    notebook.page.display(summary.table(("name", "what", "where"), rows))


def compare(notebook: Notebook, arguments: VerbArguments) -> None:
    last = notebook.last()
    texts = [part.strip() for word in arguments.words for part in word.split(";") if part.strip()]
    if len(arguments.words) > 1 and not any(";" in word for word in arguments.words):
        texts = [" ".join(arguments.words)]  # one strategy without quotes
    if not texts:
        raise ValueError('compare needs strategies: %colossal compare "dp=4 ; tp=4"')
    strategies = tuple(Strategy.parse(text) for text in texts)
    notebook.compare(last.source, "", strategies)


def export(notebook: Notebook, arguments: VerbArguments) -> None:
    if len(arguments.words) != 1:
        raise ValueError("export needs one file: %colossal export train.py")
    path = Path(arguments.words[0]).expanduser()
    if path.suffix != ".py":
        raise ValueError(f"a script is a .py file: %colossal export {path.with_suffix('.py')}")
    if path.exists() and "written by %colossal export" not in path.read_text(errors="replace")[:400]:
        raise ValueError(f"{path} exists and was not written by %colossal export: name another file")
    numbers = arguments.options.get("--cells")
    chosen, strategy, engines = _last_cell(notebook, path) if numbers is None else _chosen(notebook, numbers)
    path.write_text(script(chosen, str(strategy), engines, path.name))
    said = rank_list(cell.number for cell in chosen)
    say(notebook.page, f"wrote {path} from cell{'s' * (len(chosen) > 1)} {said}; run it with: "
                       f"torchrun --nproc-per-node {engines} {path}")


def _chosen(notebook: Notebook, numbers: tuple[int, ...]) -> tuple[list[ExportCell], Strategy, int]:
    """The cells of these numbers, their one strategy, and its number of engines."""
    sources = [_from_history(notebook, number) for number in numbers]
    past = {cell.number: cell for cell in notebook.cells}
    named_cells = [past[number] for number in numbers if number in past]
    strategies = {cell.strategy for cell in named_cells if cell.strategy is not None}
    if len(strategies) > 1:
        said = ", ".join(f"cell {cell.number}: {cell.strategy}" for cell in named_cells if cell.strategy is not None)
        raise ValueError(f"a script has one strategy; these cells name several ({said})")
    if not strategies:
        raise ValueError("none of these cells names a strategy")
    engines = max(cell.engines for cell in named_cells)
    return sources, strategies.pop(), engines


def _last_cell(notebook: Notebook, path: Path) -> tuple[list[ExportCell], Strategy, int]:
    """The last cell with a strategy that ran well. ValueError, with the cells to name, if it needs other cells."""
    main = next((cell for cell in reversed(notebook.cells) if cell.ok and cell.strategy is not None), None)
    if main is None or main.strategy is None:
        raise ValueError("no %%colossal cell with a strategy has run without an error yet")
    unfit = {cell.number for cell in notebook.cells if not cell.ok or cell.strategy not in (None, main.strategy)}
    earlier = [_from_history(notebook, number) for number in range(1, main.number) if number not in unfit]
    chosen = ExportCell(main.number, main.source)
    lacking, givers = lacks(chosen, earlier)
    if lacking:
        cells = rank_list([*givers, main.number])
        them = "with the cells that do" if givers else "and no earlier cell does; to write it all the same"
        raise ValueError(f"cell {main.number} reads {', '.join(lacking)} and does not define {_them(lacking)}; {them}: "
                         f"%colossal export {path} --cells {cells}")
    return [chosen], main.strategy, main.engines


def _them(things: list[str]) -> str:
    return "it" if len(things) == 1 else "them"


def _from_history(notebook: Notebook, number: int) -> ExportCell:
    history = notebook.shell.history_manager.input_hist_raw
    if not 0 < number < len(history):
        raise ValueError(f"there is no cell {number}; the last one has the number {len(history) - 1}")
    source = "".join(forgive(str(history[number]).splitlines(keepends=True)))
    first, _, rest = source.lstrip().partition("\n")
    return ExportCell(number, rest if first.startswith("%%colossal") else source)


def help_on(notebook: Notebook, arguments: VerbArguments) -> None:
    if not arguments.words:
        say(notebook.page, helps.line())
    for word in arguments.words:
        say(notebook.page, helps.word(plain(word)))


def _last_run() -> Run:
    run = getattr(colossal_nb, "last_run", None)
    if run is None:
        raise ValueError("no %%colossal cell has run yet")
    assert isinstance(run, Run)
    return run


def _names(arguments: VerbArguments, verb: str, example: str) -> list[str]:
    found = [name for word in arguments.words for name in word.split(",") if name]
    wrong = [name for name in found if not name.isidentifier() or iskeyword(name)]
    if wrong or not found:
        said = f"{', '.join(wrong)}: no name of a variable" if wrong else f"{verb} what?"
        raise ValueError(f"{said}; for example: %colossal {verb} {example}")
    return list(dict.fromkeys(found))


def _no_words(arguments: VerbArguments) -> None:
    if arguments.words:
        example = VERBS[arguments.verb].example
        raise ValueError(f"%colossal {arguments.verb} takes no {arguments.words[0]!r}; for example: {example}")


VERB_FUNCTIONS: dict[str, Verb] = {
    "start": start, "status": status, "stop": stop, "restart": restart, "push": push, "pull": pull, "report": report,
    "who": who, "compare": compare, "export": export, "help": help_on,
}
