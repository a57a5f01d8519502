"""Anything may lie in the place of a run directory's files: every command says what, and nothing is launched twice.

Each case puts one kind of damage in the place of one file of a run, alive or dead, and then looks, controls, drains,
cancels and resumes it, as a person would who does not understand what is going on.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import launch_cases as cases
import orch_worlds as w
import pytest

from orchestrator.agent.proc import boot_id, own_start_ticks
from orchestrator.agent.record import NodeRecord, write_record
from orchestrator.cli.actions import controller, launch
from orchestrator.cli.app import run
from orchestrator.control.observe import local_liveness
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.ledger import Ledger
from orchestrator.state.records import (
    AttemptNode,
    AttemptNodes,
    Claim,
    Cycle,
    CycleNode,
    Intent,
    Verb,
)
from orchestrator.state.requests import make_request, write_request
from orchestrator.state.retention import Retention
from orchestrator.state.rundir import RunPaths, make_attempt, make_cycle
from orchestrator.submit import submit
from orchestrator.views import watch

NONCE, ULID = "feedfeedfeedfeed", "01ARZ3NDEKTSV4RRFFQ69G5FAV"
CONFIG = "general: {run: demo}\nslurm: {nodes: 1, ranks_per_node: 8, gpu_request: none}\nlauncher: {kind: local}\n"
FILES = {
    "run.yaml": lambda paths: paths.config,
    "launch_facts.json": lambda paths: paths.launch_facts,
    "provenance.json": lambda paths: paths.provenance,
    "intent.json": lambda paths: paths.intent(1),
    "claim": lambda paths: paths.claim(1),
    "nodes.json": lambda paths: paths.nodes(1),
    "cycle.json": lambda paths: paths.cycle_file(1, 1),
    f"drain-{ULID}": lambda paths: paths.request("drain", ULID),
    "node0": lambda paths: paths.beat(1, "node0"),
    "attempt-0001-g01.jsonl": lambda paths: paths.ledger_file("attempt-0001-g01"),
    "targets.json": lambda paths: paths.targets,
    "train.jsonl": lambda paths: paths.train_log(1, 1),
    "node0.log": lambda paths: paths.node_log(1, 1, "node0"),
}
# Nobody decides by these; they are shown as unknown.
UNNAMED = {"nodes.json", "node0", "targets.json", "provenance.json", "train.jsonl", "node0.log"}
# A torn last line is the trace of a crash; the orchestrator reads its own sections of run.yaml, which all are optional.
HARMLESS = {
    "attempt-0001-g01.jsonl": ("empty", "truncated", "NUL", "deep"),
    "run.yaml": ("other version", "nothing but the version", "1e308", "1e400", "huge", "negative", "texts", "nulls"),
}


def other_values(text: str, value: str) -> str:
    """The JSON lines of `text` with every value in the place of which a number or text stood replaced."""

    def change(item: object) -> object:
        if isinstance(item, dict):
            return {key: inner if key == "schema_version" else change(inner) for key, inner in item.items()}
        return "\u2603" if not isinstance(item, list) or not item else [change(inner) for inner in item]

    try:
        records = [json.loads(text)]
    except ValueError:
        records = [json.loads(line) for line in text.splitlines()]
    return "".join(json.dumps(change(r), ensure_ascii=False).replace('"\u2603"', value) + "\n" for r in records)


def overwrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def wrong_value(value: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        text = path.read_bytes().decode(errors="replace")
        is_json = text.startswith(("{", "[")) and not text.startswith("{}")
        path.write_text(other_values(text, value) if is_json else f"general: {value}\n{value}: 3\n")

    return damage


DAMAGE = {
    "empty": overwrite(lambda _old: b""),
    "truncated": overwrite(lambda old: old[: len(old) // 2]),
    "random": overwrite(lambda old: bytes((7 * i * i + 13 * i) % 251 for i in range(len(old) + 40))),
    "not UTF-8": overwrite(lambda old: old.replace(b"e", b"\xff", 1)),
    "NUL": overwrite(lambda old: b"\0" * len(old)),
    "null": overwrite(lambda _old: b"null\n"),
    "list": overwrite(lambda _old: b"[[1]]\n"),
    "other version": overwrite(lambda _old: b'{"schema_version": 99}\n'),
    "nothing but the version": overwrite(lambda _old: b'{"schema_version": 1}\n'),
    "deep": overwrite(lambda _old: b"[" * 2000),
    "1e308": wrong_value("1e308"),
    "1e400": wrong_value("1e400"),
    "huge": wrong_value("9" * 400),
    "negative": wrong_value("-1"),
    "texts": wrong_value('"x"'),
    "lists": wrong_value('["x"]'),
    "nulls": wrong_value("null"),
    "absent": instead(lambda _path: None),
    "folder": instead(lambda path: path.mkdir()),
    "fifo": instead(os.mkfifo),
    "loop": instead(lambda path: path.symlink_to(path.name)),
    "dangling": instead(lambda path: path.symlink_to("nowhere")),
    "unreadable": instead(lambda path: path.symlink_to("/proc/self/mem")),
}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> w.FakeLauncher:
    """Counts what would be started; whether an attempt is alive is judged as on any machine."""
    found = w.FakeLauncher()
    monkeypatch.setattr(found, "liveness", local_liveness)
    monkeypatch.setattr(controller, "make_launcher", lambda _kind: found)
    monkeypatch.setattr(launch, "_ENDING_S", 0.0)

    def stop(_seconds: float) -> None:
        raise KeyboardInterrupt

    assert watch.run.__kwdefaults__ is None or "sleep" in watch.run.__kwdefaults__
    monkeypatch.setattr(watch, "_plain", lambda folder, screen, look, sleep: _once(folder, screen, look, stop))
    return found


_plain = watch._plain


def _once(folder, screen, look, stop):
    return _plain(folder, screen, look, stop)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The run with a supervisor that lives (this process) and with one that is dead."""
    return {alive: make(tmp_path_factory.mktemp("runs"), alive=alive) for alive in (True, False)}


