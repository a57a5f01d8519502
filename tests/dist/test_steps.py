"""Steps on several ranks: everybody or nobody updates, words are agreed, layouts that promise equal bits give them."""

import math

import pytest
from dist.pool import Pool
from dist.step_cases import counted_ahead, fp32_bits, nan_on_one_rank, told, votes

from trainer.mesh.topology import Topology

ALONE = [(Topology(**{axis: 2}), bad, {}) for axis in ("dp", "pp", "tp") for bad in (0, 1)]
TOGETHER: list[tuple[Topology, int, dict[str, object]]] = [
    (Topology(dp=2, pp=2), 0, {"zero_stage": 0}),
    (Topology(pp=2, tp=2), 3, {"tied": False}),
    (Topology(dp=2, pp=2), 2, {"pp_engine": "zb-v", "layers": 4}),
    (Topology(dp=2, pp=2, tp=2), 5, {"tp_mode": "REDUCE_SCATTER", "dtype": "bfloat16"}),
]


@pytest.mark.parametrize(("topology", "bad", "options"), [*ALONE, *TOGETHER], ids=str)
def test_a_nan_on_one_rank_stops_all_and_leaves_no_trace(
    pool: Pool, topology: Topology, bad: int, options: dict[str, object]
) -> None:
    """G6, on every axis alone, from either rank, and on meshes."""
    for rank, (result, unmoved, after) in enumerate(pool.run(topology, nan_on_one_rank, topology, bad, options)):
        assert not result.finite and result.skipped is not None and not math.isfinite(result.grad_norm)
        assert unmoved, f"rank {rank} moved"
        assert after.finite and after.skipped is None


@pytest.mark.parametrize(
    ("words", "agreed"), [((0, 0, 0, 0), 0), ((0, 1, 0, 0), 1), ((1, 0, 2, 1), 2), ((0, 0, 0, 2), 2)]
)
def test_ranks_agree_on_the_largest_control_word(pool: Pool, words: tuple[int, ...], agreed: int) -> None:
    topology = Topology(dp=2, pp=2)
    assert pool.run(topology, votes, topology, words) == [[agreed, agreed]] * 4


@pytest.mark.parametrize("topology", [Topology(dp=2, pp=2), Topology(dp=2, tp=2), Topology(dp=4)], ids=str)
def test_labels_counted_a_step_ahead_are_those_counted_in_time(pool: Pool, topology: Topology) -> None:
    """The same bits, and a step waits for one reduction less."""
    late = pool.run(topology, counted_ahead, topology, False)
    for rank, (results, calls, weights) in enumerate(pool.run(topology, counted_ahead, topology, True)):
        assert repr(results) == repr(late[rank][0]), "repr, because the step without labels has a loss of NaN"
        assert weights == late[rank][2]
        assert [result.next_num_valid for result in results[:4]] == [result.num_valid for result in results[1:]]
        assert results[2].skipped is not None and results[3].num_valid > 0
        assert [after - before for after, before in zip(late[rank][1], calls, strict=True)] == [0, 1, 1, 1, 1]


def test_ranks_that_see_something_else_on_disk_believe_rank_0(pool: Pool) -> None:
    topology = Topology(dp=2, pp=2)
    assert pool.run(topology, told, topology, None) == [{"name": "seen by 0", "done": None}] * 4


@pytest.mark.parametrize("error", [OSError, ValueError, MemoryError])
def test_a_look_that_fails_on_rank_0_fails_on_all(pool: Pool, error: type[Exception]) -> None:
    """Whatever the error: a rank that raised alone would leave the others in their collective."""
    topology = Topology(dp=2, pp=2)
    first, *others = pool.run(topology, told, topology, error)
    assert first == (error.__name__, "the folder does not answer")
    assert others == [("SaveFailed", "Rank 0 reports: the folder does not answer")] * 3


