"""`pawl resume`: a person's word that a run may go on, with or without changed values.

    no --set        ledger: resumed{by, why}
    --set a.b=c     sort keys (free, recorded, fixed) ─▶ check the changed config ─▶ revisions/000N.yaml ─▶ resumed{…}
    --code current  code/provenance.json is written anew: the commit and versions that the next attempts run with

A revision is the whole config, so that each attempt has been started from one file. Its number is taken by creating it
exactly once; two people who change a run at the same time get one revision and one refusal.
"""

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.config.check import CheckResult, run_check
from orchestrator.config.secret_names import REDACTED, blanked, blanked_override
from orchestrator.errors import PawlError, UsageError
from orchestrator.state import ledger
from orchestrator.state.codec import dumps
from orchestrator.state.fsio import claim, write_atomic
from orchestrator.state.ledger import Ledger, latest_epoch
from orchestrator.state.provenance import code_line, renew
from orchestrator.state.records import LaunchFacts
from orchestrator.state.requests import new_ulid
from orchestrator.state.revisions import Change, sort_keys
from orchestrator.state.rundir import RunPaths, check_owner
from orchestrator.submit.facts import current_config, current_revision, read_facts, retention_of_config, revision_path
from orchestrator.submit.quoting import check_text
from orchestrator.submit.redact import redact
from orchestrator.submit.secrets_file import read_secrets, split_secrets, write_secrets
from orchestrator.submit.space import need_of, require_room
from orchestrator.views.records import RunState, RunView
from orchestrator.views.run_view import run_view
from orchestrator.words import plural

_ACTIVE = (RunState.QUEUED, RunState.STARTING, RunState.TRAINING, RunState.RECOVERING)


def resume(
    paths: RunPaths, *, overrides: tuple[str, ...], why: str, by: str, now_unix: float, code_current: bool = False,
    from_start: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """Record that the run may go on; what was done, a line each. Launching is the controller's.

    from_start: where no checkpoint is left, the run may begin again at step 1.

    Raises UsageError for a run that is over or running, a fixed key, or a config with problems.
    """
    check_owner(paths)
    check_text(why, key="--why")
    # Hints name the directory, which may be a copy under another name than its records say.
    view = replace(run_view(paths.root, now=now_unix), run=paths.root.name)
    _check_state(view, overrides)
    said = _revise(paths, view, overrides=overrides, why=why, by=by, now_unix=now_unix) if overrides else ()
    data: dict[str, object] = {"by": by, "why": why, "set": [blanked_override(text) for text in overrides]}
    if from_start:
        data["from_start"] = True
    if code_current:
        before, after = renew(paths, by=by, now_unix=now_unix)
        said, data = (*said, code_line(before, after)), {**data, "code": "current"}
    writer = Ledger(paths.root, f"cli-{new_ulid(now_unix)}")
    epoch = latest_epoch(ledger.read_all(paths.root))
    writer.append(epoch, "resumed", {**data, "revision": current_revision(paths)})
    return said


def _check_state(view: RunView, overrides: tuple[str, ...]) -> None:
    if view.state is RunState.DONE:
        raise UsageError(
            f"Run {view.run} is complete; there is nothing to resume. `pawl export {view.run} --out DIR` takes the "
            "model out. More steps are a run of their own, which costs no space and goes on where this one ended: "
            f"{fork_command(view.run, overrides or ('tokens.train_steps=N',))}"
        )
    if view.state in _ACTIVE and view.supervisor_alive is not False:
        raise UsageError(
            f"Run {view.run} is {view.state} and needs no resume. To change it, stop it first: pawl drain {view.run}"
        )


def fork_command(run: str, overrides: tuple[str, ...]) -> str:
    """The command line of a fork with these changes."""
    changes = (f"--set {shlex.quote(blanked_override(text))}" for text in overrides)
    return " ".join(["pawl fork", shlex.quote(run), "--run", shlex.quote(f"{run}-2"), *changes])


def changed_keys(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The dotted keys of `KEY=VALUE` texts. Raises UsageError for another form."""
    for text in overrides:
        if "=" not in text or not text.split("=")[0].strip():
            raise UsageError(
                f"--set {blanked(text)[:80]!r} is no KEY=VALUE. Write for example --set recovery.spares=2."
            )
    return tuple(text.split("=", 1)[0].strip() for text in overrides)


def _revise(
    paths: RunPaths, view: RunView, *, overrides: tuple[str, ...], why: str, by: str, now_unix: float
) -> tuple[str, ...]:
    sorted_keys = sort_keys(changed_keys(overrides))
    if fixed := sorted_keys[Change.FIXED]:
        raise UsageError(
            f"{fixed[0]} is fixed for the life of a run: with another value it would be another run. Make that one "
            f"from the newest checkpoint of this: {fork_command(view.run, overrides)}"
        )
    result = run_check(current_config(paths), overrides=overrides)
    if not result.ok:
        redact(result).require()
    spec, facts = result.require()
    _same_batch(read_facts(paths), facts)
    held = sum(item.bytes or 0 for item in view.checkpoints if item.counts)
    require_room(view.run, paths.root, need_of(facts, retention_of_config(result.config)), held=held)
    _keep_secrets(paths, spec.slurm.env)
    number = _write_revision(paths, redact(result), header=_header(overrides, why=why, by=by, now_unix=now_unix))
    write_atomic(paths.launch_facts, dumps(facts, indent=2) + "\n")
    step = view.newest_checkpoint.step if view.newest_checkpoint else 0
    recorded = [f"{key} changes from step {step} on" for key in sorted_keys[Change.RECORDED]]
    return (f"Wrote revision {number} of {view.run}.", *recorded)


def _same_batch(before: LaunchFacts, after: LaunchFacts) -> None:
    """Another layout is free as long as a step means the same samples."""
    if after.samples_per_step != before.samples_per_step:
        raise UsageError(
            f"The global batch would become {plural(after.samples_per_step, 'sample')} a step instead of "
            f"{before.samples_per_step}. Keep dp × micro_batch_size × batch_accumulation_per_replica equal to "
            f"{before.samples_per_step}: with another batch it would be another run."
        )


def _keep_secrets(paths: RunPaths, env: Mapping[str, str]) -> None:
    """New secret values join the file; those that are blanked keep the value they have there."""
    _, secret = split_secrets(env)
    known = read_secrets(paths.root)
    given = {name: value for name, value in secret.items() if value != REDACTED}
    missing = [name for name, value in secret.items() if value == REDACTED and name not in known]
    if missing:
        raise PawlError(f"The value of {missing[0]} is not in {paths.root}/secrets any more. Give it with --set.")
    if given:
        write_secrets(paths.root, {**known, **given})


def _header(overrides: tuple[str, ...], *, why: str, by: str, now_unix: float) -> str:
    """Comment lines that say who changed what, when and why."""
    changes = "".join(f"#   {check_text(blanked_override(text), key='--set')}\n" for text in overrides)
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_unix))
    return f"# {moment} by {by}: {why or 'no reason given'}\n{changes}"


def _write_revision(paths: RunPaths, result: CheckResult, *, header: str) -> int:
    number = current_revision(paths) + 1
    path: Path = revision_path(paths, number)
    path.parent.mkdir(mode=0o750, exist_ok=True)
    if not claim(path, header + result.merged_yaml):
        raise PawlError(
            f"Revision {number} of {paths.root.name} was written by someone else meanwhile. Look at {path}."
        )
    return number
