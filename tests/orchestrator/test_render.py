"""Batch scripts: as text (goldens), as sbatch reads them, and run for real with stub executables.

Cases: S1 directives first · S3 X2 hostile values arrive unchanged or are refused, nothing executes · S5 names letter
for letter · S6 cpus per task · S9 head node · S11 node rank per task · X6 no secret in any text.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import launch_cases as cases
import pytest
import slurm_stubs as stubs
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import PawlError, UsageError
from orchestrator.submit.plan import LaunchPlan
from orchestrator.submit.quoting import sbatch_quote
from orchestrator.submit.render import check_directives_first, render_batch
from orchestrator.submit.secrets_file import write_secrets
from orchestrator.submit.templates import PLAIN, SUPERVISED, load_template

HOSTILE = [
    'a"b',
    "it's",
    "$(touch PWNED)",
    "`touch PWNED`",
    "; touch PWNED #",
    "a b  c",
    "\\",
    "-n 1",
    "ä→漢",
    "'\"'",
    "*",
]


def render(plan: LaunchPlan, *, plain: bool = False) -> str:
    return render_batch(plan, load_template(PLAIN if plain else SUPERVISED))


GOLDENS = {
    "supervised.sh": ({}, False),
    "supervised_all.sh": (cases.EVERYTHING, False),
    "plain.sh": ({}, True),
    "plain_gres.sh": ({"gpu_request": "gres", "gpu_type": "h100", "cpus_per_task": 64, "time": "12:30:00"}, True),
    "supervised_hostile.sh": ({"job_name": 'it\'s "me" $(id)', "env": {"http_proxy": "$(id) 'x'"}}, False),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    slurm, plain = GOLDENS[name]
    golden(f"sbatch/{name}", render(cases.make_plan(slurm=slurm, plain=plain), plain=plain))


@pytest.mark.parametrize("plain", [False, True])
def test_directives_stand_directly_under_the_shebang(plain: bool) -> None:
    """S1 (Megatron-Bridge#3068)."""
    plan = cases.make_plan(slurm=cases.EVERYTHING, plain=plain)
    lines = render(plan, plain=plain).split("\n")
    count = len(plan.directives)
    assert lines[0] == "#!/bin/bash -l"
    assert all(line.startswith("#SBATCH ") for line in lines[1 : count + 1])
    assert not any(line.startswith("#SBATCH") for line in lines[count + 1 :])
    assert stubs.directives("\n".join(lines)) == [directive.argument for directive in plan.directives]


def test_supervised_job_leaves_retry_to_pawl() -> None:
    found = stubs.directives(render(cases.make_plan(slurm={"signal_lead_s": 300})))
    for flag in ("--no-requeue", "--no-kill", "--open-mode=append", "--export=NONE", "--signal=B:USR2@300"):
        assert flag in found
    assert any(argument.startswith("--comment=pawl ") and cases.NONCE in argument for argument in found)
    assert "--nodes=3" in found  # 2 that train and 1 hot spare


def test_a_directive_after_a_command_is_refused() -> None:
    """S1 (Megatron-Bridge#3068)."""
    with pytest.raises(UsageError, match=r"slurm\.prologue line 2"):
        cases.make_plan(slurm={"prologue": "module load cuda\n#SBATCH --qos=high"})
    with pytest.raises(UsageError, match="line 3"):
        check_directives_first("#!/bin/bash\nset -e\n#SBATCH --nodes=2\n")


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_directive_values_reach_sbatch_unchanged(value: str) -> None:
    """S3 (submitit#1678, Luna.jl#420), X2 (luigi#3455): names, comments, output paths and extra options alike."""
    slurm = {"account": value, "job_name": value, "reservation": value, "extra": [f"--switches={value}"]}
    plan = cases.make_plan(slurm=slurm, run_dir=Path("/tmp/x y/$(id)") / value)
    found = stubs.directives(render(plan))
    for flag in ("account", "job-name", "reservation", "switches"):
        assert f"--{flag}={value}" in found
    (output,) = [argument for argument in found if argument.startswith("--output=")]
    assert output.startswith(f"--output=/tmp/x y/$(id)/{value}/attempts/")


@given(st.text(alphabet=st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp")), max_size=60))
@settings(max_examples=50, deadline=None)
def test_any_printable_text_reads_back_from_a_directive(value: str) -> None:
    """S3 (submitit#1678)."""
    assert stubs.directives(f"#SBATCH --x={sbatch_quote(value, key='k')} --y=1\n") == [f"--x={value}", "--y=1"]


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x1b", "\u2028", "\u202e", "\x7f"])
@pytest.mark.parametrize(
    ("slurm", "key"),
    [
        ({"partition": "a{}b"}, "slurm.partition"),
        ({"env": {"A": "a{}b"}}, "slurm.env.A"),
        ({"extra": ["--switches=a{}b"]}, r"slurm.extra\[0\]"),
        ({"job_name": "a{}b"}, "slurm.job_name"),
    ],
)
def test_control_characters_are_refused_with_the_key(slurm: dict[str, object], key: str, character: str) -> None:
    """S3 (submitit#1678); X2 (luigi#3455)."""
    filled = json.loads(json.dumps(slurm).replace("{}", json.dumps(character)[1:-1]))
    with pytest.raises(UsageError, match=key):
        render(cases.make_plan(slurm=filled))


def run_script(script: str, tmp_path: Path, *, bin_dir: Path, nodes: int = 2, hosts: str = "node1") -> str:
    """Run a rendered script as Slurm would on the first node; returns its stderr. The folder it runs in is empty."""
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=work,
        env=stubs.environment(bin_dir, nodes=nodes, hosts=hosts),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert list(work.iterdir()) == [], "a value of the config was executed"
    return f"rc={done.returncode} {done.stderr}"


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_pass_through_a_supervised_script(value: str, tmp_path: Path) -> None:
    """S3 (submitit#1678); S5 (NVIDIA-NeMo/Run#234); X2 (luigi#3455)."""
    folder = tmp_path / value.replace("/", "_")
    bin_dir = stubs.install(folder)
    plan = cases.make_plan(
        slurm={"env": {"http_proxy": value, "OMPI_MCA_btl": "y"}},
        run_dir=folder / "run",
        python=str(bin_dir / "python"),
    )
    assert run_script(render(plan), tmp_path, bin_dir=bin_dir) == "rc=0 "
    seen = stubs.saw(folder, "recorder-x")
    assert [*plan.supervise[1:], *plan.torchrun] == seen["argv"]
    environ = seen["environ"]
    assert isinstance(environ, dict)
    assert (environ["http_proxy"], environ["OMPI_MCA_btl"], environ["PAWL_NONCE"]) == (value, "y", cases.NONCE)


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_pass_through_a_plain_script(value: str, tmp_path: Path) -> None:
    """S9 (nebius-solutions-library#177, pytorch#79388); X2 (luigi#3455)."""
    folder = tmp_path / value.replace("/", "_")
    bin_dir = stubs.install(folder)
    plan = cases.make_plan(
        slurm={"env": {"no_proxy": value}}, run_dir=folder / "run", python=str(bin_dir / "python"), plain=True
    )
    assert run_script(render(plan, plain=True), tmp_path, bin_dir=bin_dir) == "rc=0 "
    for node_rank in (0, 1):
        seen = stubs.saw(folder, f"torchrun-{node_rank}")
        argv, environ = seen["argv"], seen["environ"]
        assert isinstance(argv, list) and isinstance(environ, dict)
        assert argv[:2] == [f"--node-rank={node_rank}", "--master-addr=node1"]
        assert argv[3:] == list(plan.plain_torchrun[1:])
        assert environ["no_proxy"] == value


def test_plain_script_gives_each_task_its_rank_and_a_port_outside_the_ephemeral_range(tmp_path: Path) -> None:
    """S11 (smollm launch.slurm)."""
    bin_dir = stubs.install(tmp_path)
    plan = cases.make_plan(python=str(bin_dir / "python"), plain=True, slurm={"cpus_per_task": 12})
    assert run_script(render(plan, plain=True), tmp_path, bin_dir=bin_dir).startswith("rc=0")
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = set()
    for node_rank in (0, 1):
        argv = stubs.saw(tmp_path, f"torchrun-{node_rank}")["argv"]
        assert isinstance(argv, list)
        assert argv[0] == f"--node-rank={node_rank}"
        ports.add(int(argv[2].removeprefix("--master-port=")))
    (port,) = ports
    assert port >= 1024 and not low <= port <= high


def test_plain_srun_repeats_cpus_per_task_and_no_variable_contradicts_it(tmp_path: Path) -> None:
    bin_dir = stubs.install(tmp_path)
    plan = cases.make_plan(python=str(bin_dir / "python"), plain=True, slurm={"cpus_per_task": 12})
    run_script(render(plan, plain=True), tmp_path, bin_dir=bin_dir)
    seen = stubs.saw(tmp_path, "srun")
    options, names = seen["options"], seen["names"]
    assert isinstance(options, list) and isinstance(names, list)
    for option in ("--cpus-per-task=12", "--kill-on-bad-exit=1", "--wait=60", "--export=ALL", "--ntasks-per-node=1"):
        assert option in options
    assert not {"SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"} & set(names)


@pytest.mark.parametrize("host", ["localhost", "127.0.1.1", "localhost.localdomain", "::1"])
def test_plain_script_refuses_a_loopback_head_node(host: str, tmp_path: Path) -> None:
    """S9 (nebius-solutions-library#177, pytorch#79388)."""
    bin_dir = stubs.install(tmp_path)
    plan = cases.make_plan(python=str(bin_dir / "python"), plain=True)
    said = run_script(render(plan, plain=True), tmp_path, bin_dir=bin_dir, hosts=host)
    assert said.startswith("rc=78") and "loopback" in said
    assert not (tmp_path / "torchrun-0.json").exists()


def test_plain_script_refuses_another_number_of_nodes_with_all_numbers(tmp_path: Path) -> None:
    """S8 (pytorch-lightning#20391)."""
    bin_dir = stubs.install(tmp_path)
    plan = cases.make_plan(python=str(bin_dir / "python"), plain=True)
    said = run_script(render(plan, plain=True), tmp_path, bin_dir=bin_dir, nodes=1)
    assert said.startswith("rc=78") and "1 nodes" in said and "2 × 4 ranks = 8" in said


def test_a_hostile_node_name_is_one_argument(tmp_path: Path) -> None:
    """X1 (cyclecloud-slurm#548)."""
    bin_dir = stubs.install(tmp_path)
    plan = cases.make_plan(python=str(bin_dir / "python"), plain=True)
    run_script(render(plan, plain=True), tmp_path, bin_dir=bin_dir, hosts="$(touch PWNED) `id`;x")
    argv = stubs.saw(tmp_path, "torchrun-1")["argv"]
    assert isinstance(argv, list) and argv[1] == "--master-addr=$(touch PWNED) `id`;x"


def test_the_script_runs_in_a_login_shell_and_after_its_prologue(tmp_path: Path) -> None:
    bin_dir = stubs.install(tmp_path)
    prologue = "case $- in *i*) exit 9;; esac\nshopt -q login_shell && export LOGIN=yes\nexport A='x  y'"
    plan = cases.make_plan(slurm={"prologue": prologue}, run_dir=tmp_path / "run", python=str(bin_dir / "python"))
    script = tmp_path / "job.sbatch"
    script.write_text(render(plan))
    script.chmod(0o700)
    subprocess.run([str(script)], env=stubs.environment(bin_dir, nodes=2), check=True, timeout=60)
    environ = stubs.saw(tmp_path, "recorder-x")["environ"]
    assert isinstance(environ, dict)
    assert (environ["LOGIN"], environ["A"]) == ("yes", "x  y")


@pytest.mark.parametrize("plain", [False, True])
def test_secrets_reach_the_processes_but_no_text(plain: bool, tmp_path: Path) -> None:
    """X6 (labs-molt#128)."""
    bin_dir = stubs.install(tmp_path)
    secret = {"WANDB_API_KEY": "hunter2 'q' $(touch PWNED)", "HF_TOKEN": "hf_abc", "my_password": "p w"}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    plan = cases.make_plan(
        slurm={"env": {**secret, "TOKENIZERS_PARALLELISM": "false"}},
        run_dir=run_dir,
        python=str(bin_dir / "python"),
        plain=plain,
    )
    path = write_secrets(run_dir, secret)
    assert path is not None and path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    script = render(plan, plain=plain)
    for text in (script, json.dumps(plan.to_json()), repr(plan)):
        assert not any(value in text for value in ("hunter2", "hf_abc", "p w"))
    assert run_script(script, tmp_path, bin_dir=bin_dir) == "rc=0 "
    environ = stubs.saw(tmp_path, "torchrun-1" if plain else "recorder-x")["environ"]
    assert isinstance(environ, dict)
    assert {name: environ[name] for name in secret} == secret
    assert environ["TOKENIZERS_PARALLELISM"] == "false"


def test_a_missing_secrets_file_stops_the_job(tmp_path: Path) -> None:
    bin_dir = stubs.install(tmp_path)
    plan = cases.make_plan(slurm={"env": {"HF_TOKEN": "x"}}, run_dir=tmp_path / "none", python=str(bin_dir / "python"))
    assert run_script(render(plan), tmp_path, bin_dir=bin_dir).startswith("rc=78")


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "", "A=B", "$(id)", "Ä"])
def test_names_that_are_no_identifiers_are_refused(name: str) -> None:
    """S5 (NVIDIA-NeMo/Run#234)."""
    with pytest.raises(UsageError, match=r"slurm\.env"):
        cases.make_plan(slurm={"env": {name: "x"}})


def test_a_broken_template_says_so() -> None:
    with pytest.raises(PawlError, match="template"):
        render_batch(cases.make_plan(), "#!/bin/bash\n{{ plan.no_such_field }}\n")


def test_templates_hold_no_unfiltered_value() -> None:
    """X2 (luigi#3455)."""
    allowed = {"plan.attempt", "plan.num_nodes", "plan.ranks_per_node", "plan.world_size", "line"}
    for name in (SUPERVISED, PLAIN):
        for piece in load_template(name).split("{{")[1:]:
            expression = piece.split("}}")[0].strip()
            assert "|" in expression or expression in allowed or "cpus_per_task" in expression, expression
