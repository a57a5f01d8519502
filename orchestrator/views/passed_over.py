"""Which checkpoints the newest launch passed over: it resumed from an older one because these do not count. Pure."""

from itertools import takewhile

from orchestrator.state.counting import resume_step
from orchestrator.state.epochs import Epoch
from orchestrator.views.records import CheckpointView, RunView


def passed_over(view: RunView) -> tuple[CheckpointView, ...]:
    """Newest first. One that an earlier launch went back before is none: that was said when it happened."""
    launches = [(Epoch.parse(cycle.epoch), resume_step(cycle.resume_from)) for cycle in view.cycles]
    newest, resumed = launches[-1] if launches else (None, None)
    if newest is None or resumed is None:
        return ()
    found = []
    for checkpoint in takewhile(lambda item: item.step > resumed, view.checkpoints):
        epoch = Epoch.parse(checkpoint.epoch)
        if checkpoint.counts or epoch is None or epoch >= newest:
            continue
        earlier = [step for at, step in launches[:-1] if at is not None and at > epoch]
        if all(step is not None and step >= checkpoint.step for step in earlier):
            found.append(checkpoint)
    return tuple(found)


def passed_over_text(view: RunView) -> str | None:
    """One sentence, None when nothing was passed over."""
    found = passed_over(view)
    if not found:
        return None
    source = view.cycles[-1].resume_from or "the beginning"
    why = "; ".join(f"{item.name} does not count: {item.why_not}" for item in found)
    return f"resumed from {source}, because {why}"
