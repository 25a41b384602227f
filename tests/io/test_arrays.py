"""A folder of arrays on a disk that is full: what is said, and what is left."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from can_train.errors import StateError
from can_train.io.arrays import ArrayWriter
try:
    with ArrayWriter(Path(sys.argv[1]), {"a": ("float32", (4,))}) as writer:
        for _ in range(100):
            writer.append({"a": np.ones((int(sys.argv[2]), 4))})
        writer.finish({})
except StateError as error:
    print(error)
"""


def refuse_large_files() -> None:
    """A file may hold 4,096 bytes: the nearest to a full disk that a test can make."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def written(folder: Path, rows: int) -> str:
    # Without bytecode: Python would leave the first 4,096 bytes of it.
    line = [sys.executable, "-B", "-c", SCRIPT, str(folder / "arrays"), str(rows)]
    done = subprocess.run(line, preexec_fn=refuse_large_files, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_full_disk_is_an_error_that_names_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    for rows in (1, 10, 1000):
        assert str(tmp_path) in written(tmp_path, 10 * rows)
        assert list(tmp_path.iterdir()) == []
