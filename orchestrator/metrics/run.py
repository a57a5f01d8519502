"""The metrics of runs, from their views: what `pawl controller --metrics-port` and `pawl serve` export."""

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric as Family

from orchestrator.metrics.table import Buckets, Kind, Metric, Samples, Value, families
from orchestrator.views.goodput_tape import Category
from orchestrator.views.records import RunState, RunView

RECOVERY_BOUNDS_S = (*(1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0), float("inf"))


def _one(read: Callable[[RunView], Value | None]) -> Callable[[RunView], Samples]:
    def extract(view: RunView) -> Samples:
        yield {}, read(view)

    return extract


def _fresh(read: Callable[[RunView], Value | None]) -> Callable[[RunView], Samples]:
    """A number that is served only while it is fresh: an old value must not look like one of now."""

    def extract(view: RunView) -> Samples:
        if not view.progress.stale:
            yield {}, read(view)

    return extract


def _info(view: RunView) -> Samples:
    mesh = view.mesh
    yield (
        {
            "project": view.project or "",
            "launcher": view.launcher or "",
            "mesh": f"dp{mesh.dp} pp{mesh.pp} tp{mesh.tp} cp{mesh.cp}" if mesh else "",
            "params": "" if view.num_params is None else str(view.num_params),
        },
        1,
    )


def _states(view: RunView) -> Samples:
    for state in RunState:
        yield {"state": str(state)}, int(view.state is state)


def _attempts(view: RunView) -> Samples:
    for outcome, count in Counter(a.outcome for a in view.attempts if a.outcome is not None).items():
        yield {"outcome": outcome}, count


def _restarts(view: RunView) -> Samples:
    counts = Counter((i.level or "", i.failure_class or "unknown") for i in view.incidents if i.cost is not None)
    for (level, cls), count in counts.items():
        yield {"level": level, "class": cls}, count


def _incidents(view: RunView) -> Samples:
    for cls, count in Counter(i.failure_class or "unknown" for i in view.incidents).items():
        yield {"class": cls}, count


def _spread(pairs: Iterable[tuple[str, float | None]], label: str) -> Samples:
    """A histogram for each value of `label`."""
    grouped: dict[str, list[float]] = {}
    for name, seconds in pairs:
        if seconds is not None:
            grouped.setdefault(name, []).append(seconds)
    for name, values in grouped.items():
        counts = [0] * len(RECOVERY_BOUNDS_S)
        for value in values:
            counts[next(i for i, bound in enumerate(RECOVERY_BOUNDS_S) if value <= bound)] += 1
        yield {label: name}, Buckets(RECOVERY_BOUNDS_S, tuple(counts), sum(values))


def _detections(view: RunView) -> Samples:
    return _spread(((i.failure_class or "unknown", i.cost.detection_s) for i in view.incidents if i.cost), "class")


def _recoveries(view: RunView) -> Samples:
    return _spread(((i.level or "", i.cost.total_s) for i in view.incidents if i.cost), "level")


def _lost_steps(view: RunView) -> int:
    return sum(i.cost.lost_steps or 0 for i in view.incidents if i.cost)


def _seconds(view: RunView) -> Samples:
    for category in Category:
        if category is not Category.PROVISIONAL:
            yield {"category": str(category)}, view.goodput.seconds[category]


def _rank_seconds(view: RunView) -> Samples:
    for category in Category:
        if category is not Category.PROVISIONAL:
            yield {"category": str(category)}, view.goodput.rank_seconds[category]


def _spares(view: RunView) -> int | None:
    return sum(node.role == "spare" for node in view.nodes) if view.nodes else None


_G, _C, _H = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM


def _view(name: str, kind: Kind, help_text: str, extract: Callable[[RunView], Samples], *labels: str) -> Metric:
    return Metric(name=f"pawl_{name}", kind=kind, help=help_text, labels=labels, extract=extract)


RUN_METRICS: tuple[Metric, ...] = (
    _view("run_info", _G, "Facts of a run; always 1.", _info, "project", "launcher", "mesh", "params"),
    _view("run_state", _G, "1 for the state a run is in, 0 for the others.", _states, "state"),
    _view("attempts_total", _C, "Attempts that ended, by how.", _attempts, "outcome"),
    _view("incidents_total", _C, "Incidents, by class of failure.", _incidents, "class"),
    _view("restarts_total", _C, "Recoveries that trained again, by level of the ladder and class of failure.",
          _restarts, "level", "class"),
    _view("detection_latency_seconds", _H, "From a fault until it was noticed.", _detections, "class"),
    _view("recovery_duration_seconds", _H, "From a fault until the first new step.", _recoveries, "level"),
    _view("run_time_seconds_total", _C, "Wall time by category; with pawl_run_provisional_seconds it is all of it.",
          _seconds, "category"),
    _view("run_gpu_seconds_total", _C, "The same, times the ranks that the attempt held.", _rank_seconds, "category"),
    _view("run_provisional_seconds", _G, "Time whose category a checkpoint has not settled yet.",
          _one(lambda v: v.goodput.seconds[Category.PROVISIONAL])),
    _view("lost_steps_total", _C, "Steps that had to be trained again.", _one(_lost_steps)),
    _view("run_step", _G, "Completed optimizer steps.", _one(lambda v: v.progress.step)),
    _view("run_train_steps", _G, "Steps that the run is to have.", _one(lambda v: v.progress.train_steps)),
    _view("run_tokens", _G, "Tokens that the model has been trained on.", _one(lambda v: v.progress.tokens)),
    _view("run_loss", _G, "Training loss of the last step, while it is fresh.", _fresh(lambda v: v.progress.loss)),
    _view("run_tokens_per_second", _G, "Tokens per second, median of the last steps, while it is fresh.",
          _fresh(lambda v: v.progress.tokens_per_s)),
    _view("run_mfu_ratio", _G, "Model FLOPs utilisation, exact causal pairs, 0-1, while it is fresh.",
          _fresh(lambda v: v.progress.mfu)),
    _view("run_eta_seconds", _G, "Expected time to the last step.", _fresh(lambda v: v.progress.eta_s)),
    _view("run_last_step_timestamp_seconds", _G, "When the last step was completed, unix time.",
          _one(lambda v: v.progress.measured_unix)),
    _view("checkpoint_last_counting_step", _G, "Step of the newest checkpoint that counts.",
          _one(lambda v: v.newest_checkpoint.step if v.newest_checkpoint else None)),
    _view("spares_available", _G, "Hot spares left in the attempt.", _one(_spares)),
)  # fmt: skip


def run_samples(views: Iterable[RunView]) -> tuple[Family, ...]:
    """The families of a controller's endpoint; of two runs of one name the second is told apart by its directory."""
    seen: set[str] = set()
    sources = []
    for view in views:
        name = view.run if view.run not in seen else f"{view.run} ({view.run_dir})"
        seen.add(name)
        sources.append((view, {"run": name}))
    return families(RUN_METRICS, sources)
