"""The request of a job, and its batch script. Text only: nothing is sent here.

submitit writes the script; this module decides its parameters, and the environment at the start of the job.
"""

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
from can_train.runs.run_state import SETUP_ENDED
from can_train.slurm import container
from can_train.slurm.client import Node, Partition, programs_folder

# The environment of a job

_CONNECTION: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""SLURM's variables with the address of the cluster and the credentials of the user."""
_FOREIGN_PREFIXES: Final = ("SLURM_", "SLURMD_", "SLURMSTEPD_", "SRUN_", "SBATCH_", "SUBMITIT_", "PMI_", "PMIX_")
"""Prefixes of variables that describe an enclosing job, or that silently override a batch script."""
_RANK_VARIABLES: Final = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables through which the processes of an enclosing job find each other."""
GPU_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
"""SLURM sets these to the GPUs of a job; the new job has other GPUs than an enclosing job."""


@contextmanager
def job_environment(source: Path | None = None) -> Iterator[None]:
    """Gives this process the environment of a new job for the duration of a block.

    Args:
        source: First folder of the job's import path. None if the job's script sets the import path.
    """
    variables = clean_environment(os.environ)
    if source is not None:
        # Python then never imports from the working folder.
        after = variables.get("PYTHONPATH")
        variables |= {"PYTHONPATH": f"{source}{os.pathsep}{after}" if after else str(source), "PYTHONSAFEPATH": "1"}
    with environment(variables):
        yield


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replaces the whole environment of this process for the duration of a block."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def remembered_environment(encoded: bytes) -> dict[str, str]:
    """Decodes the environment that the first line of a batch script saved: the output of `env -0` in Base64.

    Raises:
        ValueError: The bytes are something else.
    """
    pairs = [os.fsdecode(pair) for pair in b64decode(encoded, validate=True).split(b"\0") if pair]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for submitting a job, without variables that describe an enclosing job or override the
    script.
    """
    stray = {*_RANK_VARIABLES, *(GPU_VARIABLES if "SLURM_JOB_ID" in environment else ())}
    return {
        name: value
        for name, value in environment.items()
        if name in _CONNECTION or not (name.startswith(_FOREIGN_PREFIXES) or name in stray)
    }


# sbatch's variables, in which a user or a site sets defaults

_VARIABLE: Final = "SBATCH_"
_SETTINGS: Final[Mapping[str, str]] = {
    **{name.upper(): name for name in ("partition", "account", "qos", "constraint", "reservation", "gres", "exclusive",
                                       "clusters", "mem_per_gpu", "cpus_per_gpu", "job_name")},
    "TIMELIMIT": "time", "MEM_PER_NODE": "mem", "GPUS_PER_NODE": "gpus",
}  # fmt: skip
"""Setting of each variable, without the prefix."""
_OPTIONS: Final = {"REQ_SWITCH": "switches", "ACCTG_FREQ": "acctg-freq", "ARRAY_INX": "array", "BURST_BUFFER": "bb",
                   "CPU_FREQ_REQ": "cpu-freq"}  # fmt: skip
"""Options of sbatch whose variable has another name."""
_NO_OPTIONS: Final = ("DEBUG", "WAIT4SWITCH", "BATCH")
_OF_AN_ENCLOSING_JOB: Final = ("MEM_BIND", "CPU_BIND")
"""Variables that SLURM sets in a job, to describe it."""


def with_sbatch_variables(
    cluster: ClusterSettings, environment: Mapping[str, str]
) -> tuple[ClusterSettings, list[str]]:
    """Fills empty settings from sbatch's variables; returns the settings, and notices that name the variables.

    Raises:
        ConfigError: A variable's value means nothing, or contradicts a setting.
    """
    in_job, used, unused = "SLURM_JOB_ID" in environment, [], []
    for variable, value in sorted(environment.items()):
        name = variable.removeprefix(_VARIABLE)
        if name == variable or (in_job and name.startswith(_OF_AN_ENCLOSING_JOB)):
            continue
        option = _OPTIONS.get(name, name.lower().replace("_", "-"))
        if name not in _SETTINGS and (option in _RESERVED_OPTIONS or name in _NO_OPTIONS):
            unused.append(f"{variable}={value}")
            continue
        try:
            filled = _with_variable(cluster, name, option, value)
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error.rule}", value=error.value,
                              remedy=f"Unset it: env -u {variable}") from error  # fmt: skip
        if filled != cluster:
            used.append(f"{variable}={value}")
        cluster = filled
    notices = [f"The request of the job takes {', '.join(used)}"] if used else []
    return cluster, notices + ([f"{', '.join(unused)} has no effect: can-train sets it itself"] if unused else [])


