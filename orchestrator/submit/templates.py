"""Where the batch templates are: in the installed wheel, or beside the packages in a checkout."""

from importlib.resources import files
from pathlib import Path

from orchestrator.errors import PawlError

SUPERVISED = "supervised.sbatch.j2"
PLAIN = "plain.sbatch.j2"


def load_template(name: str) -> str:
    """Text of a template. Raises PawlError when the installation lacks it."""
    package = Path(str(files("orchestrator")))
    for folder in (package / "_data" / "slurm_templates", package.parent / "slurm_templates"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    raise PawlError(f"The template {name} is missing from this installation of pawl ({package}). Install pawl again.")
