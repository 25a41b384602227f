"""`can-train doctor`: checks the requirements of a training, a line each, and names the remedy of each problem.

A check is a pure function that returns a `Finding`; the function above it asks this machine.
"""

import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Final

import psutil
import typer

from can_train import __version__
from can_train.cli.output import make_reporter, print_json, print_text, print_wrapped
from can_train.cli.train_options import GROUPS, OPTIONS, Flags, Groups, check_flags, make_command, resolve_runs
from can_train.config.resolved import (
    NO_TRACKER,
    PATH_FLAGS,
    PathSettings,
    cache_folder,
    check_folder,
    config_folder,
    data_root,
    state_dir,
    user_file,
)
from can_train.config.settings import split_list
from can_train.config.task_settings import package_folders
from can_train.errors import CanTrainError, ConfigError, DeviceError, first_sentence, with_command_name
from can_train.io.ownership import Account, is_private_group, other_writer, places_on_the_way
from can_train.io.units import counted, size_text
from can_train.memory.allocator_settings import OWN_SETTINGS, SETTINGS_VARIABLES, read_allocator_settings
from can_train.memory.catalogue import (
    AMD_CARDS,
    CARDS,
    SLICES,
    cards_named,
    find_card,
    gpu_key,
    read_gpu_constants,
    usable,
)
from can_train.reporter import COLUMNS, wrapped
from can_train.runs.scheduler import NoControllerError
from can_train.slurm.client import Partition, is_installed, read_partitions, read_version

OK: Final = "ok"
NOTE: Final = "note"  # it works, and something is worth knowing
PROBLEM: Final = "problem"  # something does not work, or will not

_TESTED_PYTHONS: Final = ((3, 11), (3, 14))  # oldest and newest
# The least driver of a CUDA release on Linux, by its first number. Source: NVIDIA's table of minor version
# compatibility in the CUDA release notes.
_LEAST_DRIVERS: Final = {"11": "450.80.02", "12": "525.60.13", "13": "580"}
_NO_CACHING: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # variable that turns PyTorch's allocator off
_FREE_SHARE: Final = 0.9  # of a GPU's memory; less is free only where another process holds some
_CLOCK_SLACK_S: Final = 2.0  # between two clocks that are kept in time, by a file system that counts whole seconds
_MANY_RUNS: Final = 10  # times the disk that one run needs; with more, the disk is large enough
_NO_CLUSTER: Final = "establish a configuration source"  # in SLURM's error where no cluster is
_IN_STATE: Final = ("runs", "code", "observations", "events")  # folders in the state folder
_MAX_NAMED: Final = 6  # packages, data sets or partitions that a line names
_NETWORK_FILE_SYSTEMS: Final = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|smb2|lustre|gpfs|beegfs|ceph|glusterfs|afs|9p|panfs|wekafs|pvfs2|orangefs|fuse\.\w+"
)


@dataclass(frozen=True)
class Finding:
    """The outcome of a check."""

    subject: str
    status: str  # ok, note or problem
    found: str
    remedy: str = ""  # without a full stop; empty if there is nothing to do


_LINE: Final = ("model", "dataset", "mode", "size", "device", "memory", "task", "model_args", "set")
"""Options that choose model, data and device; they are for --gradients."""
_OF_PRUNE: Final = ("older_than", "yes")
_ACTIONS: Final = ("prune", "report", "gradients", "target_gpu")
"""Options that exclude each other."""
_MACHINE: Final = ("gradients", "target_gpu", "report", "prune", *_OF_PRUNE, "json", *PATH_FLAGS)
"""Options of the doctor's own."""
_OPTIONS: Final[dict[str, tuple[Any, Any, str]]] = {
    "gradients": (bool, False, "Show that splitting a batch keeps its gradient; takes the flags of a training line."),
    "target_gpu": (str | None, None, "GPUs to look up in the catalogue: a100-40gb,t4."),
    "prune": (bool, False, "List what can be made again and was not used for long, and ask whether to delete it."),
    "report": (bool, False, "Print what a bug report needs: versions and hardware, no names, paths or secrets."),
    "older_than": (str | None, None, "Time without use, with --prune: 30d, 12h. [90d]"),
    "yes": (bool, False, "Do not ask before --prune deletes."),
    "json": (bool, False, "Print JSON."),
    **{name: OPTIONS[name] for name in (*PATH_FLAGS, *_LINE)},
}
_TITLE, _EVERYDAY, _ = GROUPS[0]
_OF_TRAINING: Final = [name for _, everyday, others in GROUPS for name in f"{everyday} {others}".split()]
_GROUPS: Final[Groups] = (
    ("Options", " ".join(_MACHINE), ""),
    (f"{_TITLE}, with --gradients", f"{_EVERYDAY} device", ""),
    ("How it is trained, with --gradients",
     "", " ".join(name for name in _OF_TRAINING if name not in (*_MACHINE, *_EVERYDAY.split(), "device"))),
)  # fmt: skip