def _with_variable(cluster: ClusterSettings, name: str, option: str, value: str) -> ClusterSettings:
    """Sets the setting or the option of a variable, unless the user has set it or an equivalent."""
    setting = _SETTINGS.get(name)
    if setting == "exclusive" and value not in ("", "1", "yes"):  # user, mcs
        setting = None
    if setting is None:
        given = {str(key).replace("_", "-") for key in cluster.additional}
        additional = {**cluster.additional, **({} if option in given else {option: value or True})}
        return replace(cluster, additional=additional)
    equivalents = {"mem": "mem_per_gpu", "mem_per_gpu": "mem", "cpus_per_gpu": "cpus"}
    plain, names = ClusterSettings(), (setting, equivalents.get(setting, setting))
    if any(getattr(cluster, each) != getattr(plain, each) for each in names):
        return cluster
    if setting == "cpus_per_gpu" and not value.isdecimal():
        raise ConfigError("cluster.cpus_per_gpu must be a whole number", value=repr(value),
                          remedy="Write it as --cpus-per-gpu 4")  # fmt: skip
    typed: Any = {"exclusive": True, "cpus_per_gpu": int(value) if value.isdecimal() else 0}.get(setting, value)
    return replace(cluster, **{setting: typed})


# Defaults of a request

DAY_MIN: Final = 24 * 60
"""Default time limit in minutes. Most trainings end sooner, and schedulers start short jobs first."""
LEAST_DEFAULT_MIN: Final = 60
"""Shortest default time limit of a partition that is followed: a job of minutes would spend them on its restarts."""
MAX_DEFAULT_CPUS: Final = 8
"""Largest default number of processors of a rank: preparing data uses a few, training one."""
MAX_DEFAULT_MEMORY_MIB: Final = 32 * 2**10
"""Largest default memory of a rank in MiB; data sets in memory need far less."""
WORKER_MEMORY_MIB: Final = 2**10
"""Memory in MiB of a process that reads samples, without the memory that it shares with its rank."""
_SETS_MEMORY: Final = frozenset(("mem-per-cpu", "mem-per-gpu"))
_SETS_CPUS: Final = frozenset(("cpus-per-gpu", "exclusive", "threads-per-core"))
"""Other sbatch options through which a user decides the amount."""


def wants_gpu(device: str) -> bool:
    """Returns whether a device may be a GPU."""
    return device == "auto" or device.startswith("cuda")


