"""Every way a rank can end has a kind, a code and words; and a process that leaves is gone at once."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.errors import CheckpointInvalid, ConfigError, DataError, DesyncError, NonFiniteError, TrainerError
from trainer.outcome import ending_of, outcome_path, relative_to_run, write_outcome
from trainer.records import Epoch, Outcome


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ConfigError("4 ranks, 2 needed"), "config_error", 78),
        (NonFiniteError("step 7"), "nonfinite", 86),
        (DataError("bad id"), "data_error", 88),
        (
            CheckpointInvalid("cut", bad_file=Path("/run/rank-00000.safetensors")),
            "checkpoint_invalid",
            89,
        ),
        (DesyncError("rank 3 differs", suspects=(3,)), "desync", 91),
        (TrainerError("other"), "crashed", 1),
        (OSError(errno.ENOSPC, "No space left on device"), "crashed", 92),
        (caused(TrainerError("not saved"), OSError(errno.EDQUOT, "Disk quota exceeded")), "crashed", 92),
        (caused(ConfigError("no tokenizer"), OSError(errno.EIO, "Input/output error")), "config_error", 78),
        (OSError(errno.ENOENT, "No such file"), "crashed", 1),
        (ValueError("odd"), "crashed", 1),
        (SystemExit(3), "crashed", 1),
        (KeyboardInterrupt(), "crashed", 1),
    ],
)
def test_endings(error: BaseException, kind: str, code: int) -> None:
    ending = ending_of(error, checkpoint="c")
    assert (ending.kind, ending.exit_code, ending.checkpoint) == (kind, code, "c")
    assert ending.message
    assert ending.exception is not None
    assert ending.exception.type == type(error).__name__


def test_the_frame_is_the_one_that_raised() -> None:
    def inner() -> None:
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd") as caught:
        inner()
    exception = ending_of(caught.value).exception
    assert exception is not None
    assert exception.frame.startswith(__file__)
    assert exception.frame.endswith(" in inner")


def test_outcome_file(tmp_path: Path) -> None:
    bad = tmp_path / "checkpoints" / "x" / "rank-00000.safetensors"
    outcome = Outcome(
        rank=42, node="node1", epoch=Epoch(attempt=1, generation=1, cycle=1), kind="checkpoint_invalid", exit_code=89,
        step=0, phase="RESTORE", message="cut", exception=None, checkpoint=None,
        bad_file=relative_to_run(bad, tmp_path), written_unix=1.5,
    )  # fmt: skip
    write_outcome(outcome, cycle_dir=tmp_path)
    path = outcome_path(tmp_path, 42)
    assert path.name == "rank-00042.json"
    read = json.loads(path.read_text())
    assert read["bad_file"] == "checkpoints/x/rank-00000.safetensors"
    assert read["epoch"] == {"attempt": 1, "generation": 1, "cycle": 1}
    assert read["schema_version"] == 1


def test_paths_outside_the_run_stay_whole(tmp_path: Path) -> None:
    assert relative_to_run(Path("/data/shard"), tmp_path) == "/data/shard"
    assert relative_to_run(None, tmp_path) is None


def test_leave_does_not_wait_for_threads_or_exit_handlers() -> None:
    """spd#552: a teardown that waits for a dead peer keeps the node for ever."""
    script = (
        "import atexit, threading, time\n"
        "from trainer.outcome import leave\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "atexit.register(time.sleep, 60)\n"
        "print('last words', end='')\n"
        "leave(75)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=20, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, "last words")