def make_doctor_command(words: Sequence[str]) -> Callable[..., None]:
    """Makes the command."""
    return make_command(_OPTIONS, _doctor, words=words, groups=_GROUPS)


def _doctor(flags: Flags) -> None:
    """Check the requirements of a training: Python, GPU, SLURM, data, folders, versions.

    With --gradients: show on the model and the data of a training line that the gradient of a batch is the same however
    the batch is split.
    """
    check_flags(flags)
    # Switches of the doctor's own are off by default, those of a training neither on nor off.
    given = {name: f"--{name.rstrip('_').replace('_', '-')}" for name, value in flags.items()
             if value not in (None, "", "auto") and not (value is False and name in _MACHINE)}  # fmt: skip
    for name, flag in given.items():
        if name in _OF_PRUNE and not flags["prune"]:
            raise ConfigError(f"{flag} has no effect without --prune", remedy="Add --prune, or leave it out")
        if name not in _MACHINE and not flags["gradients"]:
            raise ConfigError(f"{flag} has no effect without --gradients", remedy="Add --gradients, or leave it out")
    actions = [given[name] for name in _ACTIONS if name in given]
    if len(actions) > 1:
        raise ConfigError(f"{' and '.join(actions)} cannot be combined", remedy="Leave one out")
    if flags["gradients"]:
        _check_gradients(flags)
        return
    paths = PathSettings(**{name: flags[name] or "" for name in PATH_FLAGS})
    check_folder("--runs-dir", Path(paths.runs_dir))
    if flags["prune"]:
        # It imports all that knows of runs.
        from can_train.cli.prune import OLDER_THAN, Places, prune

        older_than = flags["older_than"] or OLDER_THAN
        places = Places(state=state_dir(paths), cache=cache_folder(paths), runs=_runs_dir(paths))
        prune(places, older_than, yes=flags["yes"], as_json=flags["json"])
        return
    if flags["report"]:
        _print_report(bug_report(paths), as_json=flags["json"])
        return
    findings = []
    for finding in examine(paths, split_list(flags["target_gpu"] or "")):
        findings.append(finding)
        if not flags["json"]:
            # Each at once: a SLURM that does not answer takes half a minute.
            label = f"{finding.status:<9}{finding.subject:<13}"
            print_text(with_command_name(wrapped(finding.found, COLUMNS, label=label)))
            if finding.remedy:
                # Without a full stop: many end with a command.
                print_text(with_command_name(wrapped(" " * len(label) + finding.remedy, COLUMNS)))
    problems = sum(finding.status == PROBLEM for finding in findings)
    if flags["json"]:
        print_json({"problems": problems, "checks": [asdict(finding) for finding in findings]})
    elif problems:
        print_text(f"\n{counted(problems, 'problem')} found; what to do about each is below it.")
    else:
        print_text("\nNo problem was found.")
    if problems:
        raise typer.Exit(2)


def _check_gradients(flags: Flags) -> None:
    # Composition imports Hydra, and computing torch.
    from can_train.training.loading import nothing_left_behind
    from can_train.training.split_gradients import compare_gradients, comparison_json, comparison_lines

    comparisons = []
    chosen = {name: value for name, value in flags.items() if name not in _MACHINE or name in PATH_FLAGS}
    for run in resolve_runs({**chosen, "submit": False, "cluster": None}, ()):
        with nothing_left_behind():
            comparisons.append(compare_gradients(run, make_reporter()))
        if not flags["json"]:
            for line in comparison_lines(comparisons[-1]):
                print_wrapped(line)
    if flags["json"]:
        plain = [comparison_json(comparison) for comparison in comparisons]
        print_json(plain[0] if len(plain) == 1 else plain)
    if not all(comparison.equal for comparison in comparisons):
        raise typer.Exit(2)


