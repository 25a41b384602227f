"""Starts and stops the sandbox's daemons. It recognises them by a variable in their environment, not by process ids in
files, since such an id may belong to another process by now.
"""

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from sandbox import files, machine
from sandbox.cluster import FOLDER_VARIABLE, Cluster, SandboxError

START_LIMIT_S: Final = 60
"""Time limit for a daemon to answer. The slowest, a new database, takes a tenth of it on two busy cores."""

STOP_LIMIT_S: Final = 10
RESTART_PAUSE_S: Final = 2.1
"""A slurmd refuses a requeued job that starts again within the same second ("Job credential revoked")."""

LOOK_INTERVAL_S: Final = 0.05

_MARK: Final = "SLURM_SANDBOX_DAEMON_OF"
"""Environment variable of the sandbox's daemons, and of the processes that they start."""

_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_FOLDERS: Final = ("etc", "log", "run", "state", "spool", "dev", "database")


def start(cluster: Cluster) -> None:
    """Starts the daemons that do not run yet, and returns when every node accepts jobs.

    Raises:
        SandboxError: A daemon failed. The message names its log.
    """
    machine.require_packages(cluster)
    _own_folder(cluster)
    with machine.alone(cluster.folder / "lock"):
        if _write_files(cluster) and running(cluster):
            _stop(cluster)  # they were started with the old configuration
        machine.add_to_hosts(cluster)
        if cluster.accounts is None:
            _start_munge(cluster)
        if cluster.has_accounting and cluster.accounts is None:
            _start_database(cluster)
            _launch(cluster, "slurmdbd", ["slurmdbd"], lambda: _answers(cluster, "sacctmgr", "-n", "list", "cluster"))
        if cluster.has_accounting:
            _add_to_accounting(cluster)
        _start_controller(cluster)
        for node in cluster.nodes:
            _start_node(cluster, node)
        _wait(lambda: _in_service(cluster), f"the nodes do not get ready; see {cluster.folder}/log")


def stop(cluster: Cluster) -> None:
    """Cancels all jobs and stops the daemons. The accounting data stay."""
    if cluster.folder.is_dir():
        check_folder(cluster.folder)
        with machine.alone(cluster.folder / "lock"):
            _stop(cluster)


def clear(cluster: Cluster) -> None:
    """Cancels all jobs and puts every node back into service."""
    _end_jobs(cluster)
    if not _in_service(cluster):
        for node in cluster.nodes:  # SLURM refuses to resume a node in service
            _answers(cluster, "scontrol", "update", f"NodeName={node}", "State=RESUME")
    _wait(lambda: _in_service(cluster), f"the nodes do not get ready; see {cluster.folder}/log")


def wipe(cluster: Cluster) -> None:
    """Stops the daemons and removes the folder."""
    stop(cluster)
    shutil.rmtree(cluster.folder, ignore_errors=True)


def kick(cluster: Cluster, job: str) -> None:
    """Waits until SLURM holds a requeued job back, and starts it at once instead of after REQUEUE_HOLD_S.

    Raises:
        SandboxError: SLURM does not hold it back.
    """
    held = ("squeue", "--noheader", f"--jobs={job}", "--format=%T %r")
    _wait(lambda: _run(cluster, *held).strip() == "PENDING BeginTime", f"job {job} is not held back")
    time.sleep(RESTART_PAUSE_S)
    _run(cluster, "scontrol", "update", f"JobId={job}", "StartTime=now")


def environment(cluster: Cluster) -> dict[str, str]:
    """Returns the environment variables that SLURM's commands need."""
    return {"SLURM_CONF": str(cluster.configuration)}


def running(cluster: Cluster) -> dict[str, int]:
    """Returns the process ids of the sandbox's daemons, by name."""
    mark = f"{_MARK}={cluster.folder}".encode()
    processes = {}
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # the process has ended meanwhile
            if process.name.isdecimal() and mark in (process / "environ").read_bytes().split(b"\0"):
                processes[_name(process)] = int(process.name)
    return processes


