"""What a job asks of SLURM, and its batch script."""

import os
import shlex
import sys
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from submitit.slurm.slurm import SlurmExecutor

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError
from can_train.io.units import memory_text, parse_time_min, time_text
from can_train.slurm.client import Node, Partition

_KEPT: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""SLURM's variables that say where the cluster is and who asks."""


_FOREIGN: Final = ("SLURM_", "SLURMD_", "SLURMSTEPD_", "SRUN_", "SBATCH_", "SUBMITIT_", "PMI_", "PMIX_")
"""Beginnings of the variables of an enclosing job, and of those that silently beat what a script says."""


_RANKS: Final = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What an enclosing job's processes were told of each other."""


_GIVEN_GPUS: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
"""What SLURM tells a job of its GPUs; those of an enclosing job are not the new one's."""


@contextmanager
def job_environment(source: Path | None = None) -> Iterator[None]:
    """Makes this process's environment the one that a job is to start with, for the block.

    Args:
        source: Folder that the job imports first, before any other and not after its working folder; None: a script
            says so.
    """
    before = dict(os.environ)
    with environment({**clean_environment(before), **(import_path(source, before) if source else {})}):
        yield


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Makes some variables this process's whole environment, for the block."""
    before = dict(os.environ)
    try:
        _replace_environment(variables)
        yield
    finally:
        _replace_environment(before)


def remembered_environment(encoded: bytes) -> dict[str, str]:
    """Reads what the first line of a job's script remembered: what `env -0` prints, in Base64.

    Raises:
        ValueError: It is something else.
    """
    pairs = [os.fsdecode(pair) for pair in b64decode(encoded, validate=True).split(b"\0") if pair]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a job is submitted with: none of an enclosing job's, nor any that beats the script."""
    stray = {*_RANKS, *(_GIVEN_GPUS if "SLURM_JOB_ID" in environment else ())}
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (name.startswith(_FOREIGN) or name in stray)
    }


