"""sbatch through the client: what it is given (S17), what it answers (S13), what a failure is called."""

import sys
from pathlib import Path

import pytest
import slurm_stubs as stubs

from orchestrator.errors import PawlError, SlurmUnreachable
from orchestrator.slurm.client import CliSlurm, SubmitRefused, SubmitUnclear
from orchestrator.slurm.environment import scrub_environment
from orchestrator.slurm.text import JobRef


def client(bin_dir: Path, *, timeout_s: float = 30, **environ: str) -> CliSlurm:
    return CliSlurm(timeout_s=timeout_s, environ={"PATH": str(bin_dir), **environ})


def stub(tmp_path: Path, body: str) -> Path:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "sbatch").write_text(f"#!{sys.executable} -I\nimport sys, time\n{body}\n")
    (bin_dir / "sbatch").chmod(0o700)
    return bin_dir


def test_the_name_in_the_script_is_the_name_slurm_gets(tmp_path: Path) -> None:
    """S17 (srunx#229)."""
    bin_dir = stubs.install(tmp_path)
    script = tmp_path / "it's a job.sbatch"
    script.write_text("#!/bin/bash -l\n#SBATCH --job-name=mine\nid\n#SBATCH --job-name=late\n")
    slurm = client(bin_dir, SBATCH_JOB_NAME="theirs", SBATCH_PARTITION="p", SLURM_JOB_ID="7", SLURM_CONF="/etc/s.conf")
    assert slurm.submit(script) == JobRef(job_id=4711)
    seen = stubs.saw(tmp_path, "sbatch")
    assert seen["directives"] == ["--job-name=mine"]
    assert seen["argv"] == ["--parsable", str(script)]
    assert seen["environ"] == {"SLURM_CONF": "/etc/s.conf"}


def test_outer_job_and_rendezvous_do_not_leak() -> None:
    """S8 (pytorch-lightning#20391)."""
    leaked = ["SLURM_JOB_ID", "SBATCH_QOS", "SRUN_CPUS_PER_TASK", "PMIX_RANK", "MASTER_ADDR", "RANK", "PAWL_NONCE"]
    kept = {"HOME": "/", "PATH": "/bin", "SLURM_CONF": "c", "SLURM_JWT": "j", "http_proxy": "p", "RANKING": "1"}
    assert scrub_environment({**dict.fromkeys(leaked, "x"), **kept}) == kept


def test_id_and_cluster(tmp_path: Path) -> None:
    """S13 (snakemake-executor-plugin-slurm#121)."""
    bin_dir = stub(tmp_path, "print('Quota 42% used'); print('75168975;clusterx'); print('1 2', file=sys.stderr)")
    assert client(bin_dir).submit(tmp_path) == JobRef(job_id=75168975, cluster="clusterx")


def test_no_sbatch_names_the_local_launcher(tmp_path: Path) -> None:
    with pytest.raises(SlurmUnreachable, match="--launcher local") as error:
        client(tmp_path).submit(tmp_path / "job.sbatch")
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    ("said", "code", "kind"),
    [
        ("sbatch: error: invalid partition specified: nope", 1, SubmitRefused),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 1,
         SlurmUnreachable),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 1, SubmitUnclear),
        ("7787233", 1, SubmitRefused),
    ],
)  # fmt: skip
def test_failures_keep_slurms_words(said: str, code: int, kind: type[PawlError], tmp_path: Path) -> None:
    bin_dir = stub(tmp_path, f"print({said!r}, file=sys.stderr); sys.exit({code})")
    with pytest.raises(kind) as error:
        client(bin_dir).submit(tmp_path)
    assert type(error.value) is kind and said in str(error.value)


@pytest.mark.parametrize("body", ["pass", "print('12 34', file=sys.stdout)", "print('4711', file=sys.stderr)"])
def test_success_without_a_job_id_is_unclear(body: str, tmp_path: Path) -> None:
    """S13 (snakemake-executor-plugin-slurm#121)."""
    with pytest.raises(SubmitUnclear, match="nonce"):
        client(stub(tmp_path, body)).submit(tmp_path)


def test_no_answer_in_time_is_unclear(tmp_path: Path) -> None:
    """S13 (snakemake-executor-plugin-slurm#121)."""
    with pytest.raises(SubmitUnclear, match="did not answer"):
        client(stub(tmp_path, "time.sleep(60)"), timeout_s=0.5).submit(tmp_path)
