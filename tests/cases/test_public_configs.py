"""Real files of real users: nanotron's and SmolLM's configs load, or say which key would change what is trained.

The files are public and no part of this repository; they are read from a folder beside it where that exists. The last
test says so where it does not.
"""

from pathlib import Path

import pytest

from trainer.config import Loaded, Severity, format_problem, load

FILES = Path(__file__).parents[3] / "shared" / "cases" / "files" / "nanotron_configs"
FOUND = sorted(FILES.glob("*.yaml")) if FILES.is_dir() else []

# What would train something else than the file says; everything else in these files is at most a warning.
CHANGES_TRAINING: dict[str, set[str]] = {
    "config_smollm1_135M.yaml": set(),
    "config_smollm2_135M.yaml": set(),
    "config_smollm2_360M.yaml": set(),
    "nanoset.yaml": set(),
    "tiny_llama.yaml": {"data_stages.0.data.dataset"},
    "mup_350m.yaml": {
        "data_stages.0.data.dataset.dataset_overwrite_cache",
        "data_stages.1.data.dataset.dataset_overwrite_cache",
    },
    "resume_training.yaml": {
        "checkpoints.load_lr_scheduler",
        "checkpoints.load_optimizer",
        "checkpoints.resume_checkpoint_path",
    },
    "qwen_with_moe.yaml": {
        "model.model_config.moe_config",
        "model.model_config.sliding_window_size",
    },
    "stage3_9T_11T.yaml": {
        "checkpoints.resume_checkpoint_path",
        "optimizer.weight_decay_exclude_named_params",
    },
}

pytestmark = pytest.mark.public_files


def shown(loaded: Loaded, severity: Severity) -> list[str]:
    return [format_problem(problem) for problem in loaded.problems if problem.severity is severity]


if FOUND:  # nothing is collected without the files, so nothing is skipped in silence

    @pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
    def test_a_real_config_loads_or_names_what_would_change_training(path: Path) -> None:
        loaded = load(path)
        errors = {problem.key for problem in loaded.problems if problem.severity is Severity.ERROR}
        assert errors == CHANGES_TRAINING[path.name], shown(loaded, Severity.ERROR)
        assert (loaded.config is None) == bool(errors)
        assert loaded.mesh is not None
        for problem in loaded.problems:
            assert problem.file == str(path) and problem.line > 0 and problem.key and problem.message

    @pytest.mark.parametrize(
        "path", [p for p in FOUND if p.name.startswith("config_smollm2")], ids=lambda path: path.name
    )
    def test_f5_real_head_counts_refuse_tp_2(path: Path) -> None:
        """F5 (SmolLM2 135M/360M)."""
        (text,) = shown(load(path, overrides=["parallelism.tp=2"]), Severity.ERROR)
        heads, kv, fits = {"135M": (9, 3, "1, 3"), "360M": (15, 5, "1, 5")}[path.stem.rsplit("_", 1)[1]]
        assert f"{heads} heads and {kv} kv heads cannot be shared out over tp = 2" in text
        assert f"tp one of {fits})" in text

    @pytest.mark.parametrize("path", [p for p in FOUND if p.name == "stage3_9T_11T.yaml"], ids=lambda path: path.name)
    def test_d4_real_weights_that_do_not_add_up_are_said_once_per_stage(path: Path) -> None:
        sums = [text for text in shown(load(path), Severity.WARNING) if "the weights add up to" in text]
        assert len(sums) == 2 and "1.00565" in sums[1]

    @pytest.mark.parametrize("path", [p for p in FOUND if p.name == "mup_350m.yaml"], ids=lambda path: path.name)
    def test_d9_a_real_stage_that_is_never_reached(path: Path) -> None:
        assert any("never reached: the last step is 440" in text for text in shown(load(path), Severity.WARNING))


def test_the_public_files_are_here_or_their_absence_is_said(pytestconfig: pytest.Config) -> None:
    """Beside a clone of this repository alone there are none; then nothing above has run, and this says so."""
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if not FOUND and reporter is not None:
        reporter.write_line(
            f"\nNOT TESTED HERE: no public configs at {FILES}; {len(CHANGES_TRAINING)} files are known."
        )
    assert not FOUND or {path.name for path in FOUND} == set(CHANGES_TRAINING)
