"""The main job, on this machine: real text → a run → a dead node → a stopped rank → a model that transformers loads.

Every pawl command is printed before it runs, and all of them are the public ones. Only the two faults are the demo's
own: it sends the signals that a broken machine would.
Usage: python -m ops.demo.run [--config configs/demo.yaml] [--work DIR] [--texts DIR]
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.panel import Panel

from ops.demo import faults, metrics, progress, summary, texts

ROOT = Path(__file__).parents[2]
DATA = Path("runs/demo-data")
PAWL = str(Path(sys.executable).with_name("pawl"))
console = Console(highlight=False)


class Phases:
    """The parts of the demo: announces each, and keeps how long it took."""

    def __init__(self) -> None:
        self._began: list[tuple[str, float]] = []

    def begin(self, title: str, body: str) -> None:
        self._began.append((title, time.monotonic()))
        title = f"{len(self._began)} · {title}"
        console.print(Panel(body, title=title, title_align="left", border_style="cyan", width=min(console.width, 110)))

    def seconds(self) -> dict[str, float]:
        """Title → seconds until the next part, or until now."""
        ends = [when for _, when in self._began[1:]] + [time.monotonic()]
        return {title: end - start for (title, start), end in zip(self._began, ends, strict=True)}


def show(argv: list[str]) -> None:
    console.print(f"[bold green]$ {shlex.join(argv)}[/]")


def run(*argv: str) -> None:
    """Print and run a command of pawl; end the demo with its exit code when it fails."""
    show(["pawl", *argv])
    done = subprocess.run([PAWL, *argv])
    if done.returncode != 0:
        console.print(f"[bold red]demo: `pawl {shlex.join(argv)}` ended with exit code {done.returncode}.[/]")
        sys.exit(done.returncode)


def prepare_text(site: Path | None, vocab_size: int) -> None:
    """Raw texts → tokenizer → one token folder per source, and one of held-out documents each."""
    raw = texts.copy_texts(DATA / "raw", site)
    tokenizer, vocab = str(DATA / "tokenizer"), str(vocab_size)
    run("data", "tokenizer", "train", "--input", *map(str, raw.values()), "--vocab-size", vocab, "--out", tokenizer)
    for name, folder in raw.items():
        every = "1000" if name == "bible" else "12"  # a verse is a document in one, a play in the others
        holdout = ["--holdout-every", every, "--holdout-out", str(DATA / "validation" / name)]
        run("data", "prepare", "--input", str(folder), "--tokenizer", tokenizer, "--out", str(DATA / name), *holdout)


def watch_until(argv: list[str], ready: Callable[[], bool], *, limit_s: float) -> None:
    """Run a watching command until `ready()`, then press Ctrl-C for the reader: watching ends, the run does not."""
    show(["pawl", *argv])
    child = subprocess.Popen([PAWL, *argv])
    deadline = time.monotonic() + limit_s
    while child.poll() is None and time.monotonic() < deadline:
        if ready():
            child.send_signal(signal.SIGINT)
            break
        time.sleep(0.2)
    try:
        code = child.wait(timeout=30)
    except subprocess.TimeoutExpired:
        child.kill()
        sys.exit(f"demo: `pawl {shlex.join(argv)}` did not end after Ctrl-C")
    if not ready():
        sys.exit(
            f"demo: `pawl {shlex.join(argv)}` ended (exit code {code}) before the run came this far; why: pawl logs RUN"
        )


def train_through_faults(phases: Phases, config_path: Path, config: dict[str, Any], run_dir: Path) -> list[str]:
    """Check, submit, kill a node, stop a rank, watch to the end; returns the addresses of the metrics."""
    run_name, steps = config["general"]["run"], config["tokens"]["train_steps"]
    first, second = steps // 3, 2 * steps // 3
    phases.begin("One YAML", "Checked first; then virtual nodes of this machine, a process tree each, and a hot spare.")
    run("check", str(config_path))
    submit = ["submit", str(config_path), "--launcher", "local", "--watch"]
    watch_until(submit, lambda: progress.last_step(run_dir) >= first, limit_s=600)
    urls = metrics.scrape(console, run_dir)
    victim = faults.training_nodes(run_dir)[-1]
    phases.begin("A node dies", f"Now SIGKILL to every process of {victim}, in the middle of a step.")
    console.print(f"[bold red]$ kill -9 {' '.join(map(str, faults.kill_node(run_dir, victim)))}[/]")
    watch_until(
        ["watch", run_name],
        lambda: progress.recoveries(run_dir) >= 1 and progress.last_step(run_dir) >= second,
        limit_s=600,
    )
    node = faults.training_nodes(run_dir)[0]
    phases.begin(
        "A rank stops", f"Now SIGSTOP to rank 1 on {node}: it lives, but it does nothing; the others wait for it."
    )
    pid = faults.trainer_pid(run_dir, node, 1)
    if pid is None:
        sys.exit(f"demo: rank 1 is not to be found on {node}")
    console.print(f"[bold red]$ kill -STOP {pid}[/]")
    os.kill(pid, signal.SIGSTOP)
    run("watch", run_name)
    run("explain", run_name)
    return urls


def compare_export(run_dir: Path) -> None:
    """Load the exported folder in a fresh process; end the demo where the losses differ."""
    run("export", run_dir.name, "--out", str(run_dir / "export"))
    check = [sys.executable, "-m", "ops.demo.check_export", str(run_dir), str(run_dir / "export")]
    show(["python", *check[1:]])
    if subprocess.run(check, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode != 0:
        sys.exit("demo: the exported model and pawl do not agree")


def start_clean(run_dir: Path) -> None:
    """Remove what an earlier demo left; exits where its run still lives."""
    if run_dir.exists():
        if faults.is_alive(run_dir):
            sys.exit(f"demo: {run_dir} of an earlier call is still running. End it first: pawl cancel {run_dir.name}")
        console.print(f"Removing {run_dir} and {DATA} of an earlier demo.")
        shutil.rmtree(run_dir)
    shutil.rmtree(DATA, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.yaml")
    parser.add_argument("--work", type=Path, default=ROOT, help="folder below which runs/ is made")
    parser.add_argument("--texts", type=Path, help="folder with the texts, laid out as the packages of make setup do")
    args = parser.parse_args()
    config_path, site = args.config.resolve(), args.texts and args.texts.resolve()
    os.chdir(args.work)
    if config_path.is_relative_to(Path.cwd()):
        config_path = config_path.relative_to(Path.cwd())  # as a person would type it
    config = yaml.safe_load(config_path.read_text())
    run_dir = Path("runs") / config["general"]["run"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup, and children would inherit that
    start_clean(run_dir)
    phases = Phases()
    phases.begin("Text", "Shakespeare in two spellings and the King James Bible: a byte-pair encoding, token folders.")
    prepare_text(site, config["model"]["model_config"]["vocab_size"])
    urls = train_through_faults(phases, config_path, config, run_dir)
    phases.begin(
        "The model", "Exported as a Hugging Face folder and loaded by transformers in a fresh, offline process."
    )
    compare_export(run_dir)
    phases.begin("What it cost", "Steps, restarts, goodput that adds up to wall time, and one report file.")
    run("report", run_dir.name, "--out", str(run_dir / "report.html"))
    summary.print_tables(console, summary.view_of(PAWL, run_dir.name), urls, phases.seconds())
    console.print(f"Report: [bold]{run_dir / 'report.html'}[/]")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ndemo: stopped. A run that was started goes on; stop it with: pawl cancel demo")
