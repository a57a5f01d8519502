"""ops/metrics.md from the table: the page cannot differ from what is served, and a test says so."""

from collections.abc import Sequence

from orchestrator.metrics.run import RUN_METRICS
from orchestrator.metrics.table import NODE_METRICS, Kind, Metric

_HEAD = """# Metrics

Made by `python -m orchestrator.metrics.page` from the table in `orchestrator/metrics/table.py` and `metrics_run.py`.
Units are in the names. An unknown number has no sample. Prometheus keeps 64-bit floats: counters are exact up to 2^53.
"""
_NODE = "## At a node\n\nServed by each node's agent; every series has `run` and `node`."
_RUN = "## Of runs\n\nServed by `pawl controller --metrics-port`; every series has `run`."
_ALWAYS = """## Everywhere

| name | type | labels | meaning |
|---|---|---|---|
| `pawl_build_info` | gauge | version | Version of pawl; always 1. |
| `pawl_scrape_errors` | gauge | | Sources that failed for this answer. |
"""


def page() -> str:
    """The whole page, Markdown."""
    return "\n".join((_HEAD, _NODE, "", _table(NODE_METRICS), _RUN, "", _table(RUN_METRICS), _ALWAYS))


def _table(metrics: Sequence[Metric]) -> str:
    rows = [f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {_meaning(m)} |" for m in metrics]
    return "\n".join(("| name | type | labels | meaning |", "|---|---|---|---|", *rows)) + "\n"


def _meaning(metric: Metric) -> str:
    tail = " (`_bucket`, `_sum`, `_count`)" if metric.kind is Kind.HISTOGRAM else ""
    return metric.help + tail


if __name__ == "__main__":
    print(page(), end="")
