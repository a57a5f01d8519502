"""The demo's look at the metrics that every node's agent serves."""

import json
import urllib.request
from pathlib import Path

from rich.console import Console

SHOWN = ("pawl_train_step", "pawl_train_loss", "pawl_train_tokens_per_second", "pawl_train_tokens_total")


def addresses(targets: str) -> list[str]:
    """URLs of a metrics/targets.json (Prometheus' file_sd format)."""
    return [f"http://{target}/metrics" for group in json.loads(targets) for target in group["targets"]]


def of_rank_0(pages: dict[str, str]) -> str | None:
    """The URL whose page speaks for rank 0, the one rank that knows loss and speed of all; None where none does."""
    return next((url for url, page in pages.items() if 'rank="0"' in page and "pawl_train_loss{" in page), None)


def shown(page: str) -> list[str]:
    """The samples of a page that the demo prints."""
    return [line for line in page.splitlines() if line.startswith(tuple(f"{name}{{" for name in SHOWN))]


def scrape(console: Console, run_dir: Path) -> list[str]:
    """Ask all agents as Prometheus would, print what rank 0's says; returns their addresses."""
    path = run_dir / "metrics" / "targets.json"
    urls = addresses(path.read_text()) if path.exists() else []
    pages = {}
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                pages[url] = answer.read().decode()
        except OSError as why:  # URLError is one; a demo goes on without
            console.print(f"metrics at {url} do not answer: {why}")
    first = of_rank_0(pages)
    if first is None:
        console.print(f"Of {len(urls)} agents none serves the metrics of rank 0 yet.")
    else:
        console.print(f"[dim]GET {first}[/]\n  " + "\n  ".join(shown(pages[first])), soft_wrap=True)
    return urls
