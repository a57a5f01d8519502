"""Which ranks hold copies of the same bits, and which of them differ. Pure: digests in, names out.

    weights          every dp replica; a tensor that is not cut also every tp rank; a tied one every rank of its stages
    optimizer state  the same where each rank holds it whole (ZeRO-0); under ZeRO-1 tp ranks hold the same shard, and
                     the dp shards of one stage's tied tensor add up to those of the other stage's

A *copy* is what one rank holds, or what the dp shards of a state hold together; a *family* is all copies of one thing.
Digests add up: the digest of a tensor is the sum of those of its parts, and a rank's digests of many tensors can be
compared in one number. Of a family in which more than half agree, the others are wrong; else nobody can tell who is.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from trainer.mesh.topology import Topology
from trainer.spec import ParamSpec, specs_on_rank

WEIGHT = "weight"
WORD = 1 << 64
NAMES_SHOWN = 3

Copy = tuple[int, ...]
Family = tuple[Copy, ...]


class Scope(StrEnum):
    """What is compared: all that has copies, or copies of tied tensors alone."""

    ALL = "all"
    TIED = "tied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something a rank holds of a parameter: its live weight, or the held part of an optimizer state."""

    state: str
    name: str

    @property
    def factor(self) -> int:
        """What its digest counts in a sum over parts: odd, so that no bit is lost, and another one for each part."""
        return 2 * zlib.crc32(f"{self.state}/{self.name}".encode()) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Parts whose digests are compared in one number by the same families."""

    parts: frozenset[Part]
    families: tuple[Family, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A family of `part` that is not equal. `wrong`: copies that most others contradict; () where no majority is."""

    part: Part
    copies: Family
    wrong: Family

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks that are known to be wrong; of shards that only add up to something wrong none is known."""
        return tuple(copy[0] for copy in self.wrong if len(copy) == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the ranks of a mesh hold: parameters, and the optimizer states beside live weights."""

    specs: tuple[ParamSpec, ...]
    topology: Topology
    states: tuple[str, ...]
    zero_stage: int
    scope: Scope = Scope.ALL

    def is_sharded(self, part: Part) -> bool:
        """Whether each dp rank holds another piece of it."""
        return self.zero_stage == 1 and part.state != WEIGHT and self.topology.dp > 1

    def parts_on(self, rank: int) -> tuple[Part, ...]:
        """What a rank holds that has another copy somewhere, in the order of the parameter table."""
        found = []
        for spec in specs_on_rank(self.specs, self.topology.coord(rank).pp):
            parts = (Part(state=state, name=spec.name) for state in (WEIGHT, *self.states))
            found += [part for part in parts if self.has_copies(part, spec)]
        return tuple(found)

    def has_copies(self, part: Part, spec: ParamSpec) -> bool:
        """Whether a part is compared with anything."""
        mesh, stages = self.topology, len(spec.pp_ranks)
        if self.scope is Scope.TIED and stages == 1:
            return False
        replicas = 1 if self.is_sharded(part) else mesh.dp * mesh.cp
        return stages * replicas * (mesh.tp if spec.shard_dim is None else 1) > 1

    def families(self, part: Part, spec: ParamSpec) -> tuple[Family, ...]:
        """Who has copies of a part; () where it is compared with nothing."""
        if not self.has_copies(part, spec):
            return ()
        found = self._shard_families(spec) if self.is_sharded(part) else self._whole_families(spec)
        return tuple(family for family in found if len(family) > 1)

    def bundles(self) -> tuple[Bundle, ...]:
        """The fewest numbers a rank must tell: one over dp, one over tp, two for each set of tied stages."""
        names = {spec.name: spec for spec in self.specs}
        parts = [Part(state=state, name=name) for name in names for state in (WEIGHT, *self.states)]
        if self.scope is Scope.TIED:
            parts = [part for part in parts if len(names[part.name].pp_ranks) > 1]
        whole = [part for part in parts if not self.is_sharded(part)]
        uncut = [part for part in parts if names[part.name].shard_dim is None]
        bundles = [
            Bundle(parts=frozenset(whole), families=_rows(self.topology.ranks.transpose(1, 3, 0, 2), keep=2)),
            Bundle(parts=frozenset(uncut), families=_rows(self.topology.ranks, keep=3)),
        ]
        for stages in sorted({spec.pp_ranks for spec in self.specs if len(spec.pp_ranks) > 1}):
            tied = [part for part in parts if names[part.name].pp_ranks == stages]
            for is_sharded in (False, True):
                of_kind = frozenset(part for part in tied if self.is_sharded(part) == is_sharded)
                bundles.append(Bundle(parts=of_kind, families=tuple(self._over_stages(stages, is_sharded))))
        return tuple(b for b in bundles if b.parts and any(len(family) > 1 for family in b.families))

    def _whole_families(self, spec: ParamSpec) -> Iterator[Family]:
        ranks = self.topology.ranks[:, list(spec.pp_ranks)]
        if spec.shard_dim is None:
            yield _each_alone(ranks)
        else:
            yield from (_each_alone(ranks[..., tp]) for tp in range(self.topology.tp))

    def _shard_families(self, spec: ParamSpec) -> Iterator[Family]:
        if spec.shard_dim is None:
            yield from _rows(self.topology.ranks[:, list(spec.pp_ranks)], keep=3)
        if len(spec.pp_ranks) > 1:
            yield from self._over_stages(spec.pp_ranks, True)

    def _over_stages(self, stages: tuple[int, ...], is_sharded: bool) -> Iterator[Family]:
        """Copies of tied tensors, by stage; the copy of a sharded state is all its dp shards."""
        ranks = self.topology.ranks[:, list(stages)]
        for cp in range(self.topology.cp):
            for tp in range(self.topology.tp):
                columns = ranks[:, :, cp, tp]
                if is_sharded:
                    yield tuple(tuple(map(int, columns[:, at])) for at in range(len(stages)))
                else:
                    yield from (_each_alone(row) for row in columns)