def import_path(source: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which Python imports from `source` first, and never from its working folder."""
    after = environment.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{source}{os.pathsep}{after}" if after else str(source), "PYTHONSAFEPATH": "1"}


def _replace_environment(variables: Mapping[str, str]) -> None:
    for name in [*os.environ]:
        if name not in variables:
            del os.environ[name]
    os.environ.update(variables)


DAY_MIN: Final = 24 * 60
"""Time limit of a job that names none: most trainings end sooner, and schedulers start short jobs first."""


MOST_CPUS: Final = 8
"""Processors of a rank that nobody asked for: preparing data uses a few, training one."""


MOST_MEMORY_MIB: Final = 32 * 2**10
"""Memory of a rank that nobody asked for; data sets in memory are far below it."""


_SHARING_MEMORY: Final = frozenset(("mem-per-cpu", "mem-per-gpu", "exclusive"))


_SHARING_CPUS: Final = frozenset(("cpus-per-gpu", "exclusive", "threads-per-core"))
"""Other options of sbatch by which a person has said how much."""


def with_cluster_defaults(cluster: ClusterSettings, partition: Partition | None, device: str) -> ClusterSettings:
    """Decides what the settings leave open.

    Args:
        cluster: As asked for.
        partition: Where the job goes; None: nothing is known of it.
        device: Of the run: auto, cpu, cuda[:i], sim:SIZE.

    Returns:
        Settings with a number of GPUs, a time limit, and, where the partition is known, processors and memory.
    """
    cluster = replace(cluster, gpus=_gpus(cluster, partition, device), time=cluster.time or _time(partition))
    nodes = [] if partition is None else _fitting(cluster, partition.nodes)
    if not nodes:
        return cluster
    said = {str(name).replace("_", "-") for name in cluster.additional}
    cpus = cluster.cpus or (0 if said & _SHARING_CPUS else min(_cpus(node) for node in nodes))
    if cluster.mem or said & _SHARING_MEMORY:
        return replace(cluster, cpus=cpus)
    memory = min(_memory_mib(cluster, node) for node in nodes)
    return replace(cluster, cpus=cpus, mem=memory_text(memory) if memory > 0 else "")


def wants_gpu(device: str) -> bool:
    """Tells whether a device may be a GPU."""
    return device == "auto" or device.startswith("cuda")


def _gpus(cluster: ClusterSettings, partition: Partition | None, device: str) -> str:
    if cluster.gpus != "auto":
        return cluster.gpus
    asked_otherwise = cluster.ranks_per_node > 1 or "gpu" in cluster.gres
    has_gpus = device.startswith("cuda") if partition is None else any(node.num_gpus() for node in partition.nodes)
    return "1" if wants_gpu(device) and has_gpus and not asked_otherwise else "0"


def _time(partition: Partition | None) -> str:
    limit = None if partition is None else partition.max_time_min
    return time_text(DAY_MIN if limit is None else min(DAY_MIN, limit))


def _fitting(cluster: ClusterSettings, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that have the GPUs asked for: the job must fit the smallest of them."""
    return [node for node in nodes if node.num_gpus(cluster.gpu_type) >= cluster.num_gpus]


def _parts(node: Node) -> int:
    """Ranks that share a node: one a GPU, or on a node without GPUs as many as have `MOST_CPUS` processors each."""
    return max(1, node.num_gpus() or node.cpus // MOST_CPUS)


def _cpus(node: Node) -> int:
    return max(1, min(MOST_CPUS, node.cpus // _parts(node)))


def _memory_mib(cluster: ClusterSettings, node: Node) -> int:
    """Memory of a node's ranks together."""
    return min(MOST_MEMORY_MIB, node.memory_mib // _parts(node)) * cluster.ranks_per_node


WARNING_SIGNAL: Final = "USR2"
"""What a job is sent before its time is up."""


_MANAGED: Final[Mapping[str, str]] = {
    "array": "Sweep a setting: --set 'training.seed=range(0,3)'",
    "error": "A run's output stays in its folder: --runs-dir",
    "input": "A run reads nothing from its standard input",
    "job-name": "A job is named after its run's configuration",
    "no-requeue": "Give --set cluster.max_restarts=0",
    "ntasks": "Give --gpus: one rank each",
    "ntasks-per-node": "Give --gpus: one rank each",
    "open-mode": "A job that continues must append to its log",
    "output": "A run's output stays in its folder: --runs-dir",
    "requeue": "Give --set cluster.max_restarts",
    "signal": "Give --set cluster.signal_delay_s",
    "wait": "Follow the run: can-train logs RUN -f",
    "wrap": "A job runs can-train; --set 'cluster.setup=[...]' adds lines before it",
    **{
        name: f"Give --{name}" for name in ("partition", "account", "qos", "time", "nodes", "mem", "constraint", "gres")
    },
    "cpus-per-task": "Give --cpus",
    "gpus-per-node": "Give --gpus",
    "exclude": "Give --set cluster.exclude",
}
"""Options of sbatch that `cluster.additional` may not set, with the way to what they are for."""


_OWN_DEFAULTS: Final[Mapping[str, str]] = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
}
"""Settings that a user or a site may have given a default by a variable of sbatch."""


_ALL: Final = 10**6
"""Jobs of an array at once where nothing limits them."""


_GO_ON: Final = "set +e"
"""What `setup` made of errors does not hold for the training: what follows a failed one must run."""


_REMEMBER: Final = "began_with=$(env -0 | base64 -w 0)"
"""First line of a script: what a job that is submitted in this one's place begins with, as this one did. A variable of
the shell, since there is a limit to what a process can be given and none to what can be piped into it.
"""


@dataclass(frozen=True, kw_only=True)
class ScriptInputs:
    """What a job's script is made of, beside what is asked for.

    Attributes:
        name: Of the job.
        code: Folder whose `src` is imported.
        state_dir: Where the registry is, absolute.
        dependency: As sbatch writes it; empty: none.
    """

    name: str
    code: Path
    state_dir: Path
    dependency: str = ""


def with_sbatch_defaults(cluster: ClusterSettings, environment: Mapping[str, str]) -> ClusterSettings:
    """Writes what a user's own variables of sbatch say into settings that say nothing."""
    given: dict[str, Any] = {
        name: environment[variable]
        for name, variable in _OWN_DEFAULTS.items()
        if not getattr(cluster, name) and environment.get(variable)
    }
    return replace(cluster, **given)


def parameters(cluster: ClusterSettings, text: ScriptInputs) -> dict[str, Any]:
    """Returns submitit's parameters of a job.

    Raises:
        ConfigError: A value cannot be written into a script.
    """
    options = {name: _directive(f"cluster.{name}", value) for name, value in _options(cluster).items()}
    additional = {name: _directive(f"cluster.additional.{name}", value) for name, value in _additional(cluster).items()}
    if text.dependency:
        # A person's own condition holds as well.
        additional["dependency"] = ",".join(
            [text.dependency, *([str(d)] if (d := additional.get("dependency")) else [])]
        )
    return {
        **options,
        "job_name": _directive("dataset.name", text.name),
        "signal_delay_s": cluster.signal_delay_s,
        "array_parallelism": cluster.max_parallel or _ALL,
        "setup": [_REMEMBER, *_setup(cluster.setup), *_exports(text.code), _GO_ON],
        "teardown": _teardown(text.state_dir),
        "srun_args": ["--kill-on-bad-exit=1", *_step(cluster)],
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": {
            "kill-on-invalid-dep": "yes",
            ("requeue" if cluster.max_restarts else "no-requeue"): True,
            # submitit's own is another where a variable says so.
            "signal": f"{WARNING_SIGNAL}@{cluster.signal_delay_s}",
            **additional,
        },
    }


def resources(cluster: ClusterSettings) -> dict[str, Any]:
    """Returns what is asked for, by sbatch's names."""
    return {name.replace("_", "-"): value for name, value in _options(cluster).items()} | _additional(cluster)


def script(folder: Path, wanted: Mapping[str, Any], count: int) -> str:
    """Writes the batch script of a job, or of an array of `count` jobs.

    Args:
        folder: Where submitit keeps the job's files.
        wanted: From `parameters`.
        count: Jobs.
    """
    executor = _Scribe(folder)
    executor.parameters.update(wanted)
    if count > 1:
        executor.parameters["map_count"] = count
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def open_executor(folder: Path, wanted: Mapping[str, Any]) -> SlurmExecutor:
    """Opens submitit's executor.

    Raises:
        ConfigError: The folder's path cannot be written into a script.
    """
    check_folder(folder)
    made = SlurmExecutor(folder)
    made.parameters.update(wanted)
    return made


def check_folder(folder: Path) -> None:
    """Checks that SLURM can write a log into a folder: it expands `%`, and drops backslashes.

    Raises:
        ConfigError: The path holds one of them, or a character that ends a line.
    """
    text = str(folder)
    if "%" in text or "\\" in text or not text.isprintable():
        raise ConfigError(
            "SLURM cannot write a log into a folder with %, a backslash or a control character in its path",
            value=repr(text),
            remedy="Give another folder with --runs-dir",
        )


class _Scribe(SlurmExecutor):
    """Writes scripts, also where there is no SLURM to send them to."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def _options(cluster: ClusterSettings) -> dict[str, Any]:
    """What is asked for, by submitit's names; nothing that is not."""
    gpus = "" if cluster.gpus in ("auto", "0") else cluster.gpus
    wanted = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": parse_time_min(cluster.time) if cluster.time else "",
        "nodes": cluster.nodes,
        "ntasks_per_node": cluster.ranks_per_node,
        "gpus_per_node": gpus,
        "cpus_per_task": cluster.cpus or "",
        "mem": cluster.mem,
        "constraint": cluster.constraint,
        "gres": cluster.gres,
        "exclude": cluster.exclude,
    }
    return {name: value for name, value in wanted.items() if value != ""}


def _additional(cluster: ClusterSettings) -> dict[str, Any]:
    """Further options of sbatch; a switch that is off is not there."""
    options = {str(name).replace("_", "-"): value for name, value in cluster.additional.items()}
    for name in options:
        if name in _MANAGED:
            raise ConfigError("can-train sets this option of sbatch itself", value=name, remedy=_MANAGED[name])
        if not name.replace("-", "").isalnum() or not name.isascii():
            raise ConfigError("An option of sbatch is named by letters and hyphens", value=repr(name))
    return {name: value for name, value in options.items() if value is not False and value is not None}


def _directive(name: str, value: Any) -> Any:
    """Prepares a value for submitit, which quotes it as a shell would read it: sbatch, unlike a shell, takes a
    backslash for an escape also between single quotes.
    """
    if not isinstance(value, str):
        return value
    if not value.isprintable():
        raise ConfigError("A job's option is one line of printable characters", value=f"{name}: {value!r}")
    return value.replace("\\", "\\\\")


def _setup(lines: Sequence[str]) -> list[str]:
    """A person's own lines of shell: theirs to write, and one line each."""
    for line in lines:
        if not line.isprintable() and "\t" not in line:
            raise ConfigError("cluster.setup has one line of shell in each item", value=repr(line))
    return list(lines)


def _exports(code: Path) -> list[str]:
    """Lines that make the job import its own copy of the code; after `setup`, whose modules may change the path too."""
    source = shlex.quote(str(code / "src"))
    return [f"export PYTHONPATH={source}${{PYTHONPATH:+:$PYTHONPATH}}", "export PYTHONSAFEPATH=1"]


def _step(cluster: ClusterSettings) -> list[str]:
    """Since SLURM 22.05 a step does not take its processors over from the job."""
    return [f"--cpus-per-task={cluster.cpus}"] if cluster.cpus else []


def _teardown(state_dir: Path) -> list[str]:
    """Lines that look at what became of the job while it still exists; its status stays what it was."""
    command = shlex.join([sys.executable, "-m", "can_train", "after-job", "--state-dir", str(state_dir), "--status"])
    return ["status=$?", f'printf %s "$began_with" | {command} "$status"', 'exit "$status"']
