"""Communication and its gradients on several ranks: dual pairs, sharded vocabulary, ordered sums, any-stage edges."""

import numpy as np
import pytest
import torch
from dist.collective_cases import (
    jacobians,
    linear_pair,
    numeric_dual,
    odd_sequence,
    ordered_sums,
    plain_vocabulary,
    scattered,
    scattered_from,
    sequence_pair,
    sequence_tensors,
    sharded_vocabulary,
    skip_pipeline,
)
from dist.pool import Pool, RankError

from trainer.layers.vocab import Objective
from trainer.mesh.topology import Topology


@pytest.mark.parametrize("tp", [2, 4])
def test_copy_and_reduce_are_each_others_transpose(pool: Pool, tp: int) -> None:
    for errors in pool.run(Topology(tp=tp), numeric_dual, tp):
        assert max(errors) < 1e-12


def test_column_then_row_equals_whole_matrices(pool: Pool) -> None:
    g = torch.Generator().manual_seed(1)
    x, w1, w2, b = (
        torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in ((3, 4), (8, 4), (5, 8), (5,))
    )
    y = torch.tanh(x @ w1.T) @ w2.T + b
    y.square().sum().backward()
    runs = pool.run(Topology(tp=2), linear_pair, 2)
    for out, grad_x, _, _, grad_b in runs:
        np.testing.assert_allclose(out, y.detach(), rtol=1e-12)
        np.testing.assert_allclose(grad_x, x.grad, rtol=1e-12)
        np.testing.assert_allclose(grad_b, b.grad, rtol=1e-12)
    np.testing.assert_allclose(np.concatenate([run[2] for run in runs]), w1.grad, rtol=1e-12)
    np.testing.assert_allclose(np.concatenate([run[3] for run in runs], axis=1), w2.grad, rtol=1e-12)


