"""The library of cuda_dispatch.cpp, compiled for the installed torch, in a folder that nobody else may write."""

import atexit
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import torch

from can_train.errors import DeviceError
from can_train.io.ownership import Account, other_writer, places_on_the_way

_SOURCE: Final = Path(__file__).with_name("cuda_dispatch.cpp")
_COMPILERS: Final = ("c++", "g++", "clang++")
_COMPILER_TIMEOUT_S: Final = 300.0
MAX_QUOTED_CHARACTERS: Final = 200  # of an error that is quoted in another


class NoCudaDispatchError(DeviceError):
    """CUDA's dispatch cannot be had here, or cannot record a program. Small batches are measured in its place, and a
    user need do nothing.
    """

    def __init__(self, rule: str, *, value: str = "", remedy: str = "") -> None:
        super().__init__(rule, value=value, remedy=remedy)


class ValuesNeededError(NoCudaDispatchError):
    """A program needs the values of tensors that have none."""


def compiled_library(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the library of cuda_dispatch.cpp, compiled for the installed torch the first time.

    The library lies in the user's cache folder, unless another user may write there and so run code in this process:
    then in a private folder, which is removed when the process ends. Two processes may compile it at once: each
    replaces it as a whole.

    Raises:
        NoCudaDispatchError: This is another system, PyTorch sees a GPU, there is no compiler, or the library cannot be
            made.
    """
    if sys.platform != "linux" or torch.version.hip:
        raise NoCudaDispatchError(
            "CUDA's dispatch can be recorded only on Linux, with a PyTorch for NVIDIA's GPUs or the CPU",
            value=f"{sys.platform}, torch {torch.__version__}",
        )
    if torch.cuda.is_available():
        # The child must not have the parent's state of a real GPU.
        raise NoCudaDispatchError("CUDA's dispatch is recorded where PyTorch sees no GPU", value="it sees one",
                                  remedy="Set CUDA_VISIBLE_DEVICES= for a process that predicts")  # fmt: skip
    key = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    name = f"cuda_dispatch-{torch.__version__}-{platform.machine()}-{key}.so"
    library = _cache_folder(environment) / name
    if _is_private(library):
        return library
    named = [environment["CXX"]] if environment.get("CXX") else _COMPILERS
    compiler = next(filter(None, (shutil.which(name, path=environment.get("PATH")) for name in named)), None)
    if compiler is None:
        raise NoCudaDispatchError("There is no C++ compiler for CUDA's dispatch", value=f"no {' or '.join(named)}",
                                  remedy="Install g++, or name a compiler in $CXX")  # fmt: skip
    installed = Path(torch.__file__).parent
    # torch.utils.cpp_extension would need setuptools, ninja and Python's headers, for a library that needs none.
    # Torch's packages were built with the older strings of the standard library before 2.7.
    strings = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", strings, f"-I{installed / 'include'}", str(_SOURCE),
               f"-L{installed / 'lib'}", "-ltorch_cpu", "-lc10"]  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [compiler, *options, "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S)
            made.chmod(0o700)
            made.replace(library)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or f"{error}"
        raise NoCudaDispatchError(
            "The library of CUDA's dispatch cannot be compiled", value=output.strip()[:MAX_QUOTED_CHARACTERS]
        ) from error
    return library


def _cache_folder(environment: Mapping[str, str]) -> Path:
    """Returns a folder for compiled libraries that no other user can write to."""
    base = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "can-train"
    with suppress(OSError):
        base.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        account, status = Account.current(), folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == account.uid:
            folder.chmod(0o700)
        writers = (other_writer(place.lstat(), account, is_passed=True) for place in places_on_the_way(folder))
        if _is_private(folder) and not any(writers):
            return folder
    return _private_folder(tempfile.gettempdir())


@cache
def _private_folder(parent: str) -> Path:
    folder = tempfile.mkdtemp(prefix="can-train-", dir=parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _is_private(path: Path) -> bool:
    """Returns whether there is a file or a folder, no link, that belongs to the user and that nobody else may write."""
    with suppress(OSError):
        status, account = path.lstat(), Account.current()
        is_link = stat.S_ISLNK(status.st_mode)
        return not is_link and status.st_uid == account.uid and not other_writer(status, account)
    return False
