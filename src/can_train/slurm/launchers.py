"""The launcher (srun, torchrun, mpirun) that has started this process as one of several: the place of the process among
the ranks of a run, and the error of a command that must run in one process.
"""

import os
import shlex
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from can_train.errors import ConfigError
from can_train.io.units import count_of

if TYPE_CHECKING:
    from can_train.training.distributed import RankPlace

FIRST_PORT: Final = 15_000
PORTS: Final = 17_000
"""Number of ports for rank 0: above the ports of services, below 32,768, where Linux's ephemeral ports begin."""
_STEP_APART: Final = (
    1009  # between the ports of two steps of a job, so that they differ from the ports of jobs with near ids
)
# torchrun, which has a store of its own, sets these beside the variables that every launcher of PyTorch sets.
_ELASTIC: Final = "TORCHELASTIC_RUN_ID"
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
_RESTART: Final = "TORCHELASTIC_RESTART_COUNT"
# Names that all processes of an mpirun share, and that differ between two mpiruns.
_NAMESPACES: Final = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The processes that a launcher has started with one command, and the place of this process among them."""

    launcher: str
    variable: str  # with the number of processes
    rank: int
    size: int
    local_rank: int | None  # among the processes of this machine; None: the launcher does not say
    local_size: int | None  # processes of the launcher on this machine

    def __str__(self) -> str:
        return f"{self.launcher} started {self.size} processes ({self.variable}={self.size})"

    @property
    def is_on_one_machine(self) -> bool:
        """Whether the launcher says that all of its processes are on this machine."""
        return self.local_size == self.size


# Variables of each launcher: rank, size, and rank and size on the machine. The innermost launcher first: torchrun may
# be started by mpirun, and mpirun by srun.
_TORCH: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI: Final[Mapping[str, tuple[str, str, str, str]]] = {
    prefix: (f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE")
    for prefix in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD")
}
_PMI: Final = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# SLURM_NTASKS counts the tasks that a job may start; SLURM_STEP_NUM_TASKS the tasks that srun has started.
_STEP: Final = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Finds the launcher that has started several processes with this one; None if this process is alone.

    Raises:
        ConfigError: A variable is not a number, a launcher was itself started several times, or a launcher does not
            set the number of processes.
    """
    from can_train.slurm.client import SRUN

    torch = "torchrun" if _ELASTIC in environment else "a launcher of PyTorch"
    named = [(torch, _TORCH), *(("mpirun", names) for names in _MPI.values()), ("mpiexec", _PMI)]
    inner = [launch for launcher, names in named if (launch := _read(launcher, names, environment)) is not None]
    # srun --pty starts its command once: it ends all tasks but the first.
    step = _read(SRUN, _STEP, environment)
    if "SLURM_PTY_PORT" in environment:
        # The tasks of a step have a controlling terminal only under --pty.
        with suppress(OSError):
            os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
            step = None
    nested = [*inner, *([step] if step is not None else [])]
    for index, launch in enumerate(nested):
        outer = next((each for each in nested[index + 1 :] if each.size > 1), None)
        # Each process of the outer launcher would train another run.
        if outer is not None and launch.is_on_one_machine:
            raise ConfigError("Two launchers started the processes of a run",
                              value=f"{outer}, and {launch.launcher} in each of them {launch.size}",
                              remedy=f"Leave {launch.launcher} out, or {outer.launcher}")  # fmt: skip
    several = [launch for launch in nested if launch.size > 1]
    if not nested and "PMIX_RANK" in environment:
        remedy = _typed_otherwise("the launcher", "torchrun, mpirun and srun tell it")
        raise ConfigError("The number of processes is unknown", value="PMIX_RANK is set, and no size", remedy=remedy)
    if step is not None and step in several and _ELASTIC not in environment:
        # MPI libraries and scripts repeat srun's values under other names.
        return next((launch for launch in several if (launch.rank, launch.size) != (step.rank, step.size)), step)
    return next(iter(several), None)


def _read(launcher: str, names: tuple[str, str, str, str], environment: Mapping[str, str]) -> Launch | None:
    # Some scripts export WORLD_SIZE without RANK, for processes that read their ranks elsewhere.
    if not (environment.get(names[0]) and environment.get(names[1])):
        return None
    rank, size, local_rank, local_size = (_count(name, environment) for name in names)
    if rank is None or size is None or rank >= size:
        value = f"{names[0]}={environment[names[0]]}, {names[1]}={environment[names[1]]}"
        remedy = f"Unset both where no launcher is at work: env -u {names[0]} -u {names[1]}"
        raise ConfigError("The rank is not less than the number of processes", value=value, remedy=remedy)
    # Only launchers know how many processes a machine has; scripts that export the variables mostly do not.
    is_known = launcher != "a launcher of PyTorch"
    return Launch(launcher=launcher, variable=names[1], rank=rank, size=size, local_rank=local_rank,
                  local_size=local_size if is_known else None)  # fmt: skip


