"""Cases that users of other trainers reported, each on real ranks with the sizes that they reported."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dist.pool import Pool, Ranks
from dist.step_cases import digest
from engine_world import T, V, tiny_batch, tiny_config
from token_folders import write_folder

from trainer.checkpoint.load import load_checkpoint
from trainer.checkpoint.saver import save_checkpoint
from trainer.checkpoint.state import RunState
from trainer.config.model import Config, Data, Dataset
from trainer.data.loader import Loader
from trainer.engine import Engine
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology

CPU = torch.device("cpu")
HEADS = {4: (2, 2), 35: (5, 8), 36: (6, 6)}
"""Hidden size → (heads, head_dim): 35 has no even head of its own."""


def engine_of(ranks: Ranks, topology: Topology, config: Config) -> Engine:
    ctx = ParallelContext(topology, rank=ranks.rank, device=CPU, group_factory=ranks.group)
    engine = Engine(config, ctx, bucket_numel=1000)
    engine.init_weights()
    return engine


def odd_config(hidden: int, *, dp: int, zero_stage: int) -> Config:
    config = tiny_config(dp=dp, zero_stage=zero_stage, tied=False, clip=0.3)
    heads, head_dim = HEADS[hidden]
    sizes = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden + 1, "num_attention_heads": heads,
        "num_key_value_heads": 1, "head_dim": head_dim,
    }  # fmt: skip
    shape = config.model.model_config_.model_copy(update=sizes)
    return config.model_copy(update={"model": replace(config.model, model_config=shape)})


def train_odd(
    ranks: Ranks, topology: Topology, hidden: int, zero_stage: int
) -> tuple[list[tuple[float, float]], dict[str, str]]:
    """(loss, gradient norm) of 6 fp32 steps on one batch, and digests of the weights after them."""
    engine = engine_of(ranks, topology, odd_config(hidden, dp=topology.dp, zero_stage=zero_stage))
    batch, results = tiny_batch(engine.ctx.get_dp_rank()), []
    for step in range(1, 7):
        result = engine.train_step(batch, lr=1e-2, weight_decay=0.1, adam_t=step)
        results.append((result.loss, result.grad_norm))
    return results, digest(engine)


@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("hidden", HEADS)
def test_zero_stages_agree_to_the_bit_for_odd_sizes(pool: Pool, hidden: int, dp: int) -> None:
    """P14 (DeepSpeed#966): asked for to 1e-6; losses, norms and weights are equal in every bit."""
    topology = Topology(dp=dp)
    zero, one = (pool.run(topology, train_odd, topology, hidden, stage) for stage in (0, 1))
    assert zero == one and all(run == one[0] for run in one)
    losses = [loss for loss, _ in one[0][0]]
    assert losses[-1] < losses[0], "it trained"


ROWS, MICRO_BATCH, DP, STEPS = 10, 2, 3, 10


def ten_rows(folder: str) -> Config:
    config = tiny_config(dp=DP)
    tokens = config.tokens.model_copy(update={"batch_accumulation_per_replica": 1, "micro_batch_size": MICRO_BATCH})
    return config.model_copy(update={"tokens": tokens, "data": Data(dataset=Dataset(dataset_folder=[folder]))})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A source of ten samples whose first tokens differ."""
    tokens = torch.randint(0, V, (ROWS * T + 1,), generator=torch.Generator().manual_seed(5))
    tokens[: ROWS * T : T] = torch.arange(ROWS)
    return str(write_folder(tmp_path / "ten", [tokens.tolist()], vocab_size=V))


def test_ranks_leave_an_epoch_together_and_no_row_comes_twice_in_it(folder: str) -> None:
    """D5 (Megatron-Bridge#5944): 10 rows, micro-batches of 2, dp 3. Epochs end inside steps, on no rank's own count."""
    config, topology = ten_rows(folder), Topology(dp=DP)
    loaders = [Loader(config, topology, rank) for rank in range(DP)]
    per_step = MICRO_BATCH * DP
    drawn: dict[int, int] = {}
    for step in range(STEPS):
        batches = [loader.batch(step, per_step * step) for loader in loaders]
        assert [batch.input_ids_MBT.shape for batch in batches] == [(1, MICRO_BATCH, T)] * DP
        for batch in batches:
            drawn |= dict(zip(batch.sample_ids, batch.input_ids_MBT[..., 0].flatten().tolist(), strict=True))
    assert sorted(drawn) == list(range(per_step * STEPS))
    for epoch in range(per_step * STEPS // ROWS):
        assert sorted(drawn[epoch * ROWS + i] for i in range(ROWS)) == list(range(ROWS)), f"epoch {epoch}"


def train_ten_rows(ranks: Ranks, folder: str, run: str, save_at: int) -> list[tuple[float, tuple[int, ...], str]]:
    """(loss, sample ids, digest of the rows) of each step; after step `save_at` all is built anew from the checkpoint.

    save_at 0: never.
    """
    config, topology = ten_rows(folder), Topology(dp=DP)
    engine, loader, state, steps = (
        engine_of(ranks, topology, config),
        Loader(config, topology, ranks.rank),
        RunState(),
        [],
    )
    while state.step < STEPS:
        batch = loader.batch(state.step, state.consumed_samples)
        result = engine.train_step(batch, lr=1e-2, weight_decay=0.1, adam_t=state.adam_t + 1)
        rows = hashlib.sha256(batch.input_ids_MBT.numpy().tobytes()).hexdigest()
        steps.append((result.loss, batch.sample_ids, rows))
        state = RunState(
            step=state.step + 1, consumed_samples=state.consumed_samples + MICRO_BATCH * DP, consumed_tokens=0,
            adam_t=state.adam_t + 1,
        )  # fmt: skip
        if state.step == save_at:
            saved = save_checkpoint(
                engine, state, checkpoints_dir=Path(run), epoch="a0001g01c0001", run="test",
                config_text="general: {}\n", tokenizer=None,
            )  # fmt: skip
            engine, loader = engine_of(ranks, topology, config), Loader(config, topology, ranks.rank)
            state = load_checkpoint(Path(run) / saved.name, engine)
    return steps


@pytest.mark.parametrize("save_at", [1, 5], ids=["inside an epoch", "at the end of one"])
def test_a_resume_in_a_small_source_goes_on_as_if_never_stopped(
    pool: Pool, folder: str, save_at: int, tmp_path: Path
) -> None:
    """D5: the same rows in the same order, the same losses to the bit."""
    topology = Topology(dp=DP)
    straight = pool.run(topology, train_ten_rows, folder, "", 0)
    assert pool.run(topology, train_ten_rows, folder, str(tmp_path), save_at) == straight
