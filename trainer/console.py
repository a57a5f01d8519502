"""One line per step for a person, from rank 0. Numbers for machines are in train.jsonl."""

from trainer.records import TrainLine

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def step_text(line: TrainLine, *, train_steps: int) -> str:
    """`step 12/100 | loss 5.1234 | grad norm 1.23 | lr 3.000e-04 | 1.2k tok/s | mfu 41.2 % | 0.81 s (data 0.00 s)`."""
    parts = [f"step {line.step}/{train_steps}", f"loss {_number(line.loss, '.4f')}"]
    parts += [f"grad norm {_number(line.grad_norm, '.3f')}", f"lr {line.lr:.3e}", f"{short(line.tokens_per_s)} tok/s"]
    if line.mfu is not None:
        parts.append(f"mfu {100 * line.mfu:.1f} %")
    parts.append(f"{short(line.tokens)} tokens seen")
    parts.append(f"{line.step_time_s:.3f} s (data {line.data_wait_s:.3f} s)")
    if line.save_s is not None:
        parts.append(f"checkpoint {line.save_s:.2f} s")
    if line.skipped is not None:
        parts.append(f"skipped: {line.skipped}")
    return " | ".join(parts)


def is_due(step: int, *, interval: int, train_steps: int) -> bool:
    """Whether the step is printed: the first, every `interval`-th and the last."""
    return step == 1 or step == train_steps or step % interval == 0


def short(value: float) -> str:
    """Three or four digits and a unit: 1234567 → `1.23M`."""
    for factor, unit in _UNITS:
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.4g}"


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
