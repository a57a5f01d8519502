"""`pawl export` and `pawl import`: what the trainer's converter is told, here or as an array of jobs.

RUN, steps ─▶ checkpoints that count ─▶ one command line of the trainer for each ─▶ run here, one after the other
                                                                                 └▶ or by submitit, all at once
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from orchestrator.cli.actions.request import choose_checkpoint, passed_over
from orchestrator.cli.app import exit_code_of_trainer, pass_to_trainer
from orchestrator.cli.places import the_run
from orchestrator.config.site import find_site
from orchestrator.config.yaml_loader import Mapping as MappingNode
from orchestrator.config.yaml_loader import Scalar, load_file
from orchestrator.errors import PawlError, UsageError
from orchestrator.state import ledger
from orchestrator.state.ledger import Ledger, latest_epoch
from orchestrator.state.requests import new_ulid
from orchestrator.state.rundir import RunPaths
from orchestrator.views.records import CheckpointView, RunView
from orchestrator.views.run_view import run_view

EXECUTORS = ("slurm", "local", "debug")
JOB_MINUTES = 240
# What a job of the site's needs besides the program; the rest of the section is about training.
_SITE_KEYS = ("partition", "account", "qos", "reservation", "constraint")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportWish:
    """What `pawl export` was asked for. steps: () is the newest. executor: None runs here, one after the other."""

    out: Path
    steps: tuple[int, ...] = ()
    every: bool = False
    dtype: str | None = None
    tokenizer: Path | None = None
    push_to_hub: str | None = None
    executor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One checkpoint, where its export goes, and what the trainer is told."""

    checkpoint: CheckpointView
    out: Path
    words: tuple[str, ...]


def export_run(run: str, wish: ExportWish, *, runs_root: Path | None, site: Path | None) -> int:
    """Convert checkpoints that count to Hugging Face folders, by the trainer's own command."""
    if wish.executor is not None and wish.executor not in EXECUTORS:
        raise UsageError(f"--executor {wish.executor} is none of {', '.join(EXECUTORS)}.")
    paths = the_run(run, runs_root=runs_root, site=site)
    view = run_view(paths.root)
    parts = plan_parts(view, paths, wish)
    for part in parts:
        if part.out.exists() and (not part.out.is_dir() or any(part.out.iterdir())):
            raise UsageError(f"{part.out} exists already and is not an empty folder. Give another --out.")
        typer.echo(f"Exporting {part.checkpoint.name} of {view.run} to {part.out}")
    for step in wish.steps or (None,):
        for line in passed_over(view, parts[0].checkpoint, step) if not wish.every else ():
            typer.echo(line)
    if wish.executor is None:
        codes = [pass_to_trainer("convert", list(part.words), prog="pawl export") for part in parts]
    else:
        codes = run_jobs(parts, wish, name=f"pawl-export-{view.run}", site=site_defaults(find_site(site)))
    _note(paths, [part for part, code in zip(parts, codes, strict=True) if code == 0])
    failed = [part.checkpoint.name for part, code in zip(parts, codes, strict=True) if code != 0]
    if failed and len(parts) > 1:
        typer.echo(f"{len(failed)} of {len(parts)} exports failed: {', '.join(failed)}.", err=True)
    return max(codes)


def plan_parts(view: RunView, paths: RunPaths, wish: ExportWish) -> tuple[Part, ...]:
    """What is exported to where: one checkpoint to `out` itself, several to `out`/step-N. Raises UsageError. Pure."""
    if wish.every and wish.steps:
        raise UsageError("--all and --step exclude each other.")
    if wish.every:
        choose_checkpoint(view, None)  # raises where there is none
        counting = [item for item in view.checkpoints if item.counts]
        chosen = sorted(counting, key=lambda item: item.step)
    else:
        chosen = [choose_checkpoint(view, step) for step in (*dict.fromkeys(wish.steps),) or (None,)]
    several = wish.every or len(chosen) > 1
    return tuple(
        Part(
            checkpoint=item,
            out=(out := wish.out / f"step-{item.step}" if several else wish.out),
            words=_words(paths, item, out, wish, revision=f"step-{item.step}" if several else None),
        )
        for item in chosen
    )


