"""Executables that stand in for Slurm's on PATH, so that rendered scripts run for real without a cluster.

`directives` reads `#SBATCH` lines with sbatch's own rules (src/sbatch/opt.c: stop at the first command; quotes of both
kinds; a backslash escapes everywhere, also in single quotes; an unquoted # starts a comment), which are not bash's.
"""

import json
import os
import stat
import sys
from pathlib import Path

SBATCH = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from slurm_stubs import directives
script = Path(sys.argv[-1]).read_text()
seen = {{"argv": sys.argv[1:], "directives": directives(script),
        "environ": {{k: v for k, v in os.environ.items() if k.startswith(("SBATCH_", "SLURM_", "SRUN_"))}}}}
Path({folder!r}, "sbatch.json").write_text(json.dumps(seen))
print({reply!r})
"""
# One task per node, each with its own SLURM_NODEID, as srun gives it; the command line is passed on unchanged.
SRUN = """
import json, os, subprocess, sys
from pathlib import Path
options = []
words = sys.argv[1:]
while words and words[0].startswith("-"):
    options.append(words.pop(0))
folder = Path({folder!r})
names = [name for name in os.environ if name.startswith(("SLURM_", "SRUN_"))]
(folder / "srun.json").write_text(json.dumps({{"options": options, "names": names}}))
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
codes = [subprocess.run(words, env={{**os.environ, "SLURM_NODEID": str(n)}}).returncode for n in range(nodes)]
sys.exit(max(codes))
"""
SCONTROL = """
import os, sys
assert sys.argv[1:3] == ["show", "hostnames"], sys.argv
print(os.environ["STUB_HOSTS"])
"""
# torchrun, and the supervisor's python: keep the arguments and the environment they were started with.
RECORDER = """
import json, os, sys
from pathlib import Path
name = Path(sys.argv[0]).name
rank = os.environ.get("SLURM_NODEID", "x")
seen = {{"argv": sys.argv[1:], "environ": dict(os.environ)}}
Path({folder!r}, f"{{name}}-{{rank}}.json").write_text(json.dumps(seen))
"""
# Real Python for `-c`, a recorder for `-m orchestrator …`.
PYTHON = """#!/bin/bash
if [ "$1" = -m ]; then exec -a python {python} {recorder} "$@"; fi
exec {python} "$@"
"""


def directives(script: str) -> list[str]:
    """The option arguments that sbatch takes from a script, in order."""
    found: list[str] = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            found += _arguments(line.removeprefix("#SBATCH"))
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


def _arguments(line: str) -> list[str]:
    arguments, current, quote, escaped = [], None, "", False
    for character in line:
        if escaped:
            current, escaped = (current or "") + character, False
        elif character == "\\":
            current, escaped = current or "", True
        elif quote:
            quote, current = ("", current) if character == quote else (quote, (current or "") + character)
        elif character in "\"'":
            quote, current = character, current or ""
        elif character == "#":
            break
        elif character.isspace():
            if current is not None:
                arguments.append(current)
            current = None
        else:
            current = (current or "") + character
    return arguments if current is None else [*arguments, current]


def install(folder: Path, *, reply: str = "Submitted batch job 4711") -> Path:
    """Write the stubs into `folder`/bin and return it; what they saw lands in `folder` as JSON."""
    bin_dir = folder / "bin"
    bin_dir.mkdir(parents=True)
    values = {"folder": str(folder), "tests": str(Path(__file__).parent), "reply": reply}
    for name, source in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", RECORDER)):
        _write(bin_dir / name, f"#!{sys.executable} -I\n{source.format(**values)}")
    _write(bin_dir / "recorder", f"#!{sys.executable} -I\n{RECORDER.format(**values)}")
    quoted = {"python": f"'{sys.executable}'", "recorder": '"${BASH_SOURCE[0]%/*}/recorder"'}
    _write(bin_dir / "python", PYTHON.format(**quoted))
    return bin_dir


def saw(folder: Path, name: str) -> dict[str, object]:
    """What a stub recorded."""
    return dict(json.loads((folder / f"{name}.json").read_text()))


def environment(bin_dir: Path, *, nodes: int, hosts: str = "node1") -> dict[str, str]:
    """The environment of a batch script on the first node of a job, as `--export=NONE` leaves it."""
    return {
        "PATH": f"{bin_dir}:/usr/bin:/bin",
        "HOME": os.environ.get("HOME", "/"),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_CPUS_PER_TASK": "3",
        "SRUN_CPUS_PER_TASK": "5",
        "STUB_HOSTS": hosts,
    }


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
