"""LaunchPlan: sizes, names, flags and placeholders, before any text is made of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import launch_cases as cases
import pytest

from orchestrator.agent.plan import AttemptPlan, fill, parse_plan
from orchestrator.errors import UsageError
from orchestrator.state.records import Unreadable
from orchestrator.state.retention import Retention
from orchestrator.submit.plan import PLACEHOLDERS, LaunchPlan


def arguments(plan: LaunchPlan) -> dict[str, str | None]:
    return {directive.flag: directive.value for directive in plan.directives}


def test_the_job_asks_for_training_nodes_and_spares() -> None:
    assert arguments(cases.make_plan())["nodes"] == "3"
    assert arguments(cases.make_plan(plain=True))["nodes"] == "2"


@pytest.mark.parametrize("retention", [Retention(), Retention(keep_last=5, keep_every=1000)])
def test_the_supervisor_keeps_what_the_plan_says(retention: Retention) -> None:
    plan = parse_plan(json.dumps(replace(cases.make_plan(), retention=retention).to_json()))
    assert isinstance(plan, AttemptPlan) and plan.retention == retention


@pytest.mark.parametrize("checkpoints", [{"keep_last": "two"}, {"keep_last": -1}, {"keep_every": 0}])
def test_a_plan_whose_retention_means_nothing_is_not_used(checkpoints: dict[str, Any]) -> None:
    plan = parse_plan(json.dumps({**cases.make_plan().to_json(), "checkpoints": checkpoints}))
    assert isinstance(plan, Unreadable) and "checkpoints" in plan.why


def test_a_mesh_of_another_size_is_refused_with_all_numbers() -> None:
    """S8 (pytorch-lightning#20391)."""
    with pytest.raises(UsageError) as error:
        cases.make_plan(facts=cases.make_facts(dp=4))
    assert all(number in str(error.value) for number in ("nodes 2", "ranks_per_node 4", "= 8", "dp 4", "= 16"))


def test_name_order_is_job_name_then_run() -> None:
    """S17 (srunx#229)."""
    assert arguments(cases.make_plan())["job-name"] == "demo"
    assert arguments(cases.make_plan(slurm={"job_name": "other"}))["job-name"] == "other"
    assert cases.make_plan(slurm={"job_name": "other"}).job_name == "other"


@pytest.mark.parametrize(
    ("slurm", "flag", "value"),
    [
        ({"gpu_request": "gpus-per-node"}, "gpus-per-node", "4"),
        ({"gpu_request": "gpus-per-node", "gpu_type": "a100"}, "gpus-per-node", "a100:4"),
        ({"gpu_request": "gres"}, "gres", "gpu:4"),
        ({"gpu_request": "gpus", "gpu_type": "h100"}, "gpus", "h100:12"),
    ],
)
def test_each_site_spells_gpus_its_own_way(slurm: dict[str, Any], flag: str, value: str) -> None:
    assert arguments(cases.make_plan(slurm=slurm))[flag] == value


def test_a_plain_job_asks_for_no_gpus_of_spares() -> None:
    assert arguments(cases.make_plan(slurm={"gpu_request": "gpus"}, plain=True))["gpus"] == "8"


def test_no_gpus_no_gpu_flag() -> None:
    assert not {"gpus", "gres", "gpus-per-node"} & set(arguments(cases.make_plan(slurm={"gpu_request": "none"})))


def test_lead_is_configured_else_learned_else_two_minutes() -> None:
    assert arguments(cases.make_plan())["signal"] == "B:USR2@120"
    assert arguments(cases.make_plan(lead_s=400))["signal"] == "B:USR2@400"
    assert arguments(cases.make_plan(lead_s=400, slurm={"signal_lead_s": 90}))["signal"] == "B:USR2@90"
    assert "signal" not in arguments(cases.make_plan(plain=True))


def test_nodes_of_bad_repute_join_those_of_the_config() -> None:
    assert arguments(cases.make_plan(exclude=("gpu03", "gpu04")))["exclude"] == "gpu03,gpu04"
    assert (
        arguments(cases.make_plan(slurm={"exclude": "gpu[07-09]"}, exclude=("gpu03",)))["exclude"] == "gpu[07-09],gpu03"
    )


@pytest.mark.parametrize(
    "extra",
    [
        *("--job-name=x", "--nodes=9", "--ntasks=9", "--ntasks-per-node=2", "--chdir=/", "--signal=USR1@5"),
        *("--requeue", "--export=ALL", "--array=0-3", "--wrap=id", "--comment=x", "--output=x"),
    ],
)
def test_options_that_pawl_owns_are_refused_by_name(extra: str) -> None:
    """S17 (srunx#229)."""
    with pytest.raises(UsageError, match=rf"slurm\.extra\[1\].*{extra.split('=')[0]}"):
        cases.make_plan(slurm={"extra": ["--spread-job", extra]})


@pytest.mark.parametrize(
    ("slurm", "key"),
    [
        ({"partition": "a", "extra": ["--partition=b"]}, "slurm.partition"),
        ({"time": "1:00:00", "extra": ["--spread-job", "--time=5"]}, "slurm.time"),
        ({"gpu_request": "gres", "extra": ["--gres=gpu:1"]}, "slurm.gpu_request"),
        ({"extra": ["--nice=1", "--nice=2"]}, r"slurm\.extra\[0\]"),
    ],
)
def test_no_option_is_said_twice(slurm: dict[str, Any], key: str) -> None:
    """S17 (srunx#229): the last speaker would win, and the config would show another value than the job has."""
    with pytest.raises(UsageError, match=f"is given by {key} already"):
        cases.make_plan(slurm=slurm)
    assert arguments(cases.make_plan(slurm={"extra": ["--partition=b"]}))["partition"] == "b"


@pytest.mark.parametrize("extra", ["-N4", "nodes=3", "--Bad", "--a b", "", "--=x", "; id"])
def test_extra_options_have_one_form(extra: str) -> None:
    with pytest.raises(UsageError, match=r"slurm\.extra\[0\]"):
        cases.make_plan(slurm={"extra": [extra]})


def test_a_percent_in_the_run_directory_is_no_pattern_of_sbatch() -> None:
    output = arguments(cases.make_plan(run_dir=Path("/data/50%x/demo")))["output"]
    assert output == "/data/50%%x/demo/attempts/0003/slurm-%j.log"


@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_paths_with_a_placeholder_are_refused(placeholder: str) -> None:
    with pytest.raises(UsageError, match="placeholder"):
        cases.make_plan(run_dir=Path(f"/runs/{placeholder}/demo"))


def test_the_supervisor_gets_the_torchrun_command_it_shows() -> None:
    plan = cases.make_plan()
    assert plan.supervise == (
        *("/opt/pawl/bin/python", "-m", "orchestrator", "supervise", "--run-dir", "/scratch/runs/demo"),
        *("--attempt", "3", "--launcher", "slurm", "--"),
    )
    values = dict.fromkeys((name[1:-1] for name in PLACEHOLDERS), "V")
    filled = fill(plan.torchrun, values)
    assert not any("{" in argument for argument in filled)
    assert filled[:7] == (
        *("/opt/pawl/bin/torchrun", "--nnodes=V", "--node-rank=V", "--nproc-per-node=V"),
        *("--master-addr=V", "--master-port=V", "--max-restarts=0"),
    )
    assert filled[-4:] == ("--cycle", "V", "--shm", "V")


def test_plan_json_is_what_the_supervisor_reads() -> None:
    plan = cases.make_plan(slurm=cases.EVERYTHING)
    read = parse_plan(json.dumps(plan.to_json()))
    assert isinstance(read, AttemptPlan)
    assert (read.run, read.attempt, read.nonce, read.num_nodes, read.num_spares) == ("demo", 3, cases.NONCE, 2, 1)
    assert read.torchrun == plan.torchrun
    assert read.env["NCCL_DEBUG"] == "INFO" and "HF_TOKEN" not in read.env


@pytest.mark.parametrize("changed", ["num_nodes", "ranks_per_node", "world_size"])
def test_plan_json_of_another_size_is_refused_with_all_numbers(changed: str) -> None:
    """S8 (pytorch-lightning#20391): plan.json is a file, and files get edited."""
    record = cases.make_plan().to_json()
    read = parse_plan(json.dumps({**record, changed: record[changed] + 1}))
    assert not isinstance(read, AttemptPlan)
    wrong = {**record, changed: record[changed] + 1}
    assert f"{wrong['num_nodes']} nodes × {wrong['ranks_per_node']} ranks per node" in read.why
    assert f"world size {wrong['world_size']}" in read.why


def test_a_plan_is_the_same_for_the_same_questions() -> None:
    assert cases.make_plan(slurm=cases.EVERYTHING) == cases.make_plan(slurm=cases.EVERYTHING)
    assert replace(cases.make_plan(), attempt=4) != cases.make_plan()
