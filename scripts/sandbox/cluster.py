"""What a sandbox is called and where its parts lie. Two sandboxes on one machine differ in folder and port: all other
names (nodes, and with them cgroups and lines of /etc/hosts) follow from those.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER_VARIABLE: Final = "SLURM_SANDBOX_DIR"
PORT_VARIABLE: Final = "SLURM_SANDBOX_PORT"
DEFAULT_FOLDER: Final = "can-train-slurm"
DEFAULT_PORT: Final = 27000

NUM_NODES: Final = 2
CPUS_PER_NODE: Final = 4
"""What a node claims, however many the machine has: tests of two tasks a node wait for nobody."""

MEMORY_PER_NODE_MIB: Final = 4000
GPUS_PER_NODE: Final = 2
"""Simulated ones: SLURM hands them out and sets CUDA_VISIBLE_DEVICES; nothing answers there."""

PORTS: Final = 20
"""Ports that one sandbox may take, counted from its own."""

HIGHEST_PORT: Final = 65535

LONGEST_SOCKET_PATH: Final = 107
"""Bytes that Linux allows for a Unix socket's name."""


class SandboxError(Exception):
    """What keeps the sandbox from working, with the log to look at."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One sandbox.

    Args:
        folder: Where its configuration, logs, sockets and state lie.
        port: The first of the PORTS that it takes, on the loopback interface only.

    Raises:
        SandboxError: The folder's path is too long for a socket in it.
    """

    folder: Path
    port: int

    def __post_init__(self) -> None:
        if len(os.fsencode(self.munge_socket)) > LONGEST_SOCKET_PATH:
            raise SandboxError(
                f"the path of {self.folder} is too long for a socket in it: set {FOLDER_VARIABLE} to a shorter one"
            )

    @classmethod
    def named_by(cls, variables: Mapping[str, str]) -> "Cluster":
        """Reads folder and port from environment variables.

        Raises:
            SandboxError: The port is none, or the folder's path too long.
        """
        folder = variables.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir(), DEFAULT_FOLDER)
        port = variables.get(PORT_VARIABLE) or str(DEFAULT_PORT)
        if not port.isdecimal() or not 0 < int(port) <= HIGHEST_PORT - PORTS:
            raise SandboxError(f"{PORT_VARIABLE}={port} is no port that has {PORTS - 1} more above it")
        return cls(folder=Path(folder).absolute(), port=int(port))

    @property
    def nodes(self) -> list[str]:
        """The nodes' names; the port in them keeps the cgroups of two sandboxes apart."""
        return [f"n{self.port}-{number}" for number in range(1, NUM_NODES + 1)]

    @property
    def node_ports(self) -> list[int]:
        """Where the nodes' daemons listen."""
        return [self.port + 10 + number for number in range(NUM_NODES)]

    @property
    def accounting_port(self) -> int:
        """Where slurmdbd listens."""
        return self.port + 1

    @property
    def database_port(self) -> int:
        """Where MariaDB listens."""
        return self.port + 2

    @property
    def configuration(self) -> Path:
        """The file that SLURM_CONF names; the other configuration files lie beside it."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def munge_key(self) -> Path:
        """What the daemons know each other by."""
        return self.folder / "etc" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """Where munged signs what SLURM's commands and daemons send."""
        return self.folder / "run" / "munge.socket"

    @property
    def database_socket(self) -> Path:
        """Where root administers the database."""
        return self.folder / "run" / "database.socket"

    def log(self, daemon: str) -> Path:
        """The log of a daemon; a node's has the node's name."""
        return self.folder / "log" / f"{daemon}.log"
