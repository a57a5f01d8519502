"""The wheel carries everything a run needs: install it into a clean environment and render elsewhere."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        text=True,
    )
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_templates_configs_and_runbooks(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "orchestrator/_data/slurm_templates/supervised.sbatch.j2",
        "orchestrator/_data/slurm_templates/plain.sbatch.j2",
        "orchestrator/_data/configs/schema/config.schema.json",
    ):
        assert wanted in names
    assert any(n.startswith("orchestrator/_data/runbooks/") for n in names)
    assert not any(n.startswith(("tests/", "ops/")) for n in names)


def test_pawl_renders_from_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """It sees this environment's libraries (no downloads), but neither the source tree nor its editable install."""
    home = tmp_path / "elsewhere"
    home.mkdir()
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    here = Path(os.path.dirname(pytest.__file__)).parent
    (site / "libraries.py").write_text(
        f"import sys\nsys.path.append({str(here)!r})\n"  # appended as plain folder: .pth files in it are not read
    )
    (site / "libraries.pth").write_text("import libraries\n")
    (home / "run.yaml").write_text((ROOT / "configs" / "seed-1.7b.yaml").read_text())
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    where = subprocess.run(
        [python, "-c", "import orchestrator; print(orchestrator.__file__)"],
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
    )
    assert str(tmp_path) in where.stdout, where
    done = subprocess.run(
        [python, "-m", "orchestrator", "render", "run.yaml"], cwd=home, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash") and done.stdout.splitlines()[1].startswith("#SBATCH ")
