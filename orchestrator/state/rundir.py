"""The run directory's paths, and their inverse: the one place that knows how anything is named.

    RUN/run.yaml revisions/ launch_facts.json code/ ledger/<writer>.jsonl control/<verb>-<ulid>
        attempts/0003/{intent.json, job.sbatch, claim, nodes.json, channel.key, supervisor.log, beats/<node>}
        attempts/0003/cycles/0001/{cycle.json, train.jsonl, validation.jsonl, outcomes/rank-00042.json, …}
        checkpoints/step-000012500.a0003g01c0002/ (.….partial/ while written, .quarantine-…, .trash-…)
        profile/step-000012500.a0003g01c0002/rank-00042.{json.gz, txt}
        metrics/targets.json

Directories are 0750; control is 0700 and what may be secret 0600. A made attempt directory is the lock of its attempt.
"""

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from orchestrator.errors import PawlError
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import fsync_dir

_CHECKPOINT = re.compile(r"step-(\d{9,15})\.(a\d{4,9}g\d{2,9}c\d{4,9})", re.ASCII)
_NUMBER = re.compile(r"\d{4,9}", re.ASCII)
_RANK = re.compile(r"rank-(\d{5,9})\.json", re.ASCII)
_TRACE = re.compile(r"rank-(\d{5,9})\.json\.gz", re.ASCII)
_REQUEST = re.compile(r"(drain|save-now|cancel|profile)-([0-9A-Za-z]{8,64})", re.ASCII)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """(step, epoch) of a checkpoint; step counts completed optimizer updates."""

    step: int
    epoch: Epoch

    @property
    def text(self) -> str:
        """For example step-000012500.a0003g01c0002."""
        return f"step-{self.step:09d}.{self.epoch.text}"

    @staticmethod
    def parse(text: str) -> "CheckpointName | None":
        """The inverse of `text`; None for every name that pawl would not have written."""
        match = _CHECKPOINT.fullmatch(text)
        epoch = Epoch.parse(match.group(2)) if match else None
        if match is None or epoch is None:
            return None
        name = CheckpointName(int(match.group(1)), epoch)
        return name if name.text == text else None


class EntryKind(StrEnum):
    """What a name in checkpoints/ says it is."""

    COMMITTED = "committed"
    PARTIAL = "partial"
    QUARANTINED = "quarantined"
    TRASH = "trash"
    FOREIGN = "foreign"


def classify_entry(entry: str) -> tuple[EntryKind, CheckpointName | None]:
    """Kind and checkpoint of a name in checkpoints/; a name pawl never writes is FOREIGN and has no checkpoint."""
    if (name := CheckpointName.parse(entry)) is not None:
        return EntryKind.COMMITTED, name
    wrapped = (
        (EntryKind.PARTIAL, entry.removeprefix(".").removesuffix(".partial"), ".{}.partial"),
        (EntryKind.QUARANTINED, entry.removeprefix(".quarantine-"), ".quarantine-{}"),
        (EntryKind.TRASH, entry.removeprefix(".trash-"), ".trash-{}"),
    )
    for kind, inner, form in wrapped:
        name = CheckpointName.parse(inner)
        if name is not None and form.format(inner) == entry:
            return kind, name
    # A trashed partial or quarantined folder keeps its whole name behind the prefix.
    return (EntryKind.TRASH, None) if entry.startswith(".trash-") else (EntryKind.FOREIGN, None)


def parse_number(text: str) -> int | None:
    """The number of an attempt or cycle directory ("0003" → 3), None for other names."""
    if not _NUMBER.fullmatch(text) or f"{int(text):04d}" != text or int(text) < 1:
        return None
    return int(text)


def parse_outcome_name(text: str) -> int | None:
    """The rank of outcomes/rank-00042.json."""
    match = _RANK.fullmatch(text)
    return int(match.group(1)) if match else None


def parse_profile_name(text: str) -> CheckpointName | None:
    """(first step, epoch) of a folder in profile/; it is named as a checkpoint is."""
    return CheckpointName.parse(text)


def parse_trace_name(text: str) -> int | None:
    """The rank of rank-00042.json.gz."""
    match = _TRACE.fullmatch(text)
    return int(match.group(1)) if match else None


def parse_request_name(text: str) -> tuple[str, str] | None:
    """(verb, ulid) of control/<verb>-<ulid>."""
    match = _REQUEST.fullmatch(text)
    return (match.group(1), match.group(2)) if match else None


def safe_name(text: str) -> str:
    """A node's name as a file name: other letters than A-Z a-z 0-9 . _ - become _ and it never starts with a dot."""
    cleaned = _UNSAFE.sub("_", text)[:128] or "_"
    return f"_{cleaned[1:]}" if cleaned.startswith(".") else cleaned


