"""What the ledger says of copies and exports beside the training; pure."""

from collections.abc import Iterable

from orchestrator.state.records import Event
from orchestrator.state.rundir import CheckpointName
from orchestrator.views.records import CopiesView


def copies_of(events: Iterable[Event]) -> CopiesView | None:
    """The newest copy and the failure that nothing has made good since; None where nothing was copied or failed."""
    names: dict[str, str] = {}
    failed: dict[str, str] = {}
    place: str | None = None
    for event in events:
        name = event.data.get("name")
        if event.kind == "checkpoint_uploaded" and name is not None:
            place = event.data.get("url") or place
            names[str(name)] = str(name)
            failed.pop("push", None)
        elif event.kind == "export":
            failed.pop("export", None)
        elif event.kind == "checkpoint_fetched":
            failed.pop("pull", None)
        elif event.kind == "errand_failed":
            errand = str(event.data.get("errand"))
            failed[errand] = f"{' '.join(filter(None, (errand, name)))} failed: {event.data.get('reason')}"
    if not names and not failed:
        return None
    steps = [parsed.step for name in names if (parsed := CheckpointName.parse(name)) is not None]
    return CopiesView(
        place=place, count=len(names), newest_step=max(steps, default=None), failed=tuple(failed.values())
    )
