"""sbatch replies and host lists as seen in public reports (cases S13, J8), and text that must not be believed (X1)."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.slurm.text import HostlistError, JobRef, expand_hostlist, parse_sbatch_reply, unique_hosts

FIXTURES = Path(__file__).parents[1] / "fixtures" / "slurm"


def reply_blocks() -> list[tuple[str, str]]:
    """(stdout, expectation) of every block; text marked as stderr is left out, as the client leaves it out."""
    blocks = []
    for block in (FIXTURES / "sbatch_stdout_variants.txt").read_text().split("---\n"):
        lines = [line for line in block.splitlines() if not line.startswith("# ")]
        expected = next(line for line in lines if line.startswith("=>"))
        said = [line.removeprefix("stdout: ") for line in lines if not line.startswith(("=>", "stderr:", "(empty"))]
        blocks.append(("\n".join(said) + "\n", expected))
    return blocks


@pytest.mark.parametrize(("stdout", "expected"), reply_blocks())
def test_every_known_reply(stdout: str, expected: str) -> None:
    """S13 (snakemake-executor-plugin-slurm#121)."""
    job = parse_sbatch_reply(stdout)
    number = re.match(r"=> (\d+)", expected)
    cluster = re.search(r"\(cluster (\w+)\)", expected)
    if number is None:
        assert job is None
    else:
        assert job == JobRef(job_id=int(number[1]), cluster=cluster[1] if cluster else None)


def test_fixture_has_all_blocks() -> None:
    assert len(reply_blocks()) == 8


@pytest.mark.parametrize(
    "stdout", ["0\n", "-5\n", "Submitted batch job $(id)\n", "12 34\n", "12;a b\n", "12;$(x)\n", "１２\n",
     "lua: Submitted batch job 12\n", "Submitted batch job 12 (test only)\n", "job 12\n"],
)  # fmt: skip
def test_replies_that_are_no_answer(stdout: str) -> None:
    """S13 (snakemake-executor-plugin-slurm#121); X1 (cyclecloud-slurm#548)."""
    assert parse_sbatch_reply(stdout) is None


@pytest.mark.parametrize(
    "stdout", ["4\n7\n", "4;old\n7\n", "Submitted batch job 4\nSubmitted batch job 7\n", "4\nlua: 5 left\n7\nbye\n"]
)
def test_the_last_answer_wins(stdout: str) -> None:
    """S13 (snakemake-executor-plugin-slurm#121): plug-ins and wrappers talk first, sbatch last."""
    assert parse_sbatch_reply(stdout) == JobRef(job_id=7)


@given(st.text(max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_text_is_a_job_or_none(text: str) -> None:
    job = parse_sbatch_reply(text)
    assert job is None or job.job_id > 0


def hostlist_rows() -> list[tuple[str, str]]:
    rows = [line.split("\t") for line in (FIXTURES / "hostlists.tsv").read_text().splitlines()[1:]]
    return [(row[0], row[1]) for row in rows]


@pytest.mark.parametrize(("expression", "expected"), hostlist_rows())
def test_every_known_hostlist(expression: str, expected: str) -> None:
    if expected == "ERROR":
        with pytest.raises(HostlistError, match="host list"):
            expand_hostlist(expression)
    elif expected == "ERROR-OR-EMPTY":
        assert expand_hostlist(expression) == ()
    else:
        assert list(expand_hostlist(expression)) == expected.split()


@pytest.mark.parametrize(
    "hostile",
    [
        "$(touch /tmp/x)",
        "node1;id",
        "node[1-2",
        "node`id`",
        "a b",
        "n[0-99999999999]",
        "n[1-300]m[1-300]",
        "n[１-2]",
        "n1,,n2",
    ],
)
def test_hostile_host_lists_are_refused(hostile: str) -> None:
    """X1 (cyclecloud-slurm#548)."""
    with pytest.raises(HostlistError):
        expand_hostlist(hostile)


def test_duplicates_are_kept_in_lists_and_dropped_in_sets() -> None:
    assert expand_hostlist("a[1-2],a[2-3]") == ("a1", "a2", "a2", "a3")
    assert unique_hosts("a[1-2],a[2-3]") == ("a1", "a2", "a3")


@given(st.integers(0, 2000), st.integers(0, 50), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_ranges_round_trip(first: int, count: int, width: int) -> None:
    hosts = expand_hostlist(f"n[{first:0{width}d}-{first + count}]")
    assert hosts == tuple(f"n{number:0{width}d}" for number in range(first, first + count + 1))
