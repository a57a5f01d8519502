"""`pawl fork`: a new run that starts from a checkpoint of another, with lineage.

    source@STEP ─▶ source's current config + --set + the new name ─▶ checked here ─▶ NewRun
                └▶ duplicate (hard links, verified) ─▶ NEW/checkpoints/step-….a0000g00c0000   goes on at that step
                                                  └──▶ NEW/base/step-…                        weights only: step 0

Keys that a resume may not change may change here, but not the shapes of tensors. The source is only read: it may be
somebody else's, may train on, and may delete its checkpoint afterwards.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.check import CheckResult, run_check
from orchestrator.config.secret_names import REDACTED, blanked_override
from orchestrator.config.typed import lookup
from orchestrator.config.yaml_loader import Scalar, load_file
from orchestrator.control.launchers import work_folder
from orchestrator.control.shelf import Item, Shelf, committed_name
from orchestrator.errors import ConfigProblems, PawlError, UsageError
from orchestrator.state.epochs import Epoch
from orchestrator.state.ledger import Ledger
from orchestrator.state.provenance import collect_provenance
from orchestrator.state.rundir import RunPaths
from orchestrator.submit.facts import current_config, retention_of_config
from orchestrator.submit.quoting import check_text
from orchestrator.submit.redact import redact
from orchestrator.submit.resume import changed_keys
from orchestrator.submit.secrets_file import read_secrets, split_secrets
from orchestrator.submit.submit import NewRun, run_folder
from orchestrator.words import plural

START_KEY = "model.init_method.path"
BASE = "base"
_BEFORE_ANY_ATTEMPT = Epoch(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a person asks for."""

    run: str
    overrides: tuple[str, ...]
    weights_only: bool
    why: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A checked fork, nothing made yet. `new` has no content of the checkpoint; `fill` brings it."""

    wish: Wish
    source: Shelf
    item: Item
    folder: Path
    result: CheckResult
    new: NewRun


def plan_fork(shelf: Shelf, item: Item, wish: Wish, *, runs_root: Path) -> Fork:
    """Check everything that can be checked before anything is made.

    Raises UsageError (name, fixed step, nothing to train), ConfigProblems, PawlError.
    """
    name, folder = committed_name(item), run_folder(runs_root, wish.run)
    check_text(wish.why, key="--why")
    if "general.run" in changed_keys(wish.overrides):
        raise UsageError("--set general.run: the new run's name is given by --run.")
    config, work = current_config(shelf.paths), Path(work_folder(shelf.paths))
    if not work.is_dir():
        raise PawlError(
            f"The work folder of {shelf.run}, {work}, does not exist on this machine, so relative paths of its config "
            "have no meaning here. Fork on the machine where it was submitted."
        )
    source = shelf.paths.checkpoints / item.entry
    named = (*wish.overrides, f"general.run={json.dumps(wish.run)}")
    checked = run_check(config, overrides=(*named, *_start(config, wish, source)), here=True, cwd=work)
    if not checked.ok:
        redact(checked).require()
    result = checked
    if wish.weights_only:
        # What is checked lies there now; what the run will read lies in its own folder, which is not made yet.
        own = (*named, f"{START_KEY}={json.dumps(str(folder / BASE / item.entry))}")
        result = run_check(config, overrides=own, cwd=work)
    spec, facts = result.require()
    if not wish.weights_only and facts.train_steps <= name.step:
        raise UsageError(
            f"{item.entry} is at step {name.step} and tokens.train_steps is {facts.train_steps}: the fork would have "
            f"nothing to train. Give it more, for example --set tokens.train_steps={2 * name.step}, or fork an earlier "
            "step."
        )
    new = _new_run(shelf, item, wish, result, config=config, work=work, launcher=spec.launcher.kind)
    return Fork(wish=wish, source=shelf, item=item, folder=folder, result=result, new=new)


def _start(config: Path, wish: Wish, source: Path) -> tuple[str, ...]:
    """The override of the start weights: these, or none where the source's own would be read in vain."""
    if wish.weights_only:
        return (f"{START_KEY}={json.dumps(str(source))}",)
    node = lookup(load_file(config).root, START_KEY)
    return (f"{START_KEY}=null",) if isinstance(node, Scalar) else ()


