"""Help on the magics, their verbs, options and strategy fields, all from the tables that parsing reads."""
from __future__ import annotations

from difflib import get_close_matches

from colossal_nb.notebook.options import CELL, CELL_LATER, VERBS, VERBS_LATER, Option
from colossal_nb.plan.legal import BUILT
from colossal_nb.plan.strategy import FIELDS


def cell() -> str:
    """The docstring of `%%colossal`."""
    return f"""Run a cell on the engines, under a parallel strategy.

%%colossal [strategy] [options]        # a comment

Every rank runs the cell. What it prints is shown once where it is equal. The first cell starts the engines.

Examples
    %%colossal tp=2 pp=2 microbatches=4     the whole cell under a strategy: parallelize() uses it
    %%colossal                              on every rank, no strategy: look at variables, use a parallel model
    %%colossal --ranks 0,2                  on two ranks only
    %%colossal dp=4 --out run               keep the Run: run.outputs, run.record, run.memory(), run.slices()
    %%colossal --compare "dp=4 ; tp=4"      one cell under several strategies, one table

Strategy
{_fields()}

Options
{_options(tuple(CELL.values()))}

%colossal (one percent sign) has verbs: {', '.join(VERBS)}. See %colossal?
"""


def line() -> str:
    """The docstring of `%colossal`."""
    return f"""Look after the engines.

%colossal VERB [options]               alone it shows the status

Verbs
{_verbs()}

Help on one of them: %colossal help push, or %colossal push?
A strategy is written after two percent signs, as the first line of a cell: %%colossal tp=2. See %%colossal?
"""


def verb(name: str) -> str:
    """Help on one verb."""
    found = VERBS[name]
    parts = [f"%colossal {found.usage}", "", found.doc]
    if found.options:
        parts += ["", "Options", _options(found.options)]
    return "\n".join([*parts, "", f"Example\n    {found.example}"])


def word(name: str) -> str:
    """Help on a verb, a strategy field or an option. ValueError with the nearest for anything else."""
    name = name.lstrip("%").rstrip("=")
    if name in VERBS:
        return verb(name)
    if name in FIELDS:
        field = FIELDS[name]
        return f"{name}: {field.doc}\nvalues: {_values(name)}\n\nExample\n    %%colossal {_example(name)}"
    if f"--{name.lstrip('-')}" in CELL:
        option = CELL[f"--{name.lstrip('-')}"]
        return f"{option.name} {option.value}\n{option.doc}\n\nExample\n    %%colossal {option.name} {option.value}"
    if name == "colossal":
        return line()
    later = {**VERBS_LATER, **CELL_LATER}
    if name in later or f"--{name}" in later:
        return f"{name} ({later.get(name) or later[f'--{name}']}) is not built yet"
    near = get_close_matches(name, [*VERBS, *FIELDS, *CELL], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; there is help on {', '.join([*VERBS, *FIELDS, *CELL])}"
    raise ValueError(f"there is no help on {name!r}{hint}")


def values(name: str) -> tuple[str, ...]:
    """What may be written behind a field's `=`: the values that are built, or the first numbers."""
    field = FIELDS[name]
    built = BUILT.get(name, field.choices or (1, 2, 4, 8))
    return tuple(str(value) for value in built)


def _values(name: str) -> str:
    field = FIELDS[name]
    if name not in BUILT:
        return field.values
    later = [str(choice) for choice in field.choices if choice not in BUILT[name]] or ["more"]
    return f"{', '.join(values(name))} (not built yet: {', '.join(later)})"


def _example(name: str) -> str:
    found = values(name)
    return f"{name}={found[min(1, len(found) - 1)]}"


def _fields() -> str:
    return "\n".join(f"    {name:<13} {field.doc}: {_values(name)}" for name, field in FIELDS.items())


def _options(options: tuple[Option, ...]) -> str:
    return "\n".join(f"    {f'{option.name} {option.value}':<25} {option.doc}" for option in options)


def _verbs() -> str:
    return "\n".join(f"    {found.usage:<31} {found.doc.partition('.')[0]}" for found in VERBS.values())
