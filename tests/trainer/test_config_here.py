"""What depends on this machine: unchecked on a laptop, an error where it is required, an error where it contradicts."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from token_folders import write_folder

from trainer.config import Problem, Severity
from trainer.config.check import Checked, as_text, check
from trainer.config.here import LocalGpu, local_gpus, parse_gpus, tokenizer_size
from trainer.pipeline.generators import make_schedule
from trainer.pipeline.text import format_csv

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = CONFIGS / "tiny.yaml"
H200 = LocalGpu(name="NVIDIA H200", total_bytes=143_771 << 20, free_bytes=143_000 << 20)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.config.check.local_gpus", lambda: ())


def about(checked: Checked, key: str) -> list[Problem]:
    return [problem for problem in checked.problems if problem.key.startswith(key)]


def folder_override(path: Path) -> str:
    return f"data.dataset.dataset_folder=['{path}']"


def test_unseen_folders_are_unchecked_and_required_with_here(tmp_path: Path) -> None:
    override = folder_override(tmp_path / "none")
    laptop, cluster = (check(TINY, overrides=[override], here=here) for here in (False, True))
    assert laptop.ok and not cluster.ok
    assert [p.severity for p in about(laptop, "data")] == [Severity.UNCHECKED]
    assert [p.severity for p in about(cluster, "data")] == [Severity.ERROR]
    text = list(as_text(laptop, show=False))
    start = text.index("not checked on this machine (--here demands it):")
    assert "data.dataset.dataset_folder.0: no such folder" in text[start + 1]


def test_a_folder_that_fits_is_silent(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "d", [[1, 2, 0]], vocab_size=256)
    assert about(check(TINY, overrides=[folder_override(folder)], here=True), "data") == []


@pytest.mark.parametrize("here", [False, True])
def test_a_folder_that_contradicts_is_an_error_anywhere(tmp_path: Path, here: bool) -> None:
    folder = write_folder(tmp_path / "d", [[1, 2, 0]], vocab_size=257)
    (problem,) = about(check(TINY, overrides=[folder_override(folder)], here=here), "data")
    assert problem.severity is Severity.ERROR and "257 entries" in problem.message
    (tmp_path / "d" / "metadata.json").write_text("{")
    (problem,) = about(check(TINY, overrides=[folder_override(folder)], here=here), "data")
    assert "cannot be read as JSON" in problem.message


def test_held_out_folders_are_looked_at_too(tmp_path: Path) -> None:
    overrides = [folder_override(write_folder(tmp_path / "d", [[1, 0]])), "data.validation.dataset_folder=[nowhere]"]
    (problem,) = about(check(TINY, overrides=overrides, here=True), "data")
    assert problem.key == "data.validation.dataset_folder.0"


def write_tokenizer(folder: Path, vocab: object, added: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    return folder


@pytest.mark.parametrize(
    ("vocab", "added", "size"),
    [
        ({"a": 0, "b": 6}, None, 7),
        ({"a": 0}, [{"id": 9}], 10),
        ([["a", 0.0], ["b", 0.0]], [], 2),
        ({}, [], None),
        ("text", None, 4),
        (3, None, None),
    ],
)
def test_the_size_of_a_tokenizer_counts_added_tokens(tmp_path: Path, vocab: object, added: object, size: int) -> None:
    assert tokenizer_size(write_tokenizer(tmp_path / "t", vocab, added) / "tokenizer.json") == size


def test_tokenizers_are_judged(tmp_path: Path) -> None:
    def problems(name: object, here: bool = True) -> list[Problem]:
        return about(check(TINY, overrides=[f"tokenizer.tokenizer_name_or_path={name}"], here=here), "tokenizer")

    assert problems(write_tokenizer(tmp_path / "good", {"a": 255})) == []
    (large,) = problems(write_tokenizer(tmp_path / "large", {"a": 256}), here=False)
    assert large.severity is Severity.ERROR and "257 entries" in large.message
    (tmp_path / "none").mkdir()
    assert "no tokenizer.json" in problems(tmp_path / "none")[0].message
    assert [p.severity for p in problems("HuggingFaceTB/SmolLM2-135M")] == [Severity.WARNING]
    assert [p.severity for p in problems("/data/nothing")] == [Severity.ERROR]
    assert [p.severity for p in problems("/data/nothing", here=False)] == [Severity.UNCHECKED]


def test_fit_by_the_gpu_that_is_asked_for() -> None:
    fine = check(CONFIGS / "smollm-135m.yaml", overrides=["slurm.gpu_type=h100"])
    assert fine.fit is not None and fine.fit.fits and fine.fit.gpu == "H100"
    assert about(fine, "tokens.micro_batch_size") == []
    best = fine.fit.largest_micro_batch
    assert best is not None and best > 8
    more = check(CONFIGS / "smollm-135m.yaml", overrides=["slurm.gpu_type=h100", f"tokens.micro_batch_size={best + 1}"])
    (problem,) = about(more, "tokens.micro_batch_size")
    assert problem.severity is Severity.WARNING and f"at most {best}" in str(problem.expected)


@pytest.mark.parametrize("gpu", ["rtx4090", "l4", "a10"])
def test_a_laptop_of_24_gb_is_told_which_micro_batch_fits(gpu: str) -> None:
    """The file as it is fits; twice the largest is a warning that names the largest."""
    asked = f"slurm.gpu_type={gpu}"
    fine = check(CONFIGS / "smollm-135m.yaml", overrides=[asked])
    assert (
        fine.fit is not None and fine.fit.fits and any(line.startswith("fits ") for line in as_text(fine, show=False))
    )
    best = fine.fit.largest_micro_batch
    assert best is not None and 8 <= best < 32
    more = check(CONFIGS / "smollm-135m.yaml", overrides=[asked, f"tokens.micro_batch_size={2 * best}"])
    (problem,) = about(more, "tokens.micro_batch_size")
    assert more.fit is not None and not more.fit.fits and f"at most {best}" in str(problem.expected)


def test_fit_by_the_gpu_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = LocalGpu(name="NVIDIA H200", total_bytes=H200.total_bytes, free_bytes=2 << 30)
    monkeypatch.setattr("trainer.config.check.local_gpus", lambda: (H200, busy))
    found = check(CONFIGS / "smollm-135m.yaml")
    assert found.fit is not None and not found.fit.fits and found.fit.largest_micro_batch is None
    (problem,) = about(found, "tokens.micro_batch_size")
    assert "NVIDIA H200" in problem.message and "not even a micro_batch_size of 1" in str(problem.expected)
    monkeypatch.setattr("trainer.config.check.local_gpus", lambda: (H200,))
    free = check(CONFIGS / "smollm-135m.yaml")
    assert free.fit is not None and free.fit.fits
    assert any(line.startswith("fits        one NVIDIA H200") for line in as_text(free, show=False))


def test_no_gpu_known_is_said_unless_none_is_asked_for() -> None:
    (problem,) = about(check(TINY), "tokens.micro_batch_size")
    assert problem.severity is Severity.UNCHECKED and check(TINY).fit is None
    assert about(check(TINY, overrides=["slurm.gpu_request=none"]), "tokens.micro_batch_size") == []
    (unknown,) = about(check(TINY, overrides=["slurm.gpu_type=z9000"]), "tokens.micro_batch_size")
    assert "'z9000' is not in the table" in unknown.message


def test_memory_is_estimated_for_the_schedule_in_the_file(tmp_path: Path) -> None:
    """As for the named schedule it is; for what it may hold at most where it cannot be read."""
    file = tmp_path / "mine.csv"
    file.write_text(format_csv(make_schedule("1f1b", p=2, m=6)))
    base = ["parallelism.pp=2", "tokens.batch_accumulation_per_replica=6"]

    def memory(engine: str) -> dict[str, Any]:
        facts = check(TINY, overrides=[*base, f"parallelism.pp_engine={engine}"]).facts
        assert facts is not None
        found: dict[str, Any] = facts["memory_per_rank_bytes"]
        return found

    assert memory(str(file)) == memory("1f1b")
    assert memory("./missing.csv") == memory("afab") and memory("afab")["activations"] > memory("1f1b")["activations"]


def test_memory_is_estimated_for_the_machine_that_is_asked_for() -> None:
    """A CPU's kernels keep more; and the fullest rank is named where there are several."""
    cpu, gpu = (check(TINY, overrides=more) for more in (["slurm.gpu_request=none"], []))
    assert cpu.facts is not None and gpu.facts is not None
    assert cpu.facts["memory_per_rank_bytes"]["activations"] > gpu.facts["memory_per_rank_bytes"]["activations"]
    two = check(TINY, overrides=["parallelism.pp=2", "model.model_config.vocab_size=100000"])
    assert any("on the fullest rank, pipeline rank 1 with stage 1 (" in line for line in as_text(two, show=False))


