"""The settings that every task has: training, safety factor, memory monitor and cluster; and their aliases."""

import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from can_train.errors import ConfigError, SettingError, unknown_name
from can_train.io.units import parse_memory_mib, parse_time_min, parse_time_s

_HOLDS: Final = {"greater than": operator.gt, "at least": operator.ge, "at most": operator.le}


def check_range(
    name: str, value: float, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> None:
    """Raises SettingError unless a number is in [low, high] and greater than `above`; not-a-number never is."""
    limits = {"greater than": above, "at least": low, "at most": high}
    given = {words: limit for words, limit in limits.items() if limit is not None}
    if value == math.inf:
        raise SettingError(f"{name} must be a finite number", value="inf")
    try:
        holds = all(_HOLDS[words](value, limit) for words, limit in given.items())
    except TypeError:
        # Settings that a task gives in its code pass no other check of their types.
        raise SettingError(f"{name} must be a number", value=f"{value!r:.60}") from None
    if not holds:
        # Whole limits in full: 4294967295, not 4.29497e+09.
        bounds = " and ".join(f"{words} {limit:.12g}" for words, limit in given.items())
        raise SettingError(f"{name} must be {bounds}", value=f"{value!r}")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raises ConfigError, which lists the choices, unless a value is among them."""
    if value not in choices:
        raise unknown_name(f"value of {name}", value, choices)


def number_or_off(name: str, text: str, *, on: float | None = None) -> float:
    """Reads a setting that is a positive number; infinite for `off` (or 0, false, none), and `on` for the word on.

    Raises:
        ConfigError: It is none of these.
    """
    word = text.strip().lower()
    if word in ("off", "false", "none", "0"):
        return math.inf
    if on is not None and word in ("on", "true"):
        return on
    with suppress(ValueError):
        if 0 < (value := float(word)) < math.inf:
            return value
    words = " or off" if on is None else f", on ({on:g}) or off"
    raise SettingError(f"{name} must be a positive number{words}", value=repr(text))


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Which training steps have their memory measured."""

    interval: int = 50
    """Steps from one measured step to the next; on the CPU one costs about a fifth more."""
    warmup: int = 20
    """Steps before the first measured one; a shorter run has its last one measured."""

    def __post_init__(self) -> None:
        check_range("monitor.interval", self.interval, low=1)
        check_range("monitor.warmup", self.warmup, low=0)


@dataclass(frozen=True, kw_only=True)
class FactorSettings:
    """How the safety factor is learned from run to run."""

    policy: str = "affine"
    """How observations become the next factor: a straight line through them, or a share of the way to the target."""
    prior: str = "auto"
    """Where the first run's factor comes from: probe (its prediction) or table (of experience); auto: probe, but table
    under momentum."""
    target: float = 0.90
    """Share of the capacity that a run's peak should reach."""
    momentum: float = 0.3
    """Share of an adjustment that is applied at once (policy momentum)."""
    oom_cut: float = 0.15
    """Fall of the factor after an out-of-memory (policy momentum)."""
    min: float = 0.05
    """Smallest factor."""
    max: float = 1.0
    """Largest factor."""

    def __post_init__(self) -> None:
        check_choice("factor.policy", self.policy, ("affine", "momentum"))
        check_choice("factor.prior", self.prior, ("auto", "probe", "table"))
        check_range("factor.oom_cut", self.oom_cut, low=0.0, high=1.0)
        for name in ("target", "momentum", "min"):
            check_range(f"factor.{name}", getattr(self, name), above=0.0, high=1.0)
        check_range("factor.max", self.max, low=self.min, high=1.0)

    @property
    def from_table(self) -> bool:
        """Whether the first run's factor comes from the experience table."""
        return self.prior == "table" or (self.prior == "auto" and self.policy == "momentum")


NOTIFY_WORDS: Final = ("run", "state", "why", "label", "folder")
"""Placeholders of `cluster.notify`."""


def _check_notify(command: Sequence[str]) -> None:
    """Raises ConfigError if a command names an unknown placeholder, or makes the words of a run a program's code."""
    remedy = "Write it as cluster.notify=[/path/to/program,'{run}','{state}']"
    if isinstance(command, str):
        raise ConfigError("cluster.notify must be a list of a program and its arguments", value=repr(command),
                          remedy=remedy)  # fmt: skip
    before: str | None = None
    for argument in map(str, command):
        words = re.findall(r"\{(\w*)\}", argument)
        if unknown := [word for word in words if word not in NOTIFY_WORDS]:
            raise unknown_name("placeholder of cluster.notify", unknown[0], NOTIFY_WORDS)
        # `-c`, also as `-ec`, is followed by a program's text.
        if words and (before is None or re.fullmatch(r"-\w*c", before)):
            what = "the program" if before is None else f"code after {before}"
            remedy = "Give them as arguments: [sh,-c,'echo \"$1\" >> ends.txt',sh,'{run}']"
            raise ConfigError("cluster.notify puts words of a run into code", value=f"{argument!r} is {what}",
                              remedy=remedy)  # fmt: skip
        before = argument


_MOUNT: Final = re.compile(r"/[^:,]*:/[^:,]+(?::.+)?|/[^:,]+")
"""A folder of the node, its place in the container, and options of the mount. A single path is the same in both, for
Apptainer and for Pyxis (man apptainer-exec, --bind; args.c of Pyxis).
"""
_MOUNT_OF_PYXIS: Final = re.compile(r"(?:tmpfs|umount):/[^:,]+(?::.+)?")
"""A file system in memory, or a mount that is taken away, which only Pyxis has."""


def _check_mounts(mounts: Sequence[str], runtime: str) -> None:
    """Raises ConfigError if a mount of a container has another form than its program reads."""
    for mount in map(str, mounts):
        if not _MOUNT.fullmatch(mount) and (runtime == "apptainer" or not _MOUNT_OF_PYXIS.fullmatch(mount)):
            raise ConfigError("cluster.container_mounts must list absolute paths, one mount an item", value=repr(mount),
                              remedy="Write it as cluster.container_mounts=[/on/the/node:/in/the/container,"
                                     "/data:/data:ro]")  # fmt: skip


AUTO_PACK: Final = "auto"
"""The value of `cluster.pack` that lets can-train choose how many runs share a GPU."""
MOST_PACKED: Final = 32  # runs on a GPU; each also takes processors and memory of the host
_MAIL_EVENTS: Final = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT",
                       "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS")  # fmt: skip
