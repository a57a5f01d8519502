#!/usr/bin/env bash
# Makes .venv with the exact versions of requirements.lock and installs pawl into it. Safe to run again.
# Needs Python 3.11+; where Debian's venv module or a C compiler (torch.compile) is missing, installs it as root
# or names the command.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found. Install one (Debian/Ubuntu: apt-get install python3) or set PYTHON=/path/to/python3.11."
}

apt_install() { # apt_install WHY PACKAGE...
  local why=$1
  shift
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "setup: installing $* ($why)"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  else
    die "$why. Run: sudo apt-get install -y $*   and then make setup again."
  fi
}

python=$(find_python)
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install "Python's venv module is missing" "python$minor-venv"
command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || apt_install "a C compiler is missing" gcc libc6-dev

if ! .venv/bin/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' 2>/dev/null; then
  say "setup: making .venv with $python"
  rm -rf .venv
  "$python" -m venv .venv
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
say "setup: installing the locked versions (torch is the large one)"
.venv/bin/pip install --quiet -r requirements.lock
.venv/bin/pip install --quiet --no-deps -r requirements-demo.lock
.venv/bin/pip install --quiet --no-deps --no-build-isolation --editable .
touch .venv/.pawl-ready
say "setup: done. Try: .venv/bin/pawl --help"
