"""Rules about the pipeline: each illegal value is refused with its key, the numbers and the nearest legal values."""

from pathlib import Path

import pytest

from trainer.config import Severity, format_problem, load
from trainer.config.check import check
from trainer.config.model import Config
from trainer.config.rules_pipeline import PIPELINE_RULES
from trainer.engine import Engine
from trainer.errors import ConfigError
from trainer.memory import topology_of
from trainer.pipeline.generators import GENERATORS, make_schedule
from trainer.pipeline.partition import placement
from trainer.pipeline.schedule import Placement
from trainer.pipeline.text import format_csv, format_text
from trainer.spec import param_specs

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"  # 4 layers
M4 = "tokens.batch_accumulation_per_replica=4"
P = "parallelism."


def found(severity: Severity, *overrides: str) -> list[str]:
    words = ("tokenizer.tokenizer_name_or_path=x", M4, *(f"{P}{override}" for override in overrides))
    return [format_problem(problem) for problem in load(TINY, overrides=words).problems if problem.severity is severity]


def config(*overrides: str) -> Config:
    loaded = load(TINY, overrides=(M4, *(f"{P}{override}" for override in overrides)))
    assert loaded.config is not None, loaded.problems
    return loaded.config


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("pp_engine=gpipe",), "pp_engine", "no such schedule (found 'gpipe'; expected one of 1f1b, afab, interleaved"),
        (("virtual_stages=2",), "virtual_stages", "1f1b is made for v = 1 stages a rank (found 2; expected 1, or pp_e"),
        (("pp_engine=zb-v", "virtual_stages=3"), "virtual_stages", "zb-v is made for v = 2 stages a rank (found 3"),
        (("pp_engine=zb-h1", "stage_placement=v"), "stage_placement", "zb-h1 places its stages as loop (found v;"),
        (("pp_engine=a/b", "stage_placement=v"), "stage_placement", "two stages a rank (found virtual_stages = 1"),
        (("pp=5",), "pp", "4 layers cannot fill 5 pipeline stages (found 5; expected at most 4)"),
        (("pp=5", "pp_engine=zb-v"), "pp", "4 layers cannot fill 10 pipeline stages (found 5; expected at most 2)"),
        (
            ("pp=2", "pp_engine=interleaved", "virtual_stages=3"),
            "virtual_stages",
            "4 layers cannot fill pp · virtual_stages = 2 · 3 = 6 pipeline stages (found 3; expected virtual_stages at "
            "most 2, or pp at most 1)",
        ),
        (("pp=2", "layers_per_stage=[4]"), "layers_per_stage", "(found [4]; expected 2 numbers (pp 2 · virtual_"),
        (("pp=2", "layers_per_stage=[2, 3]"), "layers_per_stage", "5 layers (found [2, 3]; expected a sum of num_hid"),
        (("pp=4", "layers_per_stage=[2, 0, 2, 0]"), "layers_per_stage", "stage 1 would hold nothing"),
        (("pp=2", "layers_per_stage=[5, -1]"), "layers_per_stage", "greater than or equal to 0"),
        (("stage_placement=x",), "stage_placement", "expected one of loop, v"),
        (("virtual_stages=0",), "virtual_stages", "greater than or equal to 1"),
        (("pp=100000", "pp_engine=interleaved", "virtual_stages=1000000000"), "pp", "4 layers cannot fill"),
    ],
)  # fmt: skip
def test_what_cannot_be_piped_is_one_error(overrides: tuple[str, ...], key: str, words: str) -> None:
    (shown,) = found(Severity.ERROR, *overrides)
    assert f"{P}{key}" in shown and words in shown


@pytest.mark.parametrize(
    "overrides",
    [
        ("pp=4", "pp_engine=zb-h1"),
        ("pp=2", "pp_engine=zb-v"),
        ("pp=2", "pp_engine=zb-v", "virtual_stages=2", "stage_placement=v"),
        ("pp=2", "pp_engine=interleaved", "virtual_stages=2"),
        ("pp=3", "pp_engine=interleaved", "virtual_stages=1"),
        ("pp=4", "layers_per_stage=[0, 2, 2, 0]"),
        ("virtual_stages=null", "layers_per_stage=null", "stage_placement=null"),
    ],
)  # fmt: skip
def test_what_can_be_piped_is_left_alone(overrides: tuple[str, ...]) -> None:
    assert found(Severity.ERROR, *overrides) == [] == found(Severity.WARNING, *overrides)


