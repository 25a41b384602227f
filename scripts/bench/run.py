#!/usr/bin/env python3
"""Runs a benchmark with the project's Python: `scripts/bench/finder` is a link to this file and runs measure_finder.py.
The arguments are passed on (--help lists them).
"""

import os
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS))

from environment import project_python  # noqa: E402

if __name__ == "__main__":
    name = Path(sys.argv[0]).stem
    if not (SCRIPTS / "bench" / f"measure_{name}.py").exists():
        sys.exit(f"{sys.argv[0]}: there is no measure_{name}.py; call this file through a link to it")
    if name in ("scoring", "startup", "chaos"):
        # torch reads it when it is imported. The command line sets it too.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A measured process has compiled modules, as an installed package has.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    python = project_python(SCRIPTS.parent)
    # A variable, so that the processes that a benchmark starts find its modules too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    os.execv(python, [python, "-P", "-m", "bench", name, *sys.argv[1:]])