def examine(paths: PathSettings, gpu_names: Sequence[str] = ()) -> Iterator[Finding]:
    """Makes all checks, one after another; a check that fails itself is a problem of its own."""
    cards: list[Gpu] = []
    partitions: list[Partition] = []
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("Python", lambda: [check_python(sys.version_info[:2], platform.python_version(), sys.executable)]),
        ("settings", _examine_settings),
        ("torch", lambda: _examine_torch(cards)),
        ("allocator", lambda: [check_allocator(os.environ)]),
        ("SLURM", lambda: [_examine_slurm(partitions)]),
        ("--target-gpu", lambda: _examine_cards(gpu_names, cards, partitions, state_dir(paths))),
        ("data", lambda: [_examine_data(paths)]),
        ("state folder", lambda: [check_state_folder(look_at(state_dir(paths)), on_cluster=bool(partitions))]),
        ("cache", lambda: [check_cache(look_at(cache_folder(paths)))]),
        ("permissions", lambda: _examine_permissions(paths)),
        (
            "disk",
            lambda: check_disks([look_at(_runs_dir(paths)), look_at(state_dir(paths)), look_at(cache_folder(paths))]),
        ),
        ("versions", _examine_versions),
        ("trackers", lambda: _examine_trackers(user_file().values.get("tracker", NO_TRACKER))),
    ]
    messages = set()
    for subject, check in checks:
        try:
            yield from check()
        except CanTrainError as error:
            # A settings file that is wrong is in the way of several checks.
            if str(error) not in messages:
                messages.add(str(error))
                yield Finding(subject, PROBLEM, f"{error.rule}: {error.value}", error.remedy)
        except (ImportError, OSError) as error:
            # A torch whose libraries do not load, a network file system that does not answer.
            yield Finding(subject, PROBLEM, f"cannot be looked at: {' '.join(str(error).split())}")


def _runs_dir(paths: PathSettings) -> Path:
    return Path(paths.runs_dir or user_file().values.get("runs_dir") or PathSettings.runs_dir)


# Bug report

# Parts of versions that a packager or a distribution gives. A person's own build may have a name in its version.
_PUBLIC_VERSION: Final = re.compile(r"\d[\d.]*(?:(?:a|b|rc|\.dev|\.post)\d+)*(?:\+(?:cu\d+|cpu|rocm[\d.]+|xpu)\b)?")
_PUBLIC_KERNEL: Final = re.compile(
    r"\d[\d.]*(?:[-+.](?:\d+|generic|lowlatency|amd64|arm64|x86_64|aarch64|cloud|aws|azure|gcp|oracle|default|deb\d+u\d+|"
    r"el\d+(?:_\d+)?|fc\d+|microsoft|standard|WSL2)\b)*"
)
_REPORTED_VARIABLES: Final = (
    "CAN_TRAIN_PYTHON", "CAN_TRAIN_HOME", "CAN_TRAIN_CACHE", "CAN_TRAIN_DATA", "CAN_TRAIN_CONFIG",
    "CAN_TRAIN_SIM_FOREIGN", *SETTINGS_VARIABLES, _NO_CACHING, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "SLURM_JOB_ID", "WORLD_SIZE",
)  # fmt: skip
_REPORTED_NUMBERS: Final = re.compile(r"\d{1,4}|true|false", re.IGNORECASE)
_NUMBER_SETTINGS: Final = ("nodes", "ranks", "cpus", "gpus", "cpus_per_gpu", "exclusive", "max_parallel")
"""Settings of a person's file whose values may be numbers. An account may be a number, too, and is left out."""


def bug_report(paths: PathSettings) -> dict[str, str]:
    """Describes this machine without names, paths and values of variables: each value is a version, a size, the name of
    a product, or a word of can-train's own.
    """
    from can_train.memory.host import available_bytes

    subjects: dict[str, list[str]] = {PROBLEM: [], NOTE: [], OK: []}
    for finding in examine(paths):
        subjects[finding.status].append(finding.subject)
    dependencies, extras = _requirements()
    names = {_canonical(re.split(r"[^\w-]", line, maxsplit=1)[0]) for line in (*dependencies, *extras)}
    return {
        "can-train": f"{__version__}, {'a checkout' if _project_file().is_file() else 'installed as a package'}",
        "Python": f"{_public(platform.python_version())}, {platform.python_implementation()}",
        **_reported_torch(),
        "SLURM": _public(read_version()) if is_installed() else "none",
        "system": _system(),
        "host": f"{counted(os.cpu_count() or 1, 'processor')}, {size_text(available_bytes())} of memory free",
        "packages": ", ".join(f"{name} {_public(number)}" for name in sorted(names - {"can-train", "torch"})
                              if (number := _installed(name))),
        "settings": ", ".join(_reported_setting(name, value) for name, value in _own_settings().items()) or "none",
        "variables": ", ".join(name for name in _REPORTED_VARIABLES if name in os.environ) or "none",
        "checks": "; ".join(f"{status}: {', '.join(dict.fromkeys(found))}"
                            for status, found in subjects.items() if found),
    }  # fmt: skip


