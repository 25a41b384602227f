"""A test that was skipped for want of a SLURM is seen: it fails where one is wanted, and is counted where none is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VARIABLE = "CAN_TRAIN_SLURM_SANDBOX"


def session(folder: Path, test: str, *, wanted: bool) -> tuple[int, str]:
    """The exit status and the output of a session with one test file, under this folder's conftest.py."""
    (folder / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (folder / "test_it.py").write_text(f"import pytest\n\n{test}\n")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", folder],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parents[2] / "scripts")]),
            VARIABLE: "1" if wanted else "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


SKIPS = {
    "in the test": 'def test_it():\n    pytest.skip("no")',
    "by a mark": '@pytest.mark.skip("no")\ndef test_it():\n    pass',
    "in a fixture": '@pytest.fixture\ndef needed():\n    pytest.skip("no")\n\ndef test_it(needed):\n    pass',
    "by the module": 'pytest.skip("no", allow_module_level=True)',
}


@pytest.mark.slow
@pytest.mark.parametrize("test", SKIPS.values(), ids=SKIPS.keys())
def test_a_skip_fails_where_a_slurm_is_wanted(tmp_path: Path, test: str) -> None:
    status, output = session(tmp_path, test, wanted=True)
    assert status != 0
    assert f"skipped, though {VARIABLE}=1" in output


@pytest.mark.slow
@pytest.mark.parametrize("test", SKIPS.values(), ids=SKIPS.keys())
def test_a_skip_is_a_skip_elsewhere(tmp_path: Path, test: str) -> None:
    status, output = session(tmp_path, test, wanted=False)
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "1 skipped" in output


@pytest.mark.slow
def test_what_is_expected_to_fail_is_no_skip(tmp_path: Path) -> None:
    status, output = session(tmp_path, "@pytest.mark.xfail\ndef test_it():\n    assert False", wanted=True)
    assert status == 0, output


MARKED = """
@pytest.fixture
def slurm():
    pass

def test_it(slurm, request):
    assert {mark.name for mark in request.node.iter_markers()} == {"slow", "slurm"}

def test_another(request):
    assert not [*request.node.iter_markers()]
"""


@pytest.mark.slow
def test_exactly_the_tests_that_take_the_fixture_are_marked(tmp_path: Path) -> None:
    status, output = session(tmp_path, MARKED, wanted=False)
    assert status == 0, output
