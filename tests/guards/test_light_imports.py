"""What must start at once imports nothing heavy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from guards.sources import PACKAGE

FRAMEWORKS = {"torch", "torch_geometric", "hydra", "hydra_zen", "omegaconf", "submitit"}
LIBRARIES = {"numpy", "polars", "scipy", "sklearn"}
ABOUT_RUNS = ("runs", "show", "compare", "report", "status", "logs", "cancel", "resume", "resubmit", "pipeline")

CALL = """
import json, sys
try:
    {statement}
except SystemExit as end:
    code = end.code
else:
    code = 0
packages = sorted({{name.partition(".")[0] for name in sys.modules}})
print("\\n" + json.dumps([code, packages]))
"""

COMMAND_LINE = "from can_train.cli.main import run; run()"


def packages_imported_by(statement: str, *arguments: str, home: Path) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-P", "-c", CALL.format(statement=statement), *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "HOME": str(home), "XDG_STATE_HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    code, packages = json.loads(result.stdout.splitlines()[-1])
    assert code in (0, None), result.stderr
    return set(packages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "arguments", "heavy"),
    [
        ("import can_train", [], FRAMEWORKS | LIBRARIES | {"typer", "rich"}),
        (COMMAND_LINE, [], FRAMEWORKS | LIBRARIES),
        # `email` comes with importlib.metadata.
        (COMMAND_LINE, ["--help"], FRAMEWORKS | LIBRARIES | {"yaml", "msgspec", "email"}),
        (COMMAND_LINE, ["factors"], FRAMEWORKS),
        (COMMAND_LINE, ["factors", "--help"], FRAMEWORKS),
        *((COMMAND_LINE, [command, "--help"], FRAMEWORKS | LIBRARIES) for command in ABOUT_RUNS),
        (COMMAND_LINE, ["doctor", "--help"], FRAMEWORKS | LIBRARIES),
        *((COMMAND_LINE, [command, "--help"], FRAMEWORKS | LIBRARIES) for command in ("evaluate", "export", "detect")),
        (COMMAND_LINE, ["runs"], FRAMEWORKS),
        (COMMAND_LINE, ["status", "made-here"], FRAMEWORKS | LIBRARIES),
        (COMMAND_LINE, ["cancel", "made-here"], FRAMEWORKS | LIBRARIES),
        (COMMAND_LINE, ["after-job", "--state-dir", "state", "--status", "0"], FRAMEWORKS | LIBRARIES),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_must_start_at_once_imports_nothing_heavy(
    tmp_path: Path, statement: str, arguments: list[str], heavy: set[str]
) -> None:
    run = tmp_path / "runs" / "made-here"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    assert packages_imported_by(statement, *arguments, home=tmp_path) & heavy == set()


@pytest.mark.slow
def test_a_heavy_import_is_found(tmp_path: Path) -> None:
    assert "numpy" in packages_imported_by("import numpy", home=tmp_path)
