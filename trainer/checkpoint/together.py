"""Do something on every rank and agree whether it worked: a rank that fails alone would leave the others waiting.

Results travel as JSON in a fixed number of bytes, not through torch's object collectives, which unpickle what they
receive.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.comm import Group, all_gather
from trainer.errors import CheckpointInvalid, TrainerError

MESSAGE_BYTES = 1024
SHOWN_CHARACTERS = 400


class SaveFailed(TrainerError):
    """A checkpoint could not be written; earlier ones are untouched."""


class Meeting(Protocol):
    """All ranks, and the device their messages travel on: a ParallelContext, or a background's own group."""

    @property
    def world(self) -> Group: ...
    @property
    def device(self) -> torch.device: ...


def together(ctx: Meeting, act: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run `act` on every rank and return the small JSON objects of all, in rank order. Comm: 1 all-gather (world).

    If it fails anywhere, whatever the error, every rank raises: the failing one its own error, the others the first
    rank's, as CheckpointInvalid with the same `bad_file` or as SaveFailed. Also a barrier: nobody returns before all
    have acted.
    """
    error: Exception | None = None
    try:
        answer = dict(act())
    except Exception as caught:  # told to all and raised again below
        error = caught
        bad_file = caught.bad_file if isinstance(caught, CheckpointInvalid) else None
        answer = {
            "error": (str(caught) or repr(caught))[:SHOWN_CHARACTERS],
            "bad_file": None if bad_file is None else str(bad_file),
            "errno": caught.errno if isinstance(caught, OSError) else None,
        }
        if len(json.dumps(answer)) > MESSAGE_BYTES:
            answer = {**answer, "error": "see the log of that rank", "bad_file": None}
    answers = _gather(ctx, answer)
    if error is not None:
        raise error
    for rank, other in enumerate(answers):
        if "error" in other:
            raise _error_of(rank, other) from _cause_of(other)
    return answers


def _error_of(rank: int, answer: Mapping[str, Any]) -> TrainerError:
    message = f"Rank {rank} reports: {answer['error']}"
    if answer["bad_file"] is not None:
        return CheckpointInvalid(message, bad_file=Path(answer["bad_file"]))
    return SaveFailed(message)


def _cause_of(answer: Mapping[str, Any]) -> OSError | None:
    """The other rank's error of the file system, for the exit code of this one."""
    return None if answer["errno"] is None else OSError(answer["errno"], answer["error"])


def _gather(ctx: Meeting, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    if ctx.world.size == 1:
        return [dict(answer)]
    text = json.dumps(answer).encode().ljust(MESSAGE_BYTES)
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(ctx.device)
    everyone = torch.empty(MESSAGE_BYTES * ctx.world.size, dtype=torch.uint8, device=ctx.device)
    data = all_gather(everyone, mine, ctx.world).cpu().numpy().tobytes()
    return [json.loads(data[at : at + MESSAGE_BYTES]) for at in range(0, len(data), MESSAGE_BYTES)]
