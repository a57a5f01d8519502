"""Documents in a sample do not see one another. Case C3."""

from dataclasses import replace

import pytest
import torch
from engine_world import T, V, logits_of, solo_engine, tiny_batch, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batch import IGNORE_LABEL, StepBatch
from trainer.layers.documents import DocumentMask
from trainer.memory import rank_memory

CUT = 7  # tokens of the first document


def with_documents(batch: StepBatch) -> StepBatch:
    """The batch with every sample cut into two documents."""
    positions = torch.arange(T)
    positions[CUT:] -= CUT
    return replace(batch, position_ids_MBT=positions.expand(batch.labels_MBT.shape).contiguous())


def changed(batch: StepBatch, places: slice) -> StepBatch:
    ids = batch.input_ids_MBT.clone()
    ids[..., places] = (ids[..., places] + 5) % V
    return replace(batch, input_ids_MBT=ids)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_changing_a_document_leaves_the_others_logits_bitwise(dtype: str, recompute: str) -> None:
    engine = solo_engine(tiny_config(dtype=dtype, recompute=recompute, document_masks=True))
    batch = with_documents(tiny_batch())
    plain = logits_of(engine, batch)
    for mine, other in ((slice(0, CUT), slice(CUT, T)), (slice(CUT, T), slice(0, CUT))):
        logits = logits_of(engine, changed(batch, mine))
        assert torch.equal(logits[..., other, :], plain[..., other, :])
        assert not torch.equal(logits[..., mine, :], plain[..., mine, :])


def test_positions_alone_keep_no_documents_apart() -> None:
    """nanoVLM#204: counting positions anew, without a mask, changes what a token is told, not whom it sees."""
    engine, batch = solo_engine(tiny_config()), with_documents(tiny_batch())
    other = logits_of(engine, changed(batch, slice(0, CUT)))[..., CUT:, :]
    assert not torch.equal(other, logits_of(engine, batch)[..., CUT:, :])


def test_a_document_in_a_sample_is_what_it_is_alone() -> None:
    engine, batch = solo_engine(tiny_config(dtype="float64", document_masks=True)), tiny_batch()
    whole = logits_of(engine, with_documents(batch))
    alone = logits_of(engine, replace(batch, input_ids_MBT=batch.input_ids_MBT.roll(-CUT, dims=-1)))
    torch.testing.assert_close(whole[..., CUT:, :], alone[..., : T - CUT, :], rtol=1e-12, atol=1e-12)


def test_gradients_do_not_cross_either() -> None:
    engine, batch = solo_engine(tiny_config(dtype="float64", document_masks=True)), with_documents(tiny_batch())
    batch.labels_MBT[..., CUT:] = IGNORE_LABEL
    engine.backward(batch, num_valid=1)
    gradients = [storage.grads.clone() for storage in engine.optimizer.storages]
    engine.backward(changed(batch, slice(CUT, T)), num_valid=1)
    assert all(torch.equal(a, s.grads) for a, s in zip(gradients, engine.optimizer.storages, strict=True))


def test_a_step_says_how_many_pairs_its_documents_left() -> None:
    engine = solo_engine(tiny_config(document_masks=True))
    result = engine.train_step(with_documents(tiny_batch()), lr=1e-3, weight_decay=0.1, adam_t=1)
    assert result.num_pairs == 4 * (CUT * (CUT + 1) + (T - CUT) * (T - CUT + 1)) // 2
    whole = engine.train_step(tiny_batch(), lr=1e-3, weight_decay=0.1, adam_t=2)
    assert whole.num_pairs == 4 * T * (T + 1) // 2


@given(st.lists(st.integers(1, T - 1), max_size=5))
def test_the_mask_is_causal_and_block_diagonal(starts: list[int]) -> None:
    document = torch.zeros(T, dtype=torch.int64)
    for start in starts:
        document[start:] += 1
    first = torch.tensor([int((document == d).nonzero()[0]) for d in document])
    mask = DocumentMask(torch.float32)((torch.arange(T) - first).unsqueeze(0))
    seen = (document[:, None] == document[None, :]).tril()
    assert torch.equal(mask[0, 0] == 0, seen) and bool((mask[0, 0][~seen] == float("-inf")).all())


def test_the_estimate_holds_a_mask_for_each_stage() -> None:
    plain, masked = (rank_memory(tiny_config(document_masks=on)).activations for on in (False, True))
    assert masked - plain == 4 * 2 * T * T