@pytest.mark.parametrize("tp", [2, 4])
def test_norms_of_cut_sequences_stay_equal_on_all_tp_ranks(pool: Pool, tp: int) -> None:
    """T1: each rank sees other tokens, all make one update; 20 steps in bfloat16 and fp32, every bit."""
    topology = Topology(tp=tp)
    for dtype in ("float32", "bfloat16"):
        options: dict[str, object] = {"dtype": dtype, "kv_heads": 4, "tp_mode": "REDUCE_SCATTER"}
        runs = pool.run(topology, fp32_bits, topology, 20, options)
        norms = [{name: value for name, value in weights.items() if "norm" in name} for _, weights in runs]
        assert len(norms[0]) == 5 and all(other == norms[0] for other in norms)
        assert len({tuple(losses) for losses, _ in runs}) == 1


@pytest.mark.parametrize("tp_mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_head_norms_and_row_biases_stay_equal_on_all_tp_ranks(pool: Pool, tp_mode: str) -> None:
    """T2: head norms see the heads of their own rank, with and without sequence parallelism; 20 steps, every bit."""
    topology = Topology(tp=2)
    options: dict[str, object] = {"tp_mode": tp_mode, "model_type": "qwen3", "attention_bias": True}
    one, two = (weights for _, weights in pool.run(topology, fp32_bits, topology, 20, options))
    whole = [name for name in one if "norm" in name or name.endswith("o_proj.bias")]
    assert len(whole) == 2 * 5 + 1 and all(one[name] == two[name] for name in whole)
    assert one["model.layers.0.self_attn.q_proj.bias"] != two["model.layers.0.self_attn.q_proj.bias"]


@pytest.mark.parametrize("pp_engine", ["1f1b", "interleaved", "zb-h1"])
def test_pipelines_of_cut_sequences_change_no_bit_in_fp32(pool: Pool, pp_engine: str) -> None:
    """pp = 2 × tp = 2 with sequence parallelism gives the losses and weights of tp = 2 with it."""
    options: dict[str, object] = {"layers": 4, "tp_mode": "REDUCE_SCATTER"}
    plain = pool.run(Topology(tp=2), fp32_bits, Topology(tp=2), 3, options)
    topology = Topology(pp=2, tp=2)
    for rank, run in enumerate(pool.run(topology, fp32_bits, topology, 3, {**options, "pp_engine": pp_engine})):
        losses, weights = plain[topology.coord(rank).tp]
        assert run[0] == losses
        assert all(weights[name] == value for name, value in run[1].items())


@pytest.mark.parametrize("tied", [True, False])
def test_pipeline_stages_change_no_bit_in_fp32(pool: Pool, tied: bool) -> None:
    """W1: pp = 4 gives the losses and weights of pp = 1, bit for bit: same order of sums, tie sites in own buffers."""
    options: dict[str, object] = {"tied": tied, "layers": 4}
    ((losses, weights),) = pool.run(Topology(), fp32_bits, Topology(), 4, options)
    for other_losses, others in pool.run(Topology(pp=4), fp32_bits, Topology(pp=4), 4, options):
        assert other_losses == losses
        assert all(weights[name] == value for name, value in others.items())


def test_zero_stages_change_no_bit_in_fp32(pool: Pool) -> None:
    topology = Topology(dp=4)
    zero, one = (pool.run(topology, fp32_bits, topology, 4, {"zero_stage": stage}) for stage in (0, 1))
    assert zero == one and len({str(run) for run in one}) == 1


def test_bfloat16_tie_copies_and_replicas_stay_equal(pool: Pool) -> None:
    """W2."""
    topology = Topology(dp=2, pp=2, tp=2)
    runs = pool.run(topology, fp32_bits, topology, 10, {"dtype": "bfloat16", "tied": True})
    name = "model.embed_tokens.weight"
    for tp in range(2):
        copies = {weights[name] for rank, (_, weights) in enumerate(runs) if topology.coord(rank).tp == tp}
        assert len(copies) == 1, "both stages and both replicas hold one embedding"
    assert len({tuple(losses) for losses, _ in runs}) == 1