def _print_report(report: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for name, value in report.items():
        print_text(wrapped(value, COLUMNS, label=f"{name:<15}"))
    print_text("\nThe report has no names of people, hosts or files, and no values of variables.\n"
               "Add the command that failed, and what it printed.")  # fmt: skip


def _public(text: str) -> str:
    found = _PUBLIC_VERSION.match(text)
    return found.group() if found else "unknown"


def _system() -> str:
    kernel = _PUBLIC_KERNEL.match(platform.release())
    library = " ".join(platform.libc_ver())
    return ", ".join(filter(None, (f"{platform.system()} {kernel.group() if kernel else ''}".strip(),
                                   platform.machine(), library.strip())))  # fmt: skip


def _reported_torch() -> dict[str, str]:
    try:
        import torch

        from can_train.memory.meters import nvidia_driver_version

        cards: list[Gpu] = []
        _examine_torch(cards)
    except (ImportError, OSError):
        return {"torch": f"{_public(_installed('torch'))}, which does not load"}
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "the CPU"
    gpus = [f"{card.device} {card.name}, {size_text(card.total_bytes)}, "
            f"compute capability {'.'.join(map(str, card.capability))}" for card in cards]  # fmt: skip
    return {
        "torch": f"{_public(str(torch.__version__))}, built for {built_for}",
        "NVIDIA driver": nvidia_driver_version() or "none",
        "GPU": "; ".join(gpus) or "none",
    }


def _own_settings() -> Mapping[str, str]:
    """Reads the settings file, which may be wrong; the checks say so."""
    try:
        return user_file().values
    except CanTrainError:
        return {}


def _reported_setting(name: str, value: str) -> str:
    return f"{name} {value}" if name in _NUMBER_SETTINGS and _REPORTED_NUMBERS.fullmatch(value) else name


# Python, torch and GPUs


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that torch sees."""

    device: str  # cuda:0
    name: str  # the driver's
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] = (0, 0)  # its CUDA compute capability; (0, 0): unknown
    architectures: Sequence[str] = ()  # that torch has code for: sm_90, compute_90; empty: unknown

    @property
    def key(self) -> str:
        """Its kind, as the factor store and the catalogue name it."""
        return gpu_key(self.name, self.total_bytes)


def _examine_torch(cards: list[Gpu]) -> list[Finding]:
    """Looks at torch and the GPUs that it sees, which are added to `cards`."""
    import torch

    from can_train.memory.host import available_bytes
    from can_train.memory.meters import nvidia_driver_version, resolve_device

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else ""
    findings = [check_torch(str(torch.__version__), built_for, nvidia_driver_version())]
    try:
        resolve_device("auto")
    except DeviceError as error:
        return [*findings, Finding("GPU", PROBLEM, f"{error.rule}: {error.value}", error.remedy)]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            # Another process has it for itself, or it has failed.
            findings.append(Finding("GPU", PROBLEM, f"cuda:{index} does not answer: {first_sentence(error)}",
                                    "Look at it with nvidia-smi, or choose another with --device"))  # fmt: skip
            continue
        cards.append(Gpu(device=f"cuda:{index}", name=torch.cuda.get_device_name(index), total_bytes=total_bytes,
                         free_bytes=free_bytes, capability=torch.cuda.get_device_capability(index),
                         architectures=torch.cuda.get_arch_list() if torch.version.cuda else ()))  # fmt: skip
        findings.append(check_gpu(cards[-1]))
    if len(findings) == 1:
        memory = size_text(available_bytes())
        findings.append(Finding("GPU", NOTE, f"none is seen: training runs on the CPU, with {memory} of memory"))
    return findings


def check_python(python: tuple[int, ...], text: str, executable: str) -> Finding:
    """Compares Python's version with the tested ones."""
    oldest, newest = (".".join(map(str, version)) for version in _TESTED_PYTHONS)
    fact = f"{text}, {executable}"
    if python < _TESTED_PYTHONS[0]:
        return Finding("Python", PROBLEM, fact, f"Use Python {oldest} or newer")
    if python > _TESTED_PYTHONS[1]:
        return Finding("Python", NOTE, f"{fact}; newer than those that are tested, {oldest} to {newest}")
    return Finding("Python", OK, fact)


def check_torch(torch_version: str, built_for: str, driver: str) -> Finding:
    """Compares the target of the torch build (`CUDA 12.8`; empty: the CPU) with the driver (empty: none)."""
    fact = f"{torch_version}, built for {built_for or 'the CPU'}"
    if not driver:
        return Finding("torch", OK, f"{fact}; no NVIDIA driver is here")
    fact = f"{fact}; NVIDIA driver {driver}"
    if not built_for:
        return Finding("torch", PROBLEM, f"{fact}: this torch cannot use the GPU", "Install a CUDA build of torch, or "
                       "set CAN_TRAIN_PYTHON to the Python of an environment that has one")  # fmt: skip
    least = _LEAST_DRIVERS.get(built_for.removeprefix("CUDA ").partition(".")[0], "0")
    if _numbers(driver) < _numbers(least):
        return Finding("torch", PROBLEM, f"{fact}: it needs driver {least} or newer",
                       "Update the driver, or install a torch that was built for an older CUDA")  # fmt: skip
    return Finding("torch", OK, fact)


def check_gpu(gpu: Gpu) -> Finding:
    """Checks that torch has code for a GPU, and that its memory is free."""
    free, total = size_text(gpu.free_bytes), size_text(gpu.total_bytes)
    fact = f"{gpu.device}, {gpu.name}: {free} of {total} free"
    # Code for `sm_80` runs on all 8.x, for `compute_80` on all later ones.
    built = [(kind, (int(major), int(minor)))
             for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(gpu.architectures))]  # fmt: skip
    has_code = any(least <= gpu.capability and (kind == "compute" or least[0] == gpu.capability[0])
                   for kind, least in built)  # fmt: skip
    if gpu.architectures and not has_code:
        number = ".".join(map(str, gpu.capability))
        return Finding("GPU", PROBLEM, f"{fact}; this torch has no code for its compute capability, {number}",
                       "Install a torch that was built for it; older cards need an older CUDA build")  # fmt: skip
    if gpu.free_bytes < _FREE_SHARE * gpu.total_bytes:
        return Finding("GPU", NOTE, f"{fact}; another process holds the rest",
                       "See which with nvidia-smi, or choose another GPU with --device")  # fmt: skip
    return Finding("GPU", OK, fact)


