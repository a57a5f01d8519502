"""What may change on resume: free, recorded, fixed; forgetting a key makes it fixed."""

import pytest

from orchestrator.state.revisions import TABLE, Change, effective_change, sort_keys


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("recovery.spares", Change.FREE),
        ("slurm.env.NCCL_DEBUG", Change.FREE),
        ("parallelism.dp", Change.FREE),
        ("tokens.micro_batch_size", Change.FREE),
        ("checkpoints.checkpoint_interval", Change.FREE),
        ("tokens.train_steps", Change.RECORDED),
        ("optimizer.learning_rate_scheduler.learning_rate", Change.RECORDED),
        ("optimizer.z_loss_coefficient", Change.RECORDED),
        ("optimizer.label_smoothing", Change.RECORDED),
        ("data.dataset.dataset_weights", Change.RECORDED),
        ("checkpoints.keep_every", Change.FREE),
        ("model.recompute", Change.FREE),
        ("tokens.val_check_interval", Change.FREE),
        ("model.compile", Change.RECORDED),
        ("tokenizer.tokenizer_name_or_path", Change.RECORDED),
        ("model", Change.FIXED),
        ("model.init_method.path", Change.FIXED),
        ("model.model_config.hidden_size", Change.FIXED),
        ("general.seed", Change.FIXED),
        ("general.run", Change.FIXED),
        ("data.seed", Change.FIXED),
        ("tokens.sequence_length", Change.FIXED),
        ("tokens", Change.FIXED),
        ("optimizer", Change.FIXED),
        ("data", Change.FIXED),
        ("something.new", Change.FIXED),
        ("slurmish.nodes", Change.FIXED),
    ],
)
def test_table(key: str, change: Change) -> None:
    assert effective_change(key) is change


def test_sorting_loses_no_key() -> None:
    keys = (*TABLE, "unknown.key")
    assert sorted(key for found in sort_keys(keys).values() for key in found) == sorted(keys)
