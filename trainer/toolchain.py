"""The C++ compiler of this machine, which torch.compile calls to make code for a CPU. Imports no torch."""

import os
import shutil


def cpp_command() -> str:
    """What is called: $CXX, else g++."""
    return os.environ.get("CXX") or "g++"


def cpp_compiler() -> str | None:
    """The path of `cpp_command`; None where it is not installed."""
    return shutil.which(cpp_command())
