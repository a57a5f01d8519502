"""A check's verdict without the values of secret variables: what may be printed, frozen and kept; pure.

Secrets belong into `slurm.env`; where a section is misspelt they stand elsewhere, and are blanked there too. Messages
and origins come from the loader without secrets; only the value that was found does not.
"""

from dataclasses import replace

from orchestrator.config.check import CheckResult
from orchestrator.config.problems import Problem
from orchestrator.config.secret_names import REDACTED, is_secret_key
from orchestrator.config.tree import to_plain, without_secrets
from orchestrator.config.yaml_loader import parse_text


def redact(result: CheckResult) -> CheckResult:
    """The same verdict; values of secret variables are *** in problems, merged config and YAML text.

    `spec` keeps them: it is what the launch needs, and it is never printed.
    """
    problems = tuple(_problem(problem) for problem in result.problems)
    text = without_secrets(result.merged_yaml)
    if text == result.merged_yaml:
        return replace(result, problems=problems)
    return replace(result, problems=problems, merged=to_plain(parse_text(text, file="run.yaml").root), merged_yaml=text)


def _problem(problem: Problem) -> Problem:
    # `slurm.env` itself: one text or list that holds names and values.
    secret = is_secret_key(problem.key) or problem.key == "slurm.env" or problem.key.startswith("slurm.env.")
    return replace(problem, found=REDACTED) if secret and problem.found is not None else problem
