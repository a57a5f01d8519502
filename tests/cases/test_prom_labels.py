"""Case M5: texts and numbers of real clusters come back from a standard parser as they went in.

The list is public and no part of this repository; it is read from a folder beside it where that exists. The last
test says so where it does not.
"""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.agent.stats import RankBlock
from orchestrator.metrics.exporter import Exposition
from orchestrator.metrics.table import Kind, Metric, NodeSource, Samples, families

FILE = Path(__file__).parents[3] / "shared" / "cases" / "files" / "composed" / "prom_labels_and_values.txt"
ROWS = [
    line.split("\t", 1)
    for line in (FILE.read_text() if FILE.is_file() else "").splitlines()
    if "\t" in line and not line.startswith("#")
]
TEXTS = [text.replace("\\n", "\n", 1) if "line feed" in text else text for name, text in ROWS if name != "loss"]
NUMBERS = {"NaN": "NaN", "Inf": "+Inf", "-Inf": "-Inf", "1e-320": "1e-320"}


def served(value: float, label: str) -> str:
    def extract(_: NodeSource) -> Samples:
        yield {"text": label}, value

    row = Metric(name="pawl_case", kind=Kind.GAUGE, help="A case.", labels=("text",), extract=extract)
    source = NodeSource((RankBlock(rank=0, beat=None, stats=None),), 0)
    return Exposition([lambda: families([row], [(source, {"run": label})])]).text().decode()


if ROWS:

    @pytest.mark.parametrize("text", TEXTS)
    def test_label_text_reads_back_the_same(text: str) -> None:
        (case,) = [f for f in text_string_to_metric_families(served(1.0, text)) if f.name == "pawl_case"]
        assert [sample.labels for sample in case.samples] == [{"run": text, "text": text}]

    @pytest.mark.parametrize("text", [text.split()[0] for name, text in ROWS if name == "loss"])
    def test_special_numbers_are_spelled_right(text: str) -> None:
        assert f" {NUMBERS[text]}\n" in served(float(text), "x")


def test_the_public_list_is_here_or_its_absence_is_said(pytestconfig: pytest.Config) -> None:
    """Beside a clone of this repository alone there is none; then nothing above has run, and this says so."""
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if not ROWS and reporter is not None:
        reporter.write_line(f"\nNOT TESTED HERE: no public list at {FILE}.")
    assert not ROWS or {name for name, _ in ROWS} >= {"job_name", "partition", "state", "loss", "reason"}