@pytest.mark.parametrize(("name", "idle"), [("1f1b", "60%"), ("afab", "60%"), ("interleaved", "56%"), ("zb-h1", "45%")])
def test_fewer_micro_batches_than_ranks_are_warned_of_with_the_schedules_own_bubble(name: str, idle: str) -> None:
    words = ("model.model_config.num_hidden_layers=8", "tokens.batch_accumulation_per_replica=2")
    loaded = load(TINY, overrides=(*words, f"{P}pp=4", f"{P}pp_engine={name}", "tokenizer.tokenizer_name_or_path=x"))
    (shown,) = [format_problem(p) for p in loaded.problems if p.severity is Severity.WARNING]
    assert f"2 micro-batches keep 4 pipeline ranks (parallelism.pp) idle for {idle} of each step" in shown


def test_rules_are_named_once() -> None:
    names = [rule.__name__ for rule in PIPELINE_RULES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("pp", [1, 2])
def test_the_table_and_the_schedule_agree_where_stages_live(name: str, pp: int) -> None:
    made = config(f"pp={pp}", f"pp_engine={name}")
    where = placement(made, pp)
    assert make_schedule(name, p=pp, m=3).placement == where
    specs = param_specs(made, topology_of(made))
    for spec in specs:
        assert spec.pp_ranks == tuple(dict.fromkeys(where.ranks[stage] for stage in spec.stages))
    assert {stage for spec in specs for stage in spec.stages} == set(range(where.num_stages))
    assert specs[0].stages == tuple(dict.fromkeys((0, where.num_stages - 1))) and specs[0].tie_sites == 2


def test_the_users_split_is_the_tables() -> None:
    made = config("pp=2", "pp_engine=interleaved", "layers_per_stage=[0, 1, 3, 0]")
    stages = {spec.name: spec.stages for spec in param_specs(made, topology_of(made))}
    layers = [stages[f"model.layers.{i}.input_layernorm.weight"] for i in range(4)]
    assert layers == [(1,), (2,), (2,), (2,)]
    assert stages["model.norm.weight"] == (3,) and stages["model.embed_tokens.weight"] == (0, 3)


def checked(path: Path, *overrides: str, here: bool = True) -> list[str]:
    """What `check` says of the schedule file."""
    words = [M4, f"{P}pp_engine={path}", *(f"{P}{override}" for override in overrides)]
    problems = check(TINY, overrides=words, here=here).problems
    return [format_problem(problem) for problem in problems if problem.key == f"{P}pp_engine"]


@pytest.mark.parametrize("form", [format_text, format_csv])
def test_a_good_file_is_accepted(tmp_path: Path, form: object) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(form(make_schedule("zb-v", p=2, m=4)))  # type: ignore[operator]
    assert checked(path, "pp=2", "virtual_stages=2", "stage_placement=v") == []
    where = placement(config(f"pp_engine={path}", "pp=2", "virtual_stages=2", "stage_placement=v"), 2)
    assert where == Placement.v_shape(2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
            "1 ranks, 4 micro-batches and stages on ranks 0, but the config has pp = 2",
        ),
        (
            "0F0 0B0\n1F0 1B0",
            "2 ranks, 1 micro-batches and stages on ranks 0 1, but the config has pp = 2, batch_accum",
        ),
        (format_text(make_schedule("zb-v", p=2, m=4)), "stages on ranks 0 1 1 0, but the config has pp = 2, batch_acc"),
        (format_text(make_schedule("1f1b", p=2, m=4)).replace("0B0 ", ""), "stage 0 on rank 0 has no B or I of micro"),
        ("0F0 0F1 0F2 0F3\n1F0 1F1 1F2 1F3", "has forwards only"),
        ("1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3\n0B0 0F0 0F1 0B1 0F2 0F3 0B2 0B3", "stages on ranks 1 0"),
        ("0B0 0F0 0F1 0F2 0F3 0B1 0B2 0B3\n1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3", "[0B0]"),
        ("0F0 what", "line 1: 'what' is no action"),
    ],
)
def test_a_bad_file_is_named_before_anything_starts(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    (shown,) = checked(path, "pp=2", here=False)
    assert words in shown and str(path) in shown


def test_a_file_that_is_not_here_is_unchecked_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "none.txt"
    (unseen,), (missing,) = (checked(path, here=here) for here in (False, True))
    assert "no such schedule file" in unseen and "error" not in unseen and "error" in missing


def test_the_engine_refuses_a_file_for_another_step(tmp_path: Path) -> None:
    from engine_world import solo_engine, tiny_batch, tiny_config

    path = tmp_path / "mine.txt"
    path.write_text("0F0 0F1 0B0 0B1")
    engine: Engine = solo_engine(tiny_config(pp_engine=str(path)))
    engine.backward(tiny_batch(m=2), num_valid=10)
    with pytest.raises(
        ConfigError, match="2 micro-batches and stages on ranks 0, but the config has pp = 1, batch_acc"
    ):
        engine.backward(tiny_batch(m=3), num_valid=10)
