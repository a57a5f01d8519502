"""The training schedule a config asks for: a named one, or the user's own from a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ConfigError
from trainer.pipeline.generators import make_schedule
from trainer.pipeline.lower import Links
from trainer.pipeline.partition import is_schedule_file, placement, stages_per_rank
from trainer.pipeline.schedule import Lists, Op, Schedule, ScheduleError
from trainer.pipeline.text import parse
from trainer.pipeline.validate import validate

if TYPE_CHECKING:
    from trainer.config.model import Config

MAX_BYTES = 1 << 26
"""A larger file is no schedule: about ten bytes an action, and more actions than `text.py` takes."""


def training_lists(config: "Config", links: Links, *, p: int, m: int) -> Lists:
    """What each rank does, messages included, for a model with these links. Raises ConfigError as below, or as
    `validate` says."""
    schedule = training_schedule(config, p=p, m=m)
    try:
        return validate(schedule, links).lists
    except ScheduleError as error:
        raise ConfigError(f"parallelism.pp_engine: {schedule.name} cannot train: {error}") from error


def training_schedule(config: "Config", *, p: int, m: int) -> Schedule:
    """`parallelism.pp_engine` for p pipeline ranks and m micro-batches.

    Raises ConfigError where there is no such schedule, or the file is for another p, m or placement, or trains nothing.
    """
    mesh = config.parallelism
    try:
        if not is_schedule_file(mesh.pp_engine):
            return make_schedule(mesh.pp_engine, p=p, m=m, v=stages_per_rank(mesh))
        schedule = read_schedule(Path(mesh.pp_engine))
    except ScheduleError as error:
        raise ConfigError(f"parallelism.pp_engine: {error}") from error
    wanted = placement(config, p)
    if (schedule.placement, schedule.m) != (wanted, m):
        held = schedule.placement
        raise ConfigError(
            f"parallelism.pp_engine: {mesh.pp_engine} is a schedule of {held.p} ranks, {schedule.m} micro-batches and "
            f"stages on ranks {_listed(held.ranks)}, but the config has pp = {p}, batch_accumulation_per_replica = {m} "
            f"and stages on ranks {_listed(wanted.ranks)} (virtual_stages = {stages_per_rank(mesh)}, stage_placement = "
            f"{mesh.stage_placement or 'loop'}); change these values or the file."
        )
    if all(action.op is Op.F for actions in schedule.lists for action in actions):
        raise ConfigError(
            f"parallelism.pp_engine: {mesh.pp_engine} has forwards only; add B, or I and W, of every stage and "
            "micro-batch."
        )
    return schedule


def read_schedule(path: Path) -> Schedule:
    """The schedule in a file. Raises ScheduleError where it cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ScheduleError(f"{path} has {size:,} bytes; a schedule file has at most {MAX_BYTES:,}")
        schedule = parse(path.read_text(encoding="utf-8"), name=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path} cannot be read: {error}") from error
    return schedule


def _listed(ranks: tuple[int, ...]) -> str:
    shown = " ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown} …"
