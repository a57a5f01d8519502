"""What Slurm's commands print, parsed; pure functions of text.

Two parsers live here: the reply of `sbatch` (which job was made?) and host lists (`node[001-004,007]`).
Both are strict in the same way: text that is not plainly an answer is no answer. A guessed job id is worse
than none, because the run would then be watched under another user's job.
"""

import re
from dataclasses import dataclass

from orchestrator.errors import PawlError

_SUBMITTED = re.compile(
    r"Submitted batch job (?P<id>[1-9]\d*)(?: on cluster (?P<cluster>[A-Za-z0-9][\w.-]*))?", re.ASCII
)
_PARSABLE = re.compile(r"(?P<id>[1-9]\d*)(?:;(?P<cluster>[A-Za-z0-9][\w.-]*))?", re.ASCII)

# squeue, scontrol and sacct print these where a job has no nodes (yet).
_NO_NODES = frozenset({"", "(null)", "None assigned", "None"})
_HOST_TEXT = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?", re.ASCII)
_MAX_HOSTS = 65_536  # Slurm's own bound for one range; a mistyped list must not fill the memory


class HostlistError(PawlError):
    """A host list expression that Slurm itself would not expand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """A Slurm job: its number, and the cluster where sbatch named one (federations, `--clusters`)."""

    job_id: int
    cluster: str | None = None

    def __str__(self) -> str:
        return str(self.job_id) if self.cluster is None else f"{self.job_id};{self.cluster}"


def parse_sbatch_reply(stdout: str) -> JobRef | None:
    """The job that `sbatch` made, from its stdout alone; None = the reply names no job.

    Site plug-ins print notices into stdout, so the last line that is a whole answer wins. stderr is never
    given to this function: it carries numbers of its own (partition defaults, retries).
    """
    for line in reversed(stdout.splitlines()):
        match = _SUBMITTED.fullmatch(line.strip()) or _PARSABLE.fullmatch(line.strip())
        if match:
            return JobRef(job_id=int(match["id"]), cluster=match["cluster"])
    return None


def expand_hostlist(expression: str) -> tuple[str, ...]:
    """All host names of a Slurm expression, in order, duplicates kept; () where there are no nodes yet.

    Raises HostlistError for anything `scontrol show hostnames` refuses, and for the unclosed brackets that
    22.05 silently turns into a wrong name.
    """
    if expression.strip() in _NO_NODES:
        return ()
    hosts: list[str] = []
    for item in _split_items(expression.strip()):
        hosts.extend(_expand_item(item, expression))
        if len(hosts) > _MAX_HOSTS:
            raise HostlistError(f"host list {expression[:80]!r} names more than {_MAX_HOSTS} hosts")
    return tuple(hosts)


def unique_hosts(expression: str) -> tuple[str, ...]:
    """The set of nodes of an expression, in order of first mention (`scontrol` repeats overlaps)."""
    return tuple(dict.fromkeys(expand_hostlist(expression)))


def _split_items(expression: str) -> list[str]:
    """Cut at the commas that stand outside brackets."""
    return re.split(r",(?![^\[\]]*\])", expression)


def _expand_item(item: str, whole: str) -> list[str]:
    """One comma-free item: text, or text followed by bracket groups, text between them allowed."""
    parts = re.split(r"(\[[^\[\]]*\])", item)
    texts, groups = parts[0::2], parts[1::2]
    # A suffix after the last bracket ("n[1-2]-ib") is invalid in Slurm too.
    well_formed = _HOST_TEXT.fullmatch(texts[0]) and all(not t or _HOST_TEXT.fullmatch(t) for t in texts[1:])
    if not well_formed or (groups and texts[-1]):
        raise HostlistError(f"host list {whole[:80]!r}: {item[:80]!r} is no host name or bracket expression")
    hosts = [texts[0]]
    for group, text in zip(groups, texts[1:], strict=True):
        numbers = _expand_group(group[1:-1], whole)
        if len(hosts) * len(numbers) > _MAX_HOSTS:
            raise HostlistError(f"host list {whole[:80]!r} names more than {_MAX_HOSTS} hosts")
        hosts = [host + number + text for host in hosts for number in numbers]
    return hosts


def _expand_group(body: str, whole: str) -> list[str]:
    """`001-004,007` → 001 002 003 004 007; the width is that of the left bound and may grow."""
    numbers: list[str] = []
    for part in body.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match["first"]), int(match["last"] or match["first"])) if match else (1, 0)
        if match is None or last < first or last - first >= _MAX_HOSTS:
            raise HostlistError(f"host list {whole[:80]!r}: {part[:40]!r} in brackets is no number or rising range")
        numbers.extend(f"{n:0{len(match['first'])}d}" for n in range(first, last + 1))
    return numbers
