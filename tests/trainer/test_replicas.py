"""Which ranks hold the same bits, who is wrong where they do not, and digests that miss nothing."""

import random
import zlib

import numpy as np
import pytest
import torch
from checkpoint_world import make_specs
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.digests import _ROW, digest
from trainer.mesh.topology import Topology
from trainer.replicas import (
    WEIGHT,
    WORD,
    Bundle,
    Held,
    Part,
    Scope,
    describe,
    differences,
    is_equal,
    summary,
    wrong_copies,
)
from trainer.spec import specs_on_rank

MESHES = [
    *(Topology(dp=n) for n in (2, 3)), *(Topology(tp=n) for n in (2, 3)), *(Topology(pp=n) for n in (2, 3)),
    Topology(dp=2, tp=2), Topology(dp=2, pp=2), Topology(pp=2, tp=3), Topology(dp=3, pp=3), Topology(dp=2, pp=2, tp=2),
]  # fmt: skip
STATES = ("master", "exp_avg", "exp_avg_sq")


def held_by(topology: Topology, *, zero_stage: int, tied: bool = True, scope: Scope = Scope.ALL) -> Held:
    specs = make_specs(topology, tied=tied)
    return Held(specs=specs, topology=topology, states=STATES, zero_stage=zero_stage, scope=scope)


def content(held: Held, rank: int, part: Part) -> int:
    """The digest of a right copy: of the whole, or of a dp shard that each stage cuts elsewhere."""
    at = held.topology.coord(rank)
    spec = next(spec for spec in held.specs if spec.name == part.name)
    key = f"{part}/{None if spec.shard_dim is None else at.tp}"
    whole = random.Random(key).randrange(WORD)
    if not held.is_sharded(part):
        return whole
    shares = [random.Random(f"{key}/{at.pp}/{dp}").randrange(WORD) for dp in range(held.topology.dp - 1)]
    return [*shares, (whole - sum(shares)) % WORD][at.dp]


def world(held: Held) -> list[dict[Part, int]]:
    return [
        {part: content(held, rank, part) for part in held.parts_on(rank)} for rank in range(held.topology.world_size)
    ]


def agrees(bundles: tuple[Bundle, ...], digests: list[dict[Part, int]]) -> bool:
    return is_equal(bundles, [[summary(bundle, mine) for bundle in bundles] for mine in digests])


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("topology", MESHES, ids=str)
def test_one_wrong_bit_anywhere_is_noticed_and_named(topology: Topology, tied: bool, zero_stage: int) -> None:
    """Every part that has a copy, on every rank: the few numbers notice it, and the many name part and rank."""
    held = held_by(topology, zero_stage=zero_stage, tied=tied)
    right, bundles = world(held), held.bundles()
    assert agrees(bundles, right) and differences(held, right) == ()
    for rank, mine in enumerate(right):
        for part in mine:
            digests = [dict(row) for row in right]
            digests[rank][part] ^= 1 << zlib.crc32(str(part).encode()) % 64
            assert not agrees(bundles, digests)
            found = differences(held, digests)
            assert {difference.part for difference in found} == {part}
            assert all(any(rank in copy for copy in difference.copies) for difference in found)
            assert {suspect for difference in found for suspect in difference.suspects} <= {rank}
            assert f"rank{'s' if not found[0].suspects else ''} " in describe(found) and part.name in describe(found)
            if any(len(difference.copies) > 2 and len(difference.copies[0]) == 1 for difference in found):
                assert (rank,) in [difference.suspects for difference in found]


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("topology", MESHES, ids=str)
def test_what_is_left_out_has_no_copy(topology: Topology, zero_stage: int) -> None:
    """By count of what each element's holders are: nothing that two ranks hold alike is left out."""
    held = held_by(topology, zero_stage=zero_stage)
    holders: dict[tuple[object, ...], int] = {}
    for rank in range(topology.world_size):
        at = topology.coord(rank)
        for spec in specs_on_rank(held.specs, at.pp):
            for state in (WEIGHT, *STATES):
                part = Part(state=state, name=spec.name)
                # The dp shards of a state are one holder; which dp rank has which differs between tied stages.
                cut, shard = None if spec.shard_dim is None else at.tp, at.dp if held.is_sharded(part) else None
                if shard in (None, 0):
                    holders[part, cut] = holders.get((part, cut), 0) + 1
    for rank in range(topology.world_size):
        tp, own = topology.coord(rank).tp, held.parts_on(rank)
        for spec in specs_on_rank(held.specs, topology.coord(rank).pp):
            for state in (WEIGHT, *STATES):
                part = Part(state=state, name=spec.name)
                assert (part in own) == (holders[part, None if spec.shard_dim is None else tp] > 1), part


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_the_tied_scope_is_tied_copies_alone(zero_stage: int) -> None:
    """P6: also of the optimizer's state, whole or in shards."""
    held = held_by(Topology(dp=2, pp=3, tp=2), zero_stage=zero_stage, scope=Scope.TIED)
    name = "model.embed_tokens.weight"
    tied = {Part(state=state, name=name) for state in (WEIGHT, *STATES)}
    assert [set(held.parts_on(rank)) for rank in range(12)] == [
        tied if held.topology.coord(rank).pp in (0, 2) else set() for rank in range(12)
    ]
    assert agrees(held.bundles(), world(held))
    alone = held_by(Topology(dp=2, pp=3, tp=2), zero_stage=zero_stage, tied=False, scope=Scope.TIED)
    assert alone.bundles() == () and all(alone.parts_on(rank) == () for rank in range(12))


