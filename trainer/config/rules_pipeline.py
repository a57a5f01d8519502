"""Rules about the pipeline: schedule, stages a rank, layers of each stage, micro-batches."""

from collections.abc import Iterator
from typing import Any

from trainer.pipeline.generators import DEFAULT_STAGES, FIXED_STAGES, GENERATORS, make_schedule
from trainer.pipeline.lower import chain
from trainer.pipeline.partition import is_schedule_file, stages_per_rank
from trainer.pipeline.simulate import simulate

from .problems import Severity, quoted
from .rules import Finding, Given, Rule

# The bubble warning plays the schedule; a step beyond this many stages is not played, and gets no warning.
MAX_PLAYED = 1 << 12


def known_schedule(c: Any, given: Given) -> Iterator[Finding]:
    name = c.parallelism.pp_engine
    if name not in GENERATORS and not is_schedule_file(name):
        expected = f"one of {', '.join(GENERATORS)}, or the path of a schedule file (has a /, or ends in .txt or .csv)"
        yield Finding(key="parallelism.pp_engine", message="no such schedule", found=quoted(name), expected=expected)


def stages_of_the_schedule(c: Any, given: Given) -> Iterator[Finding]:
    """Some schedules are made for one number of stages a rank."""
    mesh = c.parallelism
    name, v = mesh.pp_engine, mesh.virtual_stages
    if name in FIXED_STAGES and v not in (None, DEFAULT_STAGES[name]):
        message = f"schedule {name} is made for v = {DEFAULT_STAGES[name]} stages a rank"
        expected = f"{DEFAULT_STAGES[name]}, or pp_engine interleaved or afab"
        yield Finding(key="parallelism.virtual_stages", message=message, found=str(v), expected=expected)


def placement_of_a_file(c: Any, given: Given) -> Iterator[Finding]:
    """A named schedule places its stages itself; v holds two stages a rank."""
    mesh, key = c.parallelism, "parallelism.stage_placement"
    shape, is_file = mesh.stage_placement, is_schedule_file(mesh.pp_engine)
    own = "v" if mesh.pp_engine == "zb-v" else "loop"
    if shape is None:
        return
    if not is_file and mesh.pp_engine in GENERATORS and shape != own:
        message = f"schedule {mesh.pp_engine} places its stages as {own}"
        yield Finding(key=key, message=message, found=shape, expected=f"{own}, or nothing")
    elif is_file and shape == "v" and stages_per_rank(mesh) != 2:
        message, expected = "the v placement has two stages a rank", "virtual_stages: 2, or stage_placement: loop"
        yield Finding(key=key, message=message, found=f"virtual_stages = {stages_per_rank(mesh)}", expected=expected)


def layers_over_stages(c: Any, given: Given) -> Iterator[Finding]:
    """Each of the pp · v stages has a layer, unless the user's own split says which has none."""
    mesh, layers = c.parallelism, c.model.model_config.num_hidden_layers
    v = stages_per_rank(mesh)
    if layers >= mesh.pp * v or mesh.layers_per_stage is not None:
        return
    if v == 1 or layers < mesh.pp:
        message = f"{layers} layers cannot fill {mesh.pp * v} pipeline stages"
        expected = f"at most {layers // v}" if layers >= v else f"1, with virtual_stages at most {layers}"
        yield Finding(key="parallelism.pp", message=message, found=str(mesh.pp), expected=expected)
    else:
        message = f"{layers} layers cannot fill pp · virtual_stages = {mesh.pp} · {v} = {mesh.pp * v} pipeline stages"
        expected = f"virtual_stages at most {layers // mesh.pp}, or pp at most {layers // v}"
        yield Finding(key="parallelism.virtual_stages", message=message, found=str(v), expected=expected)


def own_split(c: Any, given: Given) -> Iterator[Finding]:
    """layers_per_stage: one number a stage, all layers; a stage without layers holds the embedding or the head."""
    mesh, layers, key = c.parallelism, c.model.model_config.num_hidden_layers, "parallelism.layers_per_stage"
    counts, stages = mesh.layers_per_stage, mesh.pp * stages_per_rank(mesh)
    if counts is None:
        return
    found = str(list(counts))
    if len(counts) != stages:
        expected = f"{stages} numbers (pp {mesh.pp} · virtual_stages {stages_per_rank(mesh)})"
        yield Finding(key=key, message="not one number a stage", found=found, expected=expected)
    elif sum(counts) != layers:
        expected = f"a sum of num_hidden_layers = {layers}"
        yield Finding(key=key, message=f"these are {sum(counts)} layers", found=found, expected=expected)
    elif empty := [stage for stage, n in enumerate(counts) if n == 0 and stage not in (0, stages - 1)]:
        message = f"stage {empty[0]} would hold nothing"
        yield Finding(key=key, message=message, found=found, expected="at least 1 on all but the first and last stage")


def bubble(c: Any, given: Given) -> Iterator[Finding]:
    """Fewer micro-batches than ranks run right, but most of the step is spent waiting."""
    mesh, p, m = c.parallelism, c.parallelism.pp, c.tokens.batch_accumulation_per_replica
    v = stages_per_rank(mesh)
    is_wrong_v = mesh.pp_engine in FIXED_STAGES and v != DEFAULT_STAGES[mesh.pp_engine]
    if p == 1 or m >= p or mesh.pp_engine not in GENERATORS or is_wrong_v or p * v > MAX_PLAYED:
        return
    run = simulate(make_schedule(mesh.pp_engine, p=p, m=m, v=v), chain(p * v))
    idle = (run.makespan - run.ideal) / run.makespan
    message = f"{m} micro-batches keep {p} pipeline ranks (parallelism.pp) idle for {idle:.0%} of each step"
    key = "tokens.batch_accumulation_per_replica"
    yield Finding(key=key, message=message, expected=f"at least {p}, better {4 * p}", severity=Severity.WARNING)


PIPELINE_RULES: tuple[Rule, ...] = (
    known_schedule,
    stages_of_the_schedule,
    placement_of_a_file,
    layers_over_stages,
    own_split,
    bubble,
)
