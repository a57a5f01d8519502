"""A check's verdict without the values of secret variables: what may be printed, frozen and kept; pure.

Only `slurm.env` holds variables, so only there is anything blanked: elsewhere names such as `bos_token_id` or
`num_key_value_heads` say "token" and "key" without holding a secret. An `env` of the wrong shape is blanked whole.
"""

from dataclasses import replace
from typing import Any

from orchestrator.config.check import CheckResult
from orchestrator.config.problems import Problem
from orchestrator.config.tree import to_yaml
from orchestrator.config.yaml_loader import Mapping, Node, Scalar, parse_text
from orchestrator.state.provenance import redact_override
from orchestrator.submit.quoting import REDACTED, is_secret

_ENV = "slurm.env"


def redact(result: CheckResult) -> CheckResult:
    """The same verdict; values of secret variables are *** in problems, merged config, YAML text and origins.

    `spec` keeps them: it is what the launch needs, and it is never printed.
    """
    slurm = result.merged.get("slurm")
    env = slurm.get("env") if isinstance(slurm, dict) else None
    if not isinstance(slurm, dict) or not env:
        return result
    whole = not isinstance(env, dict)
    return replace(
        result,
        problems=tuple(_problem(problem, whole=whole) for problem in result.problems),
        merged={**result.merged, "slurm": {**slurm, "env": REDACTED if whole else _blank(env)}},
        merged_yaml=_yaml(result.merged_yaml),
        origins={key: _origin(where) for key, where in result.origins.items()},
    )


def _blank(env: dict[str, Any]) -> dict[str, Any]:
    return {name: REDACTED if is_secret(name) else value for name, value in env.items()}


def _yaml(text: str) -> str:
    root = parse_text(text, file="run.yaml").root
    slurm = root.entries["slurm"]
    assert isinstance(slurm, Mapping), "merged data and its text are of one tree"
    env = slurm.entries["env"]
    blanked: Node = _text_at(env)
    if isinstance(env, Mapping):
        entries = {name: _text_at(node) if is_secret(name) else node for name, node in env.entries.items()}
        blanked = replace(env, entries=entries)
    return to_yaml(replace(root, entries={**root.entries, "slurm": _with(slurm, env=blanked)}))


def _text_at(node: Node) -> Scalar:
    return Scalar(text=REDACTED, quoted=True, file=node.file, line=node.line)


def _with(mapping: Mapping, **entries: Node) -> Mapping:
    return replace(mapping, entries={**mapping.entries, **entries})


def _problem(problem: Problem, *, whole: bool) -> Problem:
    inside = problem.key == _ENV or problem.key.startswith(f"{_ENV}.")
    if not inside or not (whole or is_secret(problem.key.removeprefix(_ENV))):
        return replace(problem, file=_origin(problem.file))
    found = None if problem.found is None else REDACTED
    return replace(problem, found=found, file=_origin(problem.file))


def _origin(where: str) -> str:
    """`--set slurm.env={HF_TOKEN: x}` stands as the origin, and as the file, of every key that it gave."""
    prefix = "--set "
    return prefix + redact_override(where.removeprefix(prefix)) if where.startswith(prefix) else where
