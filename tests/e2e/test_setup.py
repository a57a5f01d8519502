"""ops/setup.sh with stand-ins for python, apt-get and id: what it says and installs, and how it goes on after a stop.

The stand-in for python writes down each call and behaves as the files in its folder `state` say.
"""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!{bash}
echo "python $*" >> {state}/calls
case "$*" in
  *%d.%d*) echo 3.11 ;;
  *ensurepip*) [ -e {state}/has-ensurepip ] ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && [ ! -e {state}/venv-stops ] && : > .venv/RECORD ;;
  *RECORD*) [ -e .venv/RECORD ] ;;
  *"-m pip install"*)
    if [ -e {state}/interrupted ]; then
      trap 'echo "ERROR: Operation cancelled by user"; exit 1' INT
      kill -INT 0
    fi
    for word in "$@"; do [ ! -e "{state}/fails-$word" ] || exit 1; done ;;
esac
"""
APT = """#!{bash}
echo "apt-get $*" >> {state}/calls
case "$*" in install*) [ ! -e {state}/apt-fails ] && : > {state}/has-ensurepip ;; esac
"""


class World:
    """A copy of the script in a folder of its own, on a PATH of stand-ins and the few tools it calls."""

    def __init__(self, root: Path) -> None:
        self.root, self.state, self.bin = root / "pawl", root / "state", root / "bin"
        for folder in (self.root / "ops", self.state, self.bin):
            folder.mkdir(parents=True)
        shutil.copy(ROOT / "ops" / "setup.sh", self.root / "ops" / "setup.sh")
        (self.root / "requirements.lock").write_text("torch==1\nnumpy==1\n")
        for tool in ("bash", "dirname", "rm", "mkdir", "cp", "touch", "grep", "env"):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.stand_in("python3", PYTHON)
        self.stand_in("apt-get", APT)
        self.stand_in("g++", "#!{bash}\n")
        self.be("1000")
        self.set("has-ensurepip")

    def stand_in(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text.replace("{bash}", str(shutil.which("bash"))).replace("{state}", str(self.state)))
        path.chmod(0o755)

    def be(self, uid: str) -> None:
        self.stand_in("id", f"#!{{bash}}\necho {uid}\n")

    def set(self, *flags: str) -> None:
        for flag in flags:
            (self.state / flag).write_text("")

    def unset(self, *flags: str) -> None:
        for flag in flags:
            (self.state / flag).unlink()

    def run(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "ops/setup.sh"], cwd=self.root, env={"PATH": str(self.bin)}, capture_output=True, text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where a background job ignores it
        )  # fmt: skip

    def calls(self, program: str) -> list[str]:
        lines = (self.state / "calls").read_text().splitlines() if (self.state / "calls").exists() else []
        return [line for line in lines if line.startswith(program)]

    @property
    def ready(self) -> bool:
        return (self.root / ".venv" / ".pawl-ready").exists()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_it_says_first_what_is_to_come_then_a_line_per_stage(world: World) -> None:
    done = world.run()
    assert done.returncode == 0 and world.ready and done.stdout == ""
    first, *stages, last = done.stderr.splitlines()
    assert "GB" in first and "minutes" in first
    assert [line[7:10] for line in stages] == ["1/4", "2/4", "3/4", "4/4"] and "2 packages" in stages[1]
    assert "done in 0 min" in last and ".venv/bin/pawl" in last
    installs = world.calls("python -m pip install")
    assert len(installs) == 3 and all("--quiet" in line for line in installs), "no terminal, no progress bars"


def test_on_a_terminal_pip_shows_its_progress(world: World) -> None:
    script = shutil.which("script")
    if script is None:
        pytest.skip("util-linux's script, which lends a terminal, is not on this machine")
    command = [script, "--quiet", "--return", "--command", "bash ops/setup.sh", "/dev/null"]
    done = subprocess.run(command, cwd=world.root, env={"PATH": str(world.bin)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    installs = world.calls("python -m pip install")
    assert len(installs) == 3 and not any("--quiet" in line for line in installs)


def test_root_gets_debians_venv_package(world: World) -> None:
    world.unset("has-ensurepip")
    world.be("0")
    done = world.run()
    assert done.returncode == 0 and world.ready, done.stderr
    (install,) = world.calls("apt-get install")
    assert install.endswith(" python3.11-venv")


@pytest.mark.parametrize("why", ["not root", "no apt-get", "apt-get fails"])
def test_where_the_venv_package_cannot_be_had_its_command_is_named(world: World, why: str) -> None:
    world.unset("has-ensurepip")
    if why != "not root":
        world.be("0")
    if why == "no apt-get":
        (world.bin / "apt-get").unlink()
    world.set("apt-fails")
    done = world.run()
    assert done.returncode == 1 and not world.ready
    assert "apt-get install -y python3.11-venv" in done.stderr and "make setup" in done.stderr
    assert bool(world.calls("apt-get")) == (why == "apt-get fails")


def test_root_gets_a_compiler(world: World) -> None:
    (world.bin / "g++").unlink()
    world.be("0")
    assert world.run().returncode == 0 and world.ready
    (install,) = world.calls("apt-get install")
    assert install.endswith(" g++")


@pytest.mark.parametrize("why", ["not root", "apt-get fails"])
def test_without_a_compiler_it_names_the_command_and_goes_on(world: World, why: str) -> None:
    (world.bin / "g++").unlink()
    world.set("apt-fails")
    if why != "not root":
        world.be("0")
    done = world.run()
    assert done.returncode == 0 and world.ready
    assert "apt-get install -y g++" in done.stderr and "model.compile" in done.stderr


def test_no_python_is_named(world: World) -> None:
    (world.bin / "python3").unlink()
    done = world.run()
    assert done.returncode == 1 and "PYTHON=" in done.stderr and not world.ready


@pytest.mark.parametrize("where", ["requirements.lock", "requirements-demo.lock", "--editable"])
def test_a_failure_half_way_leaves_no_ready_mark_not_even_an_old_one(world: World, where: str) -> None:
    assert world.run().returncode == 0 and world.ready
    world.set(f"fails-{where}")
    done = world.run()
    assert done.returncode == 1 and "make setup again" in done.stderr and not world.ready
    world.unset(f"fails-{where}")
    assert world.run().returncode == 0 and world.ready


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(world: World) -> None:
    world.set("interrupted")
    done = world.run()
    assert done.returncode == 130 and "stopped. Run make setup again" in done.stderr and not world.ready
    site = world.root / ".venv" / "lib" / "python3.11" / "site-packages"
    for name, whole in {"torch": False, "numpy": True}.items():
        info = site / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("")
        if whole:
            (info / "RECORD").write_text("")
    world.unset("interrupted")
    assert world.run().returncode == 0 and world.ready
    assert len(world.calls("python -m venv")) == 1, "what was installed is kept"
    assert [path.name for path in site.iterdir()] == ["numpy-1.dist-info"], "and what was cut off is installed anew"


def test_a_venv_cut_off_in_the_making_is_made_anew(world: World) -> None:
    world.set("venv-stops")
    assert world.run().returncode != 0 and not world.ready
    assert (world.root / ".venv" / "bin" / "python").exists()
    world.unset("venv-stops")
    assert world.run().returncode == 0 and world.ready
    assert len(world.calls("python -m venv")) == 2
