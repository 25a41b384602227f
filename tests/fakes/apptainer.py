"""A stand-in for Apptainer, which Debian does not have."""

from pathlib import Path

STAND_IN = """#!/bin/bash
# Runs a command as `apptainer exec` does: with the variables of an image, and only if it has each folder.
[ "$1" = exec ] || exit 90; shift
while [ "${1#-}" != "$1" ]; do
  case $1 in
    --nv) echo nv; shift;;
    --bind) [ -e "${2%%:*}" ] || exit 91; echo "bind $2"; shift 2;;
    --pwd) cd "$2" || exit 92; shift 2;;
    *) exit 93;;
  esac
done
echo "image $1"; shift
PYTHONPATH=/of/the/image exec "$@"
"""


def installed(folder: Path) -> Path:
    """Puts the stand-in into a folder; returns the program."""
    folder.mkdir(exist_ok=True)
    program = folder / "apptainer"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    return program