def _name(process: Path) -> str:
    """Returns a daemon's name, as in its log's, or a unique name for a process that a daemon started."""
    command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    daemon = Path(command[0]).name
    if daemon == "slurmd":
        return command[command.index("-N") + 1]
    return daemon if daemon in _DAEMONS else f"{daemon} {process.name}"


_DAEMONS: Final = ("munged", "mariadbd", "slurmdbd", "slurmctld")


# Files


def _own_folder(cluster: Cluster) -> None:
    cluster.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_folder(cluster.folder)
    for name in (*_FOLDERS, *(f"spool/{node}" for node in cluster.nodes)):
        (cluster.folder / name).mkdir(mode=0o755, exist_ok=True)
        check_folder(cluster.folder / name)


def check_folder(folder: Path) -> None:
    """Raises SandboxError for a folder that another user may change: the daemons run its files, as root."""
    for place in (folder, *folder.parents):
        status = place.lstat()
        is_own = place != folder or (stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid())
        # A sticky bit (/tmp) lets nobody replace another user's files.
        is_shielded = place != folder and status.st_mode & stat.S_ISVTX
        if not is_own or status.st_uid not in (0, os.geteuid()):
            raise SandboxError(f"{place} belongs to user {status.st_uid}, or is a link: set {FOLDER_VARIABLE}")
        if status.st_mode & _WRITABLE_BY_OTHERS and not is_shielded and not stat.S_ISLNK(status.st_mode):
            raise SandboxError(f"{place} may be written to by other users: chmod go-w {place}")


def _write_files(cluster: Cluster) -> bool:
    """Writes the configuration. Returns whether it changed."""
    for number in range(max(int(gpus.partition(":")[2]) for gpus in cluster.gpus)):
        _make_device(cluster.folder / "dev" / f"gpu{number}")
    if not cluster.munge_key.exists():
        _write(cluster.munge_key, secrets.token_hex(64))
    host = socket.gethostname().partition(".")[0]
    folder = cluster.configuration.parent
    changed = [
        _write(cluster.configuration, files.slurm_conf(cluster, host=host, cgroups=machine.cgroups_usable())),
        _write(folder / "gres.conf", files.gres_conf(cluster)),
        _write(folder / "cgroup.conf", files.cgroup_conf(cluster)),
        _write(folder / "slurmdbd.conf", files.slurmdbd_conf(cluster, host=host)),
    ]
    cluster.configuration.chmod(0o644)  # so that any user can submit jobs
    return any(changed)


def _make_device(file: Path) -> None:
    """Makes a copy of /dev/null, because SLURM accepts only device files as GPUs."""
    if not file.exists():
        os.mknod(file, stat.S_IFCHR | 0o666, Path(os.devnull).stat().st_rdev)


def _write(file: Path, text: str) -> bool:
    if file.exists() and file.read_text() == text:
        return False
    file.touch(mode=0o600)
    file.write_text(text)
    return True


# Starting each daemon


def _start_munge(cluster: Cluster) -> None:
    run = cluster.folder / "run"
    _launch(
        cluster,
        "munged",
        [
            *("munged", "--foreground", "--force", "--num-threads=2"),
            *(f"--key-file={cluster.munge_key}", f"--socket={cluster.munge_socket}"),
            *(f"--pid-file={run}/munged.pid", f"--seed-file={run}/munged.seed"),
        ],
        lambda: _answers(cluster, "munge", "--no-input", f"--socket={cluster.munge_socket}"),
    )


def _start_database(cluster: Cluster) -> None:
    data = cluster.folder / "database"
    if not (data / "mysql").exists():
        _run(
            cluster,
            *("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}"),
            *("--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve"),
        )
    client = ("--no-defaults", f"--socket={cluster.database_socket}")
    _launch(
        cluster,
        "mariadbd",
        [
            *("mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={cluster.database_socket}"),
            *("--bind-address=127.0.0.1", f"--port={cluster.database_port}", f"--pid-file={data}/mariadbd.pid"),
            *("--skip-name-resolve", "--skip-log-bin", "--performance-schema=OFF"),
            # slurmdbd asks for the long lock wait. Writes are not flushed: nothing here must survive a power cut.
            *("--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0"),
            *("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M"),
        ],
        lambda: _answers(cluster, "mariadb-admin", *client, "ping"),
    )
    _run(cluster, "mariadb", *client, "--execute", files.database_rights())