def test_a_rank_tells_few_numbers_whatever_the_model() -> None:
    assert len(held_by(Topology(dp=2, pp=3, tp=2), zero_stage=1).bundles()) == 4
    assert len(held_by(Topology(dp=4), zero_stage=1).bundles()) == 1
    assert held_by(Topology(pp=3), zero_stage=1, tied=False).bundles() == ()
    assert held_by(Topology(), zero_stage=0).bundles() == ()


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([7, 7, 7], None),
        ([7, 7, 8], ((2,),)),
        ([8, 7, 7, 7, 9], ((0,), (4,))),
        ([7, 8], ()),
        ([7, 7, 8, 8], ()),
        ([1, 2, 3], ()),
        ([7, 7 + WORD], None),
    ],
)
def test_the_majority_is_right_and_without_one_nobody_knows(
    values: list[int], wrong: tuple[tuple[int, ...], ...] | None
) -> None:
    family = tuple((rank,) for rank in range(len(values)))
    assert wrong_copies(dict(enumerate(values)), family) == wrong


def test_the_words_name_ranks_and_parameters_and_stay_short() -> None:
    held = held_by(Topology(dp=3, tp=2), zero_stage=0, tied=False)
    right = world(held)
    broken = [dict(row) for row in right]
    for part in broken[4]:
        broken[4][part] ^= 1
    text = describe(differences(held, broken))
    assert "rank 4 holds other bits than ranks 0, 2 of model.embed_tokens.weight" in text
    assert "ranks 0, 1, 2, 3, 5 of model.layers.0.input_layernorm.weight" in text and "more" in text
    assert len(text) < 1000
    two = held_by(Topology(dp=2), zero_stage=1, tied=False)
    digests = world(two)
    digests[1][Part(state=WEIGHT, name="model.norm.weight")] ^= 4
    text = describe(differences(two, digests))
    assert text == "ranks 0 and 1 hold different bits, and nothing tells which are right, of model.norm.weight"


def value_of(x: torch.Tensor, *, first: int = 0) -> int:
    return int(digest(x, first=first)) % WORD


def exact(x: torch.Tensor) -> int:
    """The digest by its definition, in Python's integers."""
    words = x.view(torch.int16 if x.element_size() == 2 else torch.int32).tolist()
    drawn = np.random.Generator(np.random.Philox(key=1)).integers(0, 2**63, size=_ROW, dtype=np.int64) | 1
    return sum(word * int(drawn[i % _ROW]) * (2 * (i // _ROW) + 1) for i, word in enumerate(words)) % WORD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 1000, _ROW, 2 * _ROW + 77])
def test_a_digest_is_its_definition(dtype: torch.dtype, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    assert value_of(x) == exact(x)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_parts_add_up_wherever_they_are_cut(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    numel = data.draw(st.integers(1, 3 * _ROW))
    cut = data.draw(st.integers(0, numel))
    x = torch.randn(numel, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert value_of(x) == (value_of(x[:cut]) + value_of(x[cut:], first=cut)) % WORD


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_every_flipped_bit_and_every_swap_changes_the_digest(data: st.DataObject) -> None:
    dtype, bits = data.draw(st.sampled_from([(torch.bfloat16, 16), (torch.float32, 32), (torch.float64, 64)]))
    ints = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    x = torch.randn(_ROW + 300, generator=torch.Generator().manual_seed(3)).to(dtype)
    at, other = (data.draw(st.integers(0, x.numel() - 1)) for _ in range(2))
    flipped = x.clone()
    flipped.view(ints)[at] ^= (
        -(1 << (bits - 1)) if (bit := data.draw(st.integers(0, bits - 1))) == bits - 1 else 1 << bit
    )
    assert value_of(flipped) != value_of(x)
    swapped = x.clone()
    swapped[at], swapped[other] = x[other], x[at]
    assert (value_of(swapped) == value_of(x)) == torch.equal(swapped.view(ints), x.view(ints))


def test_two_values_that_differ_in_sign_alone_are_told_from_their_swap() -> None:
    """The highest bit of a sum is the first to be lost: a difference of 2^31 or 2^63 must not be shifted out."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.full((3 * _ROW,), 1.5, dtype=dtype)
        for at, other in ((0, 1), (2, 2 + _ROW), (0, 2 * _ROW), (5, _ROW - 1)):
            one, two = x.clone(), x.clone()
            one[at] = two[other] = -1.5
            assert value_of(one) != value_of(two)