AUTO_PARTITION: Final = "auto"
"""The value of `cluster.partition` that lets can-train choose."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Where `--submit` sends a run, and the requests of its job."""

    executor: str = "local"
    """How jobs are started: slurm, local (a background process of this machine) or debug (in this process)."""
    partition: str = ""
    """Partition, or auto: the one where the run is predicted to end first; empty: the cluster's default."""
    account: str = ""
    """Account that is charged; empty: the user's default."""
    qos: str = ""
    """Quality of service; empty: the default."""
    time: str = ""
    """Time limit: 90 (minutes), 1:30:00, 2-12 or 12h; empty: a day, or less where a limit is less."""
    nodes: int = 1
    """Number of nodes."""
    gpus: str = "auto"
    """GPUs of each node, one rank each: 2, a100:2, or auto: one where the run's device is a GPU."""
    ranks: int = 0
    """Processes of each node for a run without GPUs; 0: one, or one for each GPU."""
    cpus: int = 0
    """Processors of each rank; 0: a share of the node."""
    mem: str = ""
    """Memory of each node (16G, 900M); empty: a share of the node."""
    mem_per_gpu: str = ""
    """Memory for each GPU in place of `mem` (16G)."""
    cpus_per_gpu: int = 0
    """Processors for each GPU in place of `cpus`; 0: as `cpus` says."""
    tmp: str = ""
    """Temporary disk space that each node must have (100G)."""
    constraint: str = ""
    """Features that nodes must have, as SLURM writes them."""
    gres: str = ""
    """Generic resources of each node, as SLURM writes them."""
    exclude: str = ""
    """Nodes that must not be used: n1,n2 or n[1-3,7]."""
    nodelist: str = ""
    """Nodes that the job must have: n1,n2 or n[1-3,7]."""
    reservation: str = ""
    """Reservation whose nodes the job uses."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    clusters: str = ""
    """Cluster that gets the job, through SLURM's accounting; empty: this machine's cluster."""
    begin: str = ""
    """Earliest start: 16:00, now+2hours, 2027-01-31T08:00."""
    nice: str = ""
    """The job's priority is lowered by this number."""
    comment: str = ""
    """Text that SLURM keeps with the job."""
    job_name: str = ""
    """Name of the job; empty: the run's configuration."""
    mail_user: str = ""
    """Address that SLURM writes to."""
    mail_type: str = ""
    """Events of a job that SLURM writes about: END,FAIL."""
    additional: Mapping[str, Any] = field(default_factory=dict)
    """Any other option of sbatch, by its long name."""
    setup: Sequence[str] = ()
    """Lines of shell that a job of SLURM runs first (module load, conda activate); a line that fails ends the job."""
    teardown: Sequence[str] = ()
    """Lines of shell that a job of SLURM runs after the training."""
    python: str = ""
    """Python of the job; empty: the one that `setup` puts first on PATH, else the Python of the submission."""
    srun_args: Sequence[str] = ()
    """Further arguments of srun (--cpu-bind=none)."""
    container: str = ""
    """Image of the container of a job: a file, or a name as docker://... for Apptainer or nvcr.io#... for Pyxis."""
    container_runtime: str = "auto"
    """Program that runs the image: pyxis, apptainer, or auto: Pyxis where srun has it, else Apptainer."""
    container_mounts: Sequence[str] = ()
    """Further folders in the container, as /on/the/node:/in/the/container[:options], or one path for both. Code, runs,
    state and data are there."""
    signal_delay_s: int = 120
    """Seconds from the warning of a job to its time limit; it then saves and goes back into the queue."""
    max_restarts: int = 100
    """Times that a job is put back into the queue for the time limit or a killed process."""
    oom_resubmits: int = 2
    """Times that a run is submitted again after it ran out of memory."""
    notify: Sequence[str] = ()
    """Command that a submitted run starts when it has ended: a program and its arguments, in which {run}, {state},
    {why}, {label} and {folder} are replaced. No shell reads them."""
    notify_on: str = "end"
    """Ends that `notify` is started for: end (every end) or failure."""
    retries: int = 2
    """Times that a run is submitted again after a fault of its node (ECC, driver, file system), without that node."""
    max_parallel: int = 0
    """Jobs of a sweep that run at once; 0: all."""
    pack: str = ""
    """Runs of a sweep that share a GPU: a number, or auto: as many as are predicted to fit; empty: one."""

    def __post_init__(self) -> None:
        check_choice("cluster.executor", self.executor, ("slurm", "local", "debug"))
        check_choice("cluster.notify_on", self.notify_on, ("end", "failure"))
        _check_notify(self.notify)
        check_choice("cluster.container_runtime", self.container_runtime, ("auto", "pyxis", "apptainer"))
        _check_mounts(self.container_mounts, self.container_runtime)
        check_range("cluster.nodes", self.nodes, low=1)
        for name in (
            "ranks",
            "cpus",
            "cpus_per_gpu",
            "max_restarts",
            "oom_resubmits",
            "max_parallel",
            "retries",
            "signal_delay_s",
        ):
            check_range(f"cluster.{name}", getattr(self, name), low=0)
        if self.pack not in ("", AUTO_PACK):
            if not 1 <= self.runs_per_job <= MOST_PACKED:
                raise SettingError(f"cluster.pack is {AUTO_PACK}, or a number of runs from 1 to {MOST_PACKED}",
                                   value=repr(self.pack))  # fmt: skip
            if self.nodes > 1 or self.ranks_per_node > 1:
                raise ConfigError("cluster.pack puts several runs on one GPU, and each run trains in one process",
                                  value=f"{self.nodes * self.ranks_per_node} processes a run",
                                  remedy="Leave out pack, or ask for one GPU of one node")  # fmt: skip
        if self.time:
            parse_time_min(self.time)
        for size in filter(None, (self.mem, self.mem_per_gpu, self.tmp)):
            parse_memory_mib(size)
        for name, other in (("mem", "mem_per_gpu"), ("cpus", "cpus_per_gpu")):
            if getattr(self, name) and getattr(self, other):
                value = f"{name} {getattr(self, name)}, {other} {getattr(self, other)}"
                raise ConfigError(f"cluster.{name} cannot go with cluster.{other}", value=value,
                                  remedy=f"Leave out {name} or {other}")  # fmt: skip
        if self.nice and not re.fullmatch(r"[+-]?\d{1,10}", self.nice, re.ASCII):
            # sbatch ignores a word.
            raise ConfigError("cluster.nice must be a whole number", value=repr(self.nice), remedy="Write it as 100")
        if self.gpus != "auto" and not re.fullmatch(r"(?:[\w.-]+:)?\d{1,4}", self.gpus, re.ASCII):
            raise ConfigError("cluster.gpus must be a number, type:number or auto", value=repr(self.gpus),
                              remedy="Write it as 2 or a100:2")  # fmt: skip
        for event in filter(None, self.mail_type.split(",")):
            # sbatch ignores an unknown event, and nobody is written to.
            check_choice("cluster.mail_type", event.strip().upper(), _MAIL_EVENTS)
        for name in ("exclude", "nodelist"):
            nodes = getattr(self, name)
            # With a slash it is the name of a file.
            if nodes and "/" not in nodes and not _NODES.fullmatch(nodes):
                raise ConfigError(f"cluster.{name} must list nodes as SLURM writes them", value=repr(nodes),
                                  remedy="Write it as n1,n2 or n[1-3,7]")  # fmt: skip
        if self.ranks and self.gpus_per_node not in (0, self.ranks):
            raise ConfigError("cluster.ranks must be the number of GPUs of a node: each rank trains on one",
                              value=f"ranks {self.ranks}, GPUs {self.gpus_per_node}",
                              remedy="Leave out ranks, or ask for no GPUs: --gpus 0")  # fmt: skip
        if self.num_gpus and _gpus_of_gres(self.gres):
            raise ConfigError("cluster.gpus and cluster.gres both request GPUs",
                              value=f"gpus {self.gpus}, gres {self.gres}", remedy="Leave out gpus or gres")  # fmt: skip

    @property
    def ranks_per_node(self) -> int:
        """Processes of each node: one for each GPU, and at least one."""
        return self.ranks or max(1, self.gpus_per_node)

    @property
    def runs_per_job(self) -> int:
        """Runs that a job trains beside each other on its GPU."""
        if self.pack in ("", AUTO_PACK):
            return 1
        return int(self.pack) if re.fullmatch(r"\d{1,4}", self.pack, re.ASCII) else 0

    @property
    def tasks_per_node(self) -> int:
        """Processes of each node, of all runs of the job."""
        return self.ranks_per_node * self.runs_per_job

    @property
    def num_ranks(self) -> int:
        """Processes of the job on all of its nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def wants_place(self) -> bool:
        """Whether can-train is to choose the partition (`--partition auto`)."""
        return self.partition == AUTO_PARTITION

    @property
    def cpus_per_node(self) -> int:
        """Processors of each node, as far as they were asked for, and at least one of each rank."""
        return self.cpus_per_gpu * self.gpus_per_node or max(1, self.cpus) * self.tasks_per_node

    @property
    def memory_per_node_mib(self) -> int:
        """Memory of each node in MiB; 0: it was not asked for, or is a whole node's."""
        if self.mem:
            return parse_memory_mib(self.mem)
        return parse_memory_mib(self.mem_per_gpu) * self.gpus_per_node if self.mem_per_gpu else 0

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node that `gpus` or `gres` asks for."""
        return self.num_gpus or _gpus_of_gres(self.gres)

    @property
    def requests_gpus(self) -> bool:
        """Whether the job has GPUs, or shares of them, in any spelling of sbatch."""
        return bool(self.num_gpus) or self.names_gpus

    @property
    def names_gpus(self) -> bool:
        """Whether `gres` or `additional` says how many GPUs, or shares of them, the job has."""
        counts, resources = self._gpu_options()
        return bool(counts) or any(_GPU_RESOURCE.search(value) for value in resources)

    @property
    def gpu_kinds(self) -> list[str]:
        """Kinds of GPU that the job asks for, by the cluster's names for them; empty: any."""
        counts, resources = self._gpu_options()
        kinds = [found[1] for value in (self.gpus, *counts) for found in re.finditer(r"(?:^|,)([^,:=]+)[:=]\d", value)]
        return [*kinds, *(found[1] or found[2] for value in resources for found in _KIND_OF_GRES.finditer(value))]

    def _gpu_options(self) -> tuple[list[str], list[str]]:
        """Returns the values of sbatch's options that count GPUs, and of those that count any resource."""
        given = {"gres": self.gres, **self.additional}
        options = {str(name).replace("_", "-"): str(value) for name, value in given.items()
                   if value is not False and value is not None}  # fmt: skip
        counts = [value for name, value in options.items() if name.startswith("gpus")]
        return counts, [value for name, value in options.items() if name.startswith(("gres", "tres-per-"))]

    @property
    def num_gpus(self) -> int:
        """GPUs of each node; 0 if `gpus` is auto, which leaves the number to the partition."""
        return 0 if self.gpus == "auto" else int(self.gpus.rpartition(":")[2])

    @property
    def gpu_type(self) -> str:
        """Kind of the GPUs, by the cluster's name for it; empty: any."""
        return next(iter(self.gpu_kinds), "")