def _new_run(
    shelf: Shelf, item: Item, wish: Wish, result: CheckResult, *, config: Path, work: Path, launcher: str
) -> NewRun:
    spec, facts = result.require()
    now = time.time()
    provenance = collect_provenance(config_path=config, overrides=wish.overrides, workdir=work, now_unix=now)
    return NewRun(
        facts=facts,
        config_text=_header(shelf, item, wish, now_unix=now) + redact(result).merged_yaml,
        secret_env=_secrets(shelf.paths, spec.slurm.env),
        provenance={**provenance, "forked_from": f"{shelf.run}@{item.entry}"},
        run_created={
            "run": facts.run,
            "world_size": facts.world_size,
            "nodes": spec.num_nodes,
            "spares": spec.recovery.spares,
            "launcher": launcher,
            "by": wish.by,
        },
        retention=retention_of_config(result.config),
    )


def _header(shelf: Shelf, item: Item, wish: Wish, *, now_unix: float) -> str:
    """Comment lines: where the run comes from."""
    changes = "".join(f"#   {check_text(blanked_override(text), key='--set')}\n" for text in wish.overrides)
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_unix))
    what = "the weights of " if wish.weights_only else ""
    return (
        f"# forked from {what}{shelf.run}@{item.entry} ({shelf.paths.root}), {moment} by {wish.by}: "
        f"{wish.why or 'no reason given'}\n{changes}"
    )


def _secrets(source: RunPaths, env: dict[str, str]) -> dict[str, str]:
    """The secret values of the new run: given with --set, else those of the source."""
    _, secret = split_secrets(env)
    if not any(value == REDACTED for value in secret.values()):
        return secret
    try:
        known = read_secrets(source.root)
    except PawlError:
        known = {}  # somebody else's
    missing = [name for name, value in secret.items() if value == REDACTED and name not in known]
    if missing:
        raise ConfigProblems(
            f"slurm.env.{missing[0]}: its value is a secret of the source run that you cannot read. Give your own with "
            f"--set slurm.env.{missing[0]}=…"
        )
    return {name: known[name] if value == REDACTED else value for name, value in secret.items()}


def filler(fork: Fork, *, say: Callable[[str], None], held: bool) -> Callable[[RunPaths, str], None]:
    """What fills the directory being built: the checkpoint, its facts in the ledger. Raises PawlError, OSError."""

    def fill(paths: RunPaths, writer: str) -> None:
        wish, source = fork.wish, fork.source.paths.checkpoints / fork.item.entry
        target = paths.root / BASE if wish.weights_only else paths.checkpoints
        say(f"Linking or copying {fork.item.entry} of {fork.source.run}, then reading all of it …")
        made = duplicate(source, target, run=None if wish.weights_only else wish.run, config=paths.config)
        ledger = Ledger(paths.root, writer)
        ledger.append(
            _BEFORE_ANY_ATTEMPT,
            "forked",
            {
                "run": fork.source.run,
                "run_dir": str(fork.source.paths.root),
                "step": fork.item.step,
                "checkpoint": fork.item.entry,
                "digest": made["digest"],
                "weights_only": wish.weights_only,
                "by": wish.by,
                "why": wish.why,
                "set": [blanked_override(text) for text in wish.overrides],
            },
        )
        if not wish.weights_only:
            data = {"name": made["name"], "step": made["step"], "bytes": made["bytes"]}
            ledger.append(_BEFORE_ANY_ATTEMPT, "checkpoint_committed", data)
        if held:
            hint = f"pawl resume {wish.run}"
            words = {"rule": "forked", "reason": "made by pawl fork, not started yet", "hint": hint}
            ledger.append(_BEFORE_ANY_ATTEMPT, "run_held", words)
        how = f"{plural(made['linked'], 'file')} linked, {made['copied']} copied"
        say(f"Took over {fork.item.entry}: {how}, verified.")

    return fill


def duplicate(source: Path, target: Path, *, run: str | None, config: Path) -> dict[str, Any]:
    """Run `trainer duplicate`; its answer. Raises PawlError with its words, UsageError where the config is wrong."""
    command = [sys.executable, "-m", "trainer", "duplicate", str(source), "--to", str(target), "--json"]
    command += [f"--config={config}"] + ([f"--run={run}"] if run is not None else [])
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"}, check=False
    )
    if done.returncode == 0:
        made: dict[str, Any] = json.loads(done.stdout)
        return made
    words = (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1]
    error = UsageError if done.returncode in (2, 78) else PawlError
    raise error(f"The fork was not made: {words.removeprefix('trainer duplicate: ')}")
