"""One rank of a training run, from the command line to the exit code. Read this file first.

    assemble   cycle.json, config, world size ▸ process group ▸ mesh, data, engine
    restore    exactly the checkpoint the cycle names, or a fresh start (drawn weights, or those of another run)
    loop       steps, checkpoints, control word           (loop.py)
    end        outcome file ▸ exit code, whatever happened

Nothing here decides what to do about a failure: a rank says how it ended and leaves. Who relaunches it, on which nodes
and from which checkpoint, is the orchestrator's business.
"""

import logging
import os
import sys
import threading
import time
import traceback
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.alone import choose_and_clear
from trainer.beat import BeatWriter, Phase, open_beats
from trainer.checkpoint.load import load_checkpoint
from trainer.checkpoint.save import tokenizer_record
from trainer.checkpoint.saver import engine_saver
from trainer.checkpoint.state import RunState
from trainer.checkpoint.weights import load_weights
from trainer.config import Config, load_config
from trainer.config.tree import without_secrets
from trainer.control import Control
from trainer.data.loader import Loader
from trainer.device import device_name, memory_bytes
from trainer.digests import check_replicas
from trainer.engine import Engine
from trainer.errors import ConfigError
from trainer.flops import peak_flops, step_flops
from trainer.guard import AgentGuard
from trainer.journal import Journal, validated
from trainer.launch import Launch, read_launch
from trainer.loop import LoopPlan, TrainLoop
from trainer.mesh.context import ParallelContext, background_of, check_world_size, init_process_group
from trainer.mesh.topology import Topology
from trainer.outcome import DONE, DRAINED, HANG_SELF_KILL, Ending, ending_of, leave, relative_to_run, write_outcome
from trainer.peers import agree, wait_for_peers
from trainer.profiler import StepProfiler
from trainer.records import UNSUPERVISED, Cycle, Epoch, Outcome
from trainer.replicas import Scope
from trainer.saves import Saves
from trainer.schedules import batch_size_at, lr_at, weight_decay_at
from trainer.signals import DrainFlag, install_alone, install_supervised
from trainer.throughput import StepCost

COLLECTIVE_TIMEOUT_S = 1800.0  # a last resort: the agent's phase limits find a hang much earlier, and name the rank
LAST_WORD_S = 5.0
AGREED_ENDINGS = frozenset({"done", "drained", "nonfinite", "desync"})


def main(args: Namespace) -> int:
    """`python -m trainer train`: run one rank and end the process with its exit code. Does not return."""
    leave(TrainerProcess(read_launch(args, os.environ)).run())