@pytest.mark.parametrize(
    ("overrides", "here", "severity"),
    [
        (["slurm.gpu_request=none"], True, Severity.ERROR),
        (["slurm.gpu_request=none"], False, Severity.UNCHECKED),
        ([], True, Severity.UNCHECKED),  # GPUs where it will run
    ],
)
def test_compiling_for_a_cpu_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], here: bool, severity: Severity
) -> None:
    compiles = [*overrides, "model.compile=block"]
    assert about(check(TINY, overrides=compiles, here=here), "model.compile") == []
    monkeypatch.setenv("CXX", "no-such-compiler")
    (problem,) = about(check(TINY, overrides=compiles, here=here), "model.compile")
    assert problem.severity is severity and "no-such-compiler" in problem.message and "g++" in problem.message
    assert about(check(TINY, overrides=overrides, here=here), "model.compile") == []


def test_lines_of_nvidia_smi() -> None:
    text = "NVIDIA H200, 143771, 143000\nbroken line\nNVIDIA X, [N/A], 5\n"
    assert parse_gpus(text) == (H200,)


@pytest.mark.parametrize(
    ("script", "count"),
    [("echo 'NVIDIA H200, 143771, 143000'", 1), ("echo no devices; exit 9", 0), ("exec sleep 30", 0)],
)
def test_the_driver_may_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, count: int) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("trainer.config.here.SMI_TIMEOUT_S", 0.5)
    assert len(local_gpus()) == count


def test_no_driver_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_gpus() == ()