def _words(
    paths: RunPaths, item: CheckpointView, out: Path, wish: ExportWish, *, revision: str | None
) -> tuple[str, ...]:
    words = ["--checkpoint-path", str(paths.checkpoint(item.name)), "--save-path", str(out), "--target-format", "hf"]
    options = {
        "--dtype": wish.dtype,
        "--tokenizer": wish.tokenizer,
        "--push-to-hub": wish.push_to_hub,
        "--revision": revision if wish.push_to_hub is not None else None,
    }
    for option, value in options.items():
        words += [] if value is None else [option, str(value)]
    return tuple(words)


def _note(paths: RunPaths, done: Sequence[Part]) -> None:
    """Into the ledger; that of a run of someone else is not ours to write."""
    if done and os.access(paths.ledger, os.W_OK):
        writer = Ledger(paths.root, f"cli-{new_ulid()}")
        for part in done:
            data = {"step": part.checkpoint.step, "out": str(part.out)}
            writer.append(latest_epoch(ledger.read_all(paths.root)), "export", data)


def run_jobs(parts: Sequence[Part], wish: ExportWish, *, name: str, site: Mapping[str, str]) -> list[int]:
    """One job of an array for each part; waits for them. Ctrl-C leaves them running. Raises PawlError."""
    import submitit

    folder = wish.out / ".jobs" if len(parts) > 1 else wish.out.with_name(f".{wish.out.name}.jobs")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # submitit keeps what it runs as pickles, which are programs
    executor = submitit.AutoExecutor(folder=folder, cluster=wish.executor)
    executor.update_parameters(**job_parameters(name, wish.executor, site))
    try:
        jobs = executor.map_array(run_part, [list(part.words) for part in parts])
    except (RuntimeError, OSError) as error:
        raise PawlError(
            f"The jobs could not be submitted: {error}. Without --executor the export runs here."
        ) from error
    typer.echo(f"{len(jobs)} jobs ({', '.join(job.job_id for job in jobs)}); their logs lie in {folder}")
    return [_result(job) for job in jobs]


def _result(job: Any) -> int:
    """pawl's exit code for a job; 1 where it left no result (cancelled, out of time)."""
    try:
        return exit_code_of_trainer(int(job.result()))
    except Exception as error:  # submitit's own kinds, and whatever the job raised
        last = str(error).strip().splitlines()[-1:] or [repr(error)]
        typer.echo(f"pawl: job {job.job_id}: {last[0]} (log: {job.paths.stderr})", err=True)
        return 1


def job_parameters(name: str, executor: str | None, site: Mapping[str, str]) -> dict[str, Any]:
    """submitit's words for a job of one process that streams files; the site's defaults on Slurm."""
    parameters: dict[str, Any] = {"name": name, "timeout_min": JOB_MINUTES, "nodes": 1, "tasks_per_node": 1}
    if executor == "slurm":
        parameters |= {"cpus_per_task": 2, **{f"slurm_{key}": value for key, value in site.items()}}
    return parameters


def site_defaults(file: Path | None) -> dict[str, str]:
    """The slurm section's defaults that any job needs."""
    root = None if file is None else load_file(file).root
    section = None if root is None else root.entries.get("slurm")
    if not isinstance(section, MappingNode):
        return {}
    found = ((key, section.entries.get(key)) for key in _SITE_KEYS)
    return {key: node.text for key, node in found if isinstance(node, Scalar) and not node.is_null}


def run_part(words: list[str]) -> int:
    """One export, in a job: the trainer's command, its output in the job's log. Returns its exit code."""
    command = [sys.executable, "-m", "trainer", "convert", "--prog", "pawl export", *words]
    return subprocess.run(command, env={**os.environ, "PYTHONSAFEPATH": "1"}, check=False).returncode


def import_model(folder: Path, *, out: Path) -> int:
    """Convert a Hugging Face folder to a checkpoint, by the trainer's own command."""
    words = ["--checkpoint-path", str(folder), "--save-path", str(out), "--target-format", "pawl"]
    return pass_to_trainer("convert", words, prog="pawl import")
