"""The strategy of a cell: one line of text, one frozen value, one table of what each field means."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from dataclasses import dataclass
from typing import Any, Self

from colossal_nb.plan import legal
from colossal_nb.plan.hints import field_hint, value_hint
from colossal_nb.plan.mesh import AXES, Mesh

MOST_ENGINES = 64


@dataclass(frozen=True)
class Field:
    """What one strategy field means and takes; feeds parsing, help and completion."""

    name: str
    doc: str
    default: int | str | None
    choices: tuple[int | str, ...] = ()  # empty: any whole number from 1

    @property
    def values(self) -> str:
        """The values as text, the default first where they are named."""
        return " ".join(map(str, self.choices)) if self.choices else "1, 2, 3, ..."


def _field(default: int | str | None, doc: str, choices: tuple[int | str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True)
class Strategy:
    """How a cell is spread over the engines. A new field is one line here; everything else follows from it.

    `None` stands for what depends on the rest: `filled(engines)` puts the numbers in. Strategies are printed in the
    order of the fields, which is the one in which people write them; the order of the mesh is `AXES`.
    """

    dp: int | None = _field(None, "data-parallel replicas (left out: fills the engines, engines / (pp*sp*tp))")
    tp: int = _field(1, "tensor parallel ranks")
    pp: int = _field(1, "pipeline stages")
    sp: int = _field(1, "sequence (context) parallel ranks")
    microbatches: int | None = _field(
        None, "microbatches per step (left out: pp); with pp=1 gradient accumulation inside a step"
    )
    schedule: str = _field("1f1b", "order of the pipeline's work", ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv"))
    chunks: int | None = _field(None, "virtual stages per rank (left out: 1; 2 for interleaved and zbv)")
    tp_mode: str = _field("1d", "tensor parallel algorithm", ("1d", "1d-sp", "2d", "2.5d", "3d"))
    depth: int = _field(1, "layers of the 2.5d grid: tp = depth*q*q")
    sp_mode: str = _field("ring", "ring attention or all-to-all", ("ring", "ulysses"))
    zero: int = _field(0, "sharded over dp: 1 optimizer, 2 + gradients, 3 + parameters", (0, 1, 2, 3))
    offload: str = _field("none", "where what is idle lives", ("none", "cpu", "nvme", "auto"))
    precision: str = _field(
        "fp32", "working weights (masters, reductions and loss stay fp32)", ("fp32", "bf16", "fp16")
    )
    recompute: str = _field("none", "activation checkpointing", ("none", "selective", "full"))

    def __new__(cls, *values: Any, **fields: Any) -> Self:
        if values and isinstance(values[0], str):
            raise ValueError(f"a strategy that is a text is read by Strategy.parse({values[0]!r}); fields are numbers")
        unknown = [field_hint(name, str(fields[name]), list(FIELDS)) for name in fields if name not in FIELDS]
        if len(values) > len(FIELDS):
            unknown.append(f"{len(values)} values for {len(FIELDS)} fields: name them, Strategy(tp=2, pp=2)")
        if unknown:
            raise ValueError(legal.message(unknown))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        given = ((field, getattr(self, field.name)) for field in FIELDS.values())
        wrong = [reason for field, value in given for reason in _wrong(field, value, repr(value))]
        if wrong:
            raise ValueError(legal.message(wrong))

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read `"tp=2 pp=4"`. Forgives odd spaces, commas, capitals and a trailing `# comment`.

        Raises one ValueError that names everything that could not be read.
        """
        if not isinstance(text, str):
            raise ValueError(f'a strategy is a text such as "tp=2 pp=2", not {type(text).__name__}')
        values: dict[str, int | str] = {}
        wrong: list[str] = []
        for word in _words(text):
            name, equals, value = word.partition("=")
            field = FIELDS.get(name)
            if field is None:
                wrong.append(field_hint(name, value, list(FIELDS)))
            elif not equals or not value:
                wrong.append(f"{name} needs a value: {name}=... ({field.values})")
            elif name in values:
                wrong.append(f"{name} is given twice: {name}={values[name]} and {name}={value}")
            else:
                values[name] = int(value) if re.fullmatch(r"-?[0-9]{1,18}", value) else value
                wrong += _wrong(field, values[name], value)
        if wrong:
            raise ValueError(legal.message(wrong))
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The fields that differ from their defaults: `Strategy.parse(str(s)) == s`."""
        changed = (field for field in FIELDS.values() if getattr(self, field.name) != field.default)
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in changed)

    @property
    def needs(self) -> int:
        """The least number of engines."""
        return (self.dp or 1) * self.pp * self.sp * self.tp

    def uses(self, engines: int) -> int:
        """How many of the engines work; the rest wait. 0 if there are too few."""
        each = self.pp * self.sp * self.tp
        return (self.dp or engines // each) * each if self.needs <= engines else 0

    def check(self, engines: int | None = None, *, most: int = MOST_ENGINES) -> None:
        """Raise one ValueError with every reason why this cannot run on `engines` engines.

        `engines=None`: as many as it needs. `most` bounds what it may need at all.
        """
        reasons = legal.reasons(self, engines, most)
        if reasons:
            raise ValueError(legal.message(reasons))

    def filled(self, engines: int | None = None) -> Strategy:
        """The same with dp, microbatches and chunks as numbers; `engines=None`: as many as it needs."""
        engines = self.needs if engines is None else engines
        if self.needs > engines:
            raise ValueError(legal.message([legal.too_few(self, engines)]))
        return dataclasses.replace(
            self,
            dp=self.uses(engines) // (self.pp * self.sp * self.tp),
            microbatches=self.microbatches or self.pp,
            chunks=self.chunks or (2 if self.schedule in ("interleaved", "zbv") else 1),
        )

    def mesh(self, engines: int | None = None) -> Mesh:
        """The mesh of the engines that work."""
        full = self.filled(engines)
        return Mesh({axis: getattr(full, axis) for axis in AXES})

    def describe(self, engines: int) -> str:
        """For people: the strategy with a filled dp marked, `dp=2 (filled) tp=2`."""
        dp = self.filled(engines).dp
        if self.dp is not None or dp == 1:
            return str(self) or "one engine"
        return f"dp={dp} (filled) {self}".strip()


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default


FIELDS: dict[str, Field] = {
    field.name: Field(field.name, field.metadata["doc"], _default(field), field.metadata["choices"])
    for field in dataclasses.fields(Strategy)
}


def _wrong(field: Field, value: object, shown: str) -> list[str]:
    """What is wrong with one value by itself; `shown`: as it was given."""
    if value is None and field.default is None:
        return []
    if field.choices:
        known = value in field.choices and not isinstance(value, bool)
        return [] if known else [
            value_hint(field.name, value, field.choices, legal.BUILT.get(field.name, field.choices))
        ]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return []
    return [f"{field.name}={shown}: {field.name} is a whole number from 1 ({field.doc})"]


def _words(text: str) -> list[str]:
    """Fields as lower-case `name=value` words, whatever a web page or an editor put between them."""
    plain = unicodedata.normalize("NFKC", text).partition("#")[0]
    plain = "".join(" " if unicodedata.category(c) in ("Zs", "Cc", "Cf") or c in ",;" else c for c in plain)
    return re.sub(r"\s*=\s*", "=", plain).lower().split()