class TrainerProcess:
    """One rank's life. The attributes are what an outcome needs to know, however far the rank has come."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.cycle: Cycle | None = None
        self.epoch = UNSUPERVISED
        self.config_text = ""
        self.beats: BeatWriter | None = None
        self.checkpoint: str | None = None
        self.tokenizer: dict[str, Any] | None = None
        self.guard: AgentGuard | None = None
        self.reported = False

    def run(self) -> int:
        """Train, leave an outcome, return the exit code. Never raises."""
        try:
            ending = self.train()
        except BaseException as error:  # SystemExit and KeyboardInterrupt end a rank too, and must say so
            traceback.print_exc()
            ending = ending_of(error, checkpoint=self.checkpoint)
        self.report(ending)
        if self.guard is not None:
            self.guard.tidy()
        if ending.kind in AGREED_ENDINGS:
            wait_for_peers(self.launch.store_prefix(self.epoch), self.launch.world_size)
        return ending.exit_code

    def train(self) -> Ending:
        """Assemble, restore, loop. Raises whatever stops it; TrainerErrors carry their exit code."""
        config, beats, drain = self.assemble()
        topology = Topology(
            dp=config.parallelism.dp, pp=config.parallelism.pp, tp=config.parallelism.tp, cp=config.parallelism.cp
        )
        # Before any connection: ranks that wait for peers that were never started wait for ever.
        check_world_size(topology, self.launch.world_size)
        prefix = self.launch.store_prefix(self.epoch)
        init_process_group(topology, prefix=prefix, timeout_s=COLLECTIVE_TIMEOUT_S)
        context = ParallelContext(topology)
        agree(context, lambda: self.note_tokenizer(config))
        loader = Loader(config, topology, context.rank)
        engine = Engine(config, context)
        state = self.restore(engine, context)
        compile_s = self.compile(engine, evaluates=bool(loader.held_out))
        with (
            Journal(
                self.launch.cycle_dir if context.rank == 0 else None,
                print_interval=config.logging.iteration_step_info_interval,
                compile_s=compile_s,
            ) as journal,
            StepProfiler(
                config.profiler,
                rank=context.rank,
                epoch_text=self.epoch.text,
                folder=self.launch.profile_dir,
                beats=beats,
                wait=lambda: agree(context, dict),
            ) as profiler,
        ):
            loop = TrainLoop(
                engine=engine,
                loader=loader,
                plan=loop_plan(config, epoch=self.epoch, device=device_name(context.device)),
                beats=beats,
                control=Control(beats, drain),
                profiler=profiler,
                journal=journal,
                saves=self.saves(engine, config),
                compare=lambda state: check_replicas(engine, step=state.step, scope=Scope.ALL),
                memory=lambda: memory_bytes(context.device) or (0, 0),
                validated=lambda step: self.validated(step, context),
            )
            return self.finish(loop, state)

    def assemble(self) -> tuple[Config, BeatWriter, DrainFlag]:
        """Everything that needs no other rank: cycle, beats, signals, config. Raises ConfigError, RecordUnreadable."""
        launch, drain = self.launch, DrainFlag()
        self.cycle = launch.read_cycle()
        if self.cycle is not None:
            self.epoch = self.cycle.epoch
        self.beats = open_beats(launch.shm, epoch=self.epoch, rank=launch.rank, local_rank=launch.local_rank)
        if launch.shm is not None:
            self.guard = guard = AgentGuard(
                launch.shm,
                interval_s=5.0 if self.cycle is None else self.cycle.beat_interval_s,
                on_gone=self.end_alone,
            )
            guard.start()
        launch.cycle_dir.mkdir(parents=True, exist_ok=True)
        launch.checkpoints_dir.mkdir(parents=True, exist_ok=True)
        if self.cycle is None:
            install_alone(drain)
        else:
            install_supervised(launch.stacks_file)
            if self.cycle.world_size != launch.world_size:
                raise ConfigError(
                    f"cycle.json says {self.cycle.world_size} ranks ({self.cycle.num_nodes} nodes × "
                    f"{self.cycle.ranks_per_node} ranks per node), torchrun started {launch.world_size} (WORLD_SIZE)."
                )
        config = load_config(launch.config_file)
        # Read once: a checkpoint records what this run was started with, whatever becomes of the file meanwhile.
        self.config_text = without_secrets(launch.config_file.read_text(encoding="utf-8"))
        level = config.logging.log_level if launch.rank == 0 else config.logging.log_level_replica
        logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
        return config, self.beats, drain

    def note_tokenizer(self, config: Config) -> dict[str, Any]:
        """Read the tokenizer's digest once, for the manifests of all checkpoints. Raises ConfigError."""
        if config.tokenizer is not None:
            name = config.tokenizer.tokenizer_name_or_path
            try:
                self.tokenizer = tokenizer_record(name)
            except OSError as error:
                raise ConfigError(
                    f"tokenizer.tokenizer_name_or_path: {name} cannot be read ({error}). Checkpoints name their "
                    "tokenizer by its digest; make the file readable, or remove the section."
                ) from error
        return {}

    def restore(self, engine: Engine, context: ParallelContext) -> RunState:
        """The state to go on from, weights and moments loaded. Raises CheckpointInvalid naming the bad file.

        Under an agent exactly `resume_from` is loaded, never another one: only the orchestrator can tell which
        checkpoints count. Alone, rank 0 looks for the newest that verifies and tells the others.
        """
        assert self.beats is not None
        self.beats.beat(Phase.RESTORE)
        began = time.perf_counter()
        name = self.cycle.resume_from if self.cycle is not None else self.newest(context)
        if name is None:
            self.begin(engine, context)
            return self.with_windows(RunState())
        state = load_checkpoint(self.launch.checkpoints_dir / name, engine)
        self.checkpoint = name
        self.beats.stats.checkpoint_load_seconds = seconds = time.perf_counter() - began
        self.beats.beat(step=state.step, tokens=state.consumed_tokens)
        say(context, f"goes on from {name}, {context.topology.world_size} ranks, loaded in {seconds:.2f} s")
        return self.with_windows(state)

    def begin(self, engine: Engine, context: ParallelContext) -> None:
        """Weights of step 0: drawn, or those of `model.init_method.path`. Raises ConfigError where that does not fit.

        Comm: 3 small all-gathers where weights are read.
        """
        start = engine.config.model.init_method.path
        if start is None:
            engine.init_weights()
        else:
            for note in load_weights(Path(start), engine):
                say(context, f"note: {note}")
        weights = "" if start is None else f" from the weights of {start}"
        say(context, f"starts at step 0{weights}, {context.topology.world_size} ranks")

    def compile(self, engine: Engine, *, evaluates: bool) -> float | None:
        """Compile what the config wants compiled; seconds, None where it wants nothing. Comm: tp collectives."""
        assert self.beats is not None
        if engine.compiler is None:
            return None
        self.beats.beat(Phase.COMPILE)
        seconds = engine.compile_blocks(evaluates=evaluates)
        say(engine.ctx, f"layers compiled in {seconds:.2f} s")
        return seconds

    def newest(self, context: ParallelContext) -> str | None:
        """The newest checkpoint that verifies, as rank 0 sees it; None when there is none. Comm: 1 all-gather."""

        def look() -> dict[str, Any]:
            name, passed_over = choose_and_clear(self.launch.checkpoints_dir)
            for reason in passed_over:
                say(context, f"not used: {reason}")
            return {"name": name}

        name: str | None = agree(context, look)["name"]
        return name

    def with_windows(self, state: RunState) -> RunState:
        """The state with the skip windows of the checkpoint and of this cycle."""
        ordered = () if self.cycle is None else self.cycle.skip_windows
        return replace(state, skip_windows=tuple(sorted({*state.skip_windows, *ordered})))

    def saves(self, engine: Engine, config: Config) -> Saves:
        """The saves of this launch. Comm: with `async_save` makes a group (world)."""
        assert self.beats is not None
        saver = engine_saver(
            engine,
            checkpoints_dir=self.launch.checkpoints_dir,
            epoch=self.epoch.text,
            run=config.general.run,
            config_text=self.config_text,
            tokenizer=self.tokenizer,
            compare=Scope.TIED if config.parallelism.replica_check_interval is None else Scope.ALL,
            background=background_of(engine.ctx) if config.checkpoints.async_save else None,
        )
        return Saves(saver, self.beats, committed=self.note_checkpoint, say=lambda text: say(engine.ctx, text))

    def note_checkpoint(self, name: str) -> None:
        """The newest checkpoint this process committed, for its outcome."""
        self.checkpoint = name

    def finish(self, loop: TrainLoop, state: RunState) -> Ending:
        """Run the loop, and say how it ended."""
        train_steps = loop.plan.train_steps
        complete = state.step >= train_steps
        end = loop.run(state)
        if end.drained:
            message = f"Drained at step {end.state.step} of {train_steps}; checkpoint {end.checkpoint}."
            return Ending(kind="drained", exit_code=DRAINED, message=message, checkpoint=end.checkpoint)
        message = "Already complete: " if complete else "Complete: "
        message += f"step {end.state.step} of {train_steps}; checkpoint {self.checkpoint}."
        return Ending(kind="done", exit_code=DONE, message=message, checkpoint=self.checkpoint)

    def validated(self, step: int, context: ParallelContext) -> bool:
        """Whether a launch of this run has already validated after `step`, as rank 0 sees it. Comm: 1 all-gather."""
        return bool(agree(context, lambda: {"done": validated(self.launch.run_dir, step)})["done"])

    def end_alone(self, why: str) -> None:
        """The agent is gone (called in the guard's thread): outcome, shared memory, exit code 90. Does not return."""
        print(f"rank {self.launch.rank}: {why}", file=sys.stderr, flush=True)
        ending = Ending(kind="hang", exit_code=HANG_SELF_KILL, message=why, checkpoint=self.checkpoint)
        # In a thread of its own: a file system that does not answer must not keep this rank.
        last_word = threading.Thread(target=self.report, args=(ending,), daemon=True)
        if not self.reported:
            last_word.start()
            last_word.join(timeout=LAST_WORD_S)
        if self.guard is not None:
            self.guard.tidy()
        leave(HANG_SELF_KILL)

    def report(self, ending: Ending) -> None:
        """Leave the outcome file and a last beat. A full disk must not keep a rank from ending."""
        self.reported = True
        phase, step = (Phase.INIT, 0) if self.beats is None else (self.beats.phase, self.beats.step)
        outcome = Outcome(
            rank=self.launch.rank,
            node=self.launch.node,
            epoch=self.epoch,
            kind=ending.kind,
            exit_code=ending.exit_code,
            step=step,
            phase=phase.name,
            message=ending.message,
            exception=ending.exception,
            checkpoint=ending.checkpoint,
            bad_file=relative_to_run(ending.bad_file, self.launch.run_dir),
            suspects=ending.suspects,
            written_unix=time.time(),
        )
        try:
            write_outcome(outcome, cycle_dir=self.launch.cycle_dir)
        except OSError:
            traceback.print_exc()
        if self.beats is not None:
            self.beats.beat(Phase.EXIT)


