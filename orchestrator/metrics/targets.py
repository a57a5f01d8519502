"""metrics/targets.json: where Prometheus finds the node endpoints of a run (file-based service discovery).

The file names what runs *now*: an attempt that ends leaves an empty list, so Prometheus stops scraping dead addresses
and its staleness markers appear. The series carry `run` and `node` themselves; a target label of the same name would
only make Prometheus rename theirs to `exported_run`, so targets carry `attempt` alone.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from orchestrator.state.fsio import read_text, write_atomic


def targets_json(addresses: Iterable[str], *, attempt: int) -> str:
    """The file's text. `addresses`: host:port of each agent's endpoint."""
    targets = sorted(set(addresses))
    groups = [{"targets": targets, "labels": {"attempt": str(attempt)}}] if targets else []
    return json.dumps(groups, indent=2, ensure_ascii=False) + "\n"


def write_targets(path: Path, addresses: Iterable[str], *, attempt: int) -> None:
    """Replace the file at once, so that Prometheus never reads half of it. Raises OSError."""
    path.parent.mkdir(mode=0o750, exist_ok=True)
    write_atomic(path, targets_json(addresses, attempt=attempt))


def parse_targets(text: str | None) -> tuple[str, ...]:
    """The host:port addresses of a targets file; () when there is none that can be read."""
    try:
        groups = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return ()
    found = []
    for group in groups if isinstance(groups, list) else ():
        targets = group.get("targets") if isinstance(group, dict) else None
        found += [target for target in targets or () if isinstance(target, str)]
    return tuple(found)


def read_targets(path: Path) -> tuple[str, ...]:
    """Addresses of the file at `path`, () when there is none."""
    return parse_targets(read_text(path))
