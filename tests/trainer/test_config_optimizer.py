"""What the config says about learning rate, weight decay and batch size: read, judged, and shown where it is odd."""

from pathlib import Path

import pytest

from trainer.config import Severity, format_problem, load

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
RATE = "optimizer.learning_rate_scheduler"
DECAY = "optimizer.weight_decay_schedule"


def found(severity: Severity, *overrides: str) -> list[str]:
    loaded = load(TINY, overrides=("tokenizer.tokenizer_name_or_path=x", *overrides))
    return [format_problem(p) for p in loaded.problems if p.severity is severity]


@pytest.mark.parametrize("key", ["lr_decay_steps=5", "lr_decay_starting_step=9", "min_decay_lr=1e-5"])
def test_keys_of_a_decay_say_nothing_beside_a_constant_rate(key: str) -> None:
    plain = (f"{RATE}.lr_decay_style=constant", f"{RATE}.min_decay_lr=0", f"{RATE}.lr_decay_steps=null")
    assert found(Severity.ERROR, *plain) == found(Severity.WARNING, *plain) == []
    assert found(Severity.ERROR, *plain, f"{RATE}.{key}") == []
    (shown,) = found(Severity.WARNING, *plain, f"{RATE}.{key}")
    assert key.split("=")[0] in shown and "lr_decay_style is constant" in shown


def test_a_change_of_weight_decay_must_fit_into_the_run() -> None:
    steps = "tokens.train_steps=20"
    assert found(Severity.WARNING, steps, f"{DECAY}={{end_value: 0.2, steps: 20}}") == []
    (shown,) = found(Severity.WARNING, steps, f"{DECAY}={{end_value: 0.2, starting_step: 5, steps: 20}}")
    assert f"{DECAY}.steps" in shown and "step 25" in shown and "at most 15" in shown
    (shown,) = found(Severity.WARNING, steps, f"{DECAY}={{end_value: 0.2, starting_step: 20}}")
    assert f"{DECAY}.starting_step" in shown and "never happens" in shown


@pytest.mark.parametrize(
    "value", ["{end_value: -1}", "{end_value: 0.1, style: 1-sqrt}", "{style: linear}", "{}", "0.1"]
)
def test_a_weight_decay_schedule_that_means_nothing_is_refused(value: str) -> None:
    assert len(found(Severity.ERROR, f"{DECAY}={value}")) == 1
