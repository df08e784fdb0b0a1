"""Which linears become column/row pairs and which weights are cut by vocabulary: from the dataflow, by no name.

A linear b is row-parallel, and the set A that feeds it column-parallel, when b's sources are A and the only reader of
each a in A is b. A residual stream never qualifies: it has many readers. {q, k, v} -> out, {qkv} -> out, {gate, up}
-> down and Linear - ReLU - Linear all come out alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from colossal_nb.parallel.tensor.dataflow import INPUT, Flow, dataflow
from colossal_nb.parallel.tensor.deal import Deal, Dealer, DoesNotDivideError, NotDealtError
from colossal_nb.parallel.tensor.probe import Region, reach, region_of
from colossal_nb.parallel.tensor.search import draws, draws_alike, find_changes
from colossal_nb.parallel.tensor.values import Change, Pair, Parts, VocabularyShard, even_parts
from colossal_nb.parallel.trace import Trace

LEAST_ROWS = 16
"""Rows per rank below which a vocabulary stays whole: its collectives would cost more than they save."""


@dataclass(frozen=True)
class Undivided:
    """Groups (heads) that cannot be dealt to these ranks; other numbers of ranks, in `works`, can have them."""

    groups: int
    works: tuple[int, ...]


class Rules:
    """The decisions for one recorded forward on `ranks` ranks: `pairs`, `vocabulary`, and `whole` with the reasons.

    Raises one ValueError when groups (heads) cannot be dealt to the ranks.
    """

    def __init__(self, model: nn.Module, record: Trace, ranks: int) -> None:
        self.record, self.ranks = record, ranks
        self.flow: Flow = dataflow(model, record)
        self.modules = dict(model.named_modules())
        self.users = _users(model)
        self.whole: dict[str, str] = {}
        self.pairs: list[Pair] = []
        self._kinds: dict[Hashable, tuple[Pair, str] | str | Undivided] = {}
        self._undivided: dict[str, tuple[str, Undivided]] = {}
        for columns, row in self._candidates():
            self._pair(columns, row)
        if self._undivided:
            raise ValueError(_undivided_text(self._undivided, ranks))
        self.vocabulary = list(self._vocabularies())
        self._rest()

    def _candidates(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """(A, b) in call order; no linear is in two pairs."""
        flow, taken = self.flow, set[str]()
        for row in flow.order:
            columns = flow.sources[row] - {INPUT}
            if not columns or not all(self._own_linear(name) for name in (row, *columns)):
                continue
            only_here = all(flow.readers[name] == {row} and name not in flow.to_output for name in columns)
            if only_here and not taken & {row, *columns}:
                taken |= {row, *columns}
                yield tuple(name for name in flow.order if name in columns), row

    def _own_linear(self, name: str) -> bool:
        """A linear whose weight nobody else reads."""
        return isinstance(self.modules[name], nn.Linear) and not self._shared(name) and not self._borrowed(name)

    def _shared(self, name: str) -> bool:
        return len(self.users[self._key(name)]) > 1

    def _borrowed(self, name: str) -> bool:
        owned = {f"{user}.weight".lstrip(".") for user in self.users[self._key(name)]}
        owned |= {f"{name}.bias".lstrip(".")}
        return bool(owned & self.flow.borrowed)

    def _pair(self, columns: tuple[str, ...], row: str) -> None:
        region = region_of(self.record, columns, row)
        kind = _kind(region)
        if kind not in self._kinds:
            self._kinds[kind] = self._decide(region)
        decided = self._kinds[kind]
        if isinstance(decided, Undivided):
            self._undivided[region.call.name] = type(region.call.module).__name__, decided
        elif isinstance(decided, str):
            self.whole.update(dict.fromkeys((*columns, row), decided))
        else:
            self.pairs.append(_moved_to(decided[0], decided[1], region, self.flow))

    def _decide(self, region: Region) -> tuple[Pair, str] | str | Undivided:
        """The pair, with the name of its region; else why it stays whole, or what is refused."""
        columns = ", ".join(_below(name, region.call.name) for name in region.columns)
        between = f"between {columns} and {_below(region.row, region.call.name)}"
        dealer = Dealer(reach(region), region.owners)
        try:
            dealt = dealer.deal(self.ranks)
        except DoesNotDivideError:
            return self._other_numbers(region, dealer) or Undivided(dealer.groups, ())
        except NotDealtError as problem:
            shared = self._other_numbers(region, dealer) if dealer.groups == 1 else None
            return shared or f"{between} {problem}"
        found = find_changes(region, dealt, self.ranks)
        if found is None:
            more_than_heads = self._other_numbers(region, dealer) if dealt.copied else None
            return more_than_heads or f"no change of integer attributes makes one rank's part run right {between}"
        if len({len(part) for part in dealt.row_parts}) > 1 and not draws_alike(region, dealt, self.ranks):
            return f"{dealt.groups} features make unequal parts, and dropout {between} needs equal ones"
        if dealt.kinds > 1 and draws(region):
            # Which part of a mask is a rank's is told by its part of the row's features, all of one kind.
            return f"{dealt.groups} groups are of {dealt.kinds} kinds, and dropout {between} needs one kind"
        changes, narrow = found
        parts = tuple(zip(region.columns, _column_parts(region, dealt), strict=True))
        pair = Pair(region.call.name, parts, region.row, dealt.row_parts, dealt.groups, changes, narrow)
        return pair, region.call.name

    def _other_numbers(self, region: Region, dealer: Dealer) -> Undivided | None:
        """Numbers of ranks, up to twice these, that the region runs right on; None if there are none."""
        works: dict[int, int] = {}
        for ranks in range(2, 2 * self.ranks + 1):
            try:
                dealt = dealer.deal(ranks)
            except (DoesNotDivideError, NotDealtError):
                continue
            if ranks != self.ranks and find_changes(region, dealt, ranks) is not None:
                works[ranks] = dealt.groups
        return Undivided(max(works.values()), tuple(works)) if works else None

    def _vocabularies(self) -> Iterator[VocabularyShard]:
        """Embeddings of the model's inputs and linears that end in its output, cut by rows; tied ones together."""
        paired = {name for pair in self.pairs for name in (pair.row, *(column for column, _ in pair.columns))}
        weights = dict.fromkeys(self._key(name) for name in self.flow.order)
        for users in (self.users[key] for key in weights):
            called = [name for name in users if name in self.flow.sources]
            size = self.modules[called[0]].weight.shape[0]
            if paired & set(called) or not all(self._by_rows(name) for name in called):
                continue
            if size < LEAST_ROWS * self.ranks:
                reason = f"{size} rows on {self.ranks} ranks are fewer than {LEAST_ROWS} each"
                self.whole.update(dict.fromkeys(called, reason))
            elif len(called) == len(users) and not self._borrowed(called[0]):
                embeddings = tuple(name for name in called if isinstance(self.modules[name], nn.Embedding))
                heads = tuple(name for name in called if name not in embeddings)
                yield VocabularyShard(embeddings, heads, even_parts(size, self.ranks))

    def _by_rows(self, name: str) -> bool:
        module, flow = self.modules[name], self.flow
        if isinstance(module, nn.Embedding):
            plain = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
            return plain and INPUT in flow.sources[name]
        return not flow.readers[name] and name in flow.to_output

    def _rest(self) -> None:
        """A reason for each linear and embedding that no rule took, and for other parameters of more than one dim."""
        taken = {name for pair in self.pairs for name in (pair.row, *(column for column, _ in pair.columns))}
        taken |= {name for shard in self.vocabulary for name in (*shard.embeddings, *shard.heads)}
        for name in self.flow.order:
            if name not in taken and name not in self.whole:
                self.whole[name] = self._reason(name)
        for name, module in self.modules.items():
            if isinstance(module, nn.Linear) and name not in self.flow.sources:
                self.whole[name] = "its weight is used without calling it"
            elif not isinstance(module, nn.Linear | nn.Embedding):
                wide = [
                    f"{name}.{kind}".lstrip(".")
                    for kind, p in module._parameters.items()
                    if p is not None and p.ndim > 1
                ]
                self.whole.update(dict.fromkeys(wide, f"no rule cuts a parameter of {type(module).__name__}"))

    def _reason(self, name: str) -> str:
        if isinstance(self.modules[name], nn.Embedding) and INPUT not in self.flow.sources[name]:
            return "its indices (positions) do not come from the model's input"
        if self._borrowed(name):
            return "its weight is read outside of its own call"
        if self._shared(name):
            return "its weight is shared with " + ", ".join(u for u in self.users[self._key(name)] if u != name)
        readers = sorted(self.flow.readers[name])
        return f"its output is read by {', '.join(readers[:3])}{' ...' if len(readers) > 3 else ''}: no column/row pair"

    def _key(self, name: str) -> int:
        return id(self.modules[name].weight)


