"""Reads a run directory for its view. The only I/O of the surfaces; it never raises for what is missing or damaged.

Nothing here needs the run's supervisor: a run on another machine, one that is over and a copied one are read alike.
"""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.agent.proc import boot_id, is_alive
from orchestrator.agent.record import read_record
from orchestrator.control.observe import count_checkpoints
from orchestrator.metrics.targets import read_targets
from orchestrator.state import ledger
from orchestrator.state.counting import Counting
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import list_names, read_text
from orchestrator.state.records import (
    Cycle,
    LaunchFacts,
    Request,
    Unreadable,
    parse_claim,
    parse_cycle,
    parse_launch_facts,
    parse_request,
)
from orchestrator.state.rundir import RunPaths, parse_number, parse_profile_name, parse_request_name
from orchestrator.state.train_lines import StepLine, ValidationLine, parse_step_lines, parse_validation_lines
from orchestrator.views.human import plural
from orchestrator.views.records import NodeBeat, RankView
from orchestrator.views.run_view import RunInputs


def read_run(run_dir: Path, now: float | None = None) -> RunInputs:
    """Everything a view is built from. What could not be read is a sentence in `problems`."""
    paths = RunPaths(run_dir)
    seen = time.time() if now is None else now
    book = ledger.read(run_dir)
    problems = [*book.unread, *(f"ledger/{problem}" for problem in book.problems)]
    lines, validation = _read_lines(paths, problems)
    facts = parse_launch_facts(read_text(paths.launch_facts))
    if isinstance(facts, Unreadable):
        problems.append(f"launch_facts.json: {facts.why}")
    counting = count_checkpoints(paths, run=facts.run if isinstance(facts, LaunchFacts) else None)
    if counting is None:
        problems.append("checkpoints/ or attempts/ cannot be listed, so it is unknown which checkpoints count")
    newest = max(_cycles(paths, problems), key=lambda cycle: cycle.epoch, default=None)
    return RunInputs(
        now=seen,
        run_dir=str(run_dir),
        facts=facts if isinstance(facts, LaunchFacts) else None,
        events=book.events,
        lines=lines,
        validation=validation,
        counting=counting or Counting(),
        cycle=newest,
        beats=_read_beats(paths, newest.epoch, seen) if newest else (),
        supervisor_alive=_supervisor_alive(paths),
        requests=_read_requests(paths, problems),
        targets=read_targets(paths.targets),
        profiles=_profiles(paths),
        unread=book.unread,
        problems=tuple(problems),
    )


def _profiles(paths: RunPaths) -> tuple[str, ...]:
    """Folders with recorded steps, relative to the run directory, oldest first."""
    names = [name for name in list_names(paths.profiles) or () if parse_profile_name(name) is not None]
    return tuple(paths.relative(paths.profile(name)) for name in sorted(names, key=lambda n: n.partition(".")[::-1]))


def numbers(folder: Path) -> tuple[int, ...]:
    """The attempt or cycle numbers in a folder, ascending."""
    found = (parse_number(name) for name in list_names(folder) or ())
    return tuple(sorted(number for number in found if number is not None))


def _cycles(paths: RunPaths, problems: list[str]) -> Iterator[Cycle]:
    """Every launch's record that can be read. A folder without one never started a rank."""
    for attempt in numbers(paths.attempts):
        for number in numbers(paths.cycles(attempt)):
            path = paths.cycle_file(attempt, number)
            record = parse_cycle(read_text(path))
            if isinstance(record, Cycle):
                yield record
            elif os.path.lexists(path):
                problems.append(f"{paths.relative(path)}: {record.why}")


def _read_lines(paths: RunPaths, problems: list[str]) -> tuple[tuple[StepLine, ...], tuple[ValidationLine, ...]]:
    lines: list[StepLine] = []
    validation: list[ValidationLine] = []
    for attempt in numbers(paths.attempts):
        for number in numbers(paths.cycles(attempt)):
            epoch = Epoch(attempt, 1, number)
            log = paths.train_log(attempt, number)
            found, bad = parse_step_lines(read_text(log, limit=1 << 31) or "", epoch=epoch)
            lines += found
            if bad:
                problems.append(f"{paths.relative(log)}: {plural(bad, 'line')} left out: not readable")
            log = paths.validation_log(attempt, number)
            measured, bad = parse_validation_lines(read_text(log) or "", epoch=epoch)
            validation += measured
            if bad:
                problems.append(f"{paths.relative(log)}: {plural(bad, 'line')} left out: not readable")
    return tuple(lines), tuple(validation)


def _read_beats(paths: RunPaths, newest: Epoch, now: float) -> tuple[NodeBeat, ...]:
    """The durable record of each node of the newest attempt; ranks only when they are of the newest cycle."""
    beats = []
    for name in list_names(paths.beats(newest.attempt)) or ():
        record = read_record(paths.beats(newest.attempt) / name)
        if isinstance(record, Unreadable):
            continue
        age = max(0.0, now - record.unix)
        current = record.running and (record.epoch.attempt, record.epoch.cycle) == (newest.attempt, newest.cycle)
        ranks = tuple(
            RankView(
                rank=place.rank,
                pid=place.pid,
                phase=place.phase,
                step=place.step,
                beat_age_s=age,
                phase_age_s=place.quiet_s + age,
            )
            for place in record.ranks
        )
        beats.append(NodeBeat(name=record.node, age_s=age, ranks=ranks if current else ()))
    return tuple(beats)


def _supervisor_alive(paths: RunPaths) -> bool | None:
    """Whether the newest attempt's claimant runs; None when that cannot be known from this machine."""
    attempts = numbers(paths.attempts)
    claim = parse_claim(read_text(paths.claim(attempts[-1]))) if attempts else None
    if claim is None or isinstance(claim, Unreadable) or claim.host != socket.gethostname():
        return None
    try:
        return claim.boot_id == boot_id() and is_alive(claim.pid, claim.start_ticks)
    except OSError:
        return None


def _read_requests(paths: RunPaths, problems: list[str]) -> tuple[Request, ...]:
    found = []
    for name in list_names(paths.control) or ():
        named = parse_request_name(name)
        if named is None:
            continue
        request = parse_request(read_text(paths.control / name))
        if isinstance(request, Unreadable):
            problems.append(f"control/{name}: {request.why}")
        else:
            found.append(Request(verb=request.verb, by=request.by, created_unix=request.created_unix, id=named[1]))
    return tuple(found)
