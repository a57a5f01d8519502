"""A run directory and its supervisor for tests of the live part: all is real but the trainer, which has no torch."""

import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from orchestrator.agent import proc
from orchestrator.control.launch_local import command_of, start_attempt
from orchestrator.state.codec import dumps
from orchestrator.state.fsio import write_atomic
from orchestrator.state.ledger import read_all
from orchestrator.state.records import Intent, LaunchFacts, MemoryPerRank, parse_claim
from orchestrator.state.rundir import RunPaths, make_attempt, make_layout

FAKE = Path(__file__).with_name("fake_trainer.py")
BEAT_S = 0.25


class LiveRun:
    """One attempt of a fake run; `stop` leaves nothing behind."""

    def __init__(self, root: Path, *, steps=20, save_every=5, nodes=2, spares=1, ranks=2, step_s=0.05, recovery=None):
        self.paths, self.attempt, self.steps = RunPaths(root), 1, steps
        self.nodes, self.spares, self.ranks = nodes, spares, ranks
        self.nonce = secrets.token_hex(8)
        self.trainer = ["--steps", str(steps), "--save-every", str(save_every), "--step-s", str(step_s)]
        self.recovery = {"beat_interval_s": BEAT_S, "backoff_s": [0.0], "supervisor_lost_s": 2.0, **(recovery or {})}
        make_layout(self.paths)
        write_atomic(self.paths.config, "general: {run: fake}\n")
        memory = MemoryPerRank(parameters=1, gradients=1, optimizer=1, activations=1, logits=1, total=5)
        facts = LaunchFacts(
            **{"run": "fake", "project": "p", "world_size": nodes * ranks, "dp": 1, "pp": 1, "tp": 1, "cp": 1},
            **{"tokens_per_step": 8, "samples_per_step": 1, "sequence_length": 8, "train_steps": steps},
            **{"checkpoint_interval": save_every, "checkpoint_bytes": 16, "num_params": 1, "flops_per_step": 1.0},
            **{"flops_per_step_full_attn": 1.0, "flops_per_step_megatron": 1.0, "memory_per_rank_bytes": memory},
            **{"compute_dtype": "float32", "config_digest": "0", "vocab_size": 8},
        )
        write_atomic(self.paths.launch_facts, dumps(facts))
        assert make_attempt(self.paths, 1)
        intent = Intent(attempt=1, nonce=self.nonce, launcher="local", by="test", created_unix=time.time())
        write_atomic(self.paths.intent(1), dumps(intent))
        self.pid = None

    def plan(self):
        fake = [sys.executable, "-S", "-E", str(FAKE)]
        places = ["--nnodes={nnodes}", "--node-rank={node_rank}", "--nproc-per-node={ranks_per_node}"]
        files = ["--run-dir", str(self.paths.root), "--cycle", "{cycle_file}", "--shm", "{shm}"]
        return {
            **{"schema_version": 1, "run": "fake", "attempt": 1, "nonce": self.nonce, "launcher": "local"},
            **{"num_nodes": self.nodes, "num_spares": self.spares, "ranks_per_node": self.ranks},
            **{"world_size": self.nodes * self.ranks, "recovery": self.recovery},
            "supervise": list(command_of(Path(sys.executable), self.paths, 1)),
            "torchrun": [*fake, *places, *files, *self.trainer],
        }

    def fault(self, *faults):
        (self.paths.root / "faults.json").write_text(json.dumps(faults))

    def start(self):
        self.pid = start_attempt(self.paths, self.plan())
        return self

    def events(self, kind=None):
        return [event for event in read_all(self.paths.root) if kind in (None, event.kind)]

    def data(self, kind):
        return [event.data for event in self.events(kind)]

    def wait(self, condition, limit_s=30.0):
        deadline = time.monotonic() + limit_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"timed out\n{self.story()}"
            time.sleep(0.03)
        return found

    def wait_event(self, kind, count=1, limit_s=30.0):
        return self.wait(lambda: self.data(kind)[count - 1 : count], limit_s)[0]

    def join(self, limit_s=30.0):
        """The last word of the attempt and the supervisor's exit code."""
        self.wait_event("attempt_ended", limit_s=limit_s)
        deadline = time.monotonic() + 10
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = None
                return self.data("attempt_ended")[0]["outcome"], os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, self.story()
            time.sleep(0.02)

    def processes(self, node=None):
        return proc.find(nonce=self.nonce, node=node)

    def step(self, cycle):
        """Steps in the train log of a cycle, in order."""
        log = self.paths.train_log(1, cycle)
        return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []

    def claim(self):
        return parse_claim(self.paths.claim(1).read_text())

    def story(self):
        """Everything a person would want to read when a test fails."""
        lines = [f"{e.epoch.text} {e.kind} {json.dumps(e.data)}" for e in self.events()]
        logs = [self.paths.supervisor_log(1), *self.paths.attempt(1).glob("agent-*.log")]
        logs += self.paths.root.glob("attempts/*/cycles/*/logs/*")
        texts = [f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs if log.exists()]
        return "\n".join([*lines, *texts])

    def stop(self):
        for process in self.processes():
            proc.send(process, signal.SIGKILL)
        proc.kill_all(self.processes)
        if self.pid is not None:
            os.waitpid(self.pid, 0)
        for file in Path("/dev/shm").glob(f"pawl-{os.getuid()}-{self.nonce}-*"):
            file.unlink()
