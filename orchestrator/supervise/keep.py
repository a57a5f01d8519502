"""House-keeping beside the decisions: new checkpoints, old checkpoints, the addresses of this attempt's metrics."""

from collections.abc import Sequence

from orchestrator.agent.io import Worker
from orchestrator.agent.plan import AttemptPlan
from orchestrator.metrics.targets import write_targets
from orchestrator.state import gc
from orchestrator.state.counting import Checkpoint, Counting
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Event
from orchestrator.state.rundir import RunPaths
from orchestrator.supervise.say import say


class Keeper:
    """Remembers what it has said already. Deleting runs in a thread of its own: a checkpoint may have terabytes."""

    def __init__(self, paths: RunPaths, plan: AttemptPlan, events: tuple[Event, ...]) -> None:
        self._paths, self._plan = paths, plan
        self._targets: Sequence[str] | None = None
        self._told = {str(event.data.get("name")) for event in events if event.kind == "checkpoint_committed"}
        self._worker = Worker("supervisor-gc")

    def publish_targets(self, addresses: Sequence[str]) -> None:
        """Write metrics/targets.json when it changes. Raises OSError."""
        if addresses != self._targets:
            self._targets = list(addresses)
            write_targets(self._paths.targets, addresses, attempt=self._plan.attempt)

    def new_commits(self, counting: Counting) -> tuple[Checkpoint, ...]:
        """Checkpoints that count and are not in the ledger yet, newest first."""
        new = tuple(checkpoint for checkpoint in counting.counted if checkpoint.name not in self._told)
        self._told.update(checkpoint.name for checkpoint in new)
        return new

    def collect(self, epoch: Epoch, *, resumed_from: str | None, in_use: frozenset[str] = frozenset()) -> None:
        """Delete what retention lets go, unless a deletion still runs. Trouble is said, and tried again next time.

        `in_use`: checkpoints that are read at this moment; they stay until the next time.
        """
        for result in self._worker.results():
            if result.error is not None:
                say(f"old checkpoints were not deleted: {result.error}")
            elif result.value.left:
                say(f"deleted, but not whole: {', '.join(result.value.left)}")
        if self._worker.pending:
            return
        retention, run = self._plan.retention, self._plan.run
        self._worker.submit(
            "gc",
            lambda: gc.collect(
                self._paths, epoch=epoch, retention=retention, resumed_from=resumed_from, run=run, in_use=in_use
            ),
        )
