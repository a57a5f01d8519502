"""Checks that need this machine: folders, the tokenizer, GPUs. Reads only what is small, imports no torch.

A laptop that writes a config for a cluster sees none of its folders: what cannot be seen is then `unchecked`, said
once and no error. With `required` (`--here`, and always before a run starts) it is an error. What can be seen and
contradicts the config is an error either way.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError, DataError
from trainer.flops import find_gpu
from trainer.memory import FIXED_BYTES, USABLE, largest_micro_batch, rank_memory, usable_bytes
from trainer.mesh.topology import Topology
from trainer.pipeline.choose import training_lists, training_schedule
from trainer.pipeline.lower import chain
from trainer.pipeline.partition import is_schedule_file, placement
from trainer.pipeline.schedule import Schedule, ScheduleError
from trainer.pipeline.validate import validate
from trainer.toolchain import cpp_command, cpp_compiler

from .model import Config
from .problems import Severity, quoted
from .rules import Finding
from .rules_data import sources

MIB = 1 << 20
MAX_TOKENIZER_BYTES = 64 * MIB
SMI_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpu:
    """One GPU of this machine."""

    name: str
    total_bytes: int
    free_bytes: int


def data_findings(config: Config, *, required: bool) -> Iterator[Finding]:
    """Every token folder: is it there, finished, and within the model's vocabulary."""
    for key, data in sources(config):
        folders = [(f"{key}.dataset.dataset_folder", data.dataset.dataset_folder)]
        if data.validation is not None:
            folders.append((f"{key}.validation.dataset_folder", data.validation.dataset_folder))
        for where, names in folders:
            for index, name in enumerate(names):
                yield from _folder(f"{where}.{index}", name, config, required=required)


def _folder(key: str, name: str, config: Config, *, required: bool) -> Iterator[Finding]:
    path, vocab = Path(name), config.model.model_config.vocab_size
    if not path.is_dir():
        yield _unseen(key, "no such folder", name, required=required)
        return
    from trainer.data.format import read_metadata  # numpy and xxhash: only where there is a folder to look at

    try:
        metadata = read_metadata(path)
    except DataError as error:
        yield Finding(key=key, message=str(error), found=quoted(name))
        return
    if metadata.vocab_size > vocab:
        message = f"its tokenizer has {metadata.vocab_size} entries, more than the model's vocab_size"
        yield Finding(key=key, message=message, found=quoted(name), expected=f"at most {vocab}")


def tokenizer_findings(config: Config, *, required: bool) -> Iterator[Finding]:
    """A tokenizer folder must hold tokenizer.json, with no more entries than the model."""
    if config.tokenizer is None:
        return
    key, name = "tokenizer.tokenizer_name_or_path", config.tokenizer.tokenizer_name_or_path
    vocab, path = config.model.model_config.vocab_size, Path(name)
    if not path.is_dir():
        looks_like_hub = name.count("/") <= 1 and not name.startswith((".", "/", "~"))
        message = "no such folder here; if it is a name on a hub, the export will need the network or its cache"
        if required and looks_like_hub:
            yield Finding(key=key, message=message, found=quoted(name), severity=Severity.WARNING)
        else:
            yield _unseen(key, message if looks_like_hub else "no such folder", name, required=required)
        return
    file = path / "tokenizer.json"
    if not file.is_file():
        yield Finding(
            key=key, message="the folder holds no tokenizer.json", found=quoted(name), expected="a tokenizer's folder"
        )
        return
    size = tokenizer_size(file)
    if size is None:
        yield Finding(key=key, message=f"{file} is no tokenizer of the tokenizers library", found=quoted(name))
    elif size > vocab:
        message = f"the tokenizer has {size} entries, more than the model's vocab_size"
        yield Finding(key=key, message=message, found=quoted(name), expected=f"at most {vocab}")


