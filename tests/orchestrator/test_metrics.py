"""Metrics: what is served parses back to what was meant, counters never go back, one bad source takes nothing down."""

import math
import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from run_stories import clean, crash_loop, rough

from orchestrator.agent.shm import STEP_BUCKET_BOUNDS_S, Beat, Phase, Stats
from orchestrator.agent.stats import RankBlock, StatsKeeper
from orchestrator.errors import PawlError
from orchestrator.metrics.exporter import Exposition, serve
from orchestrator.metrics.page import page
from orchestrator.metrics.run import RUN_METRICS, run_samples
from orchestrator.metrics.table import NODE_METRICS, Kind, node_samples
from orchestrator.metrics.targets import parse_targets, targets_json
from orchestrator.views.records import RunView
from orchestrator.views.run_view import RunInputs, build_view

REPO = Path(__file__).parents[2]
GOLDEN = REPO / "tests" / "golden" / "metrics"
LABELS = {"run": "demo", "node": "node0"}
SECOND = 1_000_000_000


def stats(**changes: object) -> Stats:
    counts = [0] * len(STEP_BUCKET_BOUNDS_S)
    counts[4], counts[5] = 3, 9
    values: dict[str, object] = {
        "seq": 2,
        "steps_total": 12,
        "tokens_total": 49_152,
        "samples_total": 384,
        "model_flops_total": 6.12e11,
        "step_seconds_sum": 4.5,
        "data_wait_seconds_total": 0.25,
        "nonfinite_steps_total": 0,
        "skipped_steps_total": 1,
        "checkpoint_saves_total": 1,
        "checkpoint_blocking_seconds_sum": 0.125,
        "checkpoint_last_step": 10,
        "checkpoint_last_unix": 1_770_000_010.5,
        "checkpoint_bytes": 16_000_000,
        "checkpoint_load_seconds": math.nan,
        "loss": 4.25,
        "grad_norm": 1.5,
        "learning_rate": 0.003,
        "tokens_per_second": 10_922.5,
        "mfu": math.nan,
        "memory_allocated_bytes": 1_000_000,
        "memory_peak_bytes": 2_000_000,
        "last_step_seconds": 0.375,
        "last_unix": 1_770_000_012.0,
        "step_buckets": tuple(counts),
        "validation_passes_total": 2,
        "validation_seconds_total": 0.75,
        "validation_loss": 4.5,
    }
    return Stats(**{**values, **changes})  # type: ignore[arg-type]


def beat(rank: int) -> Beat:
    return Beat(
        seq=2,
        attempt=1,
        generation=1,
        cycle=1,
        rank=rank,
        pid=4000 + rank,
        phase=Phase.STEP,
        step=12,
        beat_monotonic_ns=99 * SECOND,
        phase_since_ns=98 * SECOND,
        collective_seq=7,
        control_ack=0,
        profile_ack=0,
        loss=4.25,
        tokens=49_152,
    )


def block(rank: int, **changes: object) -> RankBlock:
    return RankBlock(rank=rank, beat=beat(rank), stats=stats(**changes))


def views() -> list[RunView]:
    made = []
    for story in (clean(), rough(), crash_loop()):
        events, lines = tuple(story.events), story.step_lines()
        made.append(build_view(RunInputs(now=story.now, run_dir=f"/runs/{story.run}", events=events, lines=lines)))
    return made


