"""Seconds of commands that people wait for, against their limits."""

import statistics
import subprocess

from ops.bench.rows import ROOT, Row, fastest, spread_of, steady, timed, turns_for


def command_row(row_id: str, command: list[str], limit_s: float, pairs: int) -> Row:
    """Wall time of a command against its limit. Raises CalledProcessError if it fails."""

    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)

    with steady():
        turns = turns_for(timed(run))
        times = [fastest(run, turns=turns)[0] for _ in range(pairs)]
    ours = statistics.median(times)
    return Row(
        id=row_id, what=f"seconds of `{' '.join(command[2:])}` against its limit", ours=ours, other=limit_s,
        ratio=ours / limit_s, spread=spread_of(times), shape="a new interpreter each time", threads=1,
    )  # fmt: skip
