"""`python -m trainer COMMAND`: parse the command line, import that command's module, run it.

Nothing heavy is imported here: `check` answers in well under a second, without torch. A TrainerError is one paragraph
on stderr and its exit code; a traceback appears with -v only.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import Interrupted, TrainerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand. `module` has `add_arguments(parser)` and `main(args) -> int`."""

    name: str
    module: str
    help: str
    example: str


COMMANDS = (
    Command(
        name="train",
        module="trainer.train_args",
        help="train one rank (started by torchrun)",
        example="torchrun --nproc-per-node=4 -m trainer train --config-file run.yaml --run-dir runs/demo",
    ),
    Command(
        name="check",
        module="trainer.config.check",
        help="find every problem of a config; no torch, under a second",
        example="python -m trainer check configs/demo.yaml --set parallelism.tp=2 --show",
    ),
    Command(
        name="convert",
        module="trainer.convert.cli",
        help="checkpoint to a Hugging Face folder, and back",
        example="python -m trainer convert --checkpoint-path runs/demo/checkpoints/step-… --save-path out "
        "--target-format hf",
    ),
    Command(
        name="data",
        module="trainer.data.cli",
        help="prepare token folders, train a tokenizer, look inside",
        example="python -m trainer data prepare --help",
    ),
    Command(
        name="inspect",
        module="trainer.inspect",
        help="what a checkpoint holds",
        example="python -m trainer inspect runs/demo/checkpoints/step-000000100.a0001g01c0001",
    ),
    Command(
        name="transfer",
        module="trainer.transfer",
        help="copy checkpoints to s3, gs, another folder, and back",
        example="python -m trainer transfer push runs/demo/checkpoints/step-000000100.a0001g01c0001 s3://bucket/demo",
    ),
    Command(
        name="duplicate",
        module="trainer.duplicate",
        help="a checkpoint once more, as the start of another run",
        example="python -m trainer duplicate runs/demo/checkpoints/step-… --to runs/other/checkpoints --run other",
    ),
    Command(
        name="schedule",
        module="trainer.pipeline.cli",
        help="print or draw a pipeline schedule and its bubble",
        example="python -m trainer schedule --name zb-h1 -p 4 -m 16",
    ),
    Command(
        name="mesh",
        module="trainer.mesh.cli",
        help="which rank sits where on the mesh",
        example="python -m trainer mesh --dp 2 --pp 2 --tp 2 --ranks-per-node 4",
    ),
)


def parser_for(command: Command | None, *, prog: str | None = None) -> argparse.ArgumentParser:
    """The parser of one command, or the overview. `prog`: how the command is called by whoever runs it."""
    if command is None:
        width = max(len(item.name) for item in COMMANDS)
        rows = "\n".join(f"  {item.name:<{width}}  {item.help}" for item in COMMANDS)
        examples = "\n".join(f"  {item.example}" for item in COMMANDS)
        parser = argparse.ArgumentParser(
            prog="trainer",
            description="Trains a language model; each command is a data contract, never an import.",
            epilog=f"commands:\n{rows}\n\nexamples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("command", choices=[item.name for item in COMMANDS], metavar="COMMAND")
        return parser
    example = command.example.replace(f"python -m trainer {command.name}", prog) if prog else command.example
    parser = argparse.ArgumentParser(
        prog=prog or f"trainer {command.name}",
        description=command.help,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # `schedule -v 2` is its number of stages; --verbose stays
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")
    importlib.import_module(command.module).add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 ok, 2 wrong usage or config, else the error's own code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = next(iter(words), "")
    command = next((item for item in COMMANDS if item.name == name), None)
    if command is None:
        overview = parser_for(None)
        if not words:
            overview.print_help()
            return 2
        overview.parse_args(words[:1])  # --help, or an error that lists the commands
        return 2
    try:
        return run(command, words)
    except KeyboardInterrupt:  # a command that has more to say about it raises Interrupted
        print(f"trainer {command.name}: interrupted.", file=sys.stderr)
        return Interrupted.exit_code


def run(command: Command, words: Sequence[str]) -> int:
    """Parse the words after `python -m trainer` (the first is the command's name) and run it."""
    # Not an option of the commands: pawl says under which name it runs them, and help and errors use that name.
    prog = words[2] if words[1:2] == ["--prog"] and len(words) > 2 else None
    args = parser_for(command, prog=prog).parse_args(words[3:] if prog else words[1:])
    try:
        return int(importlib.import_module(command.module).main(args))
    except TrainerError as error:
        if args.verbose:
            raise
        print(f"{prog or f'trainer {command.name}'}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone; there is nobody to tell
        sys.stderr.close()
        return 1
