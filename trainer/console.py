"""One line per step for a person, from rank 0. Numbers for machines are in train.jsonl."""

import math
from collections.abc import Sequence

from trainer.records import TrainLine, ValidationLine

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


def validation_text(line: ValidationLine) -> str:
    """`validation after step 100: loss 3.2100 over 4096 tokens (books 3.1000, code 3.3000)`."""
    text = f"validation after step {line.step}: loss {_number(line.loss, '.4f')} over {line.num_valid} tokens"
    if len(line.sources) > 1:
        names = short_names([each.source for each in line.sources])
        losses = [_number(each.loss, ".4f") for each in line.sources]
        text += f" ({', '.join(f'{name} {loss}' for name, loss in zip(names, losses, strict=True))})"
    return text


def short_names(paths: Sequence[str]) -> list[str]:
    """The shortest tails of the paths, in whole parts, that tell them apart."""
    parts = [[part for part in path.split("/") if part] or [path] for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        tails = ["/".join(part[-length:]) for part in parts]
        if len(set(tails)) == len(tails):
            return tails
    return list(paths)


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
    return "–" if value is None or math.isnan(value) else format(value, spec)