def _users(model: nn.Module) -> dict[int, list[str]]:
    """The modules that own a parameter (more than one when tied), by its id."""
    users: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append(name)
    return dict(users)


def _below(name: str, region: str) -> str:
    """The path of a module from the region that holds it; "" for the region itself."""
    if name == region:
        return ""
    return name[len(region) + 1 :] if region and name.startswith(region + ".") else name


def _kind(region: Region) -> Hashable:
    """Regions of one kind are decided once: the blocks of a model differ in their weights alone."""
    name = region.call.name
    integers = [
        (_below(call.name, name), attribute, value)
        for call in (region.call, *region.call.descendants())
        for attribute, value in sorted(vars(call.module).items())
        if type(value) is int and attribute != "call_super_init"
    ]
    shapes = [(_below(column, name), tuple(value.shape)) for column, value in region.values.items()]
    inputs = [tuple(x.shape) for x in region.call.args if isinstance(x, Tensor)]
    return type(region.call.module), tuple(shapes), _below(region.row, name), tuple(inputs), tuple(integers)


def _column_parts(region: Region, dealt: Deal) -> list[Parts]:
    """The features of all columns, counted through, as each column counts its own."""
    parts: list[Parts] = []
    start = 0
    for value in region.values.values():
        stop = start + value.shape[-1]
        parts.append(tuple(tuple(i - start for i in held if start <= i < stop) for held in dealt.column_parts))
        start = stop
    return parts


