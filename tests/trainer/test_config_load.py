"""Layers, overrides, paths, all problems at once, origins: what a person meets when a config is read."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config import Config, Loaded, Severity, format_problem, load, load_config
from trainer.config.check import as_json, check
from trainer.config.facts import config_digest, launch_facts
from trainer.config.tree import to_plain, to_yaml
from trainer.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = CONFIGS / "tiny.yaml"


def errors(loaded: Loaded) -> list[tuple[str, int, str]]:
    return [(p.file, p.line, p.key) for p in loaded.problems if p.severity is Severity.ERROR]


def loaded_config(path: Path = TINY, *overrides: str) -> Config:
    loaded = load(path, overrides=overrides)
    assert loaded.config is not None, [format_problem(p) for p in loaded.problems]
    return loaded.config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_of_the_repository_loads(path: Path) -> None:
    loaded = load(path)
    assert loaded.ok and loaded.config is not None
    assert loaded.mesh is not None and loaded.mesh["world_size"] == loaded.config.world_size


def test_the_seed_config_has_the_documented_defaults_and_one_warning_about_its_rate() -> None:
    loaded = load(CONFIGS / "seed-1.7b.yaml")
    config = loaded.config
    assert config is not None
    rate = config.optimizer.learning_rate_scheduler
    assert (config.checkpoints.checkpoint_interval, rate.lr_decay_style, config.optimizer.clip_grad) == (
        1000,
        "linear",
        1.0,
    )
    assert (config.compute_dtype, config.general.step, config.world_size) == ("bfloat16", 0, 64)
    assert [(p.key.split(".")[-1], p.severity.value) for p in loaded.problems] == [
        ("tokenizer", "warning"),
        ("lr_decay_steps", "warning"),
    ]
    assert "102,000" in loaded.problems[1].message and "0.000354" in loaded.problems[1].message


def test_five_mistakes_give_five_messages(tmp_path: Path) -> None:
    text = TINY.read_text()
    for right, wrong in (
        ("learning_rate: 1e-3", "learing_rate: 1e-3"),
        ("train_steps: 20", "train_steps: many"),
        ("zero_stage: 1", "zero_stage: 3"),
        ("  tp: 1", "  tp: 3"),
        ("hidden_size: 64", "hidden_size: 64\n    hidden_act: relu"),
    ):
        assert right in text
        text = text.replace(right, wrong, 1)
    path = tmp_path / "run.yaml"
    path.write_text(text)
    loaded = load(path)
    assert loaded.config is None
    lines = text.splitlines()
    found = errors(loaded)
    assert [key.split(".")[-1] for _, _, key in found] == [
        *("tp", "hidden_act", "learing_rate", "zero_stage", "train_steps")
    ]
    for file, line, key in found:
        assert file == str(path)
        assert key.split(".")[-1] in lines[line - 1]
    shown = "\n".join(format_problem(problem) for problem in loaded.problems)
    assert "did you mean 'learning_rate'?" in shown and "ZeRO-3 is not offered" in shown and "tp one of 1, 2" in shown


def test_a_wrong_file_says_one_thing_only(tmp_path: Path) -> None:
    """An unreadable text is one problem, not one and a list of missing sections."""
    for name, data in (
        ("run.sh", b"#!/bin/sh\nsrun x\n"),
        ("empty", b""),
        ("bin", b"\x00\x01"),
        ("tab", b"a:\n\tb: 1\n"),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        assert len(load(path).problems) == 1
    (missing,) = load(tmp_path / "none.yaml").problems
    assert "cannot be read" in missing.message


def test_defaults_that_follow_a_wrong_key_are_no_mistakes_of_their_own(tmp_path: Path) -> None:
    """head_dim and num_key_value_heads follow from other keys; only the other key is wrong."""
    lines = [line for line in TINY.read_text().splitlines() if "num_key_value_heads" not in line]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(lines).replace("intermediate_size:", "intermediate_sizes:"))
    assert [key for _, _, key in errors(load(path))] == ["model.model_config.intermediate_sizes"]


def test_sections_that_are_missing_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("general:\n  project: p\n  run: r\n")
    assert {key for _, _, key in errors(load(path))} == {"parallelism", "model", "optimizer", "tokens", "data"}


def test_a_typo_in_a_section_name_is_told_from_its_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TINY.read_text() + "slrum:\n  time: 1:00\nrecovry: {}\n")
    shown = [format_problem(p) for p in load(path).problems if p.severity is Severity.ERROR]
    assert "did you mean 'slurm'?" in shown[0] and "did you mean 'recovery'?" in shown[1] and len(shown) == 2


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.learning_rate_scheduler.min_decay_lr=3E-5", 3e-5),
        ("optimizer.learning_rate_scheduler.learning_rate=.1", 0.1),
        ("optimizer.weight_decay=1.e-8", 1e-8),
        ("optimizer.clip_grad=null", None),
        ("optimizer.clip_grad=", None),
        ("optimizer.clip_grad=1", 1.0),
        ("model.model_config.tie_word_embeddings=no", False),
        ("data.dataset.dataset_folder=[a, b=c]", ["a", "b=c"]),
        ("data.dataset.dataset_folder.0=x", ["x"]),
        ("general.project='1e-4'", "1e-4"),
        ("general.project=1e-4", "1e-4"),
        ("tokenizer.tokenizer_name_or_path=x", "x"),
    ],
)
def test_overrides_replace_one_value(override: str, value: object) -> None:
    data: Any = as_json(check(TINY, overrides=[override]))["config"]
    for part in override.split("=")[0].removesuffix(".0").split("."):
        data = data[part]
    assert data == value


@pytest.mark.parametrize(
    "override",
    [
        *["tokens", "=3", "a..b=1", "tokens.train_steps.x=1", "data.dataset.dataset_folder.7=x", "tokens.trainsteps=3"],
        *["tokens.train_steps=[", "tokens.train_steps=!!int 3", "nonsense=1"],
    ],
)
def test_a_wrong_override_is_shown_with_its_text(override: str) -> None:
    loaded = load(TINY, overrides=[override])
    assert loaded.config is None
    assert all(p.file == f"--set {override}" for p in loaded.problems if p.severity is Severity.ERROR)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text("runs_root: /r\npaths:\n  data: /scratch/d\nslurm:\n  account: 007\n  time: 12:30:00\n  qos: low\n")
    return path


@pytest.mark.parametrize("text", ["0", "off", "false", "[]"])
@pytest.mark.parametrize("key", ["parallelism.replica_check_interval", "logging.grad_norms_interval"])
def test_a_key_that_null_turns_off_says_so(key: str, text: str) -> None:
    (problem,) = [p for p in load(TINY, overrides=[f"{key}={text}"]).problems if p.key == key]
    assert problem.expected is not None and problem.expected.endswith("or null")


def test_site_lies_under_the_config_and_set_over_it(tmp_path: Path, site: Path) -> None:
    path = tmp_path / "run.yaml"
    text = TINY.read_text().replace("- data/tiny", "- ${paths.data}/tiny")
    path.write_text(text + "slurm:\n  qos: high\n  partition: gpu\n")
    loaded = load(path, site=site, overrides=["slurm.partition=debug"])
    assert loaded.config is not None
    assert loaded.config.stages[0].data.dataset.dataset_folder == ["/scratch/d/tiny"]
    slurm = {key: (node["text"], node["file"]) for key, node in loaded.foreign["slurm"]["map"].items()}
    assert slurm == {
        "account": ("007", str(site)),
        "time": ("12:30:00", str(site)),
        "qos": ("high", str(path)),
        "partition": ("debug", "--set slurm.partition=debug"),
    }
    plain = to_plain(loaded.merged)
    assert "paths" not in plain and "runs_root" not in plain and plain["slurm"]["time"] == "12:30:00"


def test_an_unknown_path_or_site_key_is_an_error_with_the_known_ones(tmp_path: Path, site: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TINY.read_text().replace("- data/tiny", "- ${paths.dta}/tiny"))
    (problem,) = [p for p in load(path, site=site).problems if p.severity is Severity.ERROR]
    assert problem.expected == "did you mean 'data'?" and problem.key == "data.dataset.dataset_folder.0"
    (without,) = [p for p in load(path).problems if p.severity is Severity.ERROR]
    assert "site file" in str(without.expected)
    site.write_text("run_root: /x\ngeneral: {seed: 1}\n")
    keys = [p.key for p in load(TINY, site=site).problems if p.severity is Severity.ERROR]
    assert keys == ["run_root", "general"]


def test_other_dollar_signs_are_left_alone(tmp_path: Path) -> None:
    loaded = load(TINY, overrides=["slurm.env.A=${HOME}/$(id) `x`", "general.project=${oc.env:HOME}"])
    assert loaded.foreign["slurm"]["map"]["env"]["map"]["A"]["text"] == "${HOME}/$(id) `x`"
    assert loaded.config is not None and loaded.config.general.project == "${oc.env:HOME}"


def test_the_frozen_text_means_the_same_run(tmp_path: Path, site: Path) -> None:
    """run.yaml is written from the merged tree and must load to equal values without site and overrides."""
    overrides = ["optimizer.learning_rate_scheduler.learning_rate=1.e-3", "general.run=v1", "slurm.job_name='007'"]
    first = load(CONFIGS / "demo.yaml", site=site, overrides=overrides)
    frozen = tmp_path / "run.yaml"
    frozen.write_text(to_yaml(first.merged))
    again = load(frozen)
    assert first.config == again.config and first.config is not None
    assert without_marks(first.foreign) == without_marks(again.foreign)


def without_marks(data: Any) -> Any:
    """A foreign section without file and line."""
    if isinstance(data, dict):
        return {key: without_marks(value) for key, value in data.items() if key not in ("file", "line")}
    return [without_marks(item) for item in data] if isinstance(data, list) else data


def test_every_value_says_where_it_comes_from() -> None:
    origins = as_json(check(TINY, overrides=["parallelism.pp=2"]))["origins"]
    assert origins["parallelism.pp"] == "--set parallelism.pp=2"
    assert origins["tokens.train_steps"] == f"{TINY}:34"
    assert origins["data.dataset.dataset_folder.0"].startswith(f"{TINY}:")
    assert origins["optimizer.optimizer_factory.adam_beta2"] == "default"


def test_what_follows_from_the_config() -> None:
    config = loaded_config(CONFIGS / "seed-1.7b.yaml")
    facts = launch_facts(config)
    assert (facts["world_size"], facts["samples_per_step"], facts["tokens_per_step"]) == (64, 64, 262_144)
    assert facts["num_params"] == 1_560_381_440 and facts["checkpoint_bytes"] == 12 * facts["num_params"]
    assert (config.num_micro_batches, config.data_seed, config.stages[0].start_training_step) == (4, 42, 1)


def test_the_digest_is_about_meaning_not_spelling() -> None:
    same = loaded_config(TINY, "optimizer.weight_decay=1.0e-2", "parallelism.cp=1")
    assert config_digest(same) == config_digest(loaded_config())
    assert config_digest(loaded_config(TINY, "general.seed=43")) != config_digest(loaded_config())


def test_load_config_raises_one_error_that_lists_all() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(CONFIGS / "nothing.yaml")
    assert raised.value.exit_code == 78 and "nothing.yaml" in str(raised.value)


def run_check(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer", "check", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


def test_the_command_exits_with_2_and_writes_nothing(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun train.py\n")
    done = run_check("job.sh", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == "" and "Traceback" not in done.stdout
    assert done.stdout.splitlines()[0].startswith("job.sh:1: error: this is a script")
    assert list(tmp_path.iterdir()) == [script]


def test_the_command_prints_one_json_document() -> None:
    done = run_check("--json", "--set=parallelism.dp=2", "--", str(TINY))
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["ok"] and answer["schema_version"] == 1
    assert answer["mesh"] == {"dp": 2, "pp": 1, "tp": 1, "cp": 1, "world_size": 2}
    assert answer["facts"]["world_size"] == 2 and answer["config"]["parallelism"]["dp"] == 2


@pytest.mark.parametrize(
    ("value", "key", "expected"),
    [
        ("[-1]", "profiler.ranks.0", "greater than or equal to 0"),
        ("[0,-2]", "profiler.ranks.1", "greater than or equal to 0"),
        ("[x]", "profiler.ranks.0", "a whole number"),
        ("[x,-2]", "profiler.ranks.0", "a whole number"),
        ("0", "profiler.ranks", "one of all, or a list"),
        ("ALL", "profiler.ranks", "all (upper and lower case matter), or a list"),
    ],
)
def test_a_list_or_a_word_that_is_neither_is_an_error_at_a_key_of_the_file(value: str, key: str, expected: str) -> None:
    problems = load(TINY, overrides=(f"profiler.ranks={value}",)).problems
    found = [(problem.key, problem.expected) for problem in problems if problem.severity is Severity.ERROR]
    assert found[:1] == [(key, expected)] and all(re.fullmatch(r"[a-z_.0-9]+", key) for key, _ in found)
