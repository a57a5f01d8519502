"""What a person sees of a step, and when; and the rates behind it."""

import math

import pytest
from record_factory import line

from trainer.console import is_due, short, short_names, step_text, validation_text
from trainer.records import SourceLoss, ValidationLine
from trainer.throughput import StepCost, rates


def test_a_step_in_one_line() -> None:
    text = step_text(line(step=12, loss=5.12345, grad_norm=1.5, mfu=0.4123, save_s=1.234), train_steps=100)
    assert text == (
        "step 12/100 | loss 5.1235 | grad norm 1.500 | lr 3.000e-04 | 2.05k tok/s | mfu 41.2 % | 1.02k tokens seen | "
        "0.500 s (data 0.000 s) | checkpoint 1.23 s"
    )


def test_a_validation_in_one_line_names_its_sources_where_there_are_several() -> None:
    books = SourceLoss(source="data/books", loss=3.1, num_valid=8, num_samples=1)
    empty = SourceLoss(source="data/code", loss=math.nan, num_valid=0, num_samples=0)
    one = ValidationLine(step=9, loss=3.1, num_valid=8, num_samples=1, sources=(books,), unix=1.0)
    assert validation_text(one) == "validation after step 9: loss 3.1000 over 8 tokens"
    both = ValidationLine(step=9, loss=3.1, num_valid=8, num_samples=1, sources=(books, empty), unix=1.0)
    assert validation_text(both).endswith("over 8 tokens (books 3.1000, code –)")


def test_short_names_tell_paths_apart() -> None:
    assert short_names(["a/x", "b/y/"]) == ["x", "y"]
    assert short_names(["a/x", "b/x", "c/y"]) == ["a/x", "b/x", "c/y"]
    assert short_names(["a/x", "a/x"]) == ["a/x", "a/x"] and short_names(["/"]) == ["/"]


def test_what_is_unknown_is_not_shown_as_zero() -> None:
    text = step_text(line(loss=None, grad_norm=None, skipped="skip_window"), train_steps=9)
    assert "loss – | grad norm –" in text
    assert "mfu" not in text
    assert text.endswith("skipped: skip_window")


def test_first_last_and_every_interval_are_printed() -> None:
    assert [step for step in range(1, 13) if is_due(step, interval=5, train_steps=12)] == [1, 5, 10, 12]


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (999, "999"), (1234, "1.23k"), (2.5e6, "2.5M"), (3e12, "3T")])
def test_short(value: float, text: str) -> None:
    assert short(value) == text


def test_rates() -> None:
    cost = StepCost(
        tokens=1000,
        samples=10,
        flops=1e12,
        flops_full_attn=1.2e12,
        flops_megatron=1.1e12,
        flops_hardware=1.3e12,
        peak_flops_per_s=1e13,
    )
    rate = rates(cost, 0.5)
    assert rate.tokens_per_s == 2000.0
    assert (rate.mfu, rate.mfu_full_attn, rate.mfu_megatron, rate.hfu) == pytest.approx((0.2, 0.24, 0.22, 0.26))
