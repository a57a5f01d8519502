"""Learning rate and weight decay as functions of the step: landmarks, and bounds that hold for every config."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.schedules import (
    BatchSize,
    batch_size_at,
    decay_start,
    decay_steps,
    first_steps,
    lr_at,
    samples_before,
    weight_decay_at,
    weight_decay_steps,
)

STYLES = ("linear", "cosine", "1-sqrt", "constant")


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
    if style == "constant" and step > warmup:
        assert now == 1.0
    elif step >= max(warmup + 1, decay_start(config) + decay_steps(config, train_steps=train_steps)):
        assert now == floor


@dataclass(frozen=True, kw_only=True)
class Decay:
    end_value: float
    style: str = "linear"
    starting_step: int = 0
    steps: int | None = None


def test_weight_decay_without_a_schedule_is_what_the_config_says() -> None:
    assert weight_decay_at(1, 0.1, None, train_steps=5) == weight_decay_at(1_000_000, 0.1, None, train_steps=5) == 0.1


def test_weight_decay_changes_between_its_steps_alone() -> None:
    schedule = Decay(end_value=0.5, starting_step=2, steps=4)
    decays = [weight_decay_at(step, 0.1, schedule, train_steps=9) for step in range(1, 10)]
    assert decays == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5])
    assert weight_decay_at(5, 0.0, Decay(end_value=1.0, style="cosine"), train_steps=10) == pytest.approx(0.5)
    assert weight_decay_at(9, 0.3, Decay(end_value=0.0), train_steps=10) == pytest.approx(0.03)


@given(
    step=st.integers(1, 300),
    train_steps=st.integers(1, 200),
    first=st.floats(0, 1),
    end=st.floats(0, 1),
    start=st.integers(0, 150),
    length=st.none() | st.integers(0, 150),
    style=st.sampled_from(("linear", "cosine")),
)
@settings(max_examples=50, deadline=None)
def test_weight_decay_goes_one_way_from_its_first_value_to_its_last(
    step: int, train_steps: int, first: float, end: float, start: int, length: int | None, style: str
) -> None:
    schedule = Decay(end_value=end, style=style, starting_step=start, steps=length)
    now, after = (weight_decay_at(at, first, schedule, train_steps=train_steps) for at in (step, step + 1))
    low, high = min(first, end), max(first, end)
    assert low - 1e-12 <= now <= high + 1e-12
    assert (after - now) * (end - first) >= -1e-12
    if step <= start:
        assert now == first
    elif step >= start + weight_decay_steps(schedule, train_steps=train_steps):
        assert now == end


def sizes(*entries: tuple[int, int]) -> tuple[BatchSize, ...]:
    return tuple(BatchSize(from_samples=start, samples=samples) for start, samples in entries)


def test_a_ramp_changes_at_the_first_step_that_starts_late_enough() -> None:
    ramp = sizes((0, 4), (10, 8), (20, 16))
    assert [samples_before(step, ramp) for step in range(1, 8)] == [0, 4, 8, 12, 20, 36, 52]
    assert first_steps(ramp) == (1, 4, 5)
    assert [batch_size_at(consumed, ramp) for consumed in (0, 9, 10, 19, 20, 10**9)] == [4, 4, 8, 8, 16, 16]


def test_an_entry_that_a_large_step_jumps_over_has_no_step() -> None:
    ramp = sizes((0, 8), (2, 9), (3, 10))
    assert first_steps(ramp) == (1, 2, 2)
    assert [samples_before(step, ramp) for step in (1, 2, 3)] == [0, 8, 18]


@given(
    entries=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), max_size=4),
    first=st.integers(1, 20),
    step=st.integers(1, 60),
)
@settings(max_examples=50, deadline=None)
def test_the_samples_before_a_step_are_those_of_the_steps_before(
    entries: list[tuple[int, int]], first: int, step: int
) -> None:
    """The closed form is what a run adds up step by step, from whichever step it goes on."""
    ramp = sizes((0, first), *sorted({start: samples for start, samples in entries}.items()))
    consumed = 0
    for number in range(1, step + 1):
        assert samples_before(number, ramp) == consumed
        at = batch_size_at(consumed, ramp)
        assert at == next(
            s.samples for s, after in zip(ramp[::-1], first_steps(ramp)[::-1], strict=True) if number >= after
        )
        consumed += at