def _each_alone(ranks: npt.NDArray[np.int64]) -> Family:
    return tuple((int(rank),) for rank in ranks.ravel())


def _rows(ranks: npt.NDArray[np.int64], *, keep: int) -> tuple[Family, ...]:
    """Families along all axes after the first `keep`."""
    return tuple(_each_alone(row) for row in ranks.reshape(int(np.prod(ranks.shape[:keep])), -1))


def summary(bundle: Bundle, digests: Mapping[Part, int]) -> int:
    """One rank's number for a bundle."""
    return sum(part.factor * digest for part, digest in digests.items() if part in bundle.parts) % WORD


def wrong_copies(values: Mapping[int, int], family: Family) -> Family | None:
    """Copies that most of the family contradict; () where there is no majority, None where all are equal.

    values: rank → its number for this family.
    """
    sums = [sum(values[rank] for rank in copy) % WORD for copy in family]
    ((common, count), *others) = Counter(sums).most_common()
    if not others:
        return None
    if 2 * count <= len(sums):
        return ()
    return tuple(copy for copy, value in zip(family, sums, strict=True) if value != common)


def is_equal(bundles: Sequence[Bundle], numbers: Sequence[Sequence[int]]) -> bool:
    """Whether no family of any bundle differs. `numbers`: by rank, then by bundle."""
    return all(
        wrong_copies({rank: row[at] for rank, row in enumerate(numbers)}, family) is None
        for at, bundle in enumerate(bundles)
        for family in bundle.families
    )


def differences(held: Held, digests: Sequence[Mapping[Part, int]]) -> tuple[Difference, ...]:
    """Every part with copies that differ, in the order of the parameter table. `digests`: by rank, then by part."""
    found: list[Difference] = []
    for spec in held.specs:
        for state in (WEIGHT, *held.states):
            part = Part(state=state, name=spec.name)
            for family in held.families(part, spec):
                values = {rank: digests[rank][part] for copy in family for rank in copy}
                wrong = wrong_copies(values, family)
                if wrong is not None:
                    found.append(Difference(part=part, copies=family, wrong=wrong))
    return tuple(found)


def describe(found: Sequence[Difference]) -> str:
    """Who differs from whom, in what: a clause for each set of ranks."""
    by_ranks: dict[tuple[Family, Family], list[Part]] = {}
    for difference in found:
        by_ranks.setdefault((difference.wrong, difference.copies), []).append(difference.part)
    clauses = [f"{_who(wrong, copies)} {_what(parts)}" for (wrong, copies), parts in by_ranks.items()]
    return "; ".join(_first(clauses))


def _who(wrong: Family, copies: Family) -> str:
    if not wrong:
        return f"{_ranks(copies, ' and ')} hold different bits, and nothing tells which are right, of"
    right = tuple(copy for copy in copies if copy not in wrong)
    verb = "holds" if len(wrong) == 1 and len(wrong[0]) == 1 else "hold"
    return f"{_ranks(wrong, ', ')} {verb} other bits than {_ranks(right, ', ')} of"


def _ranks(copies: Family, between: str) -> str:
    """`rank 3`, `ranks 0, 1, 2`, `ranks 0+4 and 3+7` (shards that together make one copy)."""
    names = ["+".join(map(str, copy)) for copy in copies]
    if len(names) > 2 * NAMES_SHOWN:
        names = [*names[: 2 * NAMES_SHOWN], f"{len(copies) - 2 * NAMES_SHOWN} more"]
    is_one = len(copies) == 1 and len(copies[0]) == 1
    return f"{'rank' if is_one else 'ranks'} {between.join(names)}"


def _what(parts: Sequence[Part]) -> str:
    names = [part.name if part.state == WEIGHT else f"{part.name} ({part.state})" for part in parts]
    return ", ".join(_first(names))


def _first(texts: Sequence[str]) -> list[str]:
    more = len(texts) - NAMES_SHOWN
    return [*texts[:NAMES_SHOWN], f"and {more} more"] if more > 0 else list(texts)
