"""A trainer without torch, in the place of torchrun: it forks a node's ranks, which step together, beat, save, obey.

    fake_trainer.py --nnodes N --node-rank R --nproc-per-node G --run-dir D --cycle F --shm S --steps 20 …

What goes wrong, and where, stands in faults.json of the run directory, each fault for one cycle: {"cycle": 1,
"rank": 2, "step": 5, "kind": "crash" | "hang" | "stop" | "save_slow" | "code", "value": …}. Ranks meet at a step border
through files, so a missing rank keeps the others waiting, as a collective does.
"""

import argparse
import faulthandler
import json
import os
import signal
import struct
import sys
import time
import zlib
from pathlib import Path

INIT, RESTORE, STEP, SAVE, EXIT = 0, 2, 3, 5, 7


class Rank:
    def __init__(self, options, local):
        self.options = options
        self.cycle = json.loads(Path(options.cycle).read_text())
        self.epoch = self.cycle["epoch"]
        self.local = local
        self.rank = options.node_rank * options.nproc_per_node + local
        self.world = options.nnodes * options.nproc_per_node
        assert self.world == self.cycle["world_size"]
        self.dir = Path(options.cycle).parent
        self.run_dir = Path(options.run_dir)
        self.shm = open(options.shm, "r+b", buffering=0)  # noqa: SIM115 - for the life of the rank
        self.seq = 0
        self.phase_since = time.monotonic_ns()
        self.phase = INIT
        self.steps_done = 0
        self.ack = self.profile_ack = 0
        self.window = None
        faults = self.run_dir / "faults.json"
        self.faults = json.loads(faults.read_text()) if faults.exists() else []
        resume = self.cycle["resume_from"]
        self.step = 0 if resume is None else int(resume.split(".")[0].removeprefix("step-"))

    def fault(self, kind):
        for fault in self.faults:
            here = (self.epoch["cycle"], self.rank, self.step)
            if fault["kind"] == kind and (fault["cycle"], fault["rank"], fault["step"]) == here:
                return fault
        return None

    def beat(self, phase, epoch=None):
        if phase != self.phase:
            self.phase, self.phase_since = phase, time.monotonic_ns()
        e = epoch or self.epoch
        body = struct.pack(
            "<IIIIIIQQQQQdQQ28x",
            *(e["attempt"], e["generation"], e["cycle"], self.rank, os.getpid(), phase, self.step),
            *(time.monotonic_ns(), self.phase_since, self.step * 3, self.ack, 1.0 / (self.step + 1), self.step * 8),
            self.profile_ack,
        )
        stats = struct.pack("<QQQddd", self.steps_done, self.steps_done * 8, 0, 0.0, 0.0, 0.0).ljust(884, b"\0")
        at = 256 + 1024 * self.local
        self.seq += 2
        for offset, part in ((at, body), (at + 128, stats)):
            os.pwrite(self.shm.fileno(), struct.pack("<Q", self.seq - 1), offset)
            os.pwrite(self.shm.fileno(), part + struct.pack("<I", zlib.crc32(part)), offset + 8)
            os.pwrite(self.shm.fileno(), struct.pack("<Q", self.seq), offset)

    def meet(self, word, profile=0):
        """All ranks reach this step: (the highest control word, the steps to profile if all ranks ask for it)."""
        folder = self.dir / "meet" / str(self.step)
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        temp = folder / f".{self.rank}"
        temp.write_text(f"{word} {profile}")
        temp.rename(folder / str(self.rank))
        while len(found := [p for p in folder.iterdir() if not p.name.startswith(".")]) < self.world:
            time.sleep(0.003)
        words, profiles = zip(*(map(int, path.read_text().split()) for path in found), strict=True)
        return max(words), max(profiles) if all(profiles) else 0

    def control(self):
        seq, word = struct.unpack("<QI", os.pread(self.shm.fileno(), 12, 64))
        return seq, (word if seq > self.ack else 0)

    def profile_wish(self):
        seq, steps, _ = struct.unpack("<QI4xQ", os.pread(self.shm.fileno(), 24, 80))
        return steps if seq > self.profile_ack and self.window is None else 0

    def profile(self, agreed):
        """Begin an agreed window after this step, or write the one that ends with it."""
        seq, _, bits = struct.unpack("<QI4xQ", os.pread(self.shm.fileno(), 24, 80))
        if self.window is not None and self.step >= self.window[1]:
            epoch = "a{attempt:04d}g{generation:02d}c{cycle:04d}".format(**self.epoch)
            folder = self.run_dir / "profile" / f"step-{self.window[0]:09d}.{epoch}"
            if bits >> self.local & 1 and not self.fault("no_trace"):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"rank-{self.rank:05d}.json.gz").write_bytes(b"trace")
            self.window, self.profile_ack = None, seq
        if agreed:
            self.window = (self.step + 1, self.step + agreed)

    def save(self):
        self.beat(SAVE)
        slow = self.fault("save_slow")
        if slow:
            time.sleep(slow["value"])
        if self.rank == 0:
            epoch = "a{attempt:04d}g{generation:02d}c{cycle:04d}".format(**self.epoch)
            name = f"step-{self.step:09d}.{epoch}"
            partial = self.run_dir / "checkpoints" / f".{name}.partial"
            if (self.run_dir / "checkpoints" / name).exists():
                return name
            partial.mkdir(exist_ok=True)
            (partial / "rank-00000.safetensors").write_bytes(b"x" * 16)
            files = [{"name": "rank-00000.safetensors", "bytes": 16, "xxh3": "0" * 16}]
            state = {"step": self.step, "consumed_samples": self.step, "consumed_tokens": 8 * self.step}
            manifest = {
                **{"schema_version": 1, "run": self.cycle["run"], "step": self.step, "epoch": epoch, "files": files},
                **{"state": {**state, "adam_t": self.step, "skip_windows": []}, "model_config": {}, "tokenizer": None},
                **{"total_bytes": 16, "pawl_version": "0", "torch_version": "0", "created_unix": time.time()},
            }
            (partial / "manifest.json").write_text(json.dumps(manifest))
            partial.rename(self.run_dir / "checkpoints" / name)
            return name
        return None

    def leave(self, kind, code, message=""):
        self.beat(EXIT)
        outcome = {
            **{"schema_version": 1, "rank": self.rank, "node": os.environ.get("PAWL_NODE"), "epoch": self.epoch},
            **{"kind": kind, "exit_code": code, "step": self.step, "phase": "step", "message": message},
            **{"exception": None, "checkpoint": None, "bad_file": None, "written_unix": time.time()},
        }
        path = self.dir / "outcomes" / f"rank-{self.rank:05d}.json"
        temp = path.with_suffix(".tmp")
        temp.write_text(json.dumps(outcome))
        temp.rename(path)
        os._exit(code)

    def log_step(self):
        if self.rank == 0:
            with (self.dir / "train.jsonl").open("a") as file:
                loss = 1.0 / (self.step + 1)
                file.write(json.dumps({"schema_version": 1, "step": self.step, "loss": loss}) + "\n")

    def misbehave(self):
        if self.fault("crash"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault := self.fault("code"):
            self.leave(fault["value"]["kind"], fault["value"]["code"], "on command")
        if self.fault("hang"):
            time.sleep(3600)
        if self.fault("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)

    def run(self):
        options = self.options
        stacks = (self.dir / "evidence" / f"rank-{self.rank:05d}.stacks").open("a")
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        self.beat(STEP, epoch={"attempt": 9, "generation": 9, "cycle": 9})
        self.beat(INIT)
        time.sleep(options.init_s)
        self.beat(RESTORE)
        self.meet(0)
        while self.step < options.steps:
            self.beat(STEP)
            time.sleep(options.step_s)
            self.misbehave()
            seq, word = self.control()
            self.step += 1
            agreed, profile = self.meet(word, self.profile_wish())
            if agreed:  # also by a rank whose agent has not told it yet: it must not ask again
                self.ack = max(self.ack + 1, seq)
            self.steps_done += 1
            self.log_step()
            self.profile(profile)
            if agreed or self.step % options.save_every == 0 or self.step == options.steps:
                self.save()
                self.beat(STEP)
                self.meet_after_save()
            if agreed == 2:
                self.leave("drained", 75)
        self.leave("done", 0)

    def meet_after_save(self):
        while not any((self.run_dir / "checkpoints").glob(f"step-{self.step:09d}.*")):
            time.sleep(0.003)


def main():
    parser = argparse.ArgumentParser()
    for name in ("nnodes", "node-rank", "nproc-per-node", "steps", "save-every", "master-port"):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in ("run-dir", "cycle", "shm"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--init-s", type=float, default=0.0)
    options = parser.parse_args()
    children = {}
    for local in range(options.nproc_per_node):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            Rank(options, local).run()
        children[pid] = local
    code = 0
    while children:
        pid, status = os.wait()
        local = children.pop(pid)
        failed = os.waitstatus_to_exitcode(status)
        if failed and not code:
            code = 1
            rank = options.node_rank * options.nproc_per_node + local
            print(f"  rank      : {rank} (local_rank: {local})\n  exitcode  : {failed} (pid: {pid})", flush=True)
            time.sleep(0.1)
            for other in children:
                os.kill(other, signal.SIGTERM)
    sys.exit(code)


if __name__ == "__main__":
    main()