def tokenizer_size(file: Path) -> int | None:
    """Highest id + 1 over vocabulary and added tokens of a tokenizer.json; None when it is none."""
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        vocab = record["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        ids += [entry["id"] for entry in record.get("added_tokens") or []]
        return 1 + max(int(i) for i in ids)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def start_findings(config: Config, *, required: bool) -> Iterator[Finding]:
    """The checkpoint whose weights the run starts from: is it there, and of this model. Its tables alone are read."""
    key, name = "model.init_method.path", config.model.init_method.path
    if name is None:
        return
    if not Path(name).is_dir():
        yield _unseen(key, "no such checkpoint folder", name, required=required)
        return
    # numpy and xxhash: only where there is a folder to look at.
    from trainer.checkpoint.match import misfit, open_start, other_numbers
    from trainer.spec import param_specs

    try:
        checkpoint = open_start(Path(name))
        different = misfit(
            checkpoint, param_specs(config, Topology(pp=config.parallelism.pp, tp=config.parallelism.tp))
        )
    except ConfigError as error:
        yield Finding(key=key, message=str(error).removeprefix(f"{key}: "), found=quoted(name))
        return
    if different is not None:
        yield Finding(key=key, message=different, found=quoted(name), expected="a checkpoint of this model")
        return
    for note in other_numbers(checkpoint, config):
        yield Finding(key=key, message=note, found=quoted(name), severity=Severity.WARNING)


def schedule_findings(config: Config, *, required: bool) -> Iterator[Finding]:
    """A schedule file must be readable, sound, and made for this pp, these stages and micro-batches."""
    key, name, mesh = "parallelism.pp_engine", config.parallelism.pp_engine, config.parallelism
    if not is_schedule_file(name):
        return
    if not Path(name).is_file():
        yield _unseen(key, "no such schedule file", name, required=required)
        return
    try:
        num_stages = placement(config, mesh.pp).num_stages
        training_lists(config, chain(num_stages), p=mesh.pp, m=config.num_micro_batches)
    except ConfigError as error:
        yield Finding(key=key, message=str(error).removeprefix(f"{key}: "), found=name)


def compiler_findings(config: Config, *, required: bool) -> Iterator[Finding]:
    """`model.compile: block` calls a C++ compiler to train on a CPU."""
    if config.model.compile != "none" and cpp_compiler() is None:
        message = f"compiling for a CPU needs a C++ compiler, and {cpp_command()} is not here (Debian/Ubuntu: g++)"
        yield _unseen("model.compile", message, config.model.compile, required=required)


def own_schedule(config: Config) -> Schedule | None:
    """The schedule in the file that the config names, where it can be read and is made for the config."""
    name, mesh = config.parallelism.pp_engine, config.parallelism
    if not is_schedule_file(name) or not Path(name).is_file():
        return None
    try:
        schedule = training_schedule(config, p=mesh.pp, m=config.num_micro_batches)
        validate(schedule, chain(schedule.placement.num_stages))
    except (ConfigError, ScheduleError):
        return None  # schedule_findings says what is wrong with it
    return schedule


def _unseen(key: str, message: str, found: str, *, required: bool) -> Finding:
    severity = Severity.ERROR if required else Severity.UNCHECKED
    return Finding(key=key, message=message, found=quoted(found), severity=severity)


def local_gpus() -> tuple[LocalGpu, ...]:
    """This machine's NVIDIA GPUs as nvidia-smi lists them; empty where there is none or the driver does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(done.stdout) if done.returncode == 0 else ()


def parse_gpus(text: str) -> tuple[LocalGpu, ...]:
    """Lines 'name, total MiB, free MiB'; lines of another shape are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(
        LocalGpu(name=row[0], total_bytes=int(row[1]) * MIB, free_bytes=int(row[2]) * MIB)
        for row in rows
        if len(row) == 3 and row[1].isdecimal() and row[2].isdecimal()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether the estimate of the fullest rank fits one GPU. `largest_micro_batch` is None when not even 1 fits."""

    gpu: str
    available_bytes: int
    needed_bytes: int
    fits: bool
    largest_micro_batch: int | None


def fit(
    config: Config, *, gpu_type: str | None, gpus: tuple[LocalGpu, ...], schedule: Schedule | None = None
) -> Fit | None:
    """By the GPU type the config asks for, else by the fullest GPU found here; None when neither is known."""
    asked = find_gpu(gpu_type)
    if asked is not None:
        name, available = asked.name, usable_bytes(asked)
    elif gpus:
        fullest = min(gpus, key=lambda gpu: gpu.free_bytes)
        name, available = fullest.name, int((fullest.free_bytes - FIXED_BYTES) * USABLE)
    else:
        return None
    needed = rank_memory(config, schedule=schedule).total
    return Fit(
        gpu=name,
        available_bytes=max(0, available),
        needed_bytes=needed,
        fits=needed <= available,
        largest_micro_batch=largest_micro_batch(config, available, schedule=schedule),
    )


def fit_findings(config: Config, result: Fit | None, gpu_type: str | None) -> Iterator[Finding]:
    """A warning where the estimate does not fit; `unchecked` where no GPU is known."""
    key = "tokens.micro_batch_size"
    if result is None:
        message = "GPU memory: no GPU here"
        message += f", and slurm.gpu_type {gpu_type!r} is not in the table" if gpu_type else ", and no slurm.gpu_type"
        yield Finding(key=key, message=message, severity=Severity.UNCHECKED)
    elif not result.fits:
        best = result.largest_micro_batch
        advice = (
            f"a micro_batch_size of at most {best}"
            if best
            else "more tp, pp or (with zero_stage 1) dp: not even a micro_batch_size of 1 fits"
        )
        yield Finding(
            key=key,
            message=f"the fullest rank needs about {result.needed_bytes / 1e9:.1f} GB, one {result.gpu} has "
            f"{result.available_bytes / 1e9:.1f} GB to give",
            found=str(config.tokens.micro_batch_size),
            expected=advice,
            severity=Severity.WARNING,
        )
