"""Between torchrun and a rank: every line that the rank writes gets the rank's number, "[rank3]: loading …".

    torchrun -m orchestrator.agent.label -m trainer train …      in each worker:

    fork twice ─▶ the labeller: reads a pipe, writes whole lines to the node's log (O_APPEND, one write a line)
    exec       ─▶ python -u -m trainer train …, its stdout and stderr are the pipe; pid and signals are torchrun's

Because the pipe is below Python, words of C libraries and of a dying interpreter are labelled too; because the labeller
is another process, what a rank wrote before SIGKILL still arrives. A full disk costs lines, never the rank: the
labeller goes on reading and says how many lines are missing. It ends when nobody holds the pipe any more. Nothing is
imported here but the standard library: this runs once for every rank, before its own program does.
"""

import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

MAX_LINE = 64 * 1024
# A line without an end (a progress bar, the last word before a hang) is written after this much silence.
IDLE_S = 1.0


def label_of(environ: Mapping[str, str]) -> bytes:
    """What stands before each line: torchrun's global rank, "[rank3]: "; nothing where there is no rank."""
    rank = environ.get("RANK", "")
    return f"[rank{int(rank)}]: ".encode() if rank.isdecimal() else b""


def labelled(line: bytes, label: bytes) -> bytes:
    """A line with its label and one line feed. torch labels some of its own lines in the same way: once is enough."""
    bare = label.rstrip(b": ")
    return (line if bare and line.startswith(bare) else label + line) + b"\n"


class Lines:
    """Bytes as they come → whole labelled lines. Pure; a line over MAX_LINE is cut into several."""

    def __init__(self, label: bytes) -> None:
        self._label, self._rest = label, b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [part for line in whole for part in _cut(line)]
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return [labelled(line, self._label) for line in lines]

    def flush(self) -> list[bytes]:
        """The line that has no end yet."""
        rest, self._rest = self._rest, b""
        return [labelled(rest, self._label)] if rest else []


def _cut(line: bytes) -> list[bytes]:
    return [line[at : at + MAX_LINE] for at in range(0, len(line), MAX_LINE)] or [b""]


class Sink:
    """Writes lines and survives a disk that takes none: `missing` counts them until it can be said."""

    def __init__(self, write: Callable[[bytes], int], label: bytes) -> None:
        self._write, self._label = write, label
        self.missing = 0

    def put(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            said = f"lines of this rank that could not be written here: {self.missing}".encode()
            if self.missing and self._whole(labelled(said, self._label)):
                self.missing = 0
            if self.missing or not self._whole(line):
                self.missing += 1

    def _whole(self, line: bytes) -> bool:
        try:
            while line:
                line = line[self._write(line) :]
        except OSError:
            return False
        return True


def pump(source: int, lines: Lines, sink: Sink) -> None:
    """Copy until the pipe has no writer left."""
    while True:
        ready, _, _ = select.select([source], [], [], IDLE_S)
        if not ready:
            sink.put(lines.flush())
            continue
        data = os.read(source, MAX_LINE)
        if not data:
            sink.put(lines.flush())
            return
        sink.put(lines.feed(data))


def become_labeller(source: int, label: bytes) -> None:
    """The life of the labelling process. It leaves the rank's session: torchrun kills a rank with its whole group."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    target = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    pump(source, Lines(label), Sink(lambda data: os.write(target, data), label))


def main(arguments: Sequence[str]) -> None:
    """Become `python -u ARGUMENTS`, with labelled output. Does not return. Raises OSError when there is no process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # The middle process ends at once: the rank has no child that a wait of its own could meet.
        try:
            if os.fork() == 0:
                os.close(writing)
                become_labeller(reading, label_of(os.environ))
        finally:
            os._exit(0)  # whatever happens here, this process never becomes a second rank
    os.waitpid(child, 0)
    os.close(reading)
    for fd in (1, 2):
        os.dup2(writing, fd)
    os.close(writing)
    os.execv(sys.executable, [sys.executable, "-u", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
