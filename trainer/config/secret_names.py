"""Which names hold secrets, and texts without what stands behind such a name; pure.

Secrets belong into `slurm.env` and nowhere else, but a misspelt section or an open quote must not print one either.

This file exists twice, byte for byte (trainer and orchestrator share no code; a contract test compares them).
"""

import re

REDACTED = "***"
# TOKENIZERS_PARALLELISM and the like are no secrets.
_SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
# Keys of a config that sound like it (a contract test compares them with the schemas).
OWN_KEYS = frozenset({"tokens", "bos_token_id", "eos_token_id", "pad_token_id", "num_key_value_heads"})
_ENV = "slurm.env."
_NAMED = re.compile(r"(?P<name>[\w.-]+)['\"]?\s*[:=]")


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name holds a secret (KEY, TOKEN, SECRET, PASSWORD in its name)."""
    return _SECRET.search(name) is not None


def is_secret_key(key: str) -> bool:
    """Whether a dotted key of a config holds a secret, also one that stands in the wrong place."""
    if key.startswith(_ENV):
        return is_secret(key.removeprefix(_ENV))
    return any(is_secret(part) and part not in OWN_KEYS for part in key.split("."))


def blanked(text: str) -> str:
    """A line of YAML, or `KEY=VALUE`, with *** for all that stands behind the first name of a secret."""
    for found in _NAMED.finditer(text):
        if is_secret_key(found["name"]):
            return text[: found.end()] + (" " if text[found.end() - 1] == ":" else "") + REDACTED
    return text


def blanked_override(text: str) -> str:
    """`slurm.env.HF_TOKEN=abc` → `slurm.env.HF_TOKEN=***`; `slurm.env={…}` is blanked whole, for it names many."""
    key, equals, _ = text.partition("=")
    return f"{key}={REDACTED}" if equals and key.strip() in ("slurm", "slurm.env") else blanked(text)
