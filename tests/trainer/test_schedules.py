"""Learning rate as a function of the step: landmarks, bounds, and independence from where a run was interrupted."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.schedules import decay_start, decay_steps, lr_at, weight_decay_at

STYLES = ("linear", "cosine", "1-sqrt")


@dataclass(frozen=True, kw_only=True)
class Lr:
    learning_rate: float = 1.0
    lr_warmup_steps: int = 0
    lr_warmup_style: str = "linear"
    lr_decay_style: str = "linear"
    lr_decay_steps: int | None = None
    lr_decay_starting_step: int | None = None
    min_decay_lr: float = 0.0


def test_warm_up_moves_from_the_first_update_and_reaches_the_peak() -> None:
    config = Lr(lr_warmup_steps=4)
    assert [lr_at(step, config, train_steps=8) for step in range(1, 9)] == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_constant_warm_up_is_the_peak() -> None:
    assert lr_at(1, Lr(lr_warmup_steps=4, lr_warmup_style="constant"), train_steps=8) == 1.0


def test_warm_up_stable_decay_floor() -> None:
    config = Lr(lr_warmup_steps=2, lr_decay_starting_step=6, lr_decay_steps=4, min_decay_lr=0.2)
    rates = [lr_at(step, config, train_steps=20) for step in range(1, 13)]
    assert rates[:6] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates[6:10] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates[10:] == [0.2, 0.2]


def test_cosine_and_square_root_at_their_middle() -> None:
    assert lr_at(50, Lr(lr_decay_style="cosine"), train_steps=100) == pytest.approx(0.5)
    assert lr_at(25, Lr(lr_decay_style="1-sqrt"), train_steps=100) == pytest.approx(0.5)


def test_a_decay_longer_than_the_run_does_not_reach_the_floor() -> None:
    """The seed's numbers: warm-up 2,000 and decay 100,000 end at 102,000 of 100,000 steps."""
    config = Lr(lr_warmup_steps=2_000, lr_decay_steps=100_000)
    assert lr_at(100_000, config, train_steps=100_000) == pytest.approx(0.02)


def test_unknown_style_is_an_error() -> None:
    with pytest.raises(ValueError, match="'sawtooth'"):
        lr_at(5, Lr(lr_decay_style="sawtooth"), train_steps=10)


@given(
    step=st.integers(1, 300),
    train_steps=st.integers(1, 200),
    warmup=st.integers(0, 50),
    start=st.none() | st.integers(0, 150),
    length=st.none() | st.integers(0, 150),
    style=st.sampled_from(STYLES),
    floor=st.floats(0, 0.5),
)
@settings(max_examples=50, deadline=None)
def test_always_between_zero_and_peak_and_never_rising_after_warm_up(
    step: int, train_steps: int, warmup: int, start: int | None, length: int | None, style: str, floor: float
) -> None:
    config = Lr(
        lr_warmup_steps=warmup,
        lr_decay_starting_step=start,
        lr_decay_steps=length,
        lr_decay_style=style,
        min_decay_lr=floor,
    )
    now, after = (lr_at(at, config, train_steps=train_steps) for at in (step, step + 1))
    assert 0.0 <= now <= 1.0
    if step > warmup:
        assert now >= floor - 1e-12
        assert after <= now + 1e-12
    if step >= max(warmup + 1, decay_start(config) + decay_steps(config, train_steps=train_steps)):
        assert now == floor


def test_weight_decay_is_what_the_config_says() -> None:
    assert weight_decay_at(1, 0.1) == weight_decay_at(1_000_000, 0.1) == 0.1