@pytest.mark.parametrize("name", ["gather", "scatter"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_gather_and_scatter_have_exact_gradients(pool: Pool, tp: int, name: str) -> None:
    """T4: the whole Jacobian over all ranks, forward and backward, is one matrix of known zeros and ones."""
    runs = pool.run(Topology(tp=tp), jacobians, tp, name)
    forward = np.concatenate([run[0] for run in runs], axis=1)
    backward = np.concatenate([run[1] for run in runs], axis=1)
    parts = np.arange(2 * 2 * tp * 3).reshape(2, tp, 2, 3).transpose(1, 0, 2, 3).reshape(tp, -1)  # rank → its elements
    whole = np.eye(2 * 2 * tp * 3)
    expected = np.tile(whole[parts.ravel()], tp) if name == "gather" else np.tile(whole[:, parts.ravel()], (tp, 1))
    assert np.array_equal(forward, expected) and np.array_equal(backward, expected.T)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_sum_over_cut_sequences_leaves_what_it_sums(pool: Pool, batch: int) -> None:
    """The reduction's input is scratch; with a batch of 1 no transposition makes a copy by itself."""
    assert all(pool.run(Topology(tp=2), scattered_from, 2, batch))


def test_a_sequence_that_tp_does_not_divide_is_not_scattered(pool: Pool) -> None:
    with pytest.raises(RankError, match="a sequence of 3 tokens cannot be cut into 2 equal parts"):
        pool.run(Topology(tp=2), odd_sequence, 2)


@pytest.mark.parametrize("tp", [2, 4])
def test_column_then_row_over_cut_sequences_equals_whole_matrices(pool: Pool, tp: int) -> None:
    """T7: the row's bias is added once; the ranks' gradients of it are parts of the whole one."""
    x, w1, w2, b = sequence_tensors(tp)
    y = torch.tanh(x @ w1.T) @ w2.T + b
    y.square().sum().backward()
    runs = pool.run(Topology(tp=tp), sequence_pair, tp)
    wholes = (y.detach(), x.grad, w1.grad, w2.grad)
    for index, (axis, whole) in enumerate(zip((1, 1, 0, 1), wholes, strict=True)):
        np.testing.assert_allclose(np.concatenate([run[index] for run in runs], axis=axis), whole, rtol=1e-12)
    np.testing.assert_allclose(sum(run[4] for run in runs), b.grad, rtol=1e-12)
    assert not np.allclose(runs[0][4], b.grad)


@pytest.mark.parametrize(
    "objective",
    [Objective(), Objective(z_loss=0.03), Objective(label_smoothing=0.2), Objective(z_loss=1e-4, label_smoothing=0.1)],
    ids=["plain", "z-loss", "smoothed", "both"],
)
@pytest.mark.parametrize(("tp", "vocab"), [(2, 31), (4, 9), (8, 9)])
def test_sharded_vocabulary_equals_whole(pool: Pool, tp: int, vocab: int, objective: Objective) -> None:
    """T5, T6. 8 ranks over 9 rows: three ranks hold padding alone, and still take part."""
    check_vocabulary(pool, tp, vocab, objective)


@pytest.mark.parametrize("vocab", [50257, 151669])
def test_real_vocabularies_that_tp_does_not_divide(pool: Pool, vocab: int) -> None:
    """C3: GPT-2's and Qwen3-Embedding's on four ranks. The last one has three rows of padding."""
    check_vocabulary(pool, 4, vocab, Objective())


def check_vocabulary(pool: Pool, tp: int, vocab: int, objective: Objective) -> None:
    """Loss, gradients and embedding as on one rank."""
    loss, grad_hidden, grad_weight, out, grad_table = plain_vocabulary(vocab, objective)
    runs = pool.run(Topology(tp=tp), sharded_vocabulary, tp, vocab, objective)
    for run in runs:
        np.testing.assert_allclose(run[0], loss, rtol=1e-12)
        np.testing.assert_allclose(run[1], grad_hidden, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(run[3], out, rtol=1e-12)
    np.testing.assert_allclose(np.concatenate([run[2] for run in runs]), grad_weight, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(np.concatenate([run[4] for run in runs]), grad_table, rtol=1e-12)


def test_reduce_scatter_has_the_same_bits_for_every_bucket_size(pool: Pool) -> None:
    results = {
        sizes: pool.run(Topology(dp=4), scattered, 4, sizes) for sizes in ((96,), (32, 64), (1, 95), (50, 40, 6))
    }
    whole = [torch.randn(4, 96, generator=torch.Generator().manual_seed(30 + r)) for r in range(4)]
    ordered = ((whole[0] + whole[1]) + whole[2]) + whole[3]
    for parts in results.values():
        assert all(np.array_equal(part, ordered[rank].numpy()) for rank, part in enumerate(parts))


def test_small_sums_have_the_same_bits_whatever_shares_their_message(pool: Pool) -> None:
    whole = [torch.randn(45, generator=torch.Generator().manual_seed(30 + r)) for r in range(4)]
    ordered = ((whole[0] + whole[1]) + whole[2]) + whole[3]
    for sizes in ((45,), (1, 44), (7, 31, 7)):
        for run in pool.run(Topology(tp=4), ordered_sums, 4, sizes):
            assert np.array_equal(run, ordered.numpy())


@pytest.mark.parametrize(
    ("pp", "name"), [(4, "1f1b"), (4, "afab"), (4, "zb-h1"), (2, "interleaved"), (2, "zb-v"), (1, "zb-h1")]
)
def test_skip_connections_and_many_tensors_travel_between_any_stages(pool: Pool, pp: int, name: str) -> None:
    """On two ranks some skips stay on a rank: stages 0 and 2 share one, V-shaped 0 and 3."""
    ((expected_loss, expected),) = pool.run(Topology(), skip_pipeline, 1, "1f1b")
    runs = pool.run(Topology(pp=pp), skip_pipeline, pp, name)
    assert sum(run[0] for run in runs) == expected_loss and sorted(run[0] == 0 for run in runs)[0] is False
    gradients = {name: grad for _, grads in runs for name, grad in grads.items()}
    assert gradients.keys() == expected.keys() and len(gradients) == 7
    for key, value in expected.items():
        assert value.any(), key
        np.testing.assert_allclose(gradients[key], value, rtol=1e-12, atol=1e-15)