def loop_plan(config: Config, *, epoch: Epoch, device: str | None) -> LoopPlan:
    """What the config asks of the loop. `device`: its name, for its peak."""
    optimizer, train_steps = config.optimizer, config.tokens.train_steps
    peak = peak_flops(device, config.compute_dtype)

    def cost(consumed_samples: int) -> StepCost:
        samples = batch_size_at(consumed_samples, config.batch_sizes)
        flops = step_flops(config, num_samples=samples)
        return StepCost(
            tokens=samples * config.tokens.sequence_length,
            samples=samples,
            flops=flops.exact,
            flops_full_attn=flops.full_attn,
            flops_megatron=flops.megatron,
            flops_hardware=flops.hardware,
            pairs=flops.pairs,
            flops_per_pair=flops.exact_per_pair,
            hardware_per_pair=flops.hardware_per_pair,
            peak_flops_per_s=None if peak is None else peak * config.world_size,
        )

    return LoopPlan(
        epoch=epoch,
        train_steps=train_steps,
        checkpoint_interval=config.checkpoints.checkpoint_interval,
        validation_interval=config.tokens.val_check_interval,
        grad_norms_interval=config.logging.grad_norms_interval,
        replica_interval=config.parallelism.replica_check_interval,
        cost=cost,
        lr=lambda step: lr_at(step, optimizer.learning_rate_scheduler, train_steps=train_steps),
        weight_decay=lambda step: weight_decay_at(
            step, optimizer.weight_decay, optimizer.weight_decay_schedule, train_steps=train_steps
        ),
    )


def say(context: ParallelContext, text: str) -> None:
    """One line for a person, from rank 0."""
    if context.rank == 0:
        print(text, flush=True)
