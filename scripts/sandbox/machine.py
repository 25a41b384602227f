"""The changes that a sandbox makes outside its folder: packages, lines of /etc/hosts, cgroups."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from sandbox.cluster import DEFAULT_FOLDER, Cluster, SandboxError

PACKAGES: Final = ("slurmctld", "slurmd", "slurmdbd", "slurm-client", "munge", "mariadb-server")

CONTROLLERS: Final = ("memory", "freezer", "cpuset", "devices")
"""The cgroup controllers (version 1) that SLURM's plug-ins require, though only memory is limited."""

_CGROUPS: Final = Path("/sys/fs/cgroup")
_HOSTS: Final = Path("/etc/hosts")
_POLICY: Final = Path("/usr/sbin/policy-rc.d")


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file. The lock ends with the process."""
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install() -> None:
    """Installs the packages unless all are installed. Their own services are not started.

    Raises:
        SandboxError: The system has no apt, the process is not root's, or apt failed.
    """
    if shutil.which("apt-get") is None:
        raise SandboxError("only Debian's packages are known here, and there is no apt-get")
    if _are_installed():
        return
    if os.geteuid() != 0:
        raise SandboxError("only root can install the packages: " + " ".join(PACKAGES))
    with alone(DEFAULT_FOLDER.with_suffix(".install")):
        if not _are_installed():  # another process may have done it meanwhile
            with _services_off():
                _apt("update")
                _apt("install", "--yes", "--no-install-recommends", *PACKAGES)


def _are_installed() -> bool:
    _, states = _run("dpkg-query", "-W", "-f", "${db:Status-Status}\n", *PACKAGES)
    return states.split() == ["installed"] * len(PACKAGES)


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
    """Keeps Debian's packages from starting their services at installation, by a file that forbids it."""
    if _POLICY.exists():  # container images bring such a file
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)


def search_path() -> str:
    """Returns PATH with the folders of the daemons, which a user's PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def own_daemons(cluster: Cluster) -> list[str]:
    """Lists the daemons that a sandbox starts itself: accounting needs two more, and a sandbox that shares the
    accounting of another one shares its munge, too.
    """
    shared = ["munged"] if cluster.accounts is None else []
    accounting = ["slurmdbd", "mariadbd"] if cluster.has_accounting and cluster.accounts is None else []
    return ["slurmctld", "slurmd", *shared, *accounting]


def require_packages(cluster: Cluster) -> None:
    """Checks that the daemons of a sandbox are installed and can be started.

    Raises:
        SandboxError: One is missing, or the process is not root's.
    """
    if os.geteuid() != 0:
        raise SandboxError("only root can start a SLURM that runs jobs")
    missing = [name for name in own_daemons(cluster) if not _found(name)]
    if missing:
        raise SandboxError(f"not installed: {', '.join(missing)}; run scripts/slurm-sandbox install")


def _found(command: str) -> bool:
    return shutil.which(command, path=search_path()) is not None


# /etc/hosts: the ranks of torch.distributed connect to a node by its name, which must resolve


def add_to_hosts(cluster: Cluster) -> None:
    """Makes the nodes' names resolve to this machine."""
    _rewrite_hosts(lambda text: hosts_with(cluster.nodes, hosts_without(cluster.nodes, text)))


def remove_from_hosts(cluster: Cluster) -> None:
    """Removes the nodes' names from /etc/hosts."""
    _rewrite_hosts(lambda text: hosts_without(cluster.nodes, text))


def hosts_with(nodes: Sequence[str], text: str) -> str:
    """Adds a line for each node to the text of /etc/hosts."""
    return "".join([text, *(f"127.0.0.1 {node}\n" for node in nodes)])


def hosts_without(nodes: Sequence[str], text: str) -> str:
    """Removes the nodes' lines from the text of /etc/hosts and leaves the others unchanged."""
    return "".join(f"{line}\n" for line in text.splitlines() if not {*line.split()} & {*nodes})


def _rewrite_hosts(change: Callable[[str], str]) -> None:
    with _HOSTS.open("r+") as file:  # written in place, because in a container it is mounted and cannot be replaced
        fcntl.flock(file, fcntl.LOCK_EX)
        old = file.read()
        new = change(old)
        if new != old:
            file.seek(0)
            file.write(new)
            file.truncate()


# cgroups


def cgroups_usable() -> bool:
    """Returns whether this process can make cgroups of version 1. SLURM 22.05 needs systemd for version 2."""
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
    """Removes the cgroups that the nodes' daemons leave behind."""
    for node in cluster.nodes:
        for top in _CGROUPS.glob(f"*/slurm_{node}"):
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):  # a process that could not be killed is still in it
                    Path(folder).rmdir()
