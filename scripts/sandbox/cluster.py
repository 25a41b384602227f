"""The names, paths and ports of a sandbox. They all follow from its folder and its first port, also the nodes' names
and with them cgroups and lines of /etc/hosts. So two sandboxes with different folders and ports share nothing.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER_VARIABLE: Final = "SLURM_SANDBOX_DIR"
PORT_VARIABLE: Final = "SLURM_SANDBOX_PORT"
GPUS_VARIABLE: Final = "SLURM_SANDBOX_GPUS"
ACCOUNTING_VARIABLE: Final = "SLURM_SANDBOX_ACCOUNTING"
DEFAULT_FOLDER: Final = Path("/var/lib/can-train-slurm")
"""In a folder that only root may write to: the daemons run its files. Not in /run, whose files may not be executed,
or in /tmp, where anybody could have made it before."""
DEFAULT_PORT: Final = 27000

NUM_NODES: Final = 2
CPUS_PER_NODE: Final = 4
"""CPUs that a node claims, on any machine: enough for tests with two tasks per node."""

MEMORY_PER_NODE_MIB: Final = 4000
GPUS: Final = ("fake:2",) * NUM_NODES
"""Kind and number of the simulated GPUs of each node: SLURM allocates them and sets CUDA_VISIBLE_DEVICES, but no such
device exists."""

PORTS: Final = 20
"""Number of ports that belong to one sandbox, from its first port on."""

HIGHEST_PORT: Final = 65535

LONGEST_SOCKET_PATH: Final = 107
"""Linux's limit on the path of a Unix socket, in bytes."""


class SandboxError(Exception):
    """The sandbox cannot work. The message names the log to read."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One sandbox.

    Args:
        folder: Holds its configuration, logs, sockets and state.
        port: The first of its PORTS, on the loopback interface only.
        gpus: Kind and number of the GPUs of each node: `a100:2`.
        has_accounting: Whether there is a slurmdbd.
        accounts: Sandbox whose slurmdbd and munge it uses; None: its own.

    Raises:
        SandboxError: The folder's path is too long for a socket in it, or the GPUs are not valid.
    """

    folder: Path
    port: int
    gpus: tuple[str, ...] = GPUS
    has_accounting: bool = True
    accounts: "Cluster | None" = None

    def __post_init__(self) -> None:
        if len(self.gpus) != NUM_NODES or not all(re.fullmatch(r"[\w-]+:[1-9]", text) for text in self.gpus):
            raise SandboxError(f"{GPUS_VARIABLE}={','.join(self.gpus)} is not as a100:2,t4:1, for {NUM_NODES} nodes")
        if len(os.fsencode(self.munge_socket)) > LONGEST_SOCKET_PATH:
            raise SandboxError(
                f"the path of {self.folder} is too long for a socket in it: set {FOLDER_VARIABLE} to a shorter one"
            )

    @classmethod
    def named_by(cls, variables: Mapping[str, str]) -> "Cluster":
        """Reads folder and port from environment variables.

        Raises:
            SandboxError: A variable is not valid, or the folder's path is too long.
        """
        folder = variables.get(FOLDER_VARIABLE) or DEFAULT_FOLDER
        port = variables.get(PORT_VARIABLE) or str(DEFAULT_PORT)
        gpus = tuple(variables[GPUS_VARIABLE].split(",")) if variables.get(GPUS_VARIABLE) else GPUS
        if not port.isdecimal() or not 0 < int(port) <= HIGHEST_PORT - PORTS:
            raise SandboxError(f"{PORT_VARIABLE}={port} is no port that has {PORTS - 1} more above it")
        accounting = variables.get(ACCOUNTING_VARIABLE, "")
        other, _, its_port = accounting.rpartition(":")
        accounts = cls.named_by({FOLDER_VARIABLE: other, PORT_VARIABLE: its_port}) if other else None
        return cls(folder=Path(folder).absolute(), port=int(port), gpus=gpus, has_accounting=accounting != "off",
                   accounts=accounts)  # fmt: skip

    @property
    def name(self) -> str:
        """The name of the cluster in SLURM."""
        return f"sandbox{self.port}" if self.accounts else "sandbox"

    @property
    def nodes(self) -> list[str]:
        """The nodes' names. They contain the port, which keeps the cgroups of two sandboxes apart."""
        return [f"n{self.port}-{number}" for number in range(1, NUM_NODES + 1)]

    @property
    def node_ports(self) -> list[int]:
        """The ports of the nodes' daemons."""
        return [self.port + 10 + number for number in range(NUM_NODES)]

    @property
    def accounting_port(self) -> int:
        """The port of slurmdbd."""
        return (self.accounts or self).port + 1

    @property
    def database_port(self) -> int:
        """The port of MariaDB."""
        return self.port + 2

    @property
    def configuration(self) -> Path:
        """The value of SLURM_CONF. The other configuration files are in the same folder."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def munge_key(self) -> Path:
        """The secret that authenticates the daemons to each other."""
        return self.folder / "etc" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """The socket of munged, which signs the messages of SLURM's commands and daemons."""
        return (self.accounts or self).folder / "run" / "munge.socket"

    @property
    def database_socket(self) -> Path:
        """The socket where root administers the database."""
        return self.folder / "run" / "database.socket"

    def log(self, daemon: str) -> Path:
        """The log of a daemon. A slurmd's is named after its node."""
        return self.folder / "log" / f"{daemon}.log"
