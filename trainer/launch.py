"""Where this process stands: its rank, its run directory, its cycle. Read once, from command line and environment.

torchrun's words are used as they are (RANK, LOCAL_RANK, WORLD_SIZE). Without them the process is a world of one.

    under an agent   --cycle <run>/attempts/0003/cycles/0001/cycle.json      records beside it
    on its own       <run>/attempts/0000/cycles/0000/                        epoch a0000g00c0000
"""

import socket
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.fsio import read_json
from trainer.records import UNSUPERVISED, Cycle, Epoch, parse_cycle


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process among the ranks. `cycle_file` and `shm` are None where no agent started it."""

    config_file: Path
    run_dir: Path
    cycle_file: Path | None
    shm: Path | None
    rank: int
    local_rank: int
    world_size: int
    node: str
    restart: str

    @property
    def cycle_dir(self) -> Path:
        """Where this launch's records go."""
        if self.cycle_file is not None:
            return self.cycle_file.parent
        return self.run_dir / "attempts" / "0000" / "cycles" / "0000"

    @property
    def checkpoints_dir(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def profile_dir(self) -> Path:
        """Where recorded steps go."""
        return self.run_dir / "profile"

    @property
    def stacks_file(self) -> Path:
        """Where SIGUSR2 leaves the stacks of this rank."""
        return self.cycle_dir / "evidence" / f"rank-{self.rank:05d}.stacks"

    def read_cycle(self) -> Cycle | None:
        """The cycle this rank is part of; None without an agent. Raises RecordUnreadable."""
        return None if self.cycle_file is None else parse_cycle(read_json(self.cycle_file))

    def store_prefix(self, epoch: Epoch) -> str:
        """A name in torchrun's store that no other launch uses.

        torchrun keeps one store over its restarts: ranks that find the keys of a dead generation dial dead addresses
        and hang (pytorch#135712). Under an agent the epoch is new each time; alone, torchrun's own count must do.
        """
        return f"pawl/{epoch.text}" if epoch != UNSUPERVISED else f"pawl/{epoch.text}/{self.restart}"


def read_launch(args: Namespace, env: Mapping[str, str]) -> Launch:
    """The launch described by `trainer train`'s arguments and torchrun's environment."""
    config_file = Path(args.config_file)
    return Launch(
        config_file=config_file,
        run_dir=(Path(args.run_dir) if args.run_dir else Path("runs") / config_file.stem).absolute(),
        cycle_file=Path(args.cycle).absolute() if args.cycle else None,
        shm=Path(args.shm) if args.shm else None,
        rank=int(env.get("RANK", "0")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        world_size=int(env.get("WORLD_SIZE", "1")),
        node=env.get("PAWL_NODE") or socket.gethostname(),
        restart=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
