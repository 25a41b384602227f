"""Containers: the command that trains in one, and the folders that it needs. Text only: nothing is started here."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError

PYXIS, APPTAINER = "pyxis", "apptainer"
PYTHON: Final = "python3"
"""Default Python of a container. Many images have no `python`."""
_SEPARATORS: Final = (",", ":")
"""Characters that separate mounts from each other, and their ends."""


def needed_paths(configs: Iterable[Mapping[str, Any]], *more: Path) -> list[Path]:
    """Lists the folders and files of this machine that runs read and write. A container has them under the same paths.

    Args:
        configs: Resolved configurations. Every existing absolute path in them counts.
        more: Further paths: code, state, folder of runs.
    """
    parts = (part for config in configs for name, part in config.items() if name != "cluster")
    named = (Path(text) for part in parts for text in _texts(part))
    paths = {path for path in named if path.is_absolute() and _exists(path)} | {Path.cwd(), *more}
    # A link needs its target, too. The root would hide the image.
    paths = (paths | {path.resolve() for path in paths}) - {Path("/")}
    return sorted(path for path in paths if not any(parent in paths for parent in path.parents))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a text that is no path
        return False


def check_image(image: str) -> str:
    """Returns an image with an absolute path if it is a file; names of registries stay.

    Raises:
        ConfigError: The image is a path without a file.
    """
    is_path = image.startswith(("/", ".", "~")) or image.endswith((".sif", ".sqsh", ".img"))
    if not is_path or "://" in image:
        return image
    path = Path(image).expanduser().absolute()
    if not path.exists():
        raise ConfigError("The image of --container does not exist", value=str(path),
                          remedy="Give a file, or a name as docker://nvcr.io/nvidia/pytorch:25.01-py3")  # fmt: skip
    return str(path)


def _mounts(cluster: ClusterSettings, paths: Iterable[Path]) -> list[str]:
    for path in paths:
        if any(mark in str(path) for mark in _SEPARATORS):
            raise ConfigError("A container cannot mount a folder with a comma or colon in its path", value=str(path),
                              remedy="Give another folder with --runs-dir, --state-dir or --data-root")  # fmt: skip
    return [*(f"{path}:{path}" for path in paths), *cluster.container_mounts]


def srun_arguments(cluster: ClusterSettings, paths: Sequence[Path], folder: Path) -> list[str]:
    """Returns the arguments of srun with which Pyxis starts the ranks in the container."""
    return [f"--container-image={cluster.container}", f"--container-mounts={','.join(_mounts(cluster, paths))}",
            f"--container-workdir={folder}"]  # fmt: skip


def command(cluster: ClusterSettings, paths: Sequence[Path], folder: Path, source: str) -> str:
    """Returns the shell words that start Python in the container, up to Python's own arguments.

    Args:
        cluster: The request. Its container runs in Pyxis, which needs arguments of srun, or in Apptainer.
        paths: Paths of this machine in the container.
        folder: Working folder.
        source: First folder of the import path. An image's variables replace the job's variables.
    """
    imports = f"PYTHONPATH={shlex.quote(source)}${{PYTHONPATH:+:$PYTHONPATH}}"
    shell = f'export {imports} PYTHONSAFEPATH=1; exec "$0" "$@"'
    python = ["sh", "-c", shell, cluster.python or PYTHON]
    if cluster.container_runtime == PYXIS:
        return shlex.join(python)
    gpus = ["--nv"] if cluster.requests_gpus else []
    binds = [word for mount in _mounts(cluster, paths) for word in ("--bind", mount)]
    return shlex.join(["apptainer", "exec", *gpus, *binds, "--pwd", str(folder), cluster.container, *python])
