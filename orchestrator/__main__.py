"""`python -m orchestrator`: the command line, and two processes that pawl itself starts inside a job.

`supervise` and `agent` are decided before anything of the command line is imported: they must start in a fraction
of a second on every node and must not depend on the packages that only draw tables.
"""

import sys


def main() -> None:
    """End the process with the exit code of the sub-command."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "supervise":
        from orchestrator.supervise.main import main as supervise

        sys.exit(supervise(sys.argv[2:]))
    if command == "agent":
        from orchestrator.agent.main import main as agent

        sys.exit(agent(sys.argv[2:]))
    from orchestrator.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