def samples(families: Iterable[Family]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the text form, read by the official parser; a doubled one fails."""
    text = Exposition([lambda: families]).text().decode()
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"doubled series {key}"
            found[key] = sample.value
    return found


def of_name(families: Iterable[Family], name: str) -> list[float]:
    return [value for (found, _), value in samples(families).items() if found == name]


def golden(name: str, families: Iterable[Family]) -> None:
    """Compare with the golden text; it is a page that people read, so it changes only by hand."""
    text = Exposition([lambda: families]).text().decode()
    assert text == (GOLDEN / name).read_text(), f"tests/golden/metrics/{name} differs"


def test_a_node_serves_the_golden_text() -> None:
    blocks = [block(0), block(1)]
    golden("node.prom", node_samples(blocks, LABELS, monotonic_ns=100 * SECOND))


def test_runs_serve_the_golden_text() -> None:
    golden("runs.prom", run_samples(views()))


def test_the_docs_page_is_the_table() -> None:
    assert (REPO / "ops" / "metrics.md").read_text() == page()


def test_names_follow_prometheus_rules() -> None:
    for metric in (*NODE_METRICS, *RUN_METRICS):
        assert metric.name.startswith("pawl_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.help.endswith(".") or metric.help.endswith("all of it."), metric.name
    names = [metric.name for metric in (*NODE_METRICS, *RUN_METRICS)]
    assert len(names) == len(set(names))


def test_unknown_numbers_have_no_sample() -> None:
    families = node_samples([block(0, steps_total=0, checkpoint_saves_total=0)], LABELS, monotonic_ns=100 * SECOND)
    names = {name for name, _ in samples(families)}
    assert not names & {"pawl_train_loss", "pawl_train_mfu_ratio", "pawl_train_checkpoint_last_committed_step"}
    assert of_name(families, "pawl_train_steps_total") == [0.0]


@pytest.mark.parametrize(
    ("loss", "spelled"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (1e-320, "1e-320")]
)
def test_special_losses_are_spelled_as_prometheus_reads_them(loss: float, spelled: str) -> None:
    text = Exposition([lambda: node_samples([block(0, loss=loss)], LABELS, monotonic_ns=0)]).text().decode()
    assert f'pawl_train_loss{{node="node0",run="demo"}} {spelled}\n' in text


def test_counters_beyond_2_to_the_53_are_rounded_and_the_page_says_so() -> None:
    families = node_samples([block(0, tokens_total=2**53 + 1)], LABELS, monotonic_ns=0)
    assert of_name(families, "pawl_train_tokens_total") == [float(2**53)]
    assert "2^53" in page()


def hostile_labels() -> list[str]:
    """M5: texts that end up as label values."""
    own = ["plain", "with space", 'quote"inside', "back\\slash", "back\\nslash-n", "new\nline", "unicode-µP-é-日本"]
    own += ["brace{}=,", "gpu*", "Not responding [slurm@2026-01-05T10:00:00]", "", "\\", '\\"', "\r", "tab\there"]
    return own


@pytest.mark.parametrize("text", hostile_labels())
def test_any_label_text_reads_back_the_same(text: str) -> None:
    families = node_samples([block(0)], {"run": text, "node": "n"}, monotonic_ns=0)
    runs = {dict(labels)["run"] for (name, labels) in samples(families) if name == "pawl_train_step"}
    assert runs == {text}


def test_a_name_that_is_no_text_does_not_break_the_exposition() -> None:
    families = node_samples([block(0)], {"run": "bad\udce9name", "node": "n"}, monotonic_ns=0)
    assert of_name(families, "pawl_train_step") == [12.0]


def test_the_histogram_is_cumulative_and_ends_in_inf() -> None:
    found = samples(node_samples([block(0)], LABELS, monotonic_ns=0))
    buckets = {
        dict(labels)["le"]: value for (name, labels), value in found.items() if name.endswith("duration_seconds_bucket")
    }
    assert buckets["0.25"] == 3.0
    assert buckets["0.5"] == buckets["300.0"] == buckets["+Inf"] == 12.0


def test_fifty_restarts_leave_no_dead_series_and_no_counter_goes_back() -> None:
    """M1: the ranks of finished cycles add up under the same series."""
    keeper = StatsKeeper()
    previous = 0.0
    for _ in range(50):
        keeper._running[0], keeper._beats[0] = stats(), beat(0)
        while_running = node_samples(keeper.blocks(), LABELS, monotonic_ns=0)
        keeper.close()
        for families in (while_running, node_samples(keeper.blocks(), LABELS, monotonic_ns=0)):
            (steps,) = [f.samples[0].value for f in families if f.name == "pawl_train_steps"]
            assert steps >= previous
            previous = steps
    assert previous == 50 * 12
    assert len(samples(while_running)) == len(samples(node_samples([block(0)], LABELS, monotonic_ns=0)))


def test_ranks_of_an_ended_cycle_have_no_phase_and_no_beat() -> None:
    families = node_samples([RankBlock(rank=0, beat=None, stats=stats())], LABELS, monotonic_ns=0)
    names = {name for name, _ in samples(families)}
    assert not names & {"pawl_train_phase", "pawl_train_rank_heartbeat_age_seconds", "pawl_train_step"}


def test_two_runs_of_one_name_are_two_series() -> None:
    """M2: a doubled series would make Prometheus refuse everything."""
    first = views()[0]
    second = replace(first, run_dir="/elsewhere/clean")
    found = samples(run_samples([first, second]))
    runs = {dict(labels)["run"] for (name, labels) in found if name == "pawl_run_state"}
    assert runs == {"clean", "clean (/elsewhere/clean)"}


def test_a_source_that_fails_takes_nothing_else_down() -> None:
    def broken() -> Iterable[Family]:
        raise RuntimeError("no such run")

    server = serve(broken, lambda: run_samples(views()))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
            text = answer.read().decode()
            assert answer.status == 200
    finally:
        server.close()
    assert "pawl_scrape_errors 1.0" in text
    assert 'pawl_run_state{run="rough",state="done"} 1.0' in text


def test_two_sources_with_the_same_series_serve_it_once() -> None:
    view = views()[:1]
    text = Exposition([lambda: run_samples(view), lambda: run_samples(view)]).text().decode()
    assert text.count('pawl_run_state{run="clean",state="done"}') == 1


def test_other_paths_are_404_and_a_taken_port_is_one_clear_error() -> None:
    server = serve(lambda: ())
    try:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/secrets")
        with pytest.raises(PawlError, match="Choose another port"):
            serve(lambda: (), port=server.port)
    finally:
        server.close()


def test_goodput_seconds_and_provisional_are_all_of_the_wall_time() -> None:
    view = views()[1]
    found = samples(run_samples([view]))
    total = sum(
        v for (name, _), v in found.items() if name in ("pawl_run_time_seconds_total", "pawl_run_provisional_seconds")
    )
    assert total == pytest.approx(view.goodput.wall_s, abs=1e-6)


def test_a_stale_loss_is_not_served_as_one_of_now() -> None:
    assert of_name(run_samples(views()), "pawl_run_loss") == []


def test_targets_name_what_runs_and_are_empty_when_nothing_does() -> None:
    text = targets_json(["127.0.0.1:9001", "127.0.0.1:9000", "127.0.0.1:9001"], attempt=3)
    assert parse_targets(text) == ("127.0.0.1:9000", "127.0.0.1:9001")
    assert parse_targets(targets_json([], attempt=3)) == ()
    assert parse_targets("{not json") == parse_targets(None) == parse_targets('[{"targets": [7]}]') == ()


def test_an_agent_can_serve_metrics_without_the_command_line_packages() -> None:
    code = "import sys, orchestrator.metrics.exporter, orchestrator.metrics.table; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert not set(loaded.stdout.split()) & {"rich", "typer", "pydantic", "torch", "plotly", "jinja2"}
