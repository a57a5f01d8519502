"""Where a process stands, from its arguments and torchrun's environment; and what it does without an orchestrator."""

import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from trainer.alone import choose_and_clear, set_aside
from trainer.fsio import RecordUnreadable
from trainer.launch import read_launch
from trainer.peers import wait_for_peers
from trainer.records import UNSUPERVISED, Epoch
from trainer.signals import DrainFlag
from trainer.train_args import add_arguments


def arguments(**given: str | None) -> Namespace:
    return Namespace(**{"config_file": "configs/demo.yaml", "run_dir": None, "cycle": None, "shm": None, **given})


def test_a_bare_process_is_a_world_of_one() -> None:
    launch = read_launch(arguments(), {})
    assert (launch.rank, launch.local_rank, launch.world_size) == (0, 0, 1)
    assert launch.run_dir == Path("runs/demo").absolute()
    assert launch.cycle_dir == launch.run_dir / "attempts" / "0000" / "cycles" / "0000"
    assert launch.read_cycle() is None


def test_under_torchrun_and_an_agent() -> None:
    env = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "PAWL_NODE": "node2"}
    launch = read_launch(
        arguments(run_dir="/r", cycle="/r/attempts/0003/cycles/0001/cycle.json", shm="/dev/shm/x"), env
    )
    assert (launch.rank, launch.local_rank, launch.world_size, launch.node) == (5, 1, 8, "node2")
    assert launch.cycle_dir == Path("/r/attempts/0003/cycles/0001")
    assert launch.stacks_file.name == "rank-00005.stacks"


def test_variables_of_an_interactive_srun_give_no_ranks() -> None:
    """S8 (pytorch-lightning#20391): a trainer that believes SLURM_NTASKS waits for ranks that nobody started."""
    inherited = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    alone = read_launch(arguments(), inherited)
    assert (alone.rank, alone.local_rank, alone.world_size) == (0, 0, 1)
    started = read_launch(arguments(), {**inherited, "RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "4"})
    assert (started.rank, started.local_rank, started.world_size) == (3, 0, 4)


def test_each_launch_has_its_own_names_in_torchruns_store() -> None:
    """pytorch#135712: a restarted group that reads the dead group's keys dials dead addresses."""
    epochs = [Epoch(attempt=1, generation=1, cycle=cycle) for cycle in (1, 2)]
    again = [read_launch(arguments(), {"TORCHELASTIC_RESTART_COUNT": str(count)}) for count in (0, 1)]
    names = [again[0].store_prefix(epoch) for epoch in epochs] + [launch.store_prefix(UNSUPERVISED) for launch in again]
    assert len(set(names)) == 4
    assert names[0] == "pawl/a0001g01c0001"


def test_an_unreadable_cycle_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordUnreadable, match=r"cycle\.json: cannot be read"):
        read_launch(arguments(cycle=str(tmp_path / "cycle.json")), {}).read_cycle()


def test_the_command_line_gives_what_a_launch_needs() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--config-file", "c.yaml", "--run-dir", "r", "--cycle", "r/cycle.json", "--shm", "s"])
    launch = read_launch(args, {})
    assert (launch.config_file, launch.shm) == (Path("c.yaml"), Path("s"))


def test_outside_torchrun_nobody_is_waited_for() -> None:
    assert wait_for_peers("pawl/x", 4, env={})
    assert wait_for_peers("pawl/x", 1, env={"TORCHELASTIC_RUN_ID": "x"})


def test_nothing_to_choose_from(tmp_path: Path) -> None:
    assert choose_and_clear(tmp_path / "absent") == (None, ())
    assert choose_and_clear(tmp_path) == (None, ())


def test_only_what_is_in_the_way_is_set_aside(tmp_path: Path) -> None:
    own, others = "step-000000003.a0000g00c0000", "step-000000003.a0001g01c0001"
    for name in (own, others, f".{own}.partial", "9999", "tmp-40"):
        (tmp_path / name).mkdir()
    chosen, reasons = choose_and_clear(tmp_path)
    assert chosen is None
    assert len(reasons) == 5
    assert {path.name for path in tmp_path.iterdir()} == {
        f".quarantine-{own}",
        f".quarantine-{own}-2",
        others,
        "9999",
        "tmp-40",
    }


def test_set_aside_never_replaces(tmp_path: Path) -> None:
    places = []
    for _ in range(3):
        (tmp_path / "x").mkdir()
        places.append(set_aside(tmp_path / "x").name)
    assert places == [".quarantine-x", ".quarantine-x-2", ".quarantine-x-3"]


def test_a_drain_flag_names_its_signal() -> None:
    flag = DrainFlag()
    assert not flag
    flag.set(signal.SIGUSR2, None)
    assert flag
    assert flag.signal_name == "SIGUSR2"


SIGNALS = """
import os, signal, sys, threading, time
from pathlib import Path
from trainer.signals import DrainFlag, install_alone, install_supervised
def stuck_function():
    time.sleep(30)
threading.Thread(target=stuck_function, daemon=True).start()
time.sleep(0.2)
flag = DrainFlag()
if sys.argv[1] == "alone":
    install_alone(flag)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    print(flag.signal_name)
else:
    install_supervised(Path(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGUSR2)
    print("alive", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_alone_a_signal_only_sets_the_flag(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALS, "alone", name], capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stdout.strip()) == (0, name)


def test_under_an_agent_usr2_dumps_all_threads_int_is_ignored_and_term_ends(tmp_path: Path) -> None:
    stacks = tmp_path / "evidence" / "rank-00000.stacks"
    done = subprocess.run([sys.executable, "-c", SIGNALS, str(stacks)], capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stdout.strip()) == (-signal.SIGTERM, "alive")
    assert "stuck_function" in stacks.read_text(), "every thread, not only the main one"
