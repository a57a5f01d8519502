"""What the config says about learning rate, weight decay and batch size: read, judged, and shown where it is odd."""

from pathlib import Path

import pytest

from trainer.config import Severity, format_problem, load
from trainer.config.facts import curve

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
RATE = "optimizer.learning_rate_scheduler"
DECAY = "optimizer.weight_decay_schedule"
RAMP = "tokens.batch_size_ramp"


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


def ramp(*entries: tuple[int, int]) -> str:
    shown = ", ".join(f"{{from_samples: {start}, global_batch_size: {size}}}" for start, size in entries)
    return f"{RAMP}=[{shown}]"


MESH = ("parallelism.dp=2", "tokens.micro_batch_size=3", "tokens.batch_accumulation_per_replica=4")


def test_a_legal_ramp_is_quiet_and_counts_its_samples() -> None:
    text = ramp((0, 6), (12, 12), (24, 24))
    assert found(Severity.ERROR, *MESH, text) == found(Severity.WARNING, *MESH, text) == []
    config = load(TINY, overrides=[*MESH, text, "tokens.train_steps=5"]).config
    assert config is not None and config.train_samples == 6 + 6 + 12 + 24 + 24
    plain = load(TINY, overrides=[*MESH, "tokens.train_steps=5"]).config
    assert plain is not None and plain.train_samples == 5 * 24 and plain.num_micro_batches == 4


@pytest.mark.parametrize(
    ("entries", "key", "expected"),
    [
        (((1, 6), (12, 24)), "0.from_samples", "expected 0"),
        (((0, 8), (12, 24)), "0.global_batch_size", "expected 6 or 12"),
        (((0, 5), (12, 24)), "0.global_batch_size", "expected 6"),
        (((0, 6), (12, 18)), "1.global_batch_size", "expected 24, or batch_accumulation_per_replica: 3"),
        (((0, 6), (12, 12), (12, 24)), "2.from_samples", "more than the 12"),
        (((0, 12), (12, 12), (24, 24)), "1.global_batch_size", "more than the 12"),
    ],
)
def test_an_illegal_ramp_is_refused_with_the_nearest_legal_values(
    entries: tuple[tuple[int, int], ...], key: str, expected: str
) -> None:
    (shown,) = found(Severity.ERROR, *MESH, ramp(*entries))
    assert f"{RAMP}.{key}" in shown and expected in shown


def test_an_empty_ramp_is_refused_and_one_that_is_never_reached_is_said() -> None:
    (shown,) = found(Severity.ERROR, f"{RAMP}=[]")
    assert RAMP in shown
    warnings = found(Severity.WARNING, *MESH, "tokens.train_steps=4", ramp((0, 6), (24, 24)))
    (shown,) = (text for text in warnings if RAMP in text)
    assert f"{RAMP}.1.from_samples" in shown and "24 samples in 4 steps" in shown


def test_a_ramp_has_several_numbers_of_micro_batches_and_a_schedule_file_one() -> None:
    assert found(Severity.ERROR, *MESH, ramp((0, 24)), "parallelism.pp_engine=./mine.txt") == []
    (shown,) = found(Severity.ERROR, *MESH, ramp((0, 6), (12, 24)), "parallelism.pp_engine=./mine.txt")
    assert RAMP in shown and "mine.txt" in shown


def test_the_curve_names_every_step_where_something_changes_its_course() -> None:
    rate = "{learning_rate: 1.0, lr_warmup_steps: 2, lr_decay_starting_step: 6, lr_decay_steps: 4}"
    decay = f"{DECAY}={{end_value: 0.2, starting_step: 3, steps: 5}}"
    steps = ("tokens.train_steps=12", "optimizer.weight_decay=0.1", f"{RATE}={rate}")
    config = load(TINY, overrides=[*MESH, *steps, decay, ramp((0, 6), (24, 24))]).config
    assert config is not None
    points = {point["step"]: point for point in curve(config)}
    assert sorted(points) == [1, 2, 3, 5, 6, 8, 10, 12]
    assert [points[step]["lr"] for step in sorted(points)] == [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert (points[3]["weight_decay"], points[8]["weight_decay"]) == (0.1, 0.2)
    assert (points[3]["batch_size"], points[5]["batch_size"]) == (6, 24)


def groups(*entries: str) -> str:
    return f"optimizer.groups=[{', '.join(entries)}]"


def test_groups_are_read_and_quiet_where_each_decides_about_something() -> None:
    text = groups("{match: '*norm*', weight_decay_mult: 0.5}", "{match: '*.layers.0.*', lr_mult: 0.1}")
    assert found(Severity.ERROR, text) == found(Severity.WARNING, text) == []


@pytest.mark.parametrize(
    ("match", "advice"),
    [
        ("*.norms", "did you mean '*norm*'?"),
        ("model.layers.0.self_attn.q_prj.weight", "did you mean 'model.layers.0.self_attn.q_proj.weight'?"),
        ("model.decoder.*", "a pattern for some of model.embed_tokens.weight, model.layers.*.input_layernorm.weight"),
        ("*bias*", "model.layers.*.self_attn.q_proj.weight"),
    ],
)
def test_a_pattern_that_fits_nothing_names_near_ones(match: str, advice: str) -> None:
    (shown,) = found(Severity.ERROR, groups("{match: '*norm*'}", f"{{match: '{match}'}}"))
    assert "optimizer.groups.1.match" in shown and match in shown and advice in shown


def test_a_pattern_whose_parameters_are_all_taken_and_a_tied_head_are_named_as_such() -> None:
    (shown,) = found(Severity.ERROR, groups("{match: '*norm*'}", "{match: '*input_layernorm*', lr_mult: 2}"))
    assert "earlier groups take all" in shown
    for tied in (True, False):
        overrides = (groups("{match: 'lm_head*'}"), f"model.model_config.tie_word_embeddings={str(tied).lower()}")
        shown_all = found(Severity.ERROR, *overrides)
        assert len(shown_all) == tied and all("model.embed_tokens.weight" in text for text in shown_all)


@pytest.mark.parametrize(
    "entry", ["{}", "{match: ''}", "{match: '*', lr_mult: -1}", "{match: '*', weight_decay: 0}", "'*norm*'"]
)
def test_a_group_that_means_nothing_is_refused(entry: str) -> None:
    assert len(found(Severity.ERROR, groups(entry))) == 1
