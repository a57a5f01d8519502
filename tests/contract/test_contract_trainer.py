"""A whole run of the trainer, read by the orchestrator: every record it leaves, its launch facts, its command line."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny_run
import yaml
from launch_cases import make_plan
from run_dir_schemas import problems
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from orchestrator.agent.plan import fill
from orchestrator.state import records as reader
from orchestrator.state import train_lines as lines_reader
from orchestrator.state.checkpoint_index import Index, parse_index
from orchestrator.state.epochs import PLAIN_EPOCH
from orchestrator.state.rundir import RunPaths
from trainer import run as run_module
from trainer.cli import COMMANDS, parser_for
from trainer.config.check import main as check_main
from trainer.launch import read_launch
from trainer.run import TrainerProcess

FACTS_SCHEMA = Path(__file__).parents[2] / "configs" / "schema" / "launch_facts.schema.json"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny config with a tokenizer, whose facts the manifest carries."""
    root = tmp_path_factory.mktemp("contract")
    path = tiny_run.make(root, train_steps=3, interval=2)
    (root / "tokenizer").mkdir()
    words = {f"w{index}": index for index in range(tiny_run.VOCAB)}
    Tokenizer(WordLevel(words, unk_token="w1")).save(str(root / "tokenizer" / "tokenizer.json"))
    body = yaml.safe_load(path.read_text())
    body["tokenizer"] = {"tokenizer_name_or_path": str(root / "tokenizer")}
    path.write_text(yaml.safe_dump(body))
    return path


@pytest.fixture(scope="module")
def paths(config: Path) -> RunPaths:
    """The run directory of a run that has trained to its end in this process."""
    paths = RunPaths(config.parent / "run")
    args = Namespace(config_file=config, run_dir=paths.root, cycle=None, shm=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "install_alone", lambda flag: None)
        assert TrainerProcess(read_launch(args, {})).run() == 0
    return paths


def test_every_record_follows_its_schema(paths: RunPaths) -> None:
    assert len(list(paths.root.rglob("*.json*"))) >= 7
    assert problems(paths.root) == []


def test_train_lines(paths: RunPaths) -> None:
    lines = paths.train_log(0, 0).read_text().splitlines()
    read = [lines_reader.parse_train_step(line) for line in lines]
    assert [step.step for step in read if isinstance(step, lines_reader.TrainStep)] == [1, 2, 3]


def test_validation_line(paths: RunPaths) -> None:
    (line,) = paths.validation_log(0, 0).read_text().splitlines()
    read = lines_reader.parse_validation_point(line)
    assert isinstance(read, lines_reader.ValidationPoint), read
    assert read.step == 3


def test_outcome(paths: RunPaths) -> None:
    text = paths.outcome(0, 0, 0).read_text()
    read = reader.parse_outcome(text)
    assert isinstance(read, reader.Outcome), read
    assert (read.kind, read.step, read.epoch) == (reader.OutcomeKind.DONE, 3, PLAIN_EPOCH)


@pytest.mark.parametrize("step", [2, 3])
def test_checkpoint_tables(paths: RunPaths, config: Path, step: int) -> None:
    folder = paths.checkpoint(f"step-{step:09d}.{PLAIN_EPOCH.text}")
    text = (folder / "manifest.json").read_text()
    manifest = reader.parse_manifest(text)
    assert isinstance(manifest, reader.Manifest), manifest
    assert (manifest.step, manifest.state.adam_t, manifest.tokenizer is None) == (step, step, False)
    sizes = {file.name: file.bytes for file in manifest.files}
    assert sizes == {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"}
    index_text = (folder / "index.json").read_text()
    index = parse_index(index_text)
    assert isinstance(index, Index), index
    assert index.step == step
    assert {box.file for tensor in index.tensors.values() for box in tensor.boxes} <= set(sizes)
    assert (folder / "config.yaml").read_text() == config.read_text()


def test_launch_facts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = next(command for command in COMMANDS if command.name == "check")
    args = parser_for(command).parse_args([str(config), "--json"])
    assert check_main(args) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)["facts"]
    jsonschema.Draft202012Validator(json.loads(FACTS_SCHEMA.read_text())).validate(facts)
    read = reader.parse_launch_facts(json.dumps(facts))
    assert isinstance(read, reader.LaunchFacts), read
    assert (read.world_size, read.train_steps, read.checkpoint_interval) == (1, 3, 2)


def test_the_command_the_agent_starts_is_one_the_trainer_understands() -> None:
    plan = make_plan(run_dir=Path("/scratch/my runs/demo"))
    argv = fill(
        plan.torchrun,
        {
            "nnodes": "2",
            "node_rank": "1",
            "ranks_per_node": "4",
            "master_addr": "gpu01",
            "master_port": "29500",
            "cycle_file": "/scratch/my runs/demo/attempts/0003/cycles/0001/cycle.json",
            "shm": "/dev/shm/pawl-1000-n-gpu02",
        },
    )
    assert not any("{" in word for word in argv)
    at = argv.index("-m")
    assert argv[at : at + 5] == ("-m", "orchestrator.agent.label", "-m", "trainer", "train")
    torchrun = dict(word.partition("=")[::2] for word in argv[1:at])
    assert torchrun["--max-restarts"] == "0"
    assert torchrun["--node-rank"] == "1"
    command = next(command for command in COMMANDS if command.name == "train")
    launch = read_launch(parser_for(command).parse_args(list(argv[at + 5 :])), {"RANK": "5", "WORLD_SIZE": "8"})
    paths = RunPaths(Path("/scratch/my runs/demo"))
    assert launch.config_file == paths.config
    assert launch.cycle_dir == paths.cycle(3, 1)
    assert launch.shm == Path("/dev/shm/pawl-1000-n-gpu02")
