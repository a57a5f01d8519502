"""Run directories as a run would have left them, made from a short story: what the surfaces are tested on.

A `Story` is told in calls (`cycle`, `steps`, `incident`, …), each moving its clock; `write` lays it out as a run
directory with ledger, train.jsonl, checkpoints, outcomes and logs. `run_stories` has three of them.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.state.epochs import Epoch
from orchestrator.state.ledger import event_line
from orchestrator.state.records import Event
from orchestrator.state.rundir import RunPaths, make_attempt, make_cycle, make_layout
from orchestrator.state.train_lines import StepLine, parse_step_lines

T0 = 1_770_000_000.0
TOKENS_PER_STEP = 4096
STEP_S = 0.5


@dataclass
class Story:
    """A run being told. `now` is the story's clock in seconds since 1970."""

    run: str = "demo"
    train_steps: int = 60
    interval: int = 10
    nodes: tuple[str, ...] = ("node0", "node1")
    spares: tuple[str, ...] = ("node2",)
    now: float = T0
    epoch: Epoch = field(default_factory=lambda: Epoch(0, 0, 0))
    step: int = 0
    events: list[Event] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    validation: list[tuple[Epoch, dict[str, Any]]] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    logs: list[tuple[Epoch, str, str]] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return 2 * len(self.nodes)

    def step_lines(self) -> tuple[StepLine, ...]:
        """The step lines as they are read back."""
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        return parse_step_lines(text, epoch=Epoch(0, 0, 0))[0]

    def event(self, kind: str, data: dict[str, Any] | None = None, *, writer: str | None = None) -> None:
        """Add a fact at the story's time."""
        name = writer or f"attempt-{self.epoch.attempt:04d}-g{self.epoch.generation:02d}"
        seq = len(self.events) + 1
        self.events.append(Event(epoch=self.epoch, seq=seq, writer=name, unix=self.now, kind=kind, data=data or {}))

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def create(self) -> None:
        """`pawl submit` made the run."""
        self.event(
            "run_created",
            {
                "run": self.run,
                "world_size": self.world_size,
                "nodes": len(self.nodes),
                "spares": len(self.spares),
                "launcher": "local",
                "by": "ada",
            },
            writer="cli-01ARZ3NDEKTSV4RRFFQ69G5FAV",
        )

    def attempt(self) -> None:
        """A new attempt is submitted and starts."""
        number = self.epoch.attempt + 1
        self.epoch = Epoch(number, 0, 0)
        self.event("attempt_intent", {"attempt": number, "nonce": "n0", "launcher": "local", "exclude": []})
        self.wait(0.5)
        self.event("attempt_submitted", {"attempt": number, "job_id": None, "pid": 4242})
        self.wait(1.0)
        self.epoch = Epoch(number, 1, 0)
        everyone = [{"name": name, "address": "127.0.0.1"} for name in (*self.nodes, *self.spares)]
        self.event("attempt_started", {"nonce": "n0", "host": "login1", "pid": 4242, "nodes": everyone})
        self.wait(0.25)

    def cycle(self, *, incident: str | None = None, level: str | None = None, run_first_step: bool = True) -> None:
        """A launch, from the newest checkpoint; by default up to its first completed step."""
        self.epoch = Epoch(self.epoch.attempt, self.epoch.generation, self.epoch.cycle + 1)
        resume = self.checkpoints[-1] if self.checkpoints else None
        self.step = int(resume[5:14]) if resume else 0
        self.event(
            "cycle_started",
            {
                "nodes": list(self.nodes),
                "spares": list(self.spares),
                "resume_from": resume,
                "world_size": self.world_size,
                "incident": incident,
                "level": level,
            },
        )
        if not run_first_step:
            return
        load = 0.4 if resume else None
        self.wait(3.0 + (load or 0.0))
        self.steps(1)
        self.event("cycle_running", {"step": self.step, "start_s": 3.0, "load_s": load})

    def steps(self, count: int) -> None:
        """Train; a checkpoint is committed at each interval and at the end."""
        for _ in range(count):
            self.step += 1
            saves = self.step % self.interval == 0 or self.step == self.train_steps
            save_s = 0.125 if saves else None
            self.wait(STEP_S + (save_s or 0.0))
            self.lines.append(self._line(save_s))
            if saves:
                name = f"step-{self.step:09d}.{self.epoch.text}"
                self.checkpoints.append(name)
                self.event("checkpoint_committed", {"name": name, "step": self.step, "bytes": 16_000_000})

    def _line(self, save_s: float | None) -> dict[str, Any]:
        step = self.step
        return {
            "schema_version": 1,
            "step": step,
            "epoch": self.epoch.text,
            "consumed_samples": step * 32,
            "tokens": step * TOKENS_PER_STEP,
            "loss": 3.0 + 4.0 * math.exp(-step / 15) + 0.05 * math.sin(step * 2.3),
            "grad_norm": 1.0 + 1.0 / step,
            "lr": 3e-3 * min(1.0, step / 10),
            "num_valid": TOKENS_PER_STEP,
            "step_time_s": STEP_S,
            "data_wait_s": 0.0625,
            "tokens_per_s": TOKENS_PER_STEP / STEP_S * (1 + 0.03 * math.sin(step)),
            "model_flops": 5.1e10,
            "mfu": None,
            "mfu_full_attn": None,
            "mfu_megatron": None,
            "skipped": None,
            "save_s": save_s,
            "unix": self.now,
        }

    def fault(
        self,
        *,
        incident: str,
        cls: str,
        level: str,
        node: str,
        rank: int | None,
        phase: str,
        message: str,
        detection_s: float,
        backoff_s: float = 0.0,
        exclude: tuple[str, ...] = (),
    ) -> None:
        """A fault in mid-step, noticed after `detection_s`, then evidence, teardown and the decision."""
        self.wait(0.2)
        fault_unix = self.now
        self.wait(detection_s)
        detected_unix = self.now
        self.wait(0.75)
        rule = "swap-node" if level == "L2" else "restart-same-nodes"
        folder = f"attempts/{self.epoch.attempt:04d}/cycles/{self.epoch.cycle:04d}/evidence"
        self.event(
            "incident",
            {
                "id": incident,
                "class": cls,
                "rule": rule,
                "level": level,
                "node": node,
                "rank": rank,
                "phase": phase,
                "step": self.step,
                "fingerprint": f"{cls}:{node}",
                "message": message,
                "evidence": [f"{folder}/rank-{rank or 0:05d}.stacks"],
                "fault_unix": fault_unix,
                "detected_unix": detected_unix,
            },
        )
        self.event(
            "decision",
            {
                "rule": rule,
                "action": "restart",
                "level": level,
                "reason": f"{message}; {node} is replaced by the spare" if exclude else message,
                "backoff_s": backoff_s,
                "exclude": list(exclude),
                "resume_from": self.checkpoints[-1] if self.checkpoints else None,
            },
        )
        self.event("teardown", {"seconds": 0.75, "orphans": 0})
        self.event("cycle_ended", {"outcome": cls, "exit_code": -9, "step": self.step})
        self.wait(backoff_s)

    def recovered(
        self, *, incident: str, cls: str, level: str, detection_s: float, lost_steps: int, backoff_s: float = 0.0
    ) -> None:
        self.event(
            "recovered",
            {
                "incident": incident,
                "class": cls,
                "level": level,
                "detection_s": detection_s,
                "teardown_s": 0.75,
                "backoff_s": backoff_s,
                "start_s": 3.0,
                "load_s": 0.4,
                "total_s": detection_s + 0.75 + backoff_s + 3.0 + 0.4,
                "lost_steps": lost_steps,
            },
        )

    def end(self, outcome: str = "done") -> None:
        """The cycle and the attempt end by themselves."""
        self.wait(0.5)
        self.event("cycle_ended", {"outcome": outcome, "exit_code": 0 if outcome == "done" else 75, "step": self.step})
        self.wait(0.25)
        if outcome == "done":
            self.event("run_done", {"step": self.step})
        self.event("attempt_ended", {"outcome": outcome, "reason": "the last step is trained", "rule": "finished"})

    def write(self, root: Path) -> Path:
        """Lay the story out as a run directory under `root` and return it."""
        run_dir = root / self.run
        paths = RunPaths(run_dir)
        make_layout(paths)
        paths.launch_facts.write_text(json.dumps(self.facts()))
        paths.config.write_text(f"general:\n  project: demo\n  run: {self.run}\n")
        for event in self.events:
            with paths.ledger_file(event.writer).open("a") as file:
                file.write(event_line(event) + "\n")
        self._write_attempts(paths)
        for line in self.lines:
            epoch = Epoch.parse(line["epoch"])
            assert epoch is not None
            with paths.train_log(epoch.attempt, epoch.cycle).open("a") as file:
                file.write(json.dumps(line) + "\n")
        for epoch, record in self.validation:
            with paths.validation_log(epoch.attempt, epoch.cycle).open("a") as file:
                file.write(json.dumps(record) + "\n")
        for epoch, node, text in self.logs:
            paths.node_log(epoch.attempt, epoch.cycle, node).write_text(text)
        for name in self.checkpoints:
            self._write_checkpoint(paths, name)
        return run_dir

    def _write_attempts(self, paths: RunPaths) -> None:
        for event in self.events:
            if event.kind == "attempt_intent":
                make_attempt(paths, event.epoch.attempt)
            elif event.kind == "cycle_started":
                make_cycle(paths, event.epoch)
                nodes = [
                    {"node_rank": index, "name": name, "address": "127.0.0.1"}
                    for index, name in enumerate(event.data["nodes"])
                ]
                record = {
                    "schema_version": 1,
                    "run": self.run,
                    "epoch": dict(zip(("attempt", "generation", "cycle"), event.epoch.to_list(), strict=True)),
                    "nonce": "n0",
                    "resume_from": event.data["resume_from"],
                    "skip_windows": [],
                    "nodes": nodes,
                    "ranks_per_node": 2,
                    "world_size": self.world_size,
                    "master_addr": "127.0.0.1",
                    "master_port": 29500,
                    "config": "run.yaml",
                    "beat_interval_s": 1.0,
                    "created_unix": event.unix,
                }
                paths.cycle_file(event.epoch.attempt, event.epoch.cycle).write_text(json.dumps(record))

    def _write_checkpoint(self, paths: RunPaths, name: str) -> None:
        step = int(name[5:14])
        folder = paths.checkpoint(name)
        folder.mkdir()
        state = {"step": step, "consumed_samples": step * 32, "consumed_tokens": step * TOKENS_PER_STEP, "adam_t": step}
        manifest = {
            "schema_version": 1,
            "run": self.run,
            "step": step,
            "epoch": name.partition(".")[2],
            "state": state,
            "model_config": {},
            "tokenizer": None,
            "files": [],
            "total_bytes": 16_000_000,
            "pawl_version": "0.1.0",
            "torch_version": "2.13.0",
            "created_unix": self.now,
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))

    def facts(self) -> dict[str, Any]:
        """launch_facts.json."""
        memory = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "logits", "total"), 1_000_000)
        return {
            "schema_version": 1,
            "run": self.run,
            "project": "demo",
            "world_size": self.world_size,
            "dp": 2,
            "pp": 2,
            "tp": 1,
            "cp": 1,
            "tokens_per_step": TOKENS_PER_STEP,
            "samples_per_step": 32,
            "sequence_length": 128,
            "train_steps": self.train_steps,
            "checkpoint_interval": self.interval,
            "checkpoint_bytes": 16_000_000,
            "num_params": 1_336_832,
            "flops_per_step": 5.1e10,
            "flops_per_step_full_attn": 5.4e10,
            "flops_per_step_megatron": 5.4e10,
            "memory_per_rank_bytes": memory,
            "compute_dtype": "float32",
            "config_digest": "0" * 16,
            "vocab_size": 1024,
            "tokenizer": None,
        }
