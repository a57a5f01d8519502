"""The import rules of CONTRIBUTING, checked on the real import graph (import-linter; contracts in pyproject.toml)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "trainer")


def sources() -> list[Path]:
    return [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]


def test_import_contracts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS


@pytest.mark.parametrize("module", ["orchestrator.supervise.main", "orchestrator.agent.main"])
def test_the_recovery_processes_start_light(module: str) -> None:
    """A supervisor or agent must start in a broken environment: nothing heavy is imported before it needs it."""
    heavy = "{'torch', 'pydantic', 'typer', 'rich', 'plotly', 'jinja2', 'transformers', 'numpy'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_config_check_starts_without_torch() -> None:
    code = "import sys, trainer.cli, trainer.config, trainer.memory, trainer.flops; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_no_object_collectives_and_no_pickle() -> None:
    """X4 (transformers#43140). torch's *_object* collectives and pickle would run what a peer or a file says."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert not (node.attr.endswith(("_object", "_object_list")) and not node.attr.startswith("_")), (
                    f"{path}:{node.lineno} uses {node.attr}"
                )
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & {"pickle", "dill", "cloudpickle"}, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                target = ast.unparse(node.func)
                assert target not in ("torch.load", "torch.save", "yaml.load", "os.system"), f"{path}:{node.lineno}"
                assert not any(
                    k.arg == "shell" and isinstance(k.value, ast.Constant) and k.value.value for k in node.keywords
                ), f"{path}:{node.lineno} runs a shell"
