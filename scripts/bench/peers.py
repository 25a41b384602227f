"""Runs other tools in an environment of their own, `.venv-peers`, which is made on first use."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

BENCH: Final = Path(__file__).resolve().parent
ROOT: Final = BENCH.parent.parent

PEERS: Final = ROOT / ".venv-peers"
REQUIREMENTS: Final = BENCH / "peers.txt"
CONSTRAINTS: Final = ROOT / "scripts" / "constraints.txt"
PEERS_TIMEOUT_S: Final = 1_800
"""Time limit for all of the other tools together. They need a few minutes at most."""


def run_peers(module: str, *arguments: str) -> Any:
    """Runs a module with the Python of the other tools, and returns the JSON that it prints last."""
    say("peers")
    # These two folders alone: packages in a PYTHONPATH of the caller would replace those of the environment.
    folders = os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "src")])
    done = subprocess.run(
        [str(_peers_python()), "-P", "-m", f"bench.{module}", *arguments],
        cwd=BENCH.parent,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders},
        text=True,
        check=True,
        timeout=PEERS_TIMEOUT_S,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _peers_python() -> Path:
    """Returns the Python of the other tools' environment. Makes the environment if its requirements have changed."""
    python, stamp = PEERS / "bin" / "python", PEERS / "installed.txt"
    wanted = REQUIREMENTS.read_text(encoding="utf-8") + CONSTRAINTS.read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    say(f"installing the peers into {PEERS.name} (with a PyTorch of their own)")
    pip = [str(python), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
    try:
        subprocess.run([sys.executable, "-I", "-m", "venv", "--clear", str(PEERS)], check=True)
        subprocess.run(pip, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"scripts/bench: the peers cannot be installed: {error}")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def say(text: str) -> None:
    """Prints what is being measured."""
    print(f"{text} ...", file=sys.stderr, flush=True)
