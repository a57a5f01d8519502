"""Communication that hides behind computation: which bucket may be reduced when, and who waits for which weights.

    last backward of the step   … dW₉ │ bucket 0 complete ▶ reduce-scatter ┐   … dW₅ │ bucket 1 complete ▶ …
                                                                          └ under way while dW₈ … dW₅ are computed
    next forward                wait for block 0's buckets │ block 0 │ wait for block 1's buckets │ block 1 │ …

A bucket is complete when all its parameters have their last gradient of the step: a matrix when its last weight
gradient is added, anything else when the last backward of its stage has passed it, a tied one when its sites are
summed. Buckets start in one order, which follows from the schedule: ranks whose threads run differently still start
the same collectives in the same order.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from trainer.pipeline.engine.parts import Watch
from trainer.pipeline.schedule import Action, LastGradients, last_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place of the model that adds to a bucket's gradients. `stage` None: a tied one, complete when all else is."""

    stage: int | None
    is_matrix: bool


def reduction_order(buckets: Sequence[Collection[Site]], actions: Sequence[Action]) -> tuple[int, ...]:
    """Bucket numbers in the order in which this rank's actions complete them; of two at one action the first first."""
    last = last_gradients(actions)
    return tuple(sorted(range(len(buckets)), key=lambda at: _complete_at(buckets[at], last, end=len(actions))))


def _complete_at(sites: Iterable[Site], last: LastGradients, *, end: int) -> int:
    """Index of the action that completes a bucket."""
    return max(
        end if site.stage is None else (last.matrices if site.is_matrix else last.others)[site.stage] for site in sites
    )


class InOrder:
    """Starts each bucket once, in a fixed order, when nothing is missing for it and all before it have started."""

    def __init__(self, order: Sequence[int], missing: Mapping[int, int], start: Callable[[int], None]) -> None:
        self._waiting, self._missing, self._start = list(order), dict(missing), start

    def arrived(self, bucket: int) -> None:
        """One of the gradients that `bucket` waits for is complete."""
        self._missing[bucket] -= 1

    def start_complete(self, may_start: Callable[[int], bool] = lambda bucket: True) -> None:
        """Start what can be started now."""
        while self._waiting and self._missing[self._waiting[0]] <= 0 and may_start(self._waiting[0]):
            self._start(self._waiting.pop(0))

    def start_all(self) -> None:
        """Start the rest, whatever is missing: a parameter that took no part in the step has its gradient, zero."""
        while self._waiting:
            self._start(self._waiting.pop(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A parameter of this rank by its live name, the address of its gradient, and the bucket that holds it."""

    live: str
    parameter: nn.Parameter
    address: int
    block: str
    bucket: int
    site: Site


class StepWatch(Watch):
    """What the interpreter tells of a step's progress, turned into starts of reductions and waits for weights.

    start: starts the reduction of a bucket. sums_tp: buckets whose start is itself collective over tp; they are not
    started from inside autograd. wait_weights: waits for the live weights of some buckets.
    """

    def __init__(
        self, placed: Sequence[Placed], num_buckets: int, *, start: Callable[[int], None],
        sums_tp: Collection[int], wait_weights: Callable[[Iterable[int]], None],
    ) -> None:  # fmt: skip
        self._start, self._sums_tp, self._wait_weights = start, sums_tp, wait_weights
        self.buckets = tuple([p.site for p in placed if p.bucket == index] for index in range(num_buckets))
        self._bucket = {id(p.parameter): p.bucket for p in placed if p.site.stage is not None}
        self._of_block: dict[str, set[int]] = {}
        self.launches: InOrder | None = None
        self.is_last_backward = False
        for p in placed:
            self._of_block.setdefault(p.block, set()).add(p.bucket)
            if p.site.stage is not None and not p.site.is_matrix:
                p.parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def begin(self, order: Sequence[int]) -> None:
        """A step starts: every bucket waits for its own parameters, and for its tie once."""
        missing = {
            index: len([site for site in sites if site.stage is not None]) + any(site.stage is None for site in sites)
            for index, sites in enumerate(self.buckets)
        }
        self.launches, self.is_last_backward = InOrder(order, missing, self._start), False

    def before_block(self, block: str) -> None:
        """A block is about to run forward."""
        self._wait_weights(self._of_block.get(block, ()))

    def complete(self, parameter: nn.Parameter) -> None:
        """A parameter has its last gradient of the step."""
        if self.launches is not None:
            self.launches.arrived(self._bucket[id(parameter)])
            self.launches.start_complete(self._may_start)

    def after_backward(self) -> None:
        """Out of autograd again: what was held back there may start."""
        if self.launches is not None:
            self.launches.start_complete()

    def tied(self, bucket: int) -> None:
        """The sites of a tied parameter in `bucket` are summed."""
        if self.launches is not None:
            self.launches.arrived(bucket)

    def end(self) -> None:
        """All gradients of the step are made: start the reductions that are left."""
        if self.launches is not None:
            self.launches.start_all()
            self.launches = None

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Autograd has added to a parameter's gradient; on an accelerator this is called on a thread of its own."""
        if self.is_last_backward and self.launches is not None:
            self.launches.arrived(self._bucket[id(parameter)])
            self.launches.start_complete(self._may_start)

    def _may_start(self, bucket: int) -> bool:
        return not (self.is_last_backward and bucket in self._sums_tp)