def _add_to_accounting(cluster: Cluster) -> None:
    if cluster.name not in _run(cluster, "sacctmgr", "-n", "-P", "list", "cluster", "format=cluster").split():
        _run(cluster, "sacctmgr", "-i", "add", "cluster", cluster.name)


def _start_controller(cluster: Cluster) -> None:
    _launch(cluster, "slurmctld", ["slurmctld"], lambda: _answers(cluster, "scontrol", "ping"))


def _start_node(cluster: Cluster, node: str) -> None:
    # Each node has its own host name, so that jobs see different names on different nodes, as on a real cluster.
    command = ["unshare", "--uts", "sh", "-c", f"hostname {node} && exec slurmd -N {node}"]
    _launch(cluster, node, command, lambda: node in running(cluster))


def _launch(cluster: Cluster, name: str, command: list[str], ready: Callable[[], bool]) -> None:
    """Starts a daemon, unless it runs, detached from the caller's terminal, and waits until it is ready."""
    if name in running(cluster):
        return
    with cluster.log(name).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=cluster.folder,
            env={**_variables(cluster), _MARK: str(cluster.folder)},
        )
    # SLURM's daemons move to the background, so the process that was started may end with status 0.
    _wait(lambda: process.poll() or ready(), f"{name} does not answer; see {cluster.log(name)}")
    if process.poll():
        raise SandboxError(f"{name} ended with status {process.returncode}; see {cluster.log(name)}")


def _variables(cluster: Cluster) -> dict[str, str]:
    """Returns a daemon's whole environment. None of the caller's variables must reach a job."""
    return {"PATH": machine.search_path(), "LANG": "C.UTF-8", **environment(cluster)}


def _in_service(cluster: Cluster) -> bool:
    states = _run(cluster, "sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()
    return len(states) == len(cluster.nodes) and {*states} <= _IN_SERVICE


_IN_SERVICE: Final = {"idle", "mixed", "allocated", "completing"}


def _answers(cluster: Cluster, *command: str) -> bool:
    return subprocess.run(command, env=_variables(cluster), capture_output=True, check=False).returncode == 0


def _run(cluster: Cluster, *command: str) -> str:
    ended = subprocess.run(command, env=_variables(cluster), capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SandboxError(f"{command[0]} failed (logs: {cluster.folder}/log): {ended.stderr or ended.stdout}")
    return ended.stdout


def _wait(done: Callable[[], object], otherwise: str) -> None:
    if not _within(START_LIMIT_S, done):
        raise SandboxError(otherwise)


def _within(limit_s: float, done: Callable[[], object]) -> bool:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_INTERVAL_S)
    return True


# Stopping


def _stop(cluster: Cluster) -> None:
    if "slurmctld" in running(cluster):  # the processes of a job would outlive the daemons
        _end_jobs(cluster)
    for names in (cluster.nodes, *([daemon] for daemon in reversed(_DAEMONS))):
        _end(cluster, names)
    _end(cluster, running(cluster))  # processes that the daemons started
    machine.remove_from_hosts(cluster)
    machine.remove_cgroups(cluster)


def _end_jobs(cluster: Cluster) -> None:
    jobs = _run(cluster, "squeue", "--noheader", "--format=%A").split()
    if jobs:
        _answers(cluster, "scancel", "--quiet", "--full", "--signal=KILL", *jobs)
        _answers(cluster, "scancel", "--quiet", *jobs)  # pending jobs get no signal
        _within(STOP_LIMIT_S, lambda: not _run(cluster, "squeue", "--noheader"))


def _end(cluster: Cluster, names: Collection[str]) -> None:
    """Ends the daemons with these names: by SIGTERM, then by SIGKILL."""

    def left() -> list[int]:
        return [process for name, process in running(cluster).items() if name in names]

    for kind in (signal.SIGTERM, signal.SIGKILL):
        for process in left():
            with suppress(ProcessLookupError):
                os.kill(process, kind)
        if _within(STOP_LIMIT_S, lambda: not left()):
            return