def check_allocator(environment: Mapping[str, str]) -> Finding:
    """Says which settings PyTorch's CUDA allocator has, and whether they leave memory unused."""
    if environment.get(_NO_CACHING, "0") not in ("", "0"):
        return Finding("allocator", NOTE, f"{_NO_CACHING} is set: each allocation waits for the driver, which makes a "
                       "training many times slower", f"Unset it: unset {_NO_CACHING}")  # fmt: skip
    name = next((name for name in SETTINGS_VARIABLES if name in environment), "")
    if not name:
        return Finding("allocator", OK, f"can-train's own settings, {OWN_SETTINGS}")
    fact = f"your settings, {name}={environment[name]}"
    if "cudaMallocAsync" in environment[name]:
        return Finding("allocator", NOTE, f"{fact}: plans predict the memory of PyTorch's own allocator, which this "
                       "is not", f"Unset it: unset {name}")  # fmt: skip
    try:
        settings = read_allocator_settings(environment)
    except ConfigError as error:
        return Finding("allocator", PROBLEM, f"{error.rule}: {error.value}", error.remedy)
    if not settings.expandable_segments:
        both = ",".join(filter(None, (environment[name], OWN_SETTINGS)))
        return Finding("allocator", NOTE, f"{fact}: segments cannot grow, so that less of a GPU's memory can be used",
                       f"Let them: export {name}={both}")  # fmt: skip
    return Finding("allocator", OK, fact)


def _examine_cards(
    names: Sequence[str], cards: Sequence[Gpu], partitions: Sequence[Partition], state: Path
) -> list[Finding]:
    """Looks up the named GPUs, else the GPUs of this machine, else the GPUs of the cluster."""
    sizes = {find_card(name).key: 0 for name in names} or {card.key: card.total_bytes for card in cards}
    kinds = sorted({kind for partition in partitions for node in partition.nodes for kind in node.gpus if kind})
    findings = [] if sizes else [check_kind(kind) for kind in kinds]
    catalogue = {card.key: card for card in (*CARDS, *SLICES, *AMD_CARDS)}
    for key, total_bytes in sizes.items():
        if key in catalogue:
            use = usable(catalogue[key], read_gpu_constants(state, key, make_reporter()))
            room, total = size_text(use.capacity_bytes), size_text(use.total_bytes)
            findings.append(Finding("--target-gpu", OK, f"knows {key}: {room} of {total} usable, {use.source}"))
        else:
            remedy = f"Plan for one elsewhere with --target-memory {round(total_bytes / 2**20)}MiB"
            findings.append(Finding("--target-gpu", NOTE, f"does not know {key}, which is here", remedy))
    none = f"knows {len(CARDS)} GPUs to plan for; none is in this machine"
    return findings or [Finding("--target-gpu", OK, none)]


