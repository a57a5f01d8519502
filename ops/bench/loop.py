"""What a step costs besides forward, backward and optimizer: data, totals, beats, journal, schedule of rates.

A whole training runs as its users run it, in a process of its own; only the three parts are clocked, the rest is what
is left of the time from one line of train.jsonl to the next.
"""

import contextlib
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from ops.bench.clock import clocked
from ops.bench.models import bench_config
from ops.bench.rows import Row, spread_of
from ops.bench.world import in_world

STEPS = 9


def config_text(folder: Path) -> str:
    """The YAML of a run over the tokens in `folder`, with one checkpoint, at its end."""
    from trainer.config.facts import as_data

    data: dict[str, Any] = as_data(bench_config(tokens={"train_steps": STEPS}))
    del data["data_stages"]  # one or the other is given
    shape = bench_config().model.model_config  # keys of other families stand at their defaults in the data
    data["model"]["model_config"] = {key: getattr(shape, key) for key in shape.model_fields_set}
    data["data"]["dataset"]["dataset_folder"] = [str(folder)]
    data["checkpoints"]["checkpoint_interval"] = 2 * STEPS
    return json.dumps(data)


def seconds_of_steps() -> list[tuple[float, float]]:
    """(whole, forward with backward and optimizer) of each step but the first two and the last, which saves."""
    from ops.gpu_check import write_tokens
    from trainer.engine import Engine
    from trainer.launch import Launch
    from trainer.optim.optimizer import FlatOptimizer
    from trainer.run import TrainerProcess

    parts = [(Engine, "backward"), (FlatOptimizer, "reduce_gradients"), (FlatOptimizer, "update")]
    with tempfile.TemporaryDirectory() as root, clocked(*parts) as spans:
        folder = Path(root)
        config_file = folder / "config.yaml"
        config_file.write_text(config_text(write_tokens(folder / "tokens", vocab=bench_vocab(), num_tokens=200_000)))
        launch = Launch(
            config_file=config_file, run_dir=folder / "run", cycle_file=None, shm=None, rank=0, local_rank=0,
            world_size=1, node="bench", restart="0",
        )  # fmt: skip
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            code = TrainerProcess(launch).run()
        if code:
            raise RuntimeError(f"the training ended with exit code {code}")
        lines = [json.loads(line) for line in (launch.cycle_dir / "train.jsonl").read_text().splitlines()]
    each = len(parts)
    computed = [sum(span.seconds for span in spans[each * i : each * (i + 1)]) for i in range(STEPS)]
    ends = [line["unix"] for line in lines]
    return [(ends[i] - ends[i - 1], computed[i]) for i in range(2, STEPS - 1)]


def bench_vocab() -> int:
    """Ids of the tokens lie below it."""
    return bench_config().model.model_config.vocab_size


def loop_row() -> Row:
    """Seconds of a step that are neither forward, backward nor optimizer, of those that are."""
    ((*steps,),) = in_world(1, seconds_of_steps)
    shares = [(whole - computed) / computed for whole, computed in steps]
    other = statistics.median(computed for _, computed in steps)
    return Row(
        id="loop-overhead", what="seconds of a step outside forward, backward and optimizer, of those inside",
        ours=statistics.median(whole - computed for whole, computed in steps), other=other,
        ratio=statistics.median(shares), spread=spread_of([whole for whole, _ in steps]), threads=1,
        shape=f"hidden=256 layers=4 vocab=8192, 2 micro-batches of 4 × 256 tokens, fp32, steps of {other:.2f} s",
    )  # fmt: skip
