"""`run_check`: the orchestrator's own sections, the shape of the launch (F8), Slurm's forms (F3), sites.

The trainer is asked by its command, as in use.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.actions.check import facts_table, report
from orchestrator.config.check import CheckResult, run_check, with_values
from orchestrator.config.launch_rules import SectionReading, resolve, shape, too_few_gpus
from orchestrator.config.problems import Severity, format_problem, quoted
from orchestrator.config.site import find_site, load_site
from orchestrator.config.spec import SECTIONS, RunSpec
from orchestrator.config.yaml_loader import parse_text
from orchestrator.errors import ConfigProblems, PawlError, UsageError

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO, SEED = CONFIGS / "demo.yaml", CONFIGS / "seed-1.7b.yaml"
MESH = {"dp": 8, "pp": 2, "tp": 4, "cp": 1, "world_size": 64}


def read(text: str, mesh: dict[str, int] | None = MESH) -> tuple[RunSpec | None, list[str]]:
    """Type the sections of a YAML text as `run_check` does; problems as a person sees them."""
    document = parse_text(text, file="run.yaml")
    assert not document.problems
    sections = SectionReading(dict(document.root.entries))
    spec, problems = resolve(sections, mesh)
    return spec, [format_problem(problem) for problem in (*sections.reading.problems, *problems)]


def spec_of(text: str, mesh: dict[str, int] | None = MESH) -> RunSpec:
    spec, problems = read(text, mesh)
    assert spec is not None and not problems, problems
    return spec


@pytest.fixture(scope="module")
def demo() -> CheckResult:
    return run_check(DEMO)


def test_the_demo_config_is_whole(demo: CheckResult) -> None:
    spec, facts = demo.require()
    assert (spec.num_nodes, spec.ranks_per_node, spec.recovery.spares, facts.world_size) == (2, 2, 1, 4)
    assert spec.recovery.beat_interval_s == 1.0 and spec.launcher.kind == "local"
    assert spec.recovery.phase_limits.step is not None and spec.recovery.phase_limits.step.floor_s == 6.0
    assert demo.origins["recovery.spares"].startswith(f"{DEMO}:")
    assert demo.config is not None and demo.config["general"]["run"] == "demo"
    assert {problem.severity for problem in demo.problems} <= {Severity.UNCHECKED, Severity.WARNING}


def test_the_frozen_text_checks_to_the_same_run(demo: CheckResult, tmp_path: Path) -> None:
    frozen = tmp_path / "run.yaml"
    frozen.write_text(demo.merged_yaml)
    again = run_check(frozen)
    assert (again.spec, again.facts) == (demo.spec, demo.facts)


@pytest.mark.parametrize(
    ("override", "numbers"),
    [
        ("slurm.nodes=7", ("7", "2", "14", "dp 2", "pp 2", "tp 1")),
        ("slurm.ranks_per_node=3", ("2", "3", "6", "4")),
        ("parallelism.dp=3", ("2 × 2 = 4", "dp 3", "= 6")),
    ],
)
def test_f8_one_number_changed_is_refused_with_all_numbers(override: str, numbers: tuple[str, ...]) -> None:
    """F8 (seed text)."""
    result = run_check(DEMO, overrides=[override])
    (problem,) = [p for p in result.problems if p.severity is Severity.ERROR]
    shown = format_problem(problem)
    assert all(number in shown for number in numbers), shown
    assert result.spec is None and problem.key.startswith("slurm.")
    with pytest.raises(ConfigProblems) as raised:
        result.require()
    assert raised.value.exit_code == 2 and shown in str(raised.value)


def test_f8_the_seed_text_eight_nodes_of_eight_and_one_number_off() -> None:
    """F8 (seed text)."""
    assert spec_of("slurm: {nodes: 8, ranks_per_node: 8}").num_nodes == 8
    _, (shown,) = read("slurm: {nodes: 8, ranks_per_node: 8}", {**MESH, "tp": 2, "world_size": 32})
    assert "nodes 8 × ranks_per_node 8 = 64 ranks" in shown and "dp 8 × pp 2 × tp 2 = 32" in shown
    assert "slurm.nodes: 4 or slurm.ranks_per_node: 4" in shown


@pytest.mark.parametrize(
    ("nodes", "ranks", "world", "expected"),
    [
        (None, None, 64, (8, 8)), (None, None, 4, (1, 4)), (None, None, 12, (1, 8)), (4, None, 64, (4, 16)),
        (3, None, 64, (3, 8)), (None, 4, 64, (16, 4)), (2, 2, 4, (2, 2)), (None, 8, 4, (1, 8)),
    ],
)  # fmt: skip
def test_missing_sizes_follow_from_the_others(
    nodes: int | None, ranks: int | None, world: int, expected: tuple[int, int]
) -> None:
    assert shape(nodes, ranks, world) == expected


def test_five_mistakes_in_both_packages_sections_give_five_messages() -> None:
    overrides = [
        *("optimizer.zero_stage=3", "tokens.train_stepz=3", "slurm.nodes=3", "slurm.env.9x=1", "recovery.spares=-1"),
    ]
    result = run_check(DEMO, overrides=overrides)
    keys = [problem.key for problem in result.problems if problem.severity is Severity.ERROR]
    assert sorted(keys) == sorted(override.split("=")[0] for override in overrides)


@pytest.mark.parametrize(
    "time", ["12:30:00", "2-00:00:00", "30", "007", "1-0", "1-12:30", "UNLIMITED", "90:00:00", '"12:30:00"']
)
def test_f3_slurm_times_keep_their_text(time: str) -> None:
    """F3 (YAML 1.1 base-60)."""
    assert spec_of(f"slurm: {{time: {time}}}").slurm.time == time.strip('"')


def test_f3_a_time_that_slurm_reads_otherwise_is_said() -> None:
    """F3 (YAML 1.1 base-60)."""
    spec, (shown,) = read("slurm: {time: 1:30}")
    assert spec is not None and spec.slurm.time == "1:30"
    assert "warning" in shown and "1 minutes 30 seconds" in shown and "1:30:00 if hours are meant" in shown


@pytest.mark.parametrize("time", ["12h", "1:2:3:4", "-1", "1.5", "1e3", "2 days", "no"])
def test_f3_other_times_are_refused(time: str) -> None:
    """F3 (YAML 1.1 base-60)."""
    spec, (shown,) = read(f"slurm: {{time: {time}}}")
    assert "slurm.time" in shown and "error" in shown and "HH:MM:SS" in shown
    del spec


def test_f3_text_fields_keep_their_text() -> None:
    """F3 (YAML 1.1 base-60)."""
    slurm = spec_of("slurm: {job_name: 007, account: 1e3, partition: no, qos: on, gpu_type: 0x10}").slurm
    texts = [slurm.job_name, slurm.account, slurm.partition, slurm.qos, slurm.gpu_type]
    assert texts == ["007", "1e3", "no", "on", "0x10"]


def test_node_lists_are_text_or_lists() -> None:
    slurm = spec_of("slurm: {nodelist: 'node[001-004,007]', exclude: [node001, gpu-a2]}").slurm
    assert (slurm.nodelist, slurm.exclude) == ("node[001-004,007]", "node001,gpu-a2")


def test_prologue_may_be_a_block_or_a_list() -> None:
    block = spec_of("slurm:\n  prologue: |\n    module purge\n    module load cuda\n").slurm.prologue
    lines = spec_of("slurm: {prologue: [module purge, module load cuda]}")
    assert block == "module purge\nmodule load cuda\n" and lines.slurm.prologue == "module purge\nmodule load cuda"
    assert lines.executed == ("slurm.prologue (2 lines, by bash -l before the launch)",)


def test_s5_environment_names_are_kept_letter_for_letter() -> None:
    """S5 (NVIDIA-NeMo/Run#234)."""
    assert spec_of("slurm: {env: {http_proxy: x, OMPI_MCA_btl: 'y', _z: no}}").slurm.env == {
        "http_proxy": "x",
        "OMPI_MCA_btl": "y",
        "_z": "no",
    }


@pytest.mark.parametrize("name", ["9a", "a-b", "a b", "'a=b'", "'$(id)'", "ä", "''", "a.b"])
def test_s5_a_name_that_is_no_identifier_is_refused(name: str) -> None:
    """S5 (NVIDIA-NeMo/Run#234)."""
    _, problems = read(f"slurm:\n  env:\n    {name}: x\n")
    assert len(problems) == 1 and "slurm.env." in problems[0] and "run.yaml:3" in problems[0]


@pytest.mark.parametrize("value", [r'"a\nb"', r'"a\rb"', r'"\e[31m"', r'"a\u202eb"', r'"a\u2028b"', r'"a\0b"'])
@pytest.mark.parametrize("key", ["partition", "job_name", "output", "env: {A", "extra: [--x="])
def test_values_that_are_more_than_one_line_are_refused(key: str, value: str) -> None:
    text = {"env: {A": f"env: {{A: {value}}}", "extra: [--x=": f"extra: [{value}]"}.get(key, f"{key}: {value}")
    _, problems = read(f"slurm:\n  {text}\n")
    assert any("cannot be passed on in one line" in shown and "slurm." in shown for shown in problems)
    assert all(shown.isprintable() for shown in problems)


@pytest.mark.parametrize("value", ["$(touch /tmp/x)", "`id`", "a;b", "it's", 'a"b', "${HOME}", "--flag"])
def test_other_characters_are_taken_literally(value: str) -> None:
    quoted = "'" + value.replace("'", "''") + "'"
    assert spec_of(f"slurm: {{account: {quoted}, env: {{A: {quoted}}}}}").slurm.account == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slurm: {partitions: x}", "did you mean 'partition'?"),
        ("slurm: {mem: 16_000}", "Slurm knows no such size"),
        ("slurm: {nodes: '8'}", "without quotes"),
        ("slurm: {exclusive: 1}", "true or false"),
        ("slurm: {extra: [mem=3]}", "--flag=value"),
        ("slurm: {container: docker}", "expected one of none"),
        ("slurm: {gpu_request: all}", "gpus-per-node, gres, gpus, none"),
        ("slurm: {signal_lead_s: 0}", "greater than or equal to 1"),
        ("slurm: 8", "this is a section"),
        ("recovery: {budgets: {hang: 1}}", "unknown failure class"),
        ("recovery: {phase_limits: {stpe: {floor_s: 1}}}", "did you mean 'step'?"),
        ("recovery: {phase_limits: {step: {floor_s: 9, ceiling_s: 3}}}", "above ceiling_s"),
        ("recovery: {backoff_s: []}", "at least 1 item"),
        ("recovery: {backoff_s: [-1]}", "greater than or equal to 0"),
        ("monitoring: {mode: push}", "nodes, gateway, textfile"),
        ("monitoring: {mode: gateway}", "this version serves metrics from the nodes only"),
        ("monitoring: {agent_port: 70000}", "less than or equal to 65535"),
        ("launcher: {kind: k8s}", "slurm, local"),
        ("notify: {command: 'mail me'}", "this is a list"),
    ],
)
def test_wrong_values_name_key_line_and_what_is_right(text: str, words: str) -> None:
    _, problems = read(text)
    assert any(words in shown and shown.startswith("run.yaml:1: error: ") for shown in problems), problems


