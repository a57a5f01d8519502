"""The main job, on this machine: real text → a run → a dead node → a stopped rank → a model that transformers loads.

Every pawl command is printed before it runs, and all of them are the public ones. Only the two faults are the demo's
own: it sends the signals that a broken machine would. Usage: python -m ops.demo.run [--config configs/demo.yaml]
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml
from rich.console import Console
from rich.panel import Panel

from ops.demo import faults, summary, texts

ROOT = Path(__file__).parents[2]
DATA = Path("runs/demo-data")
PAWL = str(Path(sys.executable).with_name("pawl"))
console = Console(highlight=False)


def say(title: str, body: str) -> None:
    console.print(Panel(body, title=title, title_align="left", border_style="cyan", width=min(console.width, 110)))


def show(argv: list[str]) -> None:
    console.print(f"[bold green]$ {shlex.join(argv)}[/]")


def run(*argv: str) -> None:
    """Print and run a command of pawl; end the demo with its exit code when it fails."""
    show(["pawl", *argv])
    done = subprocess.run([PAWL, *argv])
    if done.returncode != 0:
        console.print(f"[bold red]demo: `pawl {shlex.join(argv)}` ended with exit code {done.returncode}.[/]")
        sys.exit(done.returncode)


def prepare_text() -> None:
    say(
        "1 · Real text",
        "Two spellings of Shakespeare and the King James Bible; a 1,024-entry BPE; three token folders.",
    )
    raw = texts.copy_texts(DATA / "raw")
    tokenizer = str(DATA / "tokenizer")
    run("data", "tokenizer", "train", "--input", *map(str, raw.values()), "--vocab-size", "1024", "--out", tokenizer)
    for name, folder in raw.items():
        every = "1000" if name == "bible" else "12"  # a verse is a document in one, a play in the others
        holdout = ["--holdout-every", every, "--holdout-out", str(DATA / "validation" / name)]
        run("data", "prepare", "--input", str(folder), "--tokenizer", tokenizer, "--out", str(DATA / name), *holdout)


def last_step(run_dir: Path) -> int:
    """Newest completed step in any train.jsonl; 0 before the first."""
    step = 0
    for path in sorted(run_dir.glob("attempts/*/cycles/*/train.jsonl")):
        lines = path.read_text().splitlines()
        if lines and lines[-1].endswith("}"):
            step = json.loads(lines[-1])["step"]
    return step


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
            f"demo: `pawl {shlex.join(argv)}` ended (exit code {code}) before the run came this far; pawl logs demo"
        )


def scrape(run_dir: Path) -> list[str]:
    """Metrics addresses of the live agents; prints two lines of the first answer."""
    path = run_dir / "metrics" / "targets.json"
    groups = json.loads(path.read_text()) if path.exists() else []
    urls = [f"http://{target}/metrics" for group in groups for target in group["targets"]]
    for url in urls[:1]:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                page = answer.read().decode()
        except (urllib.error.URLError, OSError) as why:
            console.print(f"metrics at {url} do not answer: {why}")
            continue
        lines = [
            line for line in page.splitlines() if line.startswith(("pawl_train_step{", "pawl_train_tokens_total{"))
        ]
        console.print(f"[dim]GET {url}[/]\n  " + "\n  ".join(lines[:4]))
    return urls


def recovered(run_dir: Path, incidents: int) -> bool:
    """True when the ledger holds that many recoveries."""
    count = 0
    for path in sorted((run_dir / "ledger").glob("*.jsonl")):
        count += sum('"kind":"recovered"' in line.replace(": ", ":") for line in path.read_text().splitlines())
    return count >= incidents


def train_through_faults(config: Path, run_dir: Path, run_name: str, train_steps: int) -> list[str]:
    first, second = train_steps // 3, 2 * train_steps // 3
    say("2 · One YAML", "Checked before anything starts; then two virtual nodes of two ranks each, and one hot spare.")
    run("check", str(config))
    submit = ["submit", str(config), "--launcher", "local", "--watch"]
    watch_until(submit, lambda: last_step(run_dir) >= first, limit_s=600)
    urls = scrape(run_dir)
    victim = faults.training_nodes(run_dir)[-1]
    say("3 · A node dies", f"Now SIGKILL to every process of {victim}, in the middle of a step.")
    console.print(f"[bold red]$ kill -9 {' '.join(map(str, faults.kill_node(run_dir, victim)))}[/]")
    watch_until(["watch", run_name], lambda: recovered(run_dir, 1) and last_step(run_dir) >= second, limit_s=600)
    node = faults.training_nodes(run_dir)[0]
    say("4 · A rank stops", f"Now SIGSTOP to rank 1 on {node}: it lives, but it does nothing; the others wait for it.")
    pid = faults.trainer_pid(run_dir, node, 1)
    if pid is None:
        sys.exit(f"demo: rank 1 is not to be found on {node}")
    console.print(f"[bold red]$ kill -STOP {pid}[/]")
    os.kill(pid, signal.SIGSTOP)
    run("watch", run_name)
    run("explain", run_name)
    return urls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    args = parser.parse_args()
    os.chdir(ROOT)
    began = time.monotonic()
    config = yaml.safe_load(args.config.read_text())
    run_name = config["general"]["run"]
    run_dir = Path("runs") / run_name
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup, and children would inherit that
    if run_dir.exists():
        if faults.is_alive(run_dir):
            sys.exit(f"demo: {run_dir} of an earlier call is still running. End it first: pawl cancel {run_name}")
        console.print(f"Removing {run_dir} and {DATA} of an earlier demo.")
        shutil.rmtree(run_dir)
    shutil.rmtree(DATA, ignore_errors=True)
    prepare_text()
    urls = train_through_faults(args.config, run_dir, run_name, config["tokens"]["train_steps"])
    say("5 · The model", "Exported as a Hugging Face folder and loaded by transformers in a fresh, offline process.")
    run("export", run_name, "--out", str(run_dir / "export"))
    check = [sys.executable, "-m", "ops.demo.check_export", str(run_dir), str(run_dir / "export")]
    show(["python", *check[1:]])
    if subprocess.run(check).returncode != 0:
        sys.exit("demo: the exported model and pawl do not agree")
    say("6 · What it cost", "Steps, restarts, goodput that adds up to wall time, and one report file.")
    run("report", run_name, "--out", str(run_dir / "report.html"))
    summary.print_table(console, PAWL, run_name, urls)
    console.print(f"Report: [bold]{run_dir / 'report.html'}[/]   The whole demo took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ndemo: stopped. A run that was started goes on; stop it with: pawl cancel demo")