def _count(name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name) or ""
    if text and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is not a whole number", value=repr(text), remedy=f"Unset it: env -u {name}")
    return int(text) if text else None


def rank_place(environment: Mapping[str, str]) -> "RankPlace | None":
    """Reads this process's place among the ranks of its job step; None if it is the only process.

    MASTER_ADDR and MASTER_PORT decide where rank 0 listens. Without them it is the step's first node, and a port that
    follows from the ids of job and step.
    """
    # SLURM_NTASKS is set in the shell of a job of several tasks, too, with a SLURM_PROCID of 0: there a process would
    # wait for ranks that nobody starts.
    size = count_of(environment, "SLURM_STEP_NUM_TASKS", 1)
    if size == 1:
        return None
    # Slow to import; a refused command does not wait for them.
    from can_train.slurm.client import node_names
    from can_train.training.distributed import RankPlace

    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    # Two steps of a job may train at the same time; can-train's jobs use step 0.
    step = environment.get("SLURM_STEP_ID", "0")
    number = int(environment["SLURM_JOB_ID"]) + _STEP_APART * (int(step) if step.isdigit() else 0)
    rank, local_rank = int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"])
    port = int(environment.get("MASTER_PORT") or FIRST_PORT + number % PORTS)
    address = environment.get("MASTER_ADDR") or node_names(nodes)[0]
    return RankPlace(rank=rank, size=size, local_rank=local_rank, address=address, port=port)


def launched_place(launch: Launch, environment: Mapping[str, str] = os.environ) -> "RankPlace":
    """Returns the place of a process among the ranks of its run, and the address of rank 0.

    Raises:
        ConfigError: The launcher does not set the address of rank 0, or the local rank.
    """
    from can_train.slurm.client import SRUN

    if launch.launcher == SRUN:
        place = rank_place(environment)
        assert place is not None, "a step of several tasks"
        return place
    address, port = environment.get("MASTER_ADDR"), _count("MASTER_PORT", environment)
    namespace = next((environment[name] for name in _NAMESPACES if name in environment), None)
    if not (address and port) and launch.is_on_one_machine and namespace is not None:
        address, port = "127.0.0.1", FIRST_PORT + zlib.crc32(namespace.encode()) % PORTS
    if not (address and port):
        arguments = shlex.join(sys.argv[1:])
        remedy = ("Set MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port there, for every process; "
                  f"or have SLURM form the ranks: can-train {arguments} --gpus N --nodes M --submit")  # fmt: skip
        if launch.is_on_one_machine:
            line = f"MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 {launch.launcher} -n {launch.size} can-train {arguments}"
            remedy = f"Set both:\n  {line}\nAny free port will do"
        value = f"{launch}, and MASTER_ADDR and MASTER_PORT are not both set"
        raise ConfigError("The address of rank 0 is unknown", value=value, remedy=remedy)
    if launch.local_rank is None:
        value = f"{launch}, and LOCAL_RANK is not set"
        remedy = "Set LOCAL_RANK: 0 for the first process of a machine, 1 for the second"
        raise ConfigError("The local rank of this process is unknown", value=value, remedy=remedy)
    from can_train.training.distributed import RankPlace

    has_store = environment.get(_AGENT_STORE, "").lower() == "true"
    prefix = f"can-train/{environment.get(_RESTART, '0')}" if has_store else ""
    return RankPlace(rank=launch.rank, size=launch.size, local_rank=launch.local_rank, address=address, port=port,
                     store_prefix=prefix)  # fmt: skip


def check_started_once(what: str, more: str = "", environment: Mapping[str, str] = os.environ) -> None:
    """Refuses a command that several processes would repeat.

    Args:
        what: The command, as the subject of a sentence.
        more: A further remedy, as a sentence without its full stop.
        environment: Environment variables.

    Raises:
        ConfigError: A launcher has started this process as rank 0 of several.
        SystemExit: This is another rank: rank 0 prints the reason.
    """
    launch = find_launch(environment)
    if launch is not None and launch.rank > 0:
        raise SystemExit(ConfigError.exit_code)
    if launch is not None:
        remedy = _typed_otherwise(launch.launcher, more or "Several processes are for training one run")
        raise ConfigError(f"{what} is work for one process", value=str(launch), remedy=remedy)


def _typed_otherwise(launcher: str, more: str) -> str:
    return f"Type it without {launcher}:\n  can-train {shlex.join(sys.argv[1:])}\n{more}"