def test_empty_sections_mean_the_defaults() -> None:
    assert spec_of("slurm:\nrecovery: ~\nmonitoring: {}\n") == spec_of("{}")


def test_commands_that_the_config_runs_are_listed() -> None:
    spec, problems = read("notify: {command: [mail, me]}")
    assert spec is not None and spec.executed == ("notify.command (mail)",)
    assert "sends no notifications" in problems[0]


def test_what_this_version_does_not_do_is_said_when_asked_for() -> None:
    spec, (shown,) = read("recovery: {successors: 2}")
    assert spec is not None and "warning" in shown and "queues no successor jobs" in shown
    assert read("recovery: {successors: 0}")[1] == []


def test_more_ranks_than_gpus_on_this_machine() -> None:
    document = parse_text("slurm: {ranks_per_node: 2}\nlauncher: {kind: local}\n", file="run.yaml")
    sections = SectionReading(dict(document.root.entries))
    spec, _ = resolve(sections, {**MESH, "world_size": 2})
    assert spec is not None
    (problem,) = too_few_gpus(sections, spec, [{"name": "x"}])
    assert "2 ranks on a node, but this machine shows 1 GPU" in problem.message
    assert list(too_few_gpus(sections, spec, [])) == []
    assert list(too_few_gpus(sections, spec, [{}, {}])) == []


