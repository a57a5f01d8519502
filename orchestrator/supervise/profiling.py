"""A profile that a person asked for, from the order to the answer: one at a time, none is lost, none ends the run.

    request ─▶ Profile order to all agents ─▶ ranks record and acknowledge its number ─▶ answer: where the traces are

What was recorded is told by what lies in profile/, not by what anybody says: a disk may have been full. An order is
given once: a cycle that ended under it is not asked again, in case the order is what ended it.
"""

from dataclasses import dataclass

from orchestrator.agent.messages import Profile
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import list_names
from orchestrator.state.records import Request
from orchestrator.state.rundir import RunPaths, parse_profile_name, parse_trace_name
from orchestrator.supervise.nodes import Nodes

DEFAULT_STEPS, MAX_STEPS = 3, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a request; `where`: the folder of the traces, relative to the run directory."""

    result: str
    where: str | None = None


class Profiling:
    """The profile under way, if there is one."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self.request: Request | None = None
        self._number = 0
        self._epoch: Epoch | None = None
        self._before: frozenset[str] = frozenset()

    def order(self, request: Request, epoch: Epoch) -> Profile:
        """The order for the agents of the running cycle; numbers rise within a cycle from 1."""
        self._number = self._number + 1 if self._epoch == epoch else 1
        self.request, self._epoch, self._before = request, epoch, self._folders()
        steps = min(max(1, request.steps or DEFAULT_STEPS), MAX_STEPS)
        return Profile(cycle=epoch.cycle, number=self._number, steps=steps, ranks=request.ranks)

    def is_done(self, nodes: Nodes) -> bool:
        """Whether every rank has acknowledged the order."""
        return self.request is not None and self._epoch == nodes.epoch and nodes.profile_ack >= self._number

    def close(self) -> Answer:
        """The answer to the request as far as it came, and an end to it."""
        self.request = None
        for name in sorted(self._folders() - self._before, reverse=True):
            if any(parse_trace_name(file) is not None for file in list_names(self._paths.profile(name)) or ()):
                return Answer(result="profiled", where=self._paths.relative(self._paths.profile(name)))
        return Answer(result="not profiled")

    def _folders(self) -> frozenset[str]:
        """This cycle's folders with traces."""
        names = list_names(self._paths.profiles) or ()
        parsed = {name: parse_profile_name(name) for name in names}
        return frozenset(name for name, found in parsed.items() if found is not None and found.epoch == self._epoch)
