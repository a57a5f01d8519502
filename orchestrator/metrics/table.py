"""Every metric pawl serves, in one table: name, type, help, labels, and where the number comes from.

    NODE   from the ranks of one node (RankBlock: beat + statistics over all cycles)   served by that node's agent
    RUN    from a RunView                                                              served by `pawl controller`

The table makes the exposition, its documentation and its lint. An unknown number makes no sample (Prometheus shows a
gap, never a 0). NaN is the trainer's way to say "not measured", so it makes none either, except for the loss and the
gradient norm, where NaN and ±Inf are news. Label sets are bounded: no rank, job id or node on a run's
series; a series that would appear twice is served once.

Prometheus keeps 64-bit floats: counters are exact up to 2^53 (9.0e15) and rounded to 16 digits beyond it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from orchestrator.agent.shm import STEP_BUCKET_BOUNDS_S, Phase, Stats
from orchestrator.agent.stats import RankBlock


class Kind(StrEnum):
    """Prometheus' metric types that pawl uses."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram's value: counts per bucket (not cumulative), their upper bounds, and the sum of what was observed."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


Value = float | int | Buckets
Samples = Iterable[tuple[Mapping[str, str], Value | None]]


@dataclass(frozen=True, slots=True)
class NodeSource:
    """The ranks of a node at `monotonic_ns` of its clock. `lead` speaks for what all ranks share."""

    blocks: tuple[RankBlock, ...]
    monotonic_ns: int

    @property
    def lead(self) -> RankBlock | None:
        return next((block for block in self.blocks if block.stats is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table. `labels` come on top of the base labels (run; and node at a node)."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    extract: Callable[[Any], Samples]


def _shared(read: Callable[[Stats], Value | None], *, keep_nonfinite: bool = False) -> Callable[[NodeSource], Samples]:
    """A number that all ranks agree on, from the first of this node's ranks that has statistics."""

    def extract(source: NodeSource) -> Samples:
        if source.lead is not None and source.lead.stats is not None:
            value = read(source.lead.stats)
            yield {}, value if keep_nonfinite else _known(value)

    return extract


def _each(read: Callable[[Stats], Value | None]) -> Callable[[NodeSource], Samples]:
    """A number of each rank."""

    def extract(source: NodeSource) -> Samples:
        for block in source.blocks:
            if block.stats is not None:
                yield {"rank": str(block.rank)}, _known(read(block.stats))

    return extract


def _known(value: Value | None) -> Value | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _measured(stats: Stats, value: Value) -> Value | None:
    """A gauge that is only news once a step was taken."""
    return value if stats.steps_total else None


def _saved(stats: Stats, value: Value) -> Value | None:
    return value if stats.checkpoint_saves_total else None


def _validated(stats: Stats, value: Value) -> Value | None:
    return value if stats.validation_passes_total else None


def _phases(source: NodeSource) -> Samples:
    for block in source.blocks:
        if block.beat is not None:
            for phase in Phase:
                yield {"rank": str(block.rank), "phase": phase.name.lower()}, int(block.beat.phase is phase)


def _beat_ages(source: NodeSource) -> Samples:
    for block in source.blocks:
        if block.beat is not None:
            age_s = (source.monotonic_ns - block.beat.beat_monotonic_ns) / 1e9
            yield {"rank": str(block.rank)}, max(0.0, age_s)


def _steps_now(source: NodeSource) -> Samples:
    beats = [block.beat for block in source.blocks if block.beat is not None]
    if beats:
        yield {}, max(beat.step for beat in beats)


def _durations(stats: Stats) -> Buckets:
    return Buckets(STEP_BUCKET_BOUNDS_S, stats.step_buckets, stats.step_seconds_sum)


_RANK = ("rank",)
_G, _C, _H = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM


def _node(name: str, kind: Kind, help_text: str, extract: Callable[[NodeSource], Samples], *labels: str) -> Metric:
    return Metric(name=f"pawl_train_{name}", kind=kind, help=help_text, labels=labels, extract=extract)


NODE_METRICS: tuple[Metric, ...] = (
    _node("step", _G, "Completed optimizer steps of the run.", _steps_now),
    _node("steps_total", _C, "Optimizer steps that this node's processes completed, work done again included.",
          _shared(lambda s: s.steps_total)),
    _node("tokens_total", _C, "Tokens trained on by all ranks together, work done again included.",
          _shared(lambda s: s.tokens_total)),
    _node("samples_total", _C, "Samples trained on by all ranks together, work done again included.",
          _shared(lambda s: s.samples_total)),
    _node("model_flops_total", _C, "Model FLOPs of all ranks together (exact causal pairs), work done again included.",
          _shared(lambda s: s.model_flops_total)),
    _node("step_duration_seconds", _H, "Duration of optimizer steps.", _each(_durations), *_RANK),
    _node("tokens_per_second", _G, "Tokens per second of all ranks together, last step.",
          _shared(lambda s: _measured(s, s.tokens_per_second))),
    _node("mfu_ratio", _G, "Model FLOPs utilisation, exact causal pairs, 0-1; absent where the peak is unknown.",
          _shared(lambda s: _measured(s, s.mfu))),
    _node("loss", _G, "Training loss of the last step.", _shared(lambda s: _measured(s, s.loss), keep_nonfinite=True)),
    _node("grad_norm", _G, "Gradient norm of the last step, before clipping.",
          _shared(lambda s: _measured(s, s.grad_norm), keep_nonfinite=True)),
    _node("learning_rate", _G, "Learning rate of the last step.", _shared(lambda s: _measured(s, s.learning_rate))),
    _node("nonfinite_steps_total", _C, "Steps whose loss or gradient was not finite.",
          _shared(lambda s: s.nonfinite_steps_total)),
    _node("skipped_steps_total", _C, "Steps that were skipped.", _shared(lambda s: s.skipped_steps_total)),
    _node("data_wait_seconds_total", _C, "Time a rank waited for its batch.",
          _each(lambda s: s.data_wait_seconds_total), *_RANK),
    _node("phase", _G, "1 for the phase a rank is in, 0 for the others.", _phases, "rank", "phase"),
    _node("memory_allocated_bytes", _G, "Device memory (on CPU: resident memory) that a rank holds.",
          _each(lambda s: _measured(s, s.memory_allocated_bytes)), *_RANK),
    _node("memory_peak_bytes", _G, "Highest device memory (on CPU: resident memory) of a rank.",
          _each(lambda s: _measured(s, s.memory_peak_bytes)), *_RANK),
    _node("checkpoint_saves_total", _C, "Checkpoints written.", _shared(lambda s: s.checkpoint_saves_total)),
    _node("checkpoint_save_blocking_seconds_total", _C, "Time that saving kept training waiting.",
          _shared(lambda s: s.checkpoint_blocking_seconds_sum)),
    _node("checkpoint_load_seconds", _G, "Time to load the checkpoint of this launch.",
          _shared(lambda s: s.checkpoint_load_seconds)),
    _node("checkpoint_size_bytes", _G, "Size of the last checkpoint.",
          _shared(lambda s: _saved(s, s.checkpoint_bytes))),
    _node("checkpoint_last_committed_step", _G, "Step of the last checkpoint.",
          _shared(lambda s: _saved(s, s.checkpoint_last_step))),
    _node("checkpoint_last_committed_timestamp_seconds", _G, "When the last checkpoint was committed, unix time.",
          _shared(lambda s: _saved(s, s.checkpoint_last_unix))),
    _node("validation_loss", _G, "Loss over the held-out sets, last validation pass.",
          _shared(lambda s: _validated(s, s.validation_loss), keep_nonfinite=True)),
    _node("validation_passes_total", _C, "Validation passes made.", _shared(lambda s: s.validation_passes_total)),
    _node("validation_seconds_total", _C, "Time that validation kept training waiting.",
          _shared(lambda s: s.validation_seconds_total)),
    _node("last_step_timestamp_seconds", _G, "When the last step was completed, unix time.",
          _shared(lambda s: _measured(s, s.last_unix))),
    _node("rank_heartbeat_age_seconds", _G, "Age of a rank's last beat.", _beat_ages, *_RANK),
)  # fmt: skip


def node_samples(blocks: Sequence[RankBlock], labels: Mapping[str, str], *, monotonic_ns: int) -> tuple[Family, ...]:
    """The families of a node's endpoint. `labels`: run and node."""
    return families(NODE_METRICS, [(NodeSource(tuple(blocks), monotonic_ns), labels)])


def families(table: Sequence[Metric], sources: Iterable[tuple[object, Mapping[str, str]]]) -> tuple[Family, ...]:
    """Prometheus families of a table over (source, base labels) pairs; rows without samples are left out.

    The first of two samples with the same labels wins: a doubled series would make Prometheus refuse the whole scrape.
    """
    known = list(sources)
    made = []
    for metric in table:
        seen: dict[tuple[tuple[str, str], ...], Value] = {}
        for source, base in known:
            for own, value in metric.extract(source):
                if value is not None:
                    seen.setdefault(_key(base, own), value)
        if seen:
            made.append(_family(metric, seen))
    return tuple(made)


def _key(base: Mapping[str, str], own: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, _label(value)) for name, value in {**base, **own}.items())


def _label(value: str) -> str:
    """Text that UTF-8 can carry: a lone surrogate (a name that is no text) would break the whole exposition."""
    return value.encode("utf-8", "replace").decode()


def _family(metric: Metric, seen: Mapping[tuple[tuple[str, str], ...], Value]) -> Family:
    names = [name for name, _ in next(iter(seen))]
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
        for key, value in seen.items():
            assert isinstance(value, Buckets)
            histogram.add_metric([text for _, text in key], *_cumulative(value))
        return histogram
    plain = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = plain(metric.name, metric.help, labels=names)
    for key, value in seen.items():
        assert not isinstance(value, Buckets)
        family.add_metric([text for _, text in key], float(value))
    return family


def _cumulative(value: Buckets) -> tuple[list[tuple[str, float]], float]:
    running = 0
    rows = []
    for bound, count in zip(value.bounds, value.counts, strict=True):
        running += count
        rows.append(("+Inf" if math.isinf(bound) else repr(bound), float(running)))
    return rows, value.total