def test_unknown_sections_are_told_from_all_known_ones() -> None:
    result = run_check(DEMO, overrides=["slrum.nodes=2"])
    (problem,) = [p for p in result.problems if p.severity is Severity.ERROR]
    assert problem.expected == "did you mean 'slurm'?"


def test_a_file_that_is_no_config_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\nsrun x\n")
    result = run_check(path)
    assert [format_problem(p).startswith(f"{path}:1: error: this is a script") for p in result.problems] == [True]
    assert not result.ok and result.spec is None and result.facts is None


def test_odd_file_names_are_arguments_not_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("--json").write_text(DEMO.read_text())
    assert run_check(Path("--json")).ok


def test_the_site_file_is_a_layer(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("runs_root: /r\nslurm: {account: 007, partition: gpu}\npaths: {d: /x}\n")
    folder = "data.validation.dataset_folder=['${paths.d}/a']"
    result = run_check(DEMO, site=site, overrides=["slurm.partition=debug", folder])
    spec, _ = result.require()
    assert (spec.slurm.account, spec.slurm.partition, spec.num_nodes) == ("007", "debug", 2)
    assert result.origins["slurm.account"] == f"{site}:2"
    assert "/x/a" in result.merged_yaml and "paths" not in result.merged


def test_site_files_are_found_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("runs_root: /r\npaths: {data: /d}\nslurm: {qos: low}\n")
    assert find_site(site, environ={}) == site
    assert find_site(None, environ={"PAWL_SITE": str(site)}) == site
    loaded = load_site(site)
    assert (loaded.runs_root, loaded.paths) == ("/r", {"data": "/d"})
    with pytest.raises(UsageError, match="does not exist"):
        find_site(None, environ={"PAWL_SITE": str(tmp_path / "none")})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_site(None, environ={}) is None and load_site(None).runs_root is None
    site.write_text("run_root: /r\n")
    with pytest.raises(ConfigProblems, match="did you mean 'runs_root'"):
        load_site(site)


def test_values_are_replaced_in_the_frozen_text() -> None:
    text = "slurm:\n  env:\n    A: x\n    B.C: y\n  exclude:\n    - n1\n"
    changed = with_values(text, {"slurm.env.A": "***", "slurm.exclude.0": "12:30"})
    assert parse_text(changed, file="f").root.entries.keys() == {"slurm"}
    assert '"***"' in changed and '"12:30"' in changed and "B.C: y" in changed
    with pytest.raises(KeyError):
        with_values(text, {"slurm.env.Z": "1"})


@pytest.mark.parametrize(
    ("stdout", "words"),
    [("", "exit code 3: boom"), ("[]", "another version"), ('{"schema_version": 9}', "another version")],
)
def test_a_trainer_that_does_not_answer_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: str, words: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho noise >&2\necho boom >&2\nprintf '%s' '{stdout}'\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(PawlError, match=words):
        run_check(DEMO)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(PawlError, match="cannot be started"):
        run_check(DEMO)


def test_every_section_has_only_defaults() -> None:
    """A config without any of these sections must launch."""
    for model in SECTIONS.values():
        defaults: dict[str, Any] = model().model_dump()
        assert model(**copy.deepcopy(defaults)) == model()


def test_the_seed_config_needs_eight_nodes_of_eight() -> None:
    spec, facts = run_check(SEED).require()
    assert (spec.num_nodes, spec.ranks_per_node, facts.world_size) == (8, 8, 64)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *(("12h", "'12h'"), ("all", "'all'"), ("1-0", "'1-0'"), ("", "''"), ("1.2.3", "'1.2.3'"), ("no", "'no'")),
        *((text, text) for text in ("12", "-3", "1e-4", "0.5", ".5", "1_000", "true", "False", "null")),
    ],
)
def test_found_text_stands_in_quotes_and_numbers_do_not(value: str, shown: str) -> None:
    assert quoted(value) == shown


