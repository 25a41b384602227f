"""What a sandbox changes of the machine outside its folder: packages, lines of /etc/hosts, cgroups."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from sandbox.cluster import Cluster, SandboxError

PACKAGES: Final = ("slurmctld", "slurmd", "slurmdbd", "slurm-client", "munge", "mariadb-server")

CONTROLLERS: Final = ("memory", "freezer", "cpuset", "devices")
"""Of cgroups, version 1: SLURM's plug-ins want them all, though only memory is limited."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_HOSTS: Final = Path("/etc/hosts")
_POLICY: Final = Path("/usr/sbin/policy-rc.d")


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Keeps other processes that ask for the same file waiting. A process that dies lets go of it."""
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install() -> None:
    """Installs the packages where one is missing; their own services stay off.

    Raises:
        SandboxError: This is no Debian, the process is not root's, or apt failed.
    """
    if shutil.which("apt-get") is None:
        raise SandboxError("only Debian's packages are known here, and there is no apt-get")
    with alone(Path(tempfile.gettempdir(), "can-train-slurm.install")):
        _, known = _run("dpkg-query", "-W", "-f", "${db:Status-Status}\n", *PACKAGES)
        if known.split() == ["installed"] * len(PACKAGES):
            return
        if os.geteuid() != 0:
            raise SandboxError("only root can install the packages: " + " ".join(PACKAGES))
        with _services_off():
            _apt("update")
            _apt("install", "--yes", "--no-install-recommends", *PACKAGES)


def _apt(verb: str, *arguments: str) -> None:
    status, output = _run("apt-get", "-q", verb, *arguments)
    if status != 0:
        raise SandboxError(f"apt-get {verb} failed:\n" + "\n".join(output.splitlines()[-10:]))


def _run(*command: str) -> tuple[int, str]:
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    ended = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return ended.returncode, ended.stdout


@contextmanager
def _services_off() -> Iterator[None]:
    """Debian's packages start their services when they are installed, unless this file says no."""
    if _POLICY.exists():  # an image's own, which says no too
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)


def search_path() -> str:
    """PATH with the folders that daemons lie in: a user's own may lack them."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def require_packages() -> None:
    """Checks that the daemons are there, and may be started.

    Raises:
        SandboxError: They are not, or the process is not root's.
    """
    if os.geteuid() != 0:
        raise SandboxError("only root can start a SLURM that runs jobs")
    missing = [name for name in ("slurmctld", "slurmdbd", "munged", "mariadbd") if not _found(name)]
    if missing:
        raise SandboxError(f"not installed: {', '.join(missing)}; run scripts/slurm-sandbox install")


def _found(command: str) -> bool:
    return shutil.which(command, path=search_path()) is not None


# The nodes' names: torch.distributed meets at a node's name, which must resolve


def add_to_hosts(cluster: Cluster) -> None:
    """Makes the nodes' names resolve to this machine."""
    _rewrite_hosts(lambda text: hosts_with(cluster.nodes, hosts_without(cluster.nodes, text)))


def remove_from_hosts(cluster: Cluster) -> None:
    """Takes the nodes' names back."""
    _rewrite_hosts(lambda text: hosts_without(cluster.nodes, text))


def hosts_with(nodes: Sequence[str], text: str) -> str:
    """Adds the nodes to the text of /etc/hosts, a line each."""
    return "".join([text, *(f"127.0.0.1 {node}\n" for node in nodes)])


def hosts_without(nodes: Sequence[str], text: str) -> str:
    """Removes the nodes' lines from the text of /etc/hosts; those of others stay as they are."""
    return "".join(f"{line}\n" for line in text.splitlines() if not {*line.split()} & {*nodes})


def _rewrite_hosts(change: Callable[[str], str]) -> None:
    with _HOSTS.open("r+") as file:  # in place: a container's is mounted, and cannot be replaced
        fcntl.flock(file, fcntl.LOCK_EX)
        old = file.read()
        new = change(old)
        if new != old:
            file.seek(0)
            file.write(new)
            file.truncate()


# cgroups


def cgroups_usable() -> bool:
    """Whether this process may make cgroups of version 1. SLURM 22.05 needs systemd for version 2."""
    if not all((_CGROUPS / controller).is_dir() for controller in CONTROLLERS):
        return False
    probe = _CGROUPS / "memory" / f"slurm_probe_{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def remove_cgroups(cluster: Cluster) -> None:
    """Removes the cgroups that the nodes leave behind when they are stopped."""
    for node in cluster.nodes:
        for top in _CGROUPS.glob(f"*/slurm_{node}"):
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):  # a process that cannot be killed keeps its own
                    Path(folder).rmdir()
