"""Which keys of a run may change on `pawl resume --set`, and how; pure.

    free       change at will: they alter how fast or where the run goes, not which run it is
    recorded   change the run from a step on; kept in a revision with who and why
    fixed      would make it another run

The longest matching prefix decides, and a key that no row names is fixed: forgetting a row must not let a run drift.
"""

from enum import StrEnum


class Change(StrEnum):
    """What a change of a key means for the run."""

    FREE = "free"
    RECORDED = "recorded"
    FIXED = "fixed"


_F, _R, _X = Change.FREE, Change.RECORDED, Change.FIXED
TABLE: dict[str, Change] = {
    "slurm": _F,
    "recovery": _F,
    "monitoring": _F,
    "launcher": _F,
    "notify": _F,
    "logging": _F,
    "profiler": _F,
    "checkpoints": _F,
    # Layout: any that keeps the global batch; the caller compares samples per step.
    "parallelism": _F,
    "tokens.micro_batch_size": _F,
    "tokens.batch_accumulation_per_replica": _F,
    "optimizer.zero_stage": _F,
    # What is kept for the backward, and when is measured: no number of the training depends on them.
    "model.recompute": _F,
    "model.recompute_interval": _F,
    "tokens.val_check_interval": _F,
    # The same model to rounding; the name that checkpoints and exports carry.
    "model.compile": _R,
    "tokenizer": _R,
    "tokens.train_steps": _R,
    "tokens.sequence_length": _X,
    "optimizer.learning_rate_scheduler": _R,
    "optimizer.weight_decay": _R,
    "optimizer.weight_decay_schedule": _R,
    "optimizer.groups": _R,
    "optimizer.clip_grad": _R,
    "optimizer.z_loss_coefficient": _R,
    "optimizer.label_smoothing": _R,
    "optimizer.optimizer_factory": _X,
    "optimizer.accumulate_grad_in_fp32": _X,
    "data": _R,
    "data.seed": _X,
    "data_stages": _R,
    "general": _X,
    "model": _X,
}


def change_of(key: str) -> Change:
    """Free, recorded or fixed, for a dotted key such as `tokens.train_steps`."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        change = TABLE.get(".".join(parts[:length]))
        if change is not None:
            return change
    return Change.FIXED


def fixed_below(key: str) -> tuple[str, ...]:
    """Fixed keys inside the mapping `key`: replacing a whole section would replace them, too."""
    return tuple(row for row, change in TABLE.items() if change is Change.FIXED and row.startswith(f"{key}."))


def sort_keys(keys: tuple[str, ...]) -> dict[Change, tuple[str, ...]]:
    """The keys by what their change means."""
    return {change: tuple(key for key in keys if effective_change(key) is change) for change in Change}


def effective_change(key: str) -> Change:
    """As `change_of`, but a section that holds fixed keys is fixed as a whole."""
    return Change.FIXED if fixed_below(key) else change_of(key)