def test_every_rule_of_both_packages_quotes_the_text_it_found() -> None:
    bad = {
        "slurm.time": "12h", "slurm.mem": "lots", "slurm.gpu_request": "all", "slurm.extra": "[mem]",
        "monitoring.mode": "gateway", "launcher.kind": "k8s", "general.run": "a/b", "general.project": '"a\\u0007"',
        "model.dtype": "float3", "model.model_config.hidden_act": "relu", "parallelism.pp_engine": "xyz",
        "checkpoints.checkpoints_path": "/ckpt",
        "tokenizer.tokenizer_name_or_path": "/no/such", "data.validation.dataset_folder": "[/no/held]",
        "recovery.spares": "one", "optimizer.zero_stage": "two",
    }  # fmt: skip
    found = [
        (problem.key, problem.found)
        for key, value in bad.items()
        for problem in run_check(DEMO, overrides=[f"{key}={value}"]).problems
        if problem.key.startswith(key) and problem.found is not None
    ]
    assert len({key.split(".0")[0] for key, _ in found}) == len(bad), found
    assert [pair for pair in found if not (pair[1].startswith("'") and pair[1].split(" (in")[0].endswith("'"))] == []


def test_with_problems_no_launch_is_shown(tmp_path: Path, demo: CheckResult) -> None:
    """A misspelt section would be replaced by defaults, shown as if they had been meant."""
    assert [line for line in report(demo, show=False) if line.startswith("launch ")]
    misspelt = tmp_path / "run.yaml"
    misspelt.write_text(DEMO.read_text().replace("\nslurm:", "\nslrum:"))
    lines = list(report(run_check(misspelt), show=False))
    assert any("did you mean 'slurm'?" in line for line in lines)
    assert not [line for line in lines if line.startswith(("launch ", "executes "))]


def test_the_fullest_rank_is_named_where_there_are_several(demo: CheckResult) -> None:
    facts = demo.require()[1]
    memory = replace(facts.memory_per_rank_bytes, pp_rank=1, stages=(1, 3))
    lines = list(facts_table(replace(facts, pp=2, memory_per_rank_bytes=memory)))
    assert "memory of the fullest rank (pipeline rank 1 of 2, with stage 1 and 3), estimated:" in lines
    assert "pipeline" not in "\n".join(facts_table(replace(facts, pp=1, memory_per_rank_bytes=memory)))
    of_old = replace(memory, pp_rank=None, stages=None, scratch=None)
    shown = "\n".join(facts_table(replace(facts, pp=2, memory_per_rank_bytes=of_old)))
    assert "memory of the fullest rank, estimated:" in shown and "scratch" not in shown, "a record of before"