_NODES: Final = re.compile(r"{0}(?:,{0})*".format(r"\w[\w.-]*(?:\[\d[\d,-]*\][\w.-]*)*"))
"""Names of nodes, each with any number of ranges: n1,rack[0-3]n[01-16,20]."""


_GPU_RESOURCE: Final = re.compile(r"(?:^|[,\[' ])(?:gres[/:])?(?:gpu|shard|mps)(?![\w.-])")
"""A GPU, or a share of one, among generic resources: gpu:a100:2, gres/gpu=1, shard:4."""


_KIND_OF_GRES: Final = re.compile(r"(?<![\w.-])gpu:(?:([^,:=()]+)[:=]\d|([^,:=()]*[^,:=()\d][^,:=()]*))")
"""The kind of a GPU among generic resources: a100 in gpu:a100:2, in gpu:a100 and in gres/gpu:a100=1."""


def _gpus_of_gres(gres: str) -> int:
    # In gpu:2, gpu:a100:2 and gpu alone the number is the last part, and a name may end in parentheses.
    found = re.findall(r"(?:^|,)gpu(?::[^,:()]*[^,:()\d][^,:()]*)?(?::(\d+))?(?=[,(]|$)", gres)
    return sum(int(number or 1) for number in found)


PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
DEFAULT_TARGET_MIB = 2048.0  # of a micro-batch, which `accumulation_target_mib=on` means