def check_kind(kind: str) -> Finding:
    """Says how to plan for GPUs that the cluster's nodes have, by the name that its administrator gave them."""
    keys = [card.key for card in cards_named(kind)]
    if len(keys) == 1:
        return Finding("--target-gpu", OK, f"knows the cluster's {kind} as {keys[0]}")
    if keys:
        return Finding("--target-gpu", NOTE, f"knows the cluster's {kind} as {' or '.join(keys)}",
                       f"Say which: --target-gpu {keys[0]}")  # fmt: skip
    return Finding("--target-gpu", NOTE, f"does not know the cluster's {kind}",
                   "Plan for one by its memory, with --target-gpu 16GiB")  # fmt: skip


# SLURM


def _examine_slurm(partitions: list[Partition]) -> Finding:
    """Looks for a controller; its partitions are added to `partitions`."""
    if not is_installed():
        return check_slurm(None)
    try:
        partitions += read_partitions()
        return check_slurm(partitions)
    except NoControllerError as error:
        if _NO_CLUSTER in error.value:
            return check_slurm(None)
        return Finding("SLURM", PROBLEM, f"its programs are here, but no controller answers: {error.value}",
                       "Try again on a login node; training here, without --submit, needs no SLURM")  # fmt: skip


def check_slurm(partitions: Sequence[Partition] | None) -> Finding:
    """Says where jobs can go; None: SLURM is not installed, or belongs to no cluster."""
    if partitions is None:
        return Finding("SLURM", NOTE, "no cluster here: --submit needs one, or --cluster local, which trains in the "
                       "background of this machine")  # fmt: skip
    up = [partition for partition in partitions if partition.is_up]
    if not up:
        return Finding("SLURM", PROBLEM, "it answers, and no partition is up", "Ask who runs the cluster")
    names = [f"{partition.name} (the default)" if partition.is_default else partition.name for partition in up]
    fact = f"it answers; partitions that are up: {_listed(names)}"
    if any(partition.is_default for partition in up):
        return Finding("SLURM", OK, fact)
    return Finding("SLURM", NOTE, f"{fact}; none is the default", f"Name one: --submit --partition {up[0].name}")


# A person's settings, data and folders