def make(root: Path, *, alive: bool) -> Path:
    made = submit.make_run(
        root,
        submit.NewRun(
            facts=cases.make_facts(), config_text=CONFIG, secret_env={}, provenance={"workdir": str(root)},
            run_created={"run": "demo", "world_size": 8, "launcher": "local"}, retention=Retention(),
        ),
        writer=f"cli-{ULID}",
    )  # fmt: skip
    now = time.time()
    assert make_attempt(made, 1) and make_cycle(made, Epoch(1, 1, 1))
    intent = Intent(attempt=1, nonce=NONCE, launcher="local", by="me", created_unix=now)
    made.intent(1).write_text(dumps(intent))
    ledger = Ledger(made.root, f"ctl-{os.uname().nodename}-1-1")
    ledger.append(Epoch(1, 0, 0), "attempt_intent", {"attempt": 1, "nonce": NONCE, "launcher": "local", "exclude": []})
    pid = os.getpid() if alive else 2**22 + 1
    claim = Claim(
        nonce=NONCE, host=os.uname().nodename, pid=pid, start_ticks=own_start_ticks(), boot_id=boot_id(),
        created_unix=now,
    )  # fmt: skip
    made.claim(1).write_text(dumps(claim))
    node = AttemptNode(name="node0", address="127.0.0.1", spare=False, agent_pid=pid)
    made.nodes(1).write_text(dumps(AttemptNodes(nodes=(node,))))
    cycle = Cycle(
        run="demo", epoch=Epoch(1, 1, 1), nonce=NONCE, resume_from=None, ranks_per_node=8, world_size=8,
        nodes=(CycleNode(node_rank=0, name="node0", address="127.0.0.1"),), master_addr="127.0.0.1", master_port=29500,
        beat_interval_s=1.0, created_unix=now,
    )  # fmt: skip
    made.cycle_file(1, 1).write_text(dumps(cycle))
    supervisor = Ledger(made.root, "attempt-0001-g01")
    supervisor.append(Epoch(1, 1, 0), "attempt_started", {"nonce": NONCE, "host": "h", "pid": pid, "nodes": []})
    supervisor.append(Epoch(1, 1, 1), "cycle_started", {"nodes": ["node0"], "resume_from": None, "world_size": 8})
    supervisor.append(Epoch(1, 1, 1), "cycle_running", {"step": 1, "start_s": 1.0, "load_s": 0.5})
    record = NodeRecord(
        seq=1, node="node0", host="h", agent_pid=pid, epoch=Epoch(1, 1, 1), unix=now, running=True, ranks=()
    )
    write_record(made.beat(1, "node0"), record)
    made.targets.write_text('[{"targets": ["127.0.0.1:9"], "labels": {}}]')
    step = {"schema_version": 1, "step": 1, "epoch": "a0001g01c0001", "loss": 2.5, "tokens": 8, "unix": now}
    made.train_log(1, 1).write_text(json.dumps(step | {"step_time_s": 0.1, "tokens_per_s": 80.0}) + "\n")
    made.node_log(1, 1, "node0").write_text("{}\n[rank0]: loading\n")
    write_request(made, make_request(Verb.DRAIN, by="me", now_unix=now + 60), ulid=ULID)
    return made.root


COMMANDS = (
    *(
        ["status", "demo"],
        ["status", "demo", "--json"],
        ["status"],
        ["watch", "demo"],
        ["explain", "demo"],
        ["logs", "demo"],
    ),
    *(["controller", "--once"], ["drain", "demo", "--timeout", "0"], ["cancel", "demo", "--timeout", "0"]),
    *(["resume", "demo"], ["controller", "--once"], ["status", "demo"]),
)


SOME = ("truncated", "random", "deep", "1e308", "lists", "folder", "fifo", "absent")
# A live run must never get a second attempt, so there everything is tried; what nobody decides by needs less.
CASES = [
    pytest.param(file, how, alive, id=f"{file}-{how}-{'alive' if alive else 'dead'}")
    for file in FILES
    for how in DAMAGE
    for alive in (True, False)
    if how in SOME or (alive and file not in UNNAMED)
    if alive or file not in UNNAMED
]


@pytest.mark.parametrize(("file", "how", "alive"), CASES)
def test_every_command_survives_every_damage(file, how, alive, originals, launcher, tmp_path, monkeypatch, capfd):
    paths = RunPaths(tmp_path / "runs" / "demo")
    shutil.copytree(originals[alive], paths.root)
    monkeypatch.setenv("PAWL_RUNS", str(paths.root.parent))
    monkeypatch.chdir(tmp_path)
    damaged = FILES[file](paths)
    DAMAGE[how](damaged)
    before = {path: path.read_bytes() for path in paths.root.rglob("*") if path.is_file() and not path.is_symlink()}
    said = ""
    for command in COMMANDS:
        code = run(command)
        out, err = capfd.readouterr()
        said += out + err
        assert code in (0, 1, 2, 3, 130), (command, code, out, err)
        assert "Traceback" not in out + err, (command, out, err)
        assert code == 0 or err or command[0] in ("status", "watch", "controller"), (command, code, "no word on stderr")
    assert launcher.launched == [] if alive else len(launcher.launched) <= 1, said
    if how != "absent" and file not in UNNAMED and how not in HARMLESS.get(file, ()):
        assert damaged.name in said, f"{damaged} is named by no command:\n{said}"
    for path, content in before.items():
        if path.parent != paths.control:
            assert path.exists() and path.read_bytes()[: len(content)] == content, path