CHOICES: Final = {
    "compile": ("off", "default", "max-autotune", "cudagraphs"),
    "data_on_device": ("auto", "on", "off"),
    "find_batch_size": ("auto", "max", "opt", "off"),
    "accumulation": ("even", "divisor"),
    "oversize": ("error", "skip"),
    "lr_scale": ("auto", "none", "sqrt", "linear"),
    "optimizer": ("adamw", "adam", "sgd", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "nadam", "radam",
                  "rmsprop", "rprop"),
    "fit": ("auto", "split", "recompute", "offload", "offload-optimizer", "offload-all", "shard", "off"),
    "micro_batch": ("auto", "fastest", "largest"),
    "order": ("shuffled", "bucketed"),
    "precision": PRECISIONS,
    "scheduler": ("cosine", "constant", "linear", "one-cycle", "step", "plateau", "wsd"),
    "scheduler_interval": ("step", "epoch"),
}  # fmt: skip
"""The values of each training setting that has a fixed list of them. An optimizer may also be code, `module.Class`."""


CLOSURE_REASON: Final = "it computes the loss several times in a step, and a batch may be computed in parts"
SPARSE_REASON: Final = "it takes sparse gradients, and the gradient of a batch is dense"
_NO_OPTIMIZERS: Final = {"lbfgs": CLOSURE_REASON, "sparseadam": SPARSE_REASON}
"""Optimizers of `torch.optim` that cannot train here, and the reason."""