def with_cluster_defaults(
    cluster: ClusterSettings, partition: Partition | None, device: str, workers: int = 0, *, offloads: bool = False
) -> ClusterSettings:
    """Fills empty settings: GPUs, time limit and a fair share of a node's processors and memory.

    Without this a site's own defaults apply, and 100 MB of memory a processor would end every training.

    Args:
        cluster: The request.
        partition: Partition of the job. If None, processors and memory stay empty.
        device: The run's device: auto, cpu, cuda[:i] or sim:SIZE.
        workers: Processes of each rank that read samples, as far as they were asked for.
        offloads: Whether tensors of the GPU wait in the memory of the host: a rank then has its whole share of it.
    """
    time = cluster.time or time_text(_default_time_min(partition))
    nodes: Sequence[Node] = () if partition is None else partition.nodes
    gpus = cluster.gpus
    if gpus == "auto":
        has_gpus = device.startswith("cuda") if partition is None else any(node.num_gpus() for node in nodes)
        wants_one = wants_gpu(device) and has_gpus and not cluster.ranks
        gpus = "1" if wants_one and not cluster.names_gpus else "0"
    cluster = replace(cluster, gpus=gpus, time=time)
    # Each of these nodes may get the job, so it must fit the smallest node.
    nodes = [node for node in nodes if node.num_gpus(cluster.gpu_type) >= cluster.gpus_per_node]
    if not nodes:
        return cluster
    decided = {str(name).replace("_", "-") for name in cluster.additional}
    own = ("exclusive", "mem_per_gpu", "cpus_per_gpu")
    decided |= {name.replace("_", "-") for name in own if getattr(cluster, name)}
    most_cpus = max(MAX_DEFAULT_CPUS, workers + 1)
    sharing = {node.name: max(cluster.ranks, _ranks_sharing(node, most_cpus)) for node in nodes}
    fair_cpus = max(1, min(most_cpus, *(node.cpus // sharing[node.name] for node in nodes)))
    cpus = cluster.cpus or (0 if decided & _SETS_CPUS else max(1, fair_cpus // cluster.runs_per_job))
    if cluster.mem or decided & _SETS_MEMORY:
        return replace(cluster, cpus=cpus)
    if "exclusive" in decided:
        # SLURM gives such a job all processors and GPUs of its nodes, but no more memory than to other jobs.
        return replace(cluster, cpus=cpus, mem=memory_text(min(node.memory_mib for node in nodes)))
    most_mib = MAX_DEFAULT_MEMORY_MIB + workers * WORKER_MEMORY_MIB
    if offloads:
        most_mib = max(node.memory_mib for node in nodes)
    rank_mib = min(min(most_mib, node.memory_mib // sharing[node.name]) for node in nodes)
    if cluster.runs_per_job > 1:
        share_mib = min(node.memory_mib // sharing[node.name] for node in nodes)
        rank_mib = min(rank_mib * cluster.runs_per_job, share_mib)
    memory_mib = rank_mib * cluster.ranks_per_node
    return replace(cluster, cpus=cpus, mem=memory_text(memory_mib) if memory_mib > 0 else "")


def _default_time_min(partition: Partition | None) -> int:
    """Returns the partition's default time limit, else a day, at most the partition's limit."""
    if partition is None:
        return DAY_MIN
    default = partition.default_time_min or 0
    wanted = default if default >= LEAST_DEFAULT_MIN else DAY_MIN
    return wanted if partition.max_time_min is None else min(wanted, partition.max_time_min)


def _ranks_sharing(node: Node, most_cpus: int = MAX_DEFAULT_CPUS) -> int:
    """Returns the number of ranks on a node: one for each GPU, or without GPUs for `most_cpus` processors."""
    return max(1, node.num_gpus() or node.cpus // most_cpus)


# The batch script

_RESERVED_OPTIONS: Final[Mapping[str, str]] = {
    "array": "Sweep a setting: --set 'training.seed=range(0,3)'",
    "error": "A run's output stays in its folder: --runs-dir",
    "input": "A run reads nothing from its standard input",
    "job-name": "Give --job-name",
    "no-requeue": "Give --set cluster.max_restarts=0",
    "ntasks": "Give --gpus: one rank each",
    "ntasks-per-node": "Give --gpus: one rank each",
    "open-mode": "A job that continues must append to its log",
    "output": "A run's output stays in its folder: --runs-dir",
    "requeue": "Give --set cluster.max_restarts",
    "signal": "Give --set cluster.signal_delay_s",
    "wait": "Follow the run: can-train logs RUN -f",
    "wrap": "A job runs can-train; --set 'cluster.setup=[...]' adds lines before it",
    **{name: f"Give --{name}" for name in ("partition", "account", "qos", "time", "nodes", "mem", "constraint")},
    "gres": "Give --gres",
    "cpus-per-task": "Give --cpus",
    "gpus-per-node": "Give --gpus",
    "exclude": "Give --exclude",
    "clusters": "Give --clusters",
    "parsable": "can-train reads the answer of sbatch",
    "quiet": "can-train reads the answer of sbatch",
    "test-only": "See the job without sending it: --dry-run",
}
"""sbatch options that `cluster.additional` may not set, with the option to use instead."""
_WHOLE_NAMES: Final = frozenset(("gpus",))
"""Options whose name is the beginning of a name in `_RESERVED_OPTIONS`."""
_RESTRICTS_ENVIRONMENT: Final = frozenset(("export", "export-file"))
"""Options of sbatch that restrict the variables at the start of a job."""
_SAVE_ENVIRONMENT: Final = "began_with=$(env -0 | base64 -w 0)"
"""First line of a script. A job in place of this job starts with the same environment. The environment is kept in a
shell variable and piped, because the size of a process's arguments and environment is limited.
"""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The description of jobs that are started together, without their request.

    Attributes:
        name: Name of the jobs.
        state_dir: State folder, absolute.
        dependency: Dependency of the jobs in sbatch's notation; empty: none.
        reason: Reason of a later submission, in words; empty for the first jobs of the runs.
        sweep: Name of the array; empty for one job.
    """

    name: str
    state_dir: Path
    dependency: str = ""
    reason: str = ""
    sweep: str = ""


def parameters(
    cluster: ClusterSettings, submission: Submission, code: Path, paths: Sequence[Path] = ()
) -> dict[str, Any]:
    """Returns submitit's parameters for a job that imports from the `src` of a snapshot of the code.

    Args:
        cluster: The request.
        submission: The description of the job.
        code: The snapshot.
        paths: The paths of this machine that the job needs in a container.

    Raises:
        ConfigError: A value cannot be written into a batch script.
    """
    options = {name: _escaped(f"cluster.{name}", value) for name, value in _options(cluster).items()}
    additional = {name: _escaped(f"cluster.additional.{name}", value) for name, value in _additional(cluster).items()}
    if submission.dependency:
        # The user's own dependency must hold as well.
        own_dependency = str(additional.get("dependency") or "")
        additional["dependency"] = ",".join(filter(None, [submission.dependency, own_dependency]))
    for name in ("setup", "teardown"):
        for line in getattr(cluster, name):
            if not line.isprintable() and "\t" not in line:
                raise ConfigError(f"An item of cluster.{name} is not a single line of shell", value=repr(line),
                                  remedy="Make an item of each line")  # fmt: skip
    source, folder = str(code / "src"), Path.cwd()
    # After the user's setup lines, whose modules may change PYTHONPATH too.
    imports = [f"export PYTHONPATH={shlex.quote(source)}${{PYTHONPATH:+:$PYTHONPATH}}", "export PYTHONSAFEPATH=1"]
    own_environment = _RESTRICTS_ENVIRONMENT.isdisjoint(additional)
    has_pyxis = cluster.container and cluster.container_runtime == container.PYXIS
    # After the training, outside of a container: SLURM's programs are there.
    python = '"$python"' if _chooses_python(cluster) and not cluster.container else shlex.quote(sys.executable)
    after_job = shlex.join(["-P", "-m", "can_train", "after-job", "--state-dir", str(submission.state_dir), "--status"])
    # These lines handle the end of the training while the job still exists, and keep its exit status.
    end = f'printf %s "$began_with" | {python} {after_job} "$status"'
    return {
        **options,
        "job_name": _escaped("cluster.job_name", cluster.job_name or submission.name),
        "signal_delay_s": cluster.signal_delay_s,
        "array_parallelism": cluster.max_parallel or 10**6,  # submitit needs a number
        "setup": [
            *([] if own_environment else _programs_path()),
            _SAVE_ENVIRONMENT,
            *_setup(cluster, imports, f'{shlex.quote(sys.executable)} {after_job} "$1"'),
            *_programs_path(),
            *imports,
            # A user's setup lines may contain `set -e`: the lines after a failed training must run all the same.
            "set +e",
        ],
        # In a shell of their own, which a line may leave.
        "teardown": [
            "status=$?",
            *(["(", *_evaluated(cluster.teardown), ")"] if cluster.teardown else []),
            end,
            'exit "$status"',
        ],
        # Since SLURM 22.05 a step no longer inherits --cpus-per-task from its job.
        "srun_args": [
            # A run that fails does not end the runs beside it.
            *(["--kill-on-bad-exit=1"] if cluster.runs_per_job == 1 else ["--kill-on-bad-exit=0", "--wait=0"]),
            *([f"--cpus-per-task={cluster.cpus}"] if cluster.cpus else []),
            # sbatch's --export holds for srun, too: the training would get no variable that this script sets.
            *([] if own_environment else ["--export=ALL"]),
            *(container.srun_arguments(cluster, paths, folder) if has_pyxis else []),
            *cluster.srun_args,
        ],
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": {
            "kill-on-invalid-dep": "yes",
            ("requeue" if cluster.max_restarts else "no-requeue"): True,
            # The warning before the time limit. submitit chooses another signal if a certain variable is set.
            "signal": f"USR2@{cluster.signal_delay_s}",
            **additional,
        },
    }


def python_command(cluster: ClusterSettings, code: Path, paths: Sequence[Path] = ()) -> str:
    """Returns the shell words that start the job's Python. Arguments: see `parameters`."""
    if cluster.container:
        return container.command(cluster, paths, Path.cwd(), str(code / "src"))
    return '"$python"' if _chooses_python(cluster) else shlex.quote(sys.executable)


def _chooses_python(cluster: ClusterSettings) -> bool:
    return bool(cluster.setup or cluster.python)


_FIRST_PYTHON: Final = "$(command -v python || command -v python3)"
_MISSING_PACKAGES: Final = (
    "import importlib.util as i, sys; "
    'sys.exit(", ".join(n for n in ("torch", "submitit", "msgspec") if not i.find_spec(n)) or 0)'
)
"""Program that ends with the names of packages that this Python does not have."""


def _setup(cluster: ClusterSettings, imports: Sequence[str], after_job: str) -> list[str]:
    """Returns the user's setup lines, and the choice of Python by them; any failure ends the job with its words."""
    if not cluster.setup and (not cluster.python or cluster.container):
        return []
    end = [
        "end_setup() {",
        'echo "error: $2" >&2',
        *imports,
        f'printf %s "$began_with" | {after_job}',
        'exit "$1"',
        "}",
    ]
    # A file that a line sources may contain commands that fail, and handle that themselves.
    failed = ('failed=$?; [ "${#BASH_SOURCE[@]}" -gt "$depth" ] || '
              f'end_setup "$failed" "{SETUP_ENDED} $failed: $BASH_COMMAND"')  # fmt: skip
    trap = ["depth=${#BASH_SOURCE[@]}", f"trap {shlex.quote(failed)} ERR"]
    lines = [*trap, *_evaluated(cluster.setup), "trap - ERR"] if cluster.setup else []
    if cluster.container:
        return [*end, *lines]
    submitted = shlex.quote(sys.executable)
    if cluster.python:
        named = shlex.quote(cluster.python)
        choice = [f'python=$(command -v {named}) || end_setup 127 "cluster.python is no program here: "{named}']
        remedy = "install them there, or leave cluster.python out"
    else:
        choice = [f"python={submitted}", f'[ "{_FIRST_PYTHON}" = "$first_python" ] || python="{_FIRST_PYTHON}"']
        remedy = f"to train with the Python of the submission: cluster.python={sys.executable}"
    check = (
        f'"$python" -c {shlex.quote(_MISSING_PACKAGES)} || end_setup 1 "$python does not have can-train\'s packages; "'
    )
    return [*end, f'first_python="{_FIRST_PYTHON}"', *lines, *choice,
            f'[ "$python" = {submitted} ] || {check}{shlex.quote(remedy)}']  # fmt: skip


def _evaluated(lines: Sequence[str]) -> list[str]:
    """Returns the line that runs a user's lines in the shell of the job's script. They are the text of one argument: a
    parenthesis too many, a here-document without an end, or a last line that ends with a backslash would otherwise
    change the lines of can-train after them. A line of can-train ends the text, so that `eval` has no status of a list
    like `[ -f env ] && . env`, which ends no script.
    """
    text = "\n".join([*lines, ":"])
    return [f"eval {shlex.quote(text)}"]


def _programs_path() -> list[str]:
    """Returns the line that adds SLURM's programs to PATH: a job may start with little of its user's environment, and
    setup lines may replace PATH. Without the programs a job cannot go back into the queue.
    """
    folder = programs_folder()
    # Every PATH has the folders of the system.
    return [] if folder in ("", "/usr/bin", "/bin") else [f'export PATH="${{PATH:+$PATH:}}"{shlex.quote(folder)}']


def resources(cluster: ClusterSettings) -> dict[str, Any]:
    """Returns the request under sbatch's option names."""
    return {name.replace("_", "-"): value for name, value in _options(cluster).items()} | _additional(cluster)


def script(folder: Path, job_parameters: Mapping[str, Any], count: int, python: str = "") -> str:
    """Returns the batch script of a job, or of an array of `count` jobs.

    Args:
        folder: Folder for submitit's files.
        job_parameters: From `parameters`.
        count: Number of jobs.
        python: From `python_command`; empty: this process's Python.
    """
    executor = _ScriptWriter(folder, python=python or None)
    executor.parameters.update(job_parameters)
    if count > 1:
        executor.parameters["map_count"] = count
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


class _ScriptWriter(SlurmExecutor):
    """Writes scripts also on a machine without SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def check_folder(folder: Path) -> None:
    """Checks that SLURM can write a log into a folder: it expands `%` and drops backslashes in file names.

    Raises:
        ConfigError: The path contains `%`, a backslash or a control character.
    """
    text = str(folder)
    if "%" in text or "\\" in text or not text.isprintable():
        rule = "SLURM cannot write a log into a folder with %, a backslash or a control character in its path"
        raise ConfigError(rule, value=repr(text), remedy="Give another folder with --runs-dir")


def _options(cluster: ClusterSettings) -> dict[str, Any]:
    """Returns the non-empty settings under submitit's names."""
    named_alike = ("partition", "account", "qos", "nodes", "mem", "constraint", "gres", "exclude", "nodelist",
                   "comment", "mail_user", "mail_type", "mem_per_gpu")  # fmt: skip
    options = {
        **{name: getattr(cluster, name) for name in named_alike},
        "time": parse_time_min(cluster.time) if cluster.time else "",
        "ntasks_per_node": cluster.tasks_per_node,
        "gpus_per_node": "" if cluster.gpus in ("auto", "0") else cluster.gpus,
        "cpus_per_task": cluster.cpus or "",
        "exclusive": cluster.exclusive or "",
    }
    return {name: value for name, value in options.items() if value != ""}


def _additional(cluster: ClusterSettings) -> dict[str, Any]:
    """Returns the user's further sbatch options; a switch that is false is left out."""
    # submitit has no parameters for these settings.
    names = ("reservation", "tmp", "begin", "nice", "clusters", "cpus_per_gpu")
    own = {name.replace("_", "-"): value for name in names if (value := getattr(cluster, name))}
    options = {str(name).replace("_", "-"): value for name, value in cluster.additional.items()}
    flags = {name.replace("_", "-") for name in _options(cluster)} | own.keys()
    for name in options:
        if name in flags - _RESERVED_OPTIONS.keys():
            raise ConfigError("An option of sbatch is given twice", value=f"--{name} and cluster.additional.{name}",
                              remedy="Give it once")  # fmt: skip
        # sbatch takes the beginning of a name for the name.
        meant = next((each for each in _RESERVED_OPTIONS if each.startswith(name) and name not in _WHOLE_NAMES), "")
        if meant:
            meant = name if name in _RESERVED_OPTIONS else meant
            raise ConfigError("An option of sbatch is set by can-train", value=meant, remedy=_RESERVED_OPTIONS[meant])
        if not name.replace("-", "").isalnum() or not name.isascii():
            raise ConfigError("This is no name of an option of sbatch", value=repr(name),
                              remedy="Give a name of letters, digits and hyphens")  # fmt: skip
    listed = {name: ",".join(map(str, value)) if isinstance(value, list | tuple) else value
              for name, value in (own | options).items()}  # fmt: skip
    return {name: value for name, value in listed.items() if value is not False and value is not None}


def _escaped(name: str, value: Any) -> Any:
    """Escapes backslashes. submitit quotes values for a shell, but sbatch also unescapes within single quotes."""
    if not isinstance(value, str):
        return value
    if not value.isprintable():
        raise ConfigError("A job's option is not a line of printable characters", value=f"{name}: {value!r}",
                          remedy="Write it in one line")  # fmt: skip
    return value.replace("\\", "\\\\")
