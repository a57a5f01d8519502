"""Replica digests on real ranks: a flipped bit stops all ranks and is named, right runs are left alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dist.pool import Pool, Ranks
from dist.step_cases import engine_on
from engine_world import tiny_batch

from trainer.checkpoint.saver import save_checkpoint
from trainer.checkpoint.state import RunState
from trainer.digests import check_replicas
from trainer.engine import Engine
from trainer.errors import DesyncError
from trainer.mesh.topology import Topology
from trainer.replicas import Scope

Told = tuple[str, tuple[int, ...]] | None
"""What a rank raised: (text, suspects); None: nothing."""

NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
MATRIX = "model.layers.1.mlp.up_proj.weight"


def step(engine: Engine, number: int) -> None:
    engine.train_step(tiny_batch(10 * number + engine.ctx.get_dp_rank()), lr=1e-2, weight_decay=0.1, adam_t=number)


def told(engine: Engine, *, at: int, scope: Scope = Scope.ALL) -> Told:
    try:
        check_replicas(engine, step=at, scope=scope)
    except DesyncError as error:
        return str(error), error.suspects
    return None


def flip(engine: Engine, state: str, name: str, *, bit: int = 0) -> None:
    """One bit of the first element of `name` that this rank holds."""
    engine.optimizer.wait_weights()  # a gather under way would write over it
    bucket, slot = engine.layout.find(name)
    storage = engine.optimizer.storages[bucket.index]
    first = 0 if state == "weights" else storage.held.start
    flat: torch.Tensor = getattr(storage, state)
    at = max(slot.start, first) - first
    assert at + first < min(slot.stop, first + flat.numel()), "this rank holds nothing of it"
    flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)[at] ^= 1 << bit


def run_and_flip(
    ranks: Ranks, topology: Topology, options: dict[str, object], where: tuple[int, str, str] | None, scope: Scope
) -> tuple[Told, Told, int]:
    """Two steps; what the check says before and after a bit flips at (rank, state, name); its communication calls."""
    engine = engine_on(ranks, topology, **options)
    step(engine, 1)
    step(engine, 2)
    before = engine.collective_seq
    first = told(engine, at=2, scope=scope)
    calls = engine.collective_seq - before
    if where is not None and where[0] == ranks.rank:
        flip(engine, *where[1:])
    return first, told(engine, at=2, scope=scope), calls


FLIPS: list[tuple[Topology, dict[str, object], tuple[int, str, str], tuple[int, ...], str]] = [
    # dp replicas: a weight, and under ZeRO-0 the optimizer's state
    (Topology(dp=3), {}, (1, "weights", MATRIX), (1,), f"rank 1 holds other bits than ranks 0, 2 of {MATRIX}"),
    (Topology(dp=3), {"zero_stage": 0}, (2, "exp_avg", NORM), (2,), f"{NORM} (exp_avg)"),
    (Topology(dp=3), {"zero_stage": 0, "dtype": "bfloat16"}, (0, "master", MATRIX), (0,), f"{MATRIX} (master)"),
    (Topology(dp=2), {}, (1, "weights", MATRIX), (), "ranks 0 and 1 hold different bits, and nothing tells"),
    # tp ranks: what is not cut
    (Topology(tp=4), {"kv_heads": 4}, (3, "weights", NORM), (3,), "rank 3 holds other bits than ranks 0, 1, 2 of"),
    (Topology(tp=2), {}, (0, "exp_avg_sq", NORM), (), "ranks 0 and 1 hold different bits, and nothing tells"),
    (Topology(dp=2, tp=2), {}, (2, "weights", NORM), (2,), f"rank 2 holds other bits than ranks 0, 1, 3 of {NORM}"),
    (Topology(dp=2, pp=2, tp=2), {}, (1, "weights", NORM), (1,), "rank 1 holds other bits than ranks 0, 4, 5 of"),
    # tied copies: live, and the optimizer's state whole and in shards
    (Topology(dp=2, pp=2), {}, (1, "weights", EMBEDDING), (1,), "rank 1 holds other bits than ranks 0, 2, 3 of"),
    (Topology(pp=3), {"layers": 3}, (2, "weights", EMBEDDING), (), "ranks 0 and 2 hold different bits"),
    (Topology(pp=2), {"zero_stage": 0}, (1, "exp_avg", EMBEDDING), (), f"{EMBEDDING} (exp_avg)"),
    (Topology(dp=2, pp=2), {"dtype": "bfloat16"}, (1, "master", EMBEDDING), (), "ranks 0+2 and 1+3 hold different"),
]  # fmt: skip


@pytest.mark.parametrize(("topology", "options", "where", "suspects", "says"), FLIPS, ids=str)
def test_a_flipped_bit_stops_every_rank_and_is_named(
    pool: Pool, topology: Topology, options: dict[str, object], where: tuple[int, str, str],
    suspects: tuple[int, ...], says: str,
) -> None:  # fmt: skip
    """P6 on the tied ones. Before the flip nothing is said; after it the same is said everywhere."""
    answers = pool.run(topology, run_and_flip, topology, options, where, Scope.ALL)
    assert [first for first, _, _ in answers] == [None] * topology.world_size
    texts = [second for _, second, _ in answers]
    assert texts[0] is not None and texts == [texts[0]] * topology.world_size
    assert texts[0][1] == suspects and says in texts[0][0], texts[0]
    assert "after step 2" in texts[0][0] and where[2] in texts[0][0]


def test_a_pipeline_without_copies_says_nothing_and_sends_nothing(pool: Pool) -> None:
    topology = Topology(pp=2)
    answers = pool.run(topology, run_and_flip, topology, {"tied": False}, (1, "weights", MATRIX), Scope.ALL)
    assert answers == [(None, None, 0)] * 2


def test_a_check_is_one_message_and_without_digests_only_tied_copies_are_compared(pool: Pool) -> None:
    topology = Topology(dp=2, pp=2)
    for name, is_seen in ((MATRIX, False), (EMBEDDING, True)):
        answers = pool.run(topology, run_and_flip, topology, {}, (1, "weights", name), Scope.TIED)
        assert [(first, second is not None, calls) for first, second, calls in answers] == [(None, is_seen, 1)] * 4


MESHES: list[tuple[Topology, dict[str, object]]] = [
    (Topology(dp=2, tp=2), {"zero_stage": 0, "tp_mode": "REDUCE_SCATTER"}),
    (Topology(dp=2, tp=2), {"tp_mode": "REDUCE_SCATTER", "model_type": "qwen3", "attention_bias": True}),
    (Topology(dp=2, pp=2, tp=2), {"model_type": "qwen3", "dtype": "bfloat16", "attention_bias": True}),
    (Topology(dp=2, pp=2, tp=2), {"zero_stage": 0, "dtype": "bfloat16", "tp_mode": "REDUCE_SCATTER", "mlp_bias": True}),
    (Topology(dp=2, pp=3), {"layers": 3, "zero_stage": 0}),
    (Topology(pp=3, tp=2), {"layers": 3, "pp_engine": "zb-h1"}),
    (Topology(dp=2, pp=2), {"layers": 4, "pp_engine": "interleaved"}),
    (Topology(dp=2, pp=2), {"layers": 4, "pp_engine": "zb-v"}),
    (Topology(dp=7), {"zero_stage": 0}),
]


def compare_every_step(ranks: Ranks, topology: Topology, options: dict[str, object], steps: int) -> list[Told]:
    engine = engine_on(ranks, topology, **options)
    answers = [told(engine, at=0)]
    for number in range(1, steps + 1):
        step(engine, number)
        answers.append(told(engine, at=number))
    return answers


@pytest.mark.parametrize(("topology", "options"), MESHES, ids=str)
def test_no_false_alarm(pool: Pool, topology: Topology, options: dict[str, object]) -> None:
    """After every step, with gathers under way: sequence parallelism, ZeRO, tied stages, head norms, biases."""
    answers = pool.run(topology, compare_every_step, topology, options, 4)
    assert answers == [[None] * 5] * topology.world_size


def copies_of_the_embedding(
    ranks: Ranks, topology: Topology, options: dict[str, object], folder: str
) -> list[tuple[bytes, ...]]:
    """The bits of the tied weight after each of 20 clipped steps (none on a stage without it); saves at the end."""
    engine = engine_on(ranks, topology, **options)
    holds = topology.coord(ranks.rank).pp in (0, topology.pp - 1)
    bits = []
    for number in range(1, 21):
        step(engine, number)
        weight = engine.optimizer.view(EMBEDDING)[0] if holds else torch.zeros(0)
        bits.append((weight.detach().clone().view(-1).view(torch.uint8).numpy().tobytes(),) if holds else ())
    save(engine, folder)
    return bits


def save(engine: Engine, folder: str, *, compare: Scope = Scope.TIED, **more: Any) -> str:
    state = RunState(step=20, consumed_samples=80, consumed_tokens=1280, adam_t=20)
    return save_checkpoint(
        engine, state, checkpoints_dir=Path(folder), epoch="a0001g01c0001", run="test", config_text="general: {}\n",
        tokenizer=None, compare=compare, **more,
    ).name  # fmt: skip


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("topology", [Topology(pp=2), Topology(pp=3), Topology(dp=2, pp=2)], ids=str)
def test_tied_copies_are_one_at_every_step_and_at_the_save(
    pool: Pool, topology: Topology, zero_stage: int, tmp_path: Path
) -> None:
    """P6, W2: tied, clipped, 20 steps; every copy has the same bits after each."""
    options: dict[str, object] = {"layers": 3, "tied": True, "zero_stage": zero_stage, "clip": 0.05}
    runs = pool.run(topology, copies_of_the_embedding, topology, options, str(tmp_path))
    holders = [run for run in runs if run[0]]
    assert len(holders) == 2 * topology.dp and all(run == holders[0] for run in holders)
    assert len(set(holders[0])) == 20, "the embedding moved in every step"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000020.a0001g01c0001"]


def save_with_a_flip(
    ranks: Ranks, topology: Topology, options: dict[str, object], state: str, name: str, compare: Scope, folder: str
) -> Told:
    """What a save raises on this rank after a bit of `name` on the last rank has flipped."""
    engine = engine_on(ranks, topology, **options)
    step(engine, 1)
    if ranks.rank == topology.world_size - 1:
        flip(engine, state, name)
    lines: list[str] = []
    try:
        save(engine, folder, compare=compare, before_commit=lambda: lines.append("line"))
    except DesyncError as error:
        assert lines == [], "no line of a step that is not saved"
        return str(error), error.suspects
    return None


@pytest.mark.parametrize(
    ("topology", "options", "state"),
    [
        (Topology(pp=2), {}, "weights"),
        (Topology(pp=3), {"layers": 3, "zero_stage": 0}, "exp_avg"),
        (Topology(dp=2, pp=2), {"dtype": "bfloat16"}, "master"),
    ],
    ids=str,
)
def test_a_save_of_unequal_tied_copies_is_refused_on_all_ranks(
    pool: Pool, topology: Topology, options: dict[str, object], state: str, tmp_path: Path
) -> None:
    """P6: an error that names both copies and the parameter, digests on or off, and nothing half made."""
    for compare in Scope:
        answers = pool.run(topology, save_with_a_flip, topology, options, state, EMBEDDING, compare, str(tmp_path))
        assert answers[0] is not None and answers == [answers[0]] * topology.world_size
        assert EMBEDDING in answers[0][0] and " and " in answers[0][0] and "not saved" in answers[0][0]
        assert list(tmp_path.iterdir()) == []


def test_replicas_that_differ_are_saved_only_where_nobody_compares_them(pool: Pool, tmp_path: Path) -> None:
    topology = Topology(dp=3)
    arguments = (topology, {}, "weights", MATRIX)
    answers = pool.run(topology, save_with_a_flip, *arguments, Scope.ALL, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert answers[0] is not None and answers == [answers[0]] * 3 and answers[0][1] == (2,)
    assert pool.run(topology, save_with_a_flip, *arguments, Scope.TIED, str(tmp_path)) == [None] * 3