def _moved_to(pair: Pair, origin: str, region: Region, flow: Flow) -> Pair:
    """The decision for one region, said of another region of its kind."""
    name = region.call.name

    def there(module: str) -> str:
        return ".".join(part for part in (name, _below(module, origin)) if part)

    columns = tuple((column, parts) for column, (_, parts) in zip(region.columns, pair.columns, strict=True))
    changes = tuple(Change(there(c.module), c.attribute, c.whole, c.local) for c in pair.changes)
    entrances: dict[int, list[str]] = defaultdict(list)
    for column in region.columns:
        entrances[flow.entrances[column]].append(column)
    groups = tuple(tuple(names) for names in entrances.values())
    return Pair(name, columns, region.row, pair.row_parts, pair.groups, changes, pair.narrow, groups)


def _undivided_text(undivided: dict[str, tuple[str, Undivided]], ranks: int) -> str:
    """One sentence per different number of groups, with the numbers of ranks that work."""
    said: list[str] = []
    alike: dict[Undivided, list[str]] = defaultdict(list)
    for region, (kind, problem) in undivided.items():
        word = "attention" if "att" in kind.lower() else kind
        alike[problem].append(f"{word} {region}".strip())
    for problem, regions in alike.items():
        near = [f"tp={n}" for n in problem.works] or ["tp=1"]
        more = f" (and {len(regions) - 1} more like it)" if len(regions) > 1 else ""
        choices = ", ".join(near[:-1]) + " or " + near[-1] if len(near) > 1 else near[0]
        said.append(
            f"{regions[0]}{more} has {problem.groups} independent groups (heads); tp={ranks} does not divide them: "
            f"take {choices}"
        )
    return "; ".join(said)
