"""A check's verdict without the values of secret variables: what may be printed, frozen and kept; pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.config.check import CheckResult, with_values
from orchestrator.config.problems import Problem
from orchestrator.quoting import REDACTED, is_secret

_ENV = "slurm.env."


def secret_keys(merged: Mapping[str, Any]) -> tuple[str, ...]:
    """Dotted keys of the secret variables in a merged config."""
    slurm = merged.get("slurm")
    env = slurm.get("env") if isinstance(slurm, dict) else None
    return tuple(f"{_ENV}{name}" for name in env if is_secret(name)) if isinstance(env, dict) else ()


def redact(result: CheckResult) -> CheckResult:
    """The same verdict; values of secret variables are *** in problems, merged config, YAML text and origins.

    `spec` keeps them: it is what the launch needs, and it is never printed.
    """
    keys = secret_keys(result.merged)
    if not keys:
        return result
    slurm = result.merged["slurm"]
    env = {name: REDACTED if is_secret(name) else value for name, value in slurm["env"].items()}
    return replace(
        result,
        problems=tuple(_problem(problem) for problem in result.problems),
        merged={**result.merged, "slurm": {**slurm, "env": env}},
        merged_yaml=with_values(result.merged_yaml, dict.fromkeys(keys, REDACTED)),
        origins={key: _origin(key, where) for key, where in result.origins.items()},
    )


def _problem(problem: Problem) -> Problem:
    secret = problem.key.startswith(_ENV) and is_secret(problem.key.removeprefix(_ENV))
    return replace(problem, found=REDACTED, file=_origin(problem.key, problem.file)) if secret else problem


def _origin(key: str, where: str) -> str:
    """`--set slurm.env={HF_TOKEN: x}` stands as the origin of every key that it gave."""
    if not where.startswith("--set "):
        return where
    from orchestrator.provenance import redact_override

    return "--set " + redact_override(where.removeprefix("--set "))