def _examine_settings() -> list[Finding]:
    file = user_file()
    values = ", ".join(f"{name} {value}" for name, value in file.values.items())
    listed = f"your own in {file.path}: {values}"
    return [Finding("settings", OK, listed if values else f"none of your own, which would be in {file.path}")]


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder as it was found; one that does not exist yet is judged by the nearest one above it."""

    path: Path
    error: str = ""  # why it cannot be written; empty where it can
    file_system: str = ""  # nfs4, ext4; empty where that is not known
    ahead_s: float = 0.0  # how far the clock of its file system is ahead of this machine's
    free_bytes: int = 0
    disk: int = 0  # number of its file system on this machine


def look_at(path: Path) -> Folder:
    """Examines a folder by writing an unnamed temporary file; a missing folder is not made."""
    path = path.expanduser().absolute()
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    resolved = place.resolve()
    file_system = next((mounts[folder] for folder in (resolved, *resolved.parents) if folder in mounts), "")
    error, ahead_s = "", 0.0
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"can-train doctor")
            # Over a network, the server gives the time once the bytes are there.
            os.fsync(file.fileno())
            ahead_s = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as failure:
        error = f"{place}: {failure.strerror}"
    return Folder(path=path, error=error, file_system=file_system, ahead_s=ahead_s,
                  free_bytes=shutil.disk_usage(place).free, disk=place.stat().st_dev)  # fmt: skip


def check_state_folder(folder: Folder, *, on_cluster: bool) -> Finding:
    """Checks that the state folder can be written, that its clock agrees, and that jobs see it."""
    if folder.error:
        return Finding("state folder", PROBLEM, f"it cannot be written: {folder.error}",
                       "Change its permissions, or name another one with --state-dir or $CAN_TRAIN_HOME")  # fmt: skip
    is_shared = _NETWORK_FILE_SYSTEMS.fullmatch(folder.file_system) is not None
    kind = "a network file system" if is_shared else "a disk of this machine"
    fact = f"{folder.path}, on {kind}" + (f" ({folder.file_system})" if folder.file_system else "")
    if abs(folder.ahead_s) > _CLOCK_SLACK_S:
        way = "ahead of" if folder.ahead_s > 0 else "behind"
        return Finding("state folder", PROBLEM, f"{fact}, whose clock is {abs(folder.ahead_s):.0f} s {way} this "
                       "machine's: runs would be learned from in another order",
                       "Have both set their clocks from the same server (timedatectl set-ntp true)")  # fmt: skip
    if on_cluster and not is_shared:
        return Finding("state folder", NOTE, f"{fact}: jobs on other nodes may not see it",
                       "Give a folder that all nodes have: export CAN_TRAIN_HOME=FOLDER")  # fmt: skip
    return Finding("state folder", OK, fact)


def check_cache(folder: Folder) -> Finding:
    """Checks that prepared data can be written."""
    if folder.error:
        return Finding("cache", PROBLEM, f"prepared data cannot be written: {folder.error}",
                       "Change its permissions, or name another one with --cache or $CAN_TRAIN_CACHE")  # fmt: skip
    return Finding("cache", OK, f"prepared data are in {folder.path}")


def _examine_permissions(paths: PathSettings) -> list[Finding]:
    """Lists the places that other users may change: settings, state, runs, cache, code, and the folders above them."""
    account, state = Account.current(), state_dir(paths).expanduser()
    compiled = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "can-train")
    places = {
        "settings": ("export CAN_TRAIN_CONFIG=FILE", [user_file().path]),
        "state folder": ("--state-dir FOLDER", [state, *(state / name for name in _IN_STATE)]),
        "prepared data": ("--cache FOLDER", [cache_folder(paths)]),
        "runs folder": ("--runs-dir FOLDER", [_runs_dir(paths).expanduser()]),
        "compiled code": ("export XDG_CACHE_HOME=FOLDER", [compiled]),
        "can-train's code": ("install it in a folder of your own", package_folders()),
    }
    # Each place once, as it is first named; a folder above an end is passed on the way.
    named: dict[Path, tuple[str, str, bool]] = {}
    for what, (other, ends) in places.items():
        for end in ends:
            for path in (end, *places_on_the_way(end)):
                named.setdefault(path, (what, other, path != end))
    findings, private = [], []
    for path, (what, other, is_passed) in named.items():
        # $CAN_TRAIN_CONFIG may be /dev/null.
        statuses = [path.lstat(), path.stat()] if path.is_dir() or path.is_file() else []
        writers = [(who, status) for status in statuses if (who := other_writer(status, account, is_passed=is_passed))]
        for who, status in writers[:1]:
            own_remedy = shlex.join(["chmod", "go-w", str(path)])
            remedy = own_remedy if status.st_uid == account.uid else f"Choose another: {other}"
            findings.append(Finding("permissions", PROBLEM, f"{what}: {path}: {who}", remedy))
        if not writers and not is_passed and any(is_private_group(status, account) for status in statuses):
            private.append(str(path))
    if private:
        fact = f"your own group, which has no other member, may write to {_listed(private)}"
        findings.append(Finding("permissions", NOTE, fact))
    nobody = "nobody else may change your state, your runs, your settings or can-train's code"
    return findings or [Finding("permissions", OK, nobody)]


def check_disks(folders: Sequence[Folder]) -> list[Finding]:
    """Checks that each disk of the folders has room."""
    # It imports submitit, which may be missing.
    from can_train.slurm.submission_plan import LEAST_FREE_BYTES

    findings = []
    for folder in {folder.disk: folder for folder in reversed(folders)}.values():
        fact = f"{size_text(folder.free_bytes)} free for {folder.path}"
        if folder.free_bytes < LEAST_FREE_BYTES:
            findings.append(Finding("disk", PROBLEM, f"{fact}: a run needs {size_text(LEAST_FREE_BYTES)}",
                                    "Free some, or choose others: --runs-dir, --state-dir, --cache"))  # fmt: skip
        elif folder.free_bytes < _MANY_RUNS * LEAST_FREE_BYTES:
            findings.append(Finding("disk", NOTE, f"{fact}: enough for a few runs"))
        else:
            findings.append(Finding("disk", OK, fact))
    return findings


def _examine_data(paths: PathSettings) -> Finding:
    # Composition imports Hydra.
    from can_train.config.compose import RunRequest, resolve
    from can_train.config.resolved import preset_folders, presets
    from can_train.config.task_settings import described_tasks, load_task_settings
    from can_train.errors import DataError

    root, names = data_root(paths), []
    if root.is_dir():
        named = ((task, name) for task in described_tasks() for name in presets("dataset", preset_folders(task)))
        for task, name in named:
            settings = load_task_settings(task)
            # It is not there, or it is no data set of this task.
            with suppress(ConfigError, DataError):
                run = resolve(RunRequest(task=task, model=next(iter(settings.models)), dataset=name))
                names += [name] if settings.data_files(run.dataset, root) else []
    file = user_file()
    given = str(file.path) if "data_root" in file.values else ""
    given = "--data-root" if paths.data_root else "$CAN_TRAIN_DATA" if os.environ.get("CAN_TRAIN_DATA") else given
    return check_data(root.absolute(), given, exists=root.is_dir(), names=names)


def check_data(root: Path, given: str, *, exists: bool, names: Sequence[str]) -> Finding:
    """Lists the published data sets; `given` is the flag, variable or file that names their folder."""
    if names:
        return Finding("data", OK, f"{_listed(names)}, in {root}")
    alone = "your own data are given by their path"
    if given and not exists:
        return Finding("data", PROBLEM, f"{given} names {root}, which does not exist",
                       f"Correct that, or leave it out: {alone}")  # fmt: skip
    where = f"{root} does not exist" if not exists else f"no published data set is in {root}"
    return Finding("data", NOTE, f"{where}: {alone}")


# Versions


def _project_file() -> Path:
    """Returns the path of pyproject.toml, which an installed package does not have."""
    return config_folder().parent / "pyproject.toml"


def _requirements() -> tuple[list[str], list[str]]:
    """Returns the requirements of can-train, and the requirements of its extras."""
    if _project_file().is_file():
        project = tomllib.loads(_project_file().read_text(encoding="utf-8"))["project"]
        return project["dependencies"], [line for lines in project["optional-dependencies"].values() for line in lines]
    lines = requires("can-train") or []
    return [line for line in lines if "extra ==" not in line], [line for line in lines if "extra ==" in line]


def _examine_versions() -> list[Finding]:
    base, (needed, _) = _project_file().parent, _requirements()
    checked_out = base / "scripts" / "constraints.txt"
    constraints = checked_out if checked_out.is_file() else base / "constraints.txt"
    tested = re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(encoding="utf-8"), flags=re.MULTILINE)
    least = re.findall(r"^([\w.-]+)>=([\d.]+)", "\n".join(needed), re.MULTILINE)
    lowest, exact = ({_canonical(name): version for name, version in pairs} for pairs in (least, tested))
    return [check_versions({name: _installed(name) for name in lowest}, lowest, exact, constraints)]


def _examine_trackers(names: str) -> list[Finding]:
    """Looks for the packages of the trackers that a person always uses; says nothing where there are none."""
    from can_train.runs.trackers import check_packages

    trackers = PathSettings(tracker=names).trackers
    check_packages(trackers)
    # The light package of MLflow has another name.
    versions = ", ".join(f"{name} {_installed(name) or _installed(f'{name}-skinny')}" for name in trackers)
    return [Finding("trackers", OK, versions)] if versions else []


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> list[int]:
    """Returns the numbers of a version without its local part: [2, 6, 0] of `2.6.0+cu124`."""
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]


def check_versions(
    installed: Mapping[str, str], least: Mapping[str, str], tested: Mapping[str, str], constraints: Path
) -> Finding:
    """Compares packages with the versions that can-train needs at least, and with those that it is tested with.

    Args:
        installed: Version of each package that it imports; empty where it is missing.
        least: The least version of each.
        tested: The exact versions of the tests.
        constraints: The file that has them.
    """
    lacking = [name for name, number in installed.items() if not number or _numbers(number) < _numbers(least[name])]
    if lacking:
        fact = [f"{name} {installed[name] or 'is missing'} (needs {least[name]})" for name in lacking]
        wanted = " ".join(f"'{name}>={least[name]}'" for name in lacking)
        return Finding("versions", PROBLEM, _listed(fact), f"Install them: {sys.executable} -m pip install {wanted}")
    untested = [f"{name} {number} (tested: {tested[name]})" for name, number in installed.items()
                if name in tested and _numbers(number) != _numbers(tested[name])]  # fmt: skip
    if not untested:
        return Finding("versions", OK, f"all {len(installed)} packages as they are tested")
    return Finding("versions", NOTE, f"within what is supported, others than are tested: {_listed(untested)}",
                   f"The tested versions are in {constraints}")  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
