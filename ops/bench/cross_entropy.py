"""Head and loss together, forward and backward: our chunked cross-entropy against torch's own on whole logits."""

import statistics
from collections.abc import Callable

from ops.bench.live import lived_in
from ops.bench.rows import Row, in_pairs, spread_of

TOKENS, HIDDEN, VOCAB = 1024, 256, 32000
SHAPE = f"tokens={TOKENS} hidden={HIDDEN} vocab={VOCAB} fp32, forward and backward of head and loss"


def both_sides() -> tuple[Callable[[], object], Callable[[], object]]:
    """(ours, plain) on the same numbers; each call leaves nothing behind."""
    import torch
    from torch.nn import functional as F

    from trainer.comm import solo
    from trainer.layers.vocab import VocabRange, vocab_parallel_cross_entropy

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight_VD = (0.02 * torch.randn(VOCAB, HIDDEN, generator=generator)).requires_grad_()
    labels_N = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    vocab, tp = VocabRange(VOCAB, solo()), solo()

    def ours() -> None:
        loss = vocab_parallel_cross_entropy(hidden_ND, weight_VD, labels_N, vocab=vocab, num_valid=float(TOKENS), tp=tp)
        torch.autograd.grad(loss, [hidden_ND, weight_VD])

    def plain() -> None:
        torch.autograd.grad(F.cross_entropy(F.linear(hidden_ND, weight_VD), labels_N), [hidden_ND, weight_VD])

    return ours, plain


def memory_row() -> Row:
    """Peak of the bytes that one call makes, gradients included, inputs and weights not."""
    ours, plain = (lived_in(side).peak / 2**20 for side in both_sides())
    return Row(
        id="ce-32k-memory-vs-plain", what="peak MiB made by cross-entropy at a vocabulary of 32k, against torch's",
        ours=ours, other=plain, ratio=ours / plain, spread=0.0, shape=SHAPE, threads=1,
    )  # fmt: skip


def time_row(pairs: int) -> Row:
    """Seconds."""
    times = in_pairs(*both_sides(), pairs)
    ratios = [mine / theirs for mine, theirs in times]
    return Row(
        id="ce-32k-time-vs-plain", what="seconds of cross-entropy at a vocabulary of 32k, against torch's",
        ours=statistics.median(mine for mine, _ in times), other=statistics.median(theirs for _, theirs in times),
        ratio=statistics.median(ratios), spread=spread_of(ratios), shape=SHAPE, threads=1,
    )  # fmt: skip