def supervisor_writer(epoch: Epoch) -> str:
    """The ledger name of the supervisor of an attempt: attempt-0003-g01."""
    return f"attempt-{epoch.attempt:04d}-g{epoch.generation:02d}"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """All paths of one run directory. Pure arithmetic; nothing here touches the disk."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    @property
    def launch_facts(self) -> Path:
        return self.root / "launch_facts.json"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def provenance(self) -> Path:
        return self.code / "provenance.json"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    def ledger_file(self, writer: str) -> Path:
        return self.ledger / f"{safe_name(writer)}.jsonl"

    @property
    def control(self) -> Path:
        return self.root / "control"

    def request(self, verb: str, ulid: str) -> Path:
        return self.control / f"{verb}-{ulid}"

    @property
    def profiles(self) -> Path:
        return self.root / "profile"

    def profile(self, name: str) -> Path:
        return self.profiles / name

    @property
    def exports(self) -> Path:
        return self.root / "exports"

    @property
    def targets(self) -> Path:
        return self.root / "metrics" / "targets.json"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def attempt(self, attempt: int) -> Path:
        return self.attempts / f"{attempt:04d}"

    def intent(self, attempt: int) -> Path:
        return self.attempt(attempt) / "intent.json"

    def job_script(self, attempt: int) -> Path:
        return self.attempt(attempt) / "job.sbatch"

    def claim(self, attempt: int) -> Path:
        return self.attempt(attempt) / "claim"

    def nodes(self, attempt: int) -> Path:
        return self.attempt(attempt) / "nodes.json"

    def channel_key(self, attempt: int) -> Path:
        """The 0600 key that authenticates supervisor and agents of one attempt."""
        return self.attempt(attempt) / "channel.key"

    def supervisor_log(self, attempt: int) -> Path:
        return self.attempt(attempt) / "supervisor.log"

    def takeover(self, attempt: int, generation: int) -> Path:
        return self.attempt(attempt) / f"takeover-{generation}"

    def beats(self, attempt: int) -> Path:
        return self.attempt(attempt) / "beats"

    def beat(self, attempt: int, node: str) -> Path:
        return self.beats(attempt) / safe_name(node)

    def cycles(self, attempt: int) -> Path:
        return self.attempt(attempt) / "cycles"

    def cycle(self, attempt: int, cycle: int) -> Path:
        return self.cycles(attempt) / f"{cycle:04d}"

    def cycle_file(self, attempt: int, cycle: int) -> Path:
        return self.cycle(attempt, cycle) / "cycle.json"

    def train_log(self, attempt: int, cycle: int) -> Path:
        return self.cycle(attempt, cycle) / "train.jsonl"

    def validation_log(self, attempt: int, cycle: int) -> Path:
        return self.cycle(attempt, cycle) / "validation.jsonl"

    def outcomes(self, attempt: int, cycle: int) -> Path:
        return self.cycle(attempt, cycle) / "outcomes"

    def outcome(self, attempt: int, cycle: int, rank: int) -> Path:
        return self.outcomes(attempt, cycle) / f"rank-{rank:05d}.json"

    def evidence(self, attempt: int, cycle: int) -> Path:
        return self.cycle(attempt, cycle) / "evidence"

    def stacks(self, attempt: int, cycle: int, rank: int) -> Path:
        return self.evidence(attempt, cycle) / f"rank-{rank:05d}.stacks"

    def logs(self, attempt: int, cycle: int) -> Path:
        return self.cycle(attempt, cycle) / "logs"

    def node_log(self, attempt: int, cycle: int, node: str) -> Path:
        return self.logs(attempt, cycle) / f"{safe_name(node)}.log"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, name: str) -> Path:
        return self.checkpoints / name

    def partial(self, name: str) -> Path:
        return self.checkpoints / f".{name}.partial"

    def quarantined(self, name: str) -> Path:
        return self.checkpoints / f".quarantine-{name}"

    def trash(self, entry: str) -> Path:
        return self.checkpoints / f".trash-{entry.removeprefix('.trash-')}"

    def relative(self, path: Path) -> str:
        """The path as records keep it: relative to the run directory."""
        return path.relative_to(self.root).as_posix()


def make_layout(paths: RunPaths) -> None:
    """Make the run directory; its last component must be new. Raises FileExistsError and OSError."""
    paths.root.parent.mkdir(parents=True, exist_ok=True)
    paths.root.mkdir(mode=0o750)
    for folder in (paths.ledger, paths.attempts, paths.checkpoints, paths.targets.parent, paths.code):
        folder.mkdir(mode=0o750)
    paths.control.mkdir(mode=0o700)
    fsync_dir(paths.root)


def make_attempt(paths: RunPaths, attempt: int) -> bool:
    """Take attempt number `attempt`: True for whoever made the directory, False for everyone else. Raises OSError."""
    try:
        paths.attempt(attempt).mkdir(mode=0o750)
    except FileExistsError:
        return False
    paths.beats(attempt).mkdir(mode=0o750)
    paths.cycles(attempt).mkdir(mode=0o750)
    fsync_dir(paths.attempts)
    return True


def make_cycle(paths: RunPaths, epoch: Epoch) -> bool:
    """Make the folders of a cycle; False when that number is taken. Raises OSError."""
    folder = paths.cycle(epoch.attempt, epoch.cycle)
    try:
        folder.mkdir(mode=0o750)  # no parents: a run directory that was removed must not come back as a stump
    except FileExistsError:
        return False
    for name in ("outcomes", "evidence", "logs"):
        (folder / name).mkdir(mode=0o750)
    fsync_dir(folder.parent)
    return True


def check_owner(paths: RunPaths) -> None:
    """Refuse to act on a run that someone else owns or could have changed. Raises PawlError."""
    try:
        info = os.stat(paths.config)
    except OSError as error:
        raise PawlError(
            f"{paths.config} cannot be read ({error.strerror}). Is {paths.root} a run directory? "
            "`pawl status` lists the runs."
        ) from error
    if info.st_uid != os.geteuid():
        raise PawlError(
            f"{paths.config} belongs to uid {info.st_uid}, you are uid {os.geteuid()}: pawl reads runs of others but "
            "controls only your own. Ask the owner, or fork the run."
        )
    if info.st_mode & 0o022:
        raise PawlError(
            f"{paths.config} may be written by its group or by everyone (mode {info.st_mode & 0o777:o}), so pawl will "
            f"not act on it. If its content is yours: chmod go-w {paths.config}"
        )