def is_code(optimizer: str) -> bool:
    """Tells whether an optimizer's name is `module.Class`, `module:Class` or `file.py:Class`, no class of PyTorch's."""
    return "." in optimizer or ":" in optimizer


def _optimizer_name(given: str) -> str:
    """Returns the name of an optimizer of `torch.optim` in lower case, and that of any other as it is."""
    name = given.strip().removeprefix("torch.optim.")
    if reason := _NO_OPTIMIZERS.get(name.lower()):
        raise ConfigError(f"training.optimizer cannot be {name}: {reason}", remedy="Try --optimizer adamw")
    if name.lower() in CHOICES["optimizer"]:
        return name.lower()
    if not is_code(given):
        check_choice("training.optimizer", name, CHOICES["optimizer"])
    return given.strip()


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a run is trained."""

    epochs: int = 6
    """Passes over the training data."""
    batch_size: int = 0
    """Logical batch: samples that one optimizer step sees; 0: the preset's, lr_batch_size."""
    find_batch_size: str = "auto"
    """opt: keep the batch and split it where it does not fit; max: the largest that fits; off: as given; auto: opt."""
    accumulation: str = "even"
    """even: fewest micro-batches, sizes differing by at most 1; divisor: equal micro-batches."""
    find_batch_size_steps_per_trial: int = 3
    """Steps of one trial of the batch-size search."""
    gradient_accumulation_steps: int = 1
    """Batches of batch_size samples that make one optimizer step."""
    accumulation_splits: str = "off"
    """A batch is computed in at least this many parts; the batch stays as it is."""
    accumulation_threshold: float = 0.0
    """Units of the task's main feature; a batch with fewer is not cut if it fits; 0: no threshold."""
    accumulation_target_mib: str = "off"
    """Cut batches until a micro-batch costs no more than this many MiB; on: 2048."""
    accumulation_max_splits: int = 4
    """Most micro-batches planned to reach accumulation_target_mib; a rescue may exceed it, and says so."""
    preflight_threshold: str = "off"
    """Units of the main feature; a batch with more becomes several optimizer steps, which changes the training."""
    oversize: str = "error"
    """Samples that do not fit by themselves: error names them before the first step, skip leaves them out."""
    min_steps_per_epoch: int = 50
    """With max: fewest optimizer steps of an epoch, which bounds the batch."""
    steps_per_epoch: int = 0
    """Optimizer steps of an epoch where samples come from a stream; 0: as many as its length makes."""
    micro_batch_size: int = 0
    """Fixed number of samples on the device at once, without a search; 0 searches."""
    micro_batch: str = "auto"
    """fastest: the size that took least time in earlier runs; largest: that fits; auto: fastest on a GPU."""
    min_micro_batch_size: int = 1
    """Samples below which a batch is never split."""
    fit: str = "auto"
    """How far a step goes to fit, with the same gradient: split, recompute, offload (saved tensors), offload-optimizer,
    offload-all, shard; auto: the first to fit; off: an out-of-memory error ends the run."""
    recompute: list[str] = field(default_factory=list)
    """Modules that the backward pass computes again, by name or pattern: [layers.*]; none: chosen from the model."""
    adaptive_micro_batch: bool = True
    """Rescue from out-of-memory: undo the micro-batch, split it and go on. Off, it is an error."""
    backoff_factor: float = 2.0
    """Divisor of a micro-batch that ran out of memory."""
    oom_retries: int = 3
    """Attempts at the smallest micro-batch, in case the memory belongs to another process."""
    regrow: bool = True
    """Let micro-batches grow back after a quiet stretch; off keeps the size that worked."""
    cuda_empty_cache_interval: int = 1000
    """Optimizer steps between releases of the allocator's cache; 0: never."""
    cuda_empty_cache_threshold_mib: str = "off"
    """Free memory below which the allocator's cache is released after a step, in MiB."""
    lr: float = 1e-3
    """Learning rate at the batch size it was chosen for (lr_batch_size)."""
    lr_batch_size: int = 64
    """Batch size that lr was chosen for."""
    lr_scale: str = "auto"
    """Learning rate against batch ÷ lr_batch_size: none, sqrt or linear; auto: sqrt under max, else none."""
    weight_decay: float = 1e-4
    """Weight decay of the optimizer."""
    optimizer: str = "adamw"
    """adamw, adam, sgd (momentum 0.9), another of torch.optim, or code: package.module.Class, my_file.py:Class."""
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer's class, by name: momentum=0.95,nesterov=true."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of the running means of the gradient and of its square, where the optimizer has them (adam, adamw)."""
    lr_factors: list[str] = field(default_factory=list)
    """Modules or parameters with a learning rate of their own, as a multiple of lr: [backbone=0.1]; patterns too."""
    no_decay: list[str] = field(default_factory=list)
    """Modules or parameters without weight decay, by name or pattern: ["*.bias","*norm*"]."""
    freeze: list[str] = field(default_factory=list)
    """Modules or parameters that are not trained, by name or pattern: [backbone]."""
    thaw_epoch: int = 0
    """Epochs after which frozen modules are trained too; 0: never."""
    precision: str = "fp32"
    """fp32, bf16 or fp16 (mixed precision), fp64."""
    tf32: bool = False
    """Compute matrix products of fp32 in TF32 on NVIDIA GPUs from Ampere on; off: only convolutions, as in PyTorch."""
    channels_last: bool = False
    """Lay images and weights of convolutions out with the channels last, which tensor cores compute with."""
    compile: str = "off"
    """torch.compile of the model: off, default, max-autotune or cudagraphs; where it fails, the model runs as it is."""
    grad_clip_norm: float = 0.0
    """Largest gradient norm, applied once a step after unscaling; 0 turns it off."""
    grad_clip_value: float = 0.0
    """Largest absolute value of each entry of the gradient, applied once a step, before the norm; 0 turns it off."""
    grad_noise: float = 0.0
    """Standard deviation of noise that is added to the gradient once a step, after it is clipped; 0 turns it off."""
    grad_noise_decay: float = 0.55
    """The variance of that noise is divided by (1 + steps done) to the power of this number; 0: it stays."""
    scheduler: str = "cosine"
    """Learning-rate schedule after the warm-up: cosine or linear to zero, constant, one-cycle, step, plateau or wsd."""
    scheduler_interval: str = "step"
    """Whether the schedule moves after each optimizer step or after each epoch."""
    warmup_share: float = 0.05
    """Share of the schedule over which the learning rate rises linearly."""
    schedule_epochs: int = 2
    """Epochs after which step lowers the learning rate, again and again."""
    schedule_patience: int = 2
    """Validations without a better loss after which plateau lowers the learning rate."""
    schedule_factor: float = 0.1
    """Multiplier of the learning rate each time that step or plateau lowers it."""
    schedule_decay_share: float = 0.2
    """Share of the schedule, at its end, over which wsd falls linearly to zero; before, it is constant."""
    schedule_rise_share: float = 0.3
    """Share of one-cycle over which the learning rate rises; it falls in the rest."""
    schedule_start_divisor: float = 25.0
    """Highest learning rate of one-cycle ÷ its first one."""
    schedule_end_divisor: float = 1e4
    """First learning rate of one-cycle ÷ its last one."""
    seed: int = 42
    """Seed of weights, data order and dropout."""
    deterministic: bool = False
    """Use deterministic algorithms only; an operation that has none is an error."""
    patience: int = 0
    """Validations (one each `val_interval` epochs) without a better one before training stops; 0: never early."""
    best_by: str = "loss"
    """Figure of the validation that chooses the best weights and stops early: loss, a metric as accuracy, mae:min."""
    keep: str = "best"
    """Weights that a run ends with: best or last; a number: best, and a file of weights every so many epochs."""
    ema: str = "off"
    """Averages weights over the steps: decay of an exponential moving average as 0.999, or equal: the mean."""
    ema_start: float = 0.0
    """Share of the training after which the average of the weights begins."""
    max_time: str = ""
    """Training time, over all attempts, after which training ends, as 90 (minutes) or 12h; empty: no limit."""
    val_interval: int = 1
    """Epochs between validations."""
    order: str = "shuffled"
    """Order of training samples: shuffled, or bucketed: batches of samples of about the same size, which pad less."""
    data_on_device: str = "auto"
    """Keep small data on the GPU and make batches there: on, off, or auto: where micro-batches stay as they are."""
    num_workers: str = "auto"
    """Processes that read samples ahead; auto: as many as processors, up to 8, where reading takes time; 0: none."""
    log_splits: bool = False
    """Write a line to the log for each batch that is split: its parts, how much they hold, and the peak."""
    checkpoint_every: int = 100
    """Optimizer steps between checkpoints, beside the one after each epoch."""
    start_from: str = ""
    """Finished run, by name or folder, whose best weights training starts from; empty: fresh weights."""
    use_adaptive_batch_size_factor: bool = True
    """Learn the safety factor from every run; off, graph_memory_safety_factor is used and nothing learned."""
    graph_memory_safety_factor: float = 0.6
    """Static safety factor, used if use_adaptive_batch_size_factor is off."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", _optimizer_name(self.optimizer))
        for name, values in CHOICES.items():
            if name != "optimizer":
                value = getattr(self, name)
                # As in names of settings, `-` and `_` are equivalent.
                if isinstance(value, str) and (hyphenated := value.replace("_", "-")) in values:
                    object.__setattr__(self, name, hyphenated)
                check_choice(f"training.{name}", getattr(self, name), values)
        for name in ("epochs", "find_batch_size_steps_per_trial", "gradient_accumulation_steps", "min_steps_per_epoch",
                     "lr_batch_size", "val_interval", "checkpoint_every", "accumulation_max_splits",
                     "min_micro_batch_size", "schedule_epochs", "schedule_patience", "schedule_start_divisor",
                     "schedule_end_divisor"):  # fmt: skip
            check_range(f"training.{name}", getattr(self, name), low=1)
        for name in ("batch_size", "micro_batch_size", "steps_per_epoch", "weight_decay", "grad_clip_norm",
                     "grad_clip_value", "grad_noise", "grad_noise_decay", "patience", "accumulation_threshold",
                     "oom_retries", "cuda_empty_cache_interval", "thaw_epoch"):  # fmt: skip
            check_range(f"training.{name}", getattr(self, name), low=0)
        if len(self.betas) != 2:
            raise SettingError("training.betas must have two numbers", value=str(list(self.betas)))
        for beta in self.betas:
            check_range("Each of training.betas", beta, low=0.0, high=1 - 1e-9)
        check_range("training.seed", self.seed, low=0, high=2**32 - 1)
        check_range("training.backoff_factor", self.backoff_factor, above=1.0, high=1e6)
        check_range("training.lr", self.lr, above=0.0)
        for name in ("warmup_share", "schedule_decay_share", "schedule_rise_share", "ema_start"):
            check_range(f"training.{name}", getattr(self, name), low=0.0, high=1.0)
        check_range("training.schedule_factor", self.schedule_factor, above=0.0, high=1.0)
        if given := {"params", "lr", "weight_decay"} & self.optimizer_args.keys():
            raise ConfigError("training.optimizer_args cannot have lr, weight_decay or params, which others give",
                              value=", ".join(sorted(given)),
                              remedy="Give --lr, --weight-decay, --lr-factors or --no-decay")  # fmt: skip
        check_range("training.graph_memory_safety_factor", self.graph_memory_safety_factor, above=0.0, high=1.0)
        object.__setattr__(self, "num_workers", str(self.num_workers))
        if self.num_workers != "auto" and not self.num_workers.isdecimal():
            raise SettingError("training.num_workers must be a whole number, at least 0, or auto",
                              value=repr(self.num_workers))  # fmt: skip
        # These properties raise if they are not as they should be.
        _ = (self.splits, self.target_mib, self.preflight_units, self.free_threshold_mib, self.lr_factor_of,
             self.criterion, self.keep_every, self.averaging, self.max_seconds)  # fmt: skip
        fixed, least = self.micro_batch_size, self.min_micro_batch_size
        if 0 < fixed < least:
            raise ConfigError("training.micro_batch_size is smaller than training.min_micro_batch_size",
                              value=f"{fixed} < {least}", remedy="Change either")  # fmt: skip
        if self.accumulation_threshold > 0 and self.gradient_accumulation_steps > 1:
            # With a threshold, "accumulation steps" usually means the parts of one batch, not several batches.
            steps, threshold = self.gradient_accumulation_steps, self.accumulation_threshold
            raise ConfigError("training.gradient_accumulation_steps and training.accumulation_threshold cannot be "
                              "combined: the first multiplies the batch, the second splits it",
                              value=f"gradient_accumulation_steps {steps}, accumulation_threshold {threshold:g}",
                              remedy=f"To compute each batch in {steps} parts: --accumulation-splits {steps} "
                                     "--gradient-accumulation-steps 1. To make one step of "
                                     f"{steps} batches: --accumulation-threshold 0")  # fmt: skip

    def validates_after(self, epochs: int) -> bool:
        """Tells whether a validation follows the first `epochs` epochs."""
        return epochs % self.val_interval == 0 or epochs == self.epochs

    @property
    def criterion(self) -> tuple[str, bool]:
        """The figure of `best_by`, and whether higher values of it are better."""
        name, _, direction = self.best_by.strip().rpartition(":")
        if direction in ("min", "max") and name:
            return name, direction == "max"
        name = self.best_by.strip()
        if not name:
            raise ConfigError("training.best_by must name a figure of the validation", value=repr(self.best_by),
                              remedy="Write it as loss, or as a metric of the task: accuracy")  # fmt: skip
        direction = metric_direction(name)
        if not direction:
            flag = f"--best-by {name}:max" if ":" not in name else "--best-by NAME:max"
            raise ConfigError(f"training.best_by must say whether a higher or a lower {name} is better",
                              value=repr(self.best_by), remedy=f"Write {flag}, or :min in place of :max")  # fmt: skip
        return name, direction == "max"

    @property
    def keep_every(self) -> int:
        """Epochs between files of weights; 0: there are none."""
        word = str(self.keep).strip()
        if word in ("best", "last"):
            return 0
        if not word.isdecimal() or int(word) < 1:
            raise SettingError("training.keep must be best, last, or a number of epochs", value=repr(self.keep))
        return int(word)

    @property
    def averaging(self) -> float | None:
        """The decay of the average of the weights; 1: all steps count alike; None: there is no average."""
        if str(self.ema).strip().lower() in ("equal", "1"):
            return 1.0
        decay = number_or_off("training.ema", str(self.ema))
        if decay == math.inf:
            return None
        check_range("training.ema", decay, above=0.0, high=1.0)
        return decay

    @property
    def max_seconds(self) -> float:
        """`max_time` in seconds; infinite if there is no limit."""
        return parse_time_s(self.max_time) if self.max_time else math.inf

    @property
    def splits(self) -> int:
        """`accumulation_splits` as a number; 1 if it is off."""
        splits = number_or_off("training.accumulation_splits", self.accumulation_splits)
        if splits == math.inf:
            return 1
        if splits != int(splits):
            raise SettingError("training.accumulation_splits must be a whole number or off", value=repr(splits))
        return int(splits)

    @property
    def target_mib(self) -> float:
        """`accumulation_target_mib` as a number; infinite if it is off."""
        return number_or_off("training.accumulation_target_mib", self.accumulation_target_mib, on=DEFAULT_TARGET_MIB)

    @property
    def preflight_units(self) -> float:
        """`preflight_threshold` as a number; infinite if it is off."""
        return number_or_off("training.preflight_threshold", self.preflight_threshold)

    @property
    def free_threshold_mib(self) -> float:
        """`cuda_empty_cache_threshold_mib` as a number; infinite if it is off."""
        return number_or_off("training.cuda_empty_cache_threshold_mib", self.cuda_empty_cache_threshold_mib)

    @property
    def lr_factor_of(self) -> dict[str, float]:
        """`lr_factors` as numbers by name or pattern."""
        factors = {}
        for text in self.lr_factors:
            name, _, number = text.partition("=")
            try:
                factors[name.strip()] = float(number)
            except ValueError as error:
                raise ConfigError("training.lr_factors must give each module a number", value=repr(text),
                                  remedy="Write it as [backbone=0.1]") from error  # fmt: skip
            check_range(f"training.lr_factors: {name.strip()}", factors[name.strip()], low=0.0)
        return factors


_HIGHER_WORDS: Final = frozenset((
    "accuracy", "acc", "f1", "auc", "auroc", "roc", "ap", "precision", "recall", "sensitivity", "specificity", "bleu",
    "rouge", "meteor", "r2", "iou", "dice", "jaccard", "kappa", "mcc", "correlation", "similarity", "ndcg", "psnr",
    "ssim", "likelihood", "score", "explained", "map", "exact", "match",
))  # fmt: skip
_LOWER_WORDS: Final = frozenset((
    "error", "errors", "err", "mae", "mse", "rmse", "mape", "perplexity", "ppl", "wer", "cer", "ter",
    "distance", "divergence", "kl", "nll", "brier", "fid", "false", "wasserstein", "w1", "w2", "emd",
    "residual", "pixels",
))  # fmt: skip
"""Words in the names of metrics that tell whether a higher or a lower value is better."""


@lru_cache(maxsize=4096)
def metric_direction(metric: str) -> str:
    """Returns `max` where a higher value of a metric is better, `min` where a lower one is, both by the words of its
    name; empty: its name does not tell.

    >>> metric_direction("far/mean_recall"), metric_direction("val rmse"), metric_direction("size")
    ('max', 'min', '')
    """
    name = metric.rpartition("/")[2].lower()
    # A term of the loss tells nothing: a critic's may grow while the critic learns.
    if name in ("loss", "best_validation_loss"):
        return "min"
    words = set(re.split(r"[^a-z0-9]+", name))
    # "False positive rate" and "error at 0.9 precision" are errors.
    if words & _LOWER_WORDS:
        return "min"
    return "max" if words & _HIGHER_WORDS and "negative" not in words else ""


ALIASES: Final[Mapping[str, str]] = {
    "max_epochs": "epochs",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "global_accum_steps": "gradient_accumulation_steps",
    "accum_steps": "gradient_accumulation_steps",
    "accumulation_muon_threshold": "accumulation_threshold",
    "preflight_muon_threshold": "preflight_threshold",
    "mb_backoff_factor": "backoff_factor",
    "gradient_clip_val": "grad_clip_norm",
    "schedule": "scheduler",
    "warmup": "warmup_share",
    "scheduler_after_batch": "scheduler_interval",
}
"""Alias to field of `TrainingSettings`; the names come from the projects that can-train unites."""


def canonical_name(name: str) -> str:
    """Resolves the name of a training setting: `-` and `_` are equivalent, and an alias gives its canonical name."""
    plain = name.replace("-", "_")
    return ALIASES.get(plain, plain)


def split_list(text: str, *, existing: Collection[str] = ()) -> Sequence[str]:
    """Splits a comma-separated flag, which may stand in brackets, unless the whole text is one of the `existing` names
    (a path may hold commas).
    """
    return [text] if text in existing else [part for part in without_brackets(text, "[]").split(",") if part]


def without_brackets(text: str, pair: str) -> str:
    """Returns a flag's text without the pair of brackets around the whole of it, as `--set` writes lists and dicts."""
    opening, closing = pair[0], pair[1]
    text, depth = text.strip(), 0
    for number, character in enumerate(text):
        depth += (character == opening) - (character == closing)
        if not depth:
            # A pattern of several brackets, as [ab]*.we[id]*, begins with a pair that ends before the text does.
            return text[1:-1].strip() if number and number == len(text) - 1 else text
    return text
