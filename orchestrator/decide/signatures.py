"""What exit codes, exceptions and log lines are known to mean: tables and patterns, pure.

A line that one rank writes because another one has gone is an echo (*cascade*) and never names a cause.
"""

import re

from orchestrator.decide.observation import LogSignature
from orchestrator.decide.taxonomy import FailureClass

# Exit codes of the trainer that say what happened; every other number is a crash.
EXIT_CODES: dict[int, FailureClass | None] = {
    0: None,
    75: None,
    78: FailureClass.CONFIG,
    86: FailureClass.NONFINITE,
    87: FailureClass.LOSS_SPIKE,
    88: FailureClass.DATA_ERROR,
    89: FailureClass.CHECKPOINT_INVALID,
    90: FailureClass.HANG_COLLECTIVE,
    91: FailureClass.DESYNC,
    92: FailureClass.STORAGE,
    93: FailureClass.DO_NOT_RESTART,
}

_CASCADE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|recvvalue failed|sendbytes failed|recv ?bytes|store_?client"
    r"|socket ?timeout|timed out waiting|nccl.*(remote|aborted)|dist(store|network|backend)error|tcpstore"
    r"|peer .* (died|left|closed)|communicator was aborted",
    re.IGNORECASE,
)
_DEVICE_MEMORY = re.compile(r"cuda out of memory|outofmemoryerror|hip out of memory", re.IGNORECASE)
_HOST_MEMORY = re.compile(r"oom-kill|out of memory: killed|cannot allocate memory|\bmemoryerror\b", re.IGNORECASE)
_STORAGE = re.compile(
    r"no space left|input/output error|stale file handle|quota exceeded|read-only file system|remote i/o error", re.I
)
_GPU = re.compile(r"xid.*\b(48|63|64|74|79|94|95)\b|uncorrectable ecc|fallen off the bus", re.IGNORECASE)
_FABRIC = re.compile(r"link (is )?down|ibv_|infiniband.*error|local protection error", re.IGNORECASE)
CODE = re.compile(
    r"\b(ModuleNotFoundError|ImportError|SyntaxError|IndentationError|AttributeError|NameError|TypeError|ValueError"
    r"|KeyError|No module named)\b"
)
CODE_TYPES = (
    *("ModuleNotFoundError", "ImportError", "SyntaxError", "IndentationError", "AttributeError", "NameError"),
    *("TypeError", "ValueError", "KeyError", "NotImplementedError"),
)
# In order: the first pattern that a line matches names its class.
SIGNATURES: tuple[tuple[re.Pattern[str], FailureClass], ...] = (
    (_GPU, FailureClass.GPU_HW),
    (_DEVICE_MEMORY, FailureClass.CUDA_OOM),
    (_HOST_MEMORY, FailureClass.HOST_OOM),
    (_STORAGE, FailureClass.STORAGE),
    (_FABRIC, FailureClass.FABRIC),
    (CODE, FailureClass.START_FAIL),
)


def find_signatures(*, node: str, text: str, limit: int = 20) -> tuple[LogSignature, ...]:
    """The first `limit` lines of a log that name a cause, in order. Echoes of another rank's end are none."""
    lines = (line.strip() for line in text.splitlines())
    hits = (line for line in lines if not is_cascade(line) and any(pattern.search(line) for pattern, _ in SIGNATURES))
    return tuple(LogSignature(node=node, line=line[:500]) for _, line in zip(range(limit), hits, strict=False))


def is_cascade(text: str) -> bool:
    """True for the words of a rank that fails because another one has gone."""
    return _CASCADE.search(text) is not None


def normalise(text: str) -> str:
    """A message without what differs from time to time: numbers, addresses, hex, quotes, length."""
    text = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)
    return re.sub(r"\s+", " ", text).strip()[:120]
