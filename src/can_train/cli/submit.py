"""`--submit`: checks runs, keeps their code, sends them to a cluster or a background process, and says how to follow
them. Imports no torch: the job itself examines its GPU, and a child process plans for a kind of GPU that a job names.

`entry`, wherever it is an argument, is `train.continue_in_job`: a job finds it by name, in its own copy of the code.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from can_train.cli.output import ask, print_json, print_note, print_tables, print_text, print_wrapped, working
from can_train.config.resolved import ResolvedRun, plain_to_yaml, state_dir
from can_train.config.settings import AUTO_PACK, MOST_PACKED, ClusterSettings
from can_train.errors import (
    DOES_NOT_FIT,
    CanTrainError,
    ConfigError,
    DoesNotFitError,
    Stopped,
    unknown_name,
    with_command_name,
)
from can_train.io.units import count_range, counted, parse_time_min, size_text, time_text
from can_train.memory.catalogue import cards_named, several_of
from can_train.reporter import Reporter, TextTable
from can_train.runs.registry import JobRecord, Registry
from can_train.runs.run_folder import RunFolder, SweepRun, new_folders, new_run_id, register_run
from can_train.runs.run_state import FINISHED
from can_train.runs.scheduler import NoControllerError
from can_train.slurm.client import (
    Partition,
    expected_start,
    may_requeue,
    read_clusters,
    read_partitions_and_limits,
)
from can_train.slurm.container import needed_paths
from can_train.slurm.job import Entry
from can_train.slurm.placement import (
    COLUMNS,
    Place,
    Speed,
    alike_in_memory,
    best_first,
    epoch_time,
    list_places,
    notes,
    read_speeds,
    reason,
    table_rows,
    to_plain,
)
from can_train.slurm.script import Submission, parameters, python_command, script, wants_gpu, with_sbatch_variables
from can_train.slurm.snapshot import Code, code_of_runs, describe, keep, with_code
from can_train.slurm.submission_plan import (
    JobDevice,
    PlannedRun,
    SubmissionPlan,
    check_requests,
    expectation,
    job_device,
    plan_submission,
    remedy_of_refusal,
)
from can_train.slurm.submit import (
    in_packs,
    run_here,
    start_jobs,
    start_process,
    submission_folder,
    submit_job,
    unpacked,
)

_MAX_LISTED: Final = 10  # runs of an array that are listed; of more, the first ones and how many follow


def submit_runs(
    entry: Entry, placement: "Placement", *, after: Sequence[str] = (), force: bool, as_json: bool = False
) -> None:
    """Submits runs, equal requests as one array; names runs that are identical to earlier ones.

    Raises:
        CanTrainError: A run cannot be submitted; of those that ask for the same, none has been.
    """
    runs = placement.runs
    code, state = code_of_runs(runs), state_dir(runs[0].paths)
    partitions = read_cluster(runs) if placement.partitions is None else placement.partitions
    plan = plan_submission(runs, code.digest, partitions, after=after, force=force, on_host=placement.on_host)
    print_notices(plan.notices)
    expected = [expectation(group[0].run, Registry(state).runs()) for group in plan.groups]
    keep(code, state)
    if not as_json:
        for duplicate in plan.duplicate_runs:
            run_id, before = duplicate.known.run_id, duplicate.state
            doubt = "" if before.certain else " as far as its files say"
            does = "has finished" if before.state == FINISHED else f"is {before.state}{doubt}"
            print_text(f"{run_id}  is the same, and {does}")
            print_text(with_command_name(f"  its state: can-train status {run_id}"))
        if plan.duplicate_runs:
            print_text("Not submitted again; --force does so all the same.")
    jobs: list[JobRecord] = []
    folders: dict[str, RunFolder] = {}
    for group, expects in zip(plan.groups, expected, strict=True):
        # With the cluster `debug` they train here, and print their results.
        started = start_group(entry, group, plan, code)
        jobs += started
        folders |= {job.run_id: RunFolder(group[0].run.runs_dir / job.run_id) for job in started}
        if not as_json:
            print_jobs(group[0].run, started, expects, [plan.sweep[each.index] for each in group if plan.sweep])
    if as_json:
        identical = [
            {"run_id": duplicate.known.run_id, "path": duplicate.known.record.path, "state": duplicate.state.state}
            for duplicate in plan.duplicate_runs
        ]
        print_json({"submitted": [job_json(job, folders[job.run_id]) for job in jobs], "identical": identical})


def job_json(job: JobRecord, folder: RunFolder) -> dict[str, Any]:
    """Makes the JSON object of a job that was started."""
    # The script that submitit sent; a whole array has one script.
    script_path = Path(job.log_path).with_name(f"{job.job_id.partition('_')[0]}_submission.sh")
    return {"run_id": job.run_id, "path": str(folder.path.resolve()), "executor": job.executor, "job_id": job.job_id,
            "cluster": job.cluster or None, "log": job.log_path,
            "script": str(script_path) if job.executor == "slurm" else None}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The job that would be submitted for a run."""

    script: str | None  # of its job, or of the array that it is in; None where it would be a process of this machine
    device: JobDevice
    cluster: ClusterSettings = field(default_factory=ClusterSettings)  # its request


def plan_jobs(
    placement: "Placement", after: Sequence[str], *, quiet: bool = False, together: bool = True
) -> list[PlannedJob]:
    """Plans the job of each run; nothing is written down or sent.

    Args:
        placement: The runs.
        after: Runs to wait for.
        quiet: Print no notices.
        together: Send runs with equal requests as one array.

    Raises:
        CanTrainError: A run could not be submitted.
    """
    runs = placement.runs
    code, partitions = code_of_runs(runs), list[Partition]()
    try:
        partitions = read_cluster(runs)
    except NoControllerError as error:
        if not quiet:
            print_note(f"{error.rule} ({error.value}): its limits are not checked")
    plan = plan_submission(runs, code.digest, partitions, after=after, force=True, on_host=placement.on_host)
    if not quiet:
        print_notices(plan.notices)
    return _planned_jobs(plan, code, partitions, together=together)


def plan_job(run: ResolvedRun, code: Code, partitions: Sequence[Partition]) -> PlannedJob:
    """Plans the job of a run as `plan_jobs` does, with code and partitions that are known, without notices."""
    plan = plan_submission([run], code.digest, partitions, force=True)
    return _planned_jobs(plan, code, partitions, together=True)[0]


def _planned_jobs(
    plan: SubmissionPlan, code: Code, partitions: Sequence[Partition], *, together: bool
) -> list[PlannedJob]:
    planned_runs = [planned for group in plan.groups for planned in group]
    state = state_dir(planned_runs[0].run.paths)
    jobs = [PlannedJob(script=None, device=JobDevice())] * len(planned_runs)
    for group in plan.groups if together else [[planned] for planned in planned_runs]:
        cluster = group[0].run.cluster if len(group) > 1 else unpacked(group[0].run.cluster)
        if cluster.executor == "slurm":
            folders, submission = _new_group(group, plan, state)
            paths = (
                []
                if not cluster.container
                else needed_paths(
                    [planned.run.config for planned in group], code.folder(state), state, group[0].run.runs_dir
                )
            )
            job_parameters = parameters(cluster, submission, code.folder(state), paths)
            python = python_command(cluster, code.folder(state), paths)
            number = len(in_packs(group, cluster))
            text = script(submission_folder(folders, submission), job_parameters, number, python)
            for planned in group:
                jobs[planned.index] = PlannedJob(
                    script=text, device=job_device(planned.run, partitions), cluster=planned.run.cluster
                )
    return jobs


def read_cluster(runs: Sequence[ResolvedRun]) -> list[Partition]:
    """Reads the partitions of the cluster that runs are sent to; none where they go elsewhere. Of several clusters,
    SLURM takes the one where the job starts first: the first one that could take it stands for them.

    Raises:
        ConfigError: A cluster has no partition of the name, or none of several could ever take the runs.
        NoControllerError: SLURM does not answer.
    """
    on_slurm = [run for run in runs if run.cluster.executor == "slurm"]
    if not on_slurm:
        return []
    asked = with_sbatch_variables(on_slurm[0].cluster, os.environ)[0]
    if asked.wants_place:
        return read_partitions_and_limits((read_clusters(asked.clusters) or [""])[0])
    by_cluster = _read_clusters(asked.clusters)
    if len(by_cluster) == 1:
        return next(iter(by_cluster.values()))
    for cluster, partitions in by_cluster.items():
        known = {partition.name for partition in partitions}
        for name in asked.partition.split(",") if asked.partition else ():
            if name not in known:
                raise unknown_name(f"partition of the cluster {cluster}", name, known)
    return _first_that_takes(on_slurm, by_cluster)


def _read_clusters(names: str) -> dict[str, list[Partition]]:
    """Reads the partitions of the clusters of `--clusters`, by the clusters' names; "" is this machine's cluster."""
    return {name: read_partitions_and_limits(name) for name in read_clusters(names) or [""]}


def _first_that_takes(runs: Sequence[ResolvedRun], by_cluster: Mapping[str, list[Partition]]) -> list[Partition]:
    """Returns the partitions of the first cluster that could take runs.

    Raises:
        ConfigError: No cluster could.
    """
    refusals: dict[str, ConfigError] = {}
    for name, partitions in by_cluster.items():
        try:
            check_requests(runs, partitions)
        except ConfigError as error:
            refusals[name] = error
        else:
            return partitions
    reasons = [f"{name}: {_refusal(error)}" for name, error in refusals.items()]
    remedies = {name: error.remedy for name, error in refusals.items()}
    remedy = "; ".join(f"{name}: {text}" for name, text in remedies.items())
    raise ConfigError("None of these clusters could ever start the job", value="; ".join(reasons),
                      remedy=next(iter(remedies.values())) if len({*remedies.values()}) == 1 else remedy)  # fmt: skip


def _refusal(error: CanTrainError) -> str:
    return f"{error.rule} ({error.value})" if error.value else error.rule


def print_notices(notices: Sequence[str]) -> None:
    """Prints the notices of a submission."""
    for notice in notices:
        print_note(notice)


def _new_group(group: Sequence[PlannedRun], plan: SubmissionPlan, state: Path) -> tuple[list[RunFolder], Submission]:
    """Names the folders of runs that are submitted together, and their array; makes none."""
    sweep = new_run_id("sweep") if len(group) > 1 else ""
    # squeue shows the name of the job.
    name = plan.sweep[0].name if sweep and plan.sweep else group[0].run.key
    submission = Submission(name=name, state_dir=state, dependency=plan.dependency, sweep=sweep)
    return new_folders([planned.run for planned in group]), submission


def start_group(
    entry: Entry,
    group: Sequence[PlannedRun],
    plan: SubmissionPlan,
    code: Code,
    prepare: Callable[[PlannedRun, RunFolder], object] = lambda planned, folder: None,
) -> list[JobRecord]:
    """Makes the folders of runs that are submitted together, starts their jobs, and enters both into the registry.

    Args:
        entry: Function that trains the run in a folder.
        group: The runs, which have equal requests.
        plan: Their submission.
        code: Their code.
        prepare: Called for each run with its folder, before its job is started.

    Raises:
        CanTrainError: They cannot be started; folders of runs that were not accepted are removed.
        Stopped: A signal arrived while a job was sent, which is recorded.
    """
    from can_train.config.compose import changed_settings

    state = state_dir(group[0].run.paths)
    folders, submission = _new_group(group, plan, state)
    registry, cluster, unregistered = Registry(state), group[0].run.cluster, list[RunFolder]()

    def register(planned: PlannedRun, folder: RunFolder) -> None:
        register_run(
            planned.run,
            folder,
            identity=planned.identity,
            after=",".join(plan.after),
            sweep=plan.sweep[planned.index] if plan.sweep else SweepRun(),
        )
        unregistered.remove(folder)

    def record(jobs: Sequence[JobRecord]) -> None:
        by_id = {folder.run_id: (planned, folder) for planned, folder in zip(group, folders, strict=True)}
        for job in jobs:
            register(*by_id[job.run_id])
            registry.add(job)

    try:
        for planned, folder in zip(group, folders, strict=True):
            folder.make(with_code(planned.run, code, state).config, changed_settings(planned.run.config))
            unregistered.append(folder)
            describe(code, state, folder.path)
            prepare(planned, folder)
        if cluster.executor == "slurm":
            jobs = start_jobs(entry, folders, cluster, submission, record)
            _note_forbidden_requeue(jobs[0], cluster)
            return jobs
        if cluster.executor == "local":
            return [start_process(entry, folder, record) for folder in folders]
        jobs = []
        for planned, folder in zip(group, folders, strict=True):
            register(planned, folder)
            jobs.append(run_here(entry, folder, submission))
        return jobs
    except (CanTrainError, Stopped):
        # No job waits for these: it is recorded, or cancelled.
        for folder in unregistered:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def submit_again(
    entry: Entry, folder: RunFolder, run: ResolvedRun, submission: Submission, *, keeps_memory: bool = True
) -> JobRecord:
    """Sends a run that has a folder, with a snapshot of its code, to SLURM once more.

    It requests the resources of `run`, but the memory of the last job if `keeps_memory`.

    Raises:
        RunError: SLURM refused.
    """
    jobs = Registry(submission.state_dir).jobs(folder.run_id)
    # It may have been submitted again with more memory since its configuration was written.
    memory = str(jobs[-1].resources.get("mem", "")) if jobs and keeps_memory else ""
    cluster = replace(run.cluster, mem=memory, mem_per_gpu="") if memory else run.cluster
    job = submit_job(entry, folder, cluster, submission)
    _note_forbidden_requeue(job, run.cluster)
    return job


def _note_forbidden_requeue(job: JobRecord, cluster: ClusterSettings) -> None:
    if job.slurm_job is not None and cluster.max_restarts and not may_requeue(job.slurm_job):
        print_note(f"SLURM does not let job {job.slurm_job} go back into the queue (Requeue=0): at its time limit the "
                   f"run saves and ends. Then go on: can-train resume {job.run_id}")  # fmt: skip


def print_jobs(run: ResolvedRun, jobs: Sequence[JobRecord], expects: str, sweep: Sequence[SweepRun] = ()) -> None:
    """Prints the jobs that were started, their request, and how to follow them.

    Args:
        run: The first of their runs.
        jobs: The jobs.
        expects: What earlier runs measured, in words.
        sweep: The place of each run in its sweep; empty: they are in none.
    """
    cluster = run.cluster
    if cluster.executor == "debug":
        return
    kind = "job" if cluster.executor == "slurm" else "process"
    labels = [each.label for each in sweep] or [""] * len(jobs)
    for job, label in [*zip(jobs, labels, strict=True)][:_MAX_LISTED]:
        # Two clusters may have a job of the same number.
        name = job.slurm_job if cluster.clusters else job.job_id
        print_text("  ".join(filter(None, [job.run_id, f"{kind} {name}", label])))
    if len(jobs) > _MAX_LISTED:
        print_text(f"... and {len(jobs) - _MAX_LISTED} more, to {kind} {jobs[-1].job_id}")
    if cluster.executor == "slurm":
        asked = [
            f"partition {cluster.partition}" if cluster.partition else "",
            f"{cluster.nodes} nodes" if cluster.nodes > 1 else "",
            f"{cluster.num_gpus} × {cluster.gpu_type or 'GPU'}" if cluster.num_gpus else cluster.gres,
            f"{counted(cluster.cpus, 'processor')} a rank" if cluster.cpus else "",
            cluster.mem if cluster.mem not in ("", "0") else "all memory of its nodes" if cluster.mem else "",
            f"at most {time_text(parse_time_min(cluster.time))}",
        ]
        print_text(f"  asked for  {', '.join(filter(None, asked))}")
    print_text(f"  expected   {expects}")
    print_text(with_command_name(f"State: can-train status {sweep[0].name if sweep else jobs[0].run_id}"))
    print_text(with_command_name(f"Log:   can-train logs {jobs[0].run_id} -f"))


# --partition auto: the place where the run ends first

_PACKED_FILL: Final = 0.9  # share of its part of a GPU that a packed run may fill, as a run fills a whole one
_PLAN_S: Final = 600  # longest wait for a plan
_NOTHING_TO_CHOOSE: Final = "The cluster tells nothing about its partitions: the job goes to the default partition"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Runs at the best place, and all places in their order; no places where the cluster tells none, or the person who
    submits has chosen one.
    """

    runs: Sequence[ResolvedRun]
    places: Sequence[Place] = ()
    on_host: Sequence[int] = ()  # bytes of a rank of each run that wait in the memory of the host; empty: unknown
    partitions: Sequence[Partition] | None = None  # of the cluster; None: not read yet

    @property
    def json_field(self) -> dict[str, Any]:
        """The places as a field of a JSON object; empty where there are none."""
        return {"places": [*to_plain(self.places)]} if self.places else {}


def place_runs(runs: Sequence[ResolvedRun], reporter: Reporter) -> Placement:
    """Chooses a place for runs, which are submitted together; nothing is written down or sent.

    Raises:
        ConfigError: No place takes the runs.
        NoControllerError: SLURM does not answer.
        CanTrainError: A run cannot be planned.
    """
    first = runs[0]
    if first.cluster.executor != "slurm":
        raise ConfigError("cluster.partition=auto chooses among the partitions of SLURM",
                          value=f"--cluster {first.cluster.executor}", remedy="Leave out --partition")  # fmt: skip
    asked = with_sbatch_variables(first.cluster, os.environ)[0]
    by_cluster = _read_clusters(asked.clusters)
    partitions = [partition for of_cluster in by_cluster.values() for partition in of_cluster]
    if not any(partition.nodes for partition in partitions):
        reporter.notice(_NOTHING_TO_CHOOSE)
        return Placement(runs=[replace(run, cluster=replace(run.cluster, partition="")) for run in runs])
    _check_kind(first.cluster.gpu_type, partitions)
    tested: list[Place] = []
    for name, of_cluster in by_cluster.items():
        # sbatch tells only of a single cluster when a job would start there.
        request = replace(first.cluster, clusters=name) if name else first.cluster
        found = list_places(request, of_cluster, wants_gpu=wants_gpu(first.device))
        tested += _tested(first, found, of_cluster)
    places = best_first(_planned(runs, tested, reporter))
    reason(places)  # raises where no place is usable
    best = places[0]
    chosen = {name: getattr(best.cluster, name) for name in ("partition", "gpus", "clusters")}
    return Placement(runs=[replace(run, cluster=replace(run.cluster, **chosen)) for run in runs], places=places,
                     on_host=[best.on_host_bytes] * len(runs))  # fmt: skip


def _check_kind(kind: str, partitions: Sequence[Partition]) -> None:
    kinds = {name for partition in partitions for node in partition.nodes for name in node.gpus if name}
    if kind and kinds and kind not in kinds:
        raise unknown_name("kind of GPU on the cluster", kind, kinds)


def _tested(run: ResolvedRun, places: Sequence[Place], partitions: Sequence[Partition]) -> list[Place]:
    """Adds to places SLURM's expected start, or the reason why it would refuse the job."""
    code, tested = code_of_runs([run]), []
    for place in places:
        here = replace(run, cluster=place.cluster)
        try:
            job = plan_job(here, code, partitions)
        except CanTrainError as error:
            tested.append(replace(place, refusal=_refusal(error), remedy=error.remedy))
            continue
        answer = expected_start(job.script or "")
        cards = place.cards or tuple(job.device.cards)
        remedy = remedy_of_refusal(answer.refusal, place.cluster)
        tested.append(replace(place, cards=cards, start=answer.time, refusal=answer.refusal, remedy=remedy))
    return tested


def _planned(runs: Sequence[ResolvedRun], places: Sequence[Place], reporter: Reporter) -> list[Place]:
    """Adds the plans of the runs, and the time of an epoch, to the places that take the job."""
    first, keys = runs[0], dict.fromkeys(key for place in places if not place.refusal for key in place.cards)
    places = [replace(place, epochs=first.training.epochs) for place in places]
    if not keys:
        return places
    ranks = next(place.cluster.num_ranks for place in places if place.cards)
    unlike = [run for index, run in enumerate(runs) if not any(_is_alike(run, known) for known in runs[:index])]
    plans = [_plan(run, [*keys], ranks, reporter) for run in unlike]
    speeds = read_speeds(first.key, first.config, Registry(state_dir(first.paths)).runs())
    return [_with_plan(place, [cards[key] for cards in plans for key in place.cards if key in cards], ranks, speeds)
            for place in places]  # fmt: skip


def _with_plan(place: Place, cards: "Sequence[CardFigures]", ranks: int, speeds: Sequence[Speed]) -> Place:
    if place.refusal or not cards:
        return place
    if misfits := [card for card in cards if not card.fits]:
        return replace(place, does_not_fit=f"The training does not fit {misfits[0].name}", remedy=misfits[0].remedy)
    fullest = max(cards, key=lambda card: card.peak_share)
    time = epoch_time(place.cards, ranks, cards[0].samples, speeds)
    return replace(place, plan=(fullest.rung, fullest.micro_batches, f"{fullest.peak_share:.1%}"), epoch=time,
                   on_host_bytes=max(card.on_host_bytes for card in cards))  # fmt: skip


def _is_alike(run: ResolvedRun, known: ResolvedRun) -> bool:
    """Tells whether two runs have the same plan: one key, and the same settings of memory."""
    same_gpus = run.cluster.gpu_kinds == known.cluster.gpu_kinds and run.cluster.num_ranks == known.cluster.num_ranks
    return same_gpus and run.key == known.key and alike_in_memory(run.config, known.config)


# Plans


@dataclass(frozen=True, kw_only=True)
class CardFigures:
    """The figures of a run's plan for a GPU."""

    name: str  # key of the GPU; 2xa100-40gb for two of them
    fits: bool
    samples: int  # training samples of an epoch
    rung: str = ""
    micro_batches: str = ""
    peak_share: float = 0.0  # predicted peak ÷ usable memory
    on_host_bytes: int = 0  # of each rank, that wait in the memory of the host
    peak_bytes: float = 0.0  # upper end of the interval of the predicted peak
    capacity_bytes: int = 0  # usable memory
    context_bytes: int = 0  # that each process takes of the GPU, beside its tensors

    def runs_beside(self) -> int:
        """Returns how many such runs fit on the GPU beside each other."""
        whole = self.capacity_bytes + self.context_bytes
        return max(1, int(whole // (self.peak_bytes / _PACKED_FILL + self.context_bytes))) if self.peak_bytes else 1

    def __str__(self) -> str:
        return f"a run is predicted to take up to {size_text(self.peak_bytes)} of {size_text(self.capacity_bytes)}"

    rule: str = ""  # rule, value and remedy of the error, where it does not fit
    value: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, plan: Mapping[str, Any], samples: int) -> "CardFigures":
        """Reads a plan of `--dry-run --json`."""
        target = plan["target"]
        name = several_of(target["key"], target["count"])
        if not plan["fits"]:
            parts = {part: plan["error"][part] for part in ("rule", "value", "remedy")}
            return cls(name=name, fits=False, samples=samples, **parts)
        ends = plan["predicted_peak_interval_bytes"] if plan["predicted_peak_bytes"] else [0, 0]
        fewest, most = (plan["micro_batches"][each] for each in ("fewest", "most"))
        return cls(name=name, fits=True, samples=samples, rung=plan["rung"]["name"],
                   micro_batches=count_range(fewest, most, "-"),
                   on_host_bytes=sum(plan["rung"][f"{kind}_on_host_bytes"] or 0 for kind in ("state", "saved")),
                   peak_bytes=max(ends), capacity_bytes=target["capacity_bytes"],
                   context_bytes=target["total_bytes"] - target["capacity_bytes"],
                   peak_share=(plan["predicted_peak_bytes"] or 0) / target["capacity_bytes"])  # fmt: skip

    def misfit(self) -> DoesNotFitError:
        """Makes the error of a submission that asks for this GPU."""
        fact = f"Nothing was submitted, since the training does not fit {self.name}. {self.rule}"
        error = DoesNotFitError(fact, value=self.value, remedy=self.remedy)
        error.exit_code = DOES_NOT_FIT
        return error


def _plan(run: ResolvedRun, keys: Sequence[str], ranks: int, reporter: Reporter) -> dict[str, CardFigures]:
    """Plans a run for GPUs, by their keys; no plans where that fails, which is said."""
    targets = ",".join(several_of(key, ranks) for key in keys)
    # In a child: a large model may take more memory or time than a login node gives, and the job can be sent all the
    # same. This process then also needs no PyTorch.
    command = [sys.executable, "-P", "-m", "can_train", "--config", "-", "--dry-run", "--json", "--quiet",
               "--target-gpu", targets]  # fmt: skip
    with working(f"planning for {targets}"):
        try:
            done = subprocess.run(command, input=plain_to_yaml(run.config), capture_output=True, text=True,
                                  timeout=_PLAN_S, check=False)  # fmt: skip
            shown = json.loads(done.stdout)
            samples = int(shown["data"]["num_train_samples"])
            return {plan["target"]["key"]: CardFigures.of(plan, samples) for plan in shown["plans"]}
        except subprocess.TimeoutExpired:
            why = f"it took more than {_PLAN_S} s"
        except (ValueError, KeyError, TypeError):
            why = [*done.stderr.strip().splitlines(), f"exit status {done.returncode}"][0].removeprefix("error: ")
    reporter.notice(f"No plan could be made here ({why}): the job plans on its device")
    return {}


def check_fits(runs: Sequence[ResolvedRun], reporter: Reporter) -> Placement:
    """Checks that the cluster has what the jobs of runs ask for, and that the runs fit its kind of GPU, as far as the
    catalogue has it. A plan takes seconds, so the cluster is asked first.

    Raises:
        ConfigError: The cluster could never start the job of a run.
        DoesNotFitError: A run fits none of the GPUs that its job may get.
        NoControllerError: SLURM does not answer.
    """
    partitions = read_cluster(runs)
    check_requests([replace(run, cluster=unpacked(run.cluster)) for run in runs], partitions)
    on_host = [0] * len(runs)
    for index, run in enumerate(runs):
        alike = next((known for known in range(index) if _is_alike(run, runs[known])), None)
        on_host[index] = _on_host(run, reporter) if alike is None else on_host[alike]
    return Placement(runs=runs, on_host=on_host, partitions=partitions)


def pack_runs(placement: Placement, reporter: Reporter) -> Placement:
    """Decides how many runs share a GPU (`--pack auto`), by the peak that their plans predict, and tells the gain.

    Raises:
        ConfigError: The runs have no GPU, or nothing tells which.
    """
    runs = placement.runs
    if not any(run.cluster.pack for run in runs):
        return placement
    first = runs[0]
    if first.cluster.executor != "slurm" or first.device == "cpu":
        value = f"--cluster {first.cluster.executor}" if first.cluster.executor != "slurm" else "--device cpu"
        raise ConfigError("--pack puts runs of a sweep on one GPU of a job of SLURM", value=value,
                          remedy="Leave it out")  # fmt: skip
    number, why = first.cluster.runs_per_job, ""
    if first.cluster.pack == AUTO_PACK:
        plans = _plans_to_pack(runs, reporter)
        number, why = min(plan.runs_beside() for plan in plans), f": {max(plans, key=lambda plan: plan.peak_share)}"
    number = min(number, len(runs), MOST_PACKED)
    if number < 2:
        reporter.notice(f"--pack: each run gets a GPU of its own{why}")
    else:
        jobs = math.ceil(len(runs) / number)
        reporter.notice(f"--pack: {number} runs share a GPU{why}. {counted(jobs, 'job')} in place of {len(runs)}")
    pack = str(number) if number > 1 else ""
    return replace(placement, runs=[replace(run, cluster=replace(run.cluster, pack=pack)) for run in runs])


def _plans_to_pack(runs: Sequence[ResolvedRun], reporter: Reporter) -> "list[CardFigures]":
    """Plans the runs whose plans differ for each GPU that their jobs may get."""
    first = runs[0]
    keys = [card.key for kind in first.cluster.gpu_kinds for card in cards_named(kind)]
    keys = [first.device] if first.device.startswith("sim:") else [*dict.fromkeys(keys)]
    if not keys:
        remedy = "Name it: --gpus a100:1; or give a number: --pack 4"
        raise ConfigError("--pack auto plans for the kind of GPU that a job asks for", value=first.cluster.gpus,
                          remedy=remedy)  # fmt: skip
    unlike = [run for index, run in enumerate(runs) if not any(_is_alike(run, known) for known in runs[:index])]
    plans = [plan for run in unlike for plan in _plan(run, keys, 1, reporter).values()]
    if misfits := [plan for plan in plans if not plan.fits]:
        raise misfits[0].misfit()
    if not plans:
        raise ConfigError("--pack auto needs a plan of the runs, and none could be made here", value=first.key,
                          remedy="Give a number: --pack 4")  # fmt: skip
    return plans


def _on_host(run: ResolvedRun, reporter: Reporter) -> int:
    """Plans a run for the kinds of GPU that its job may get; returns the bytes that wait on the host with any of them.

    Raises:
        DoesNotFitError: It fits none of them.
    """
    cluster = run.cluster
    cards = dict.fromkeys(card.key for kind in cluster.gpu_kinds for card in cards_named(kind))
    if cluster.executor != "slurm" or not cards or not wants_gpu(run.device):
        return 0
    plans = _plan(run, [*cards], cluster.num_ranks, reporter)
    if plans and not any(plan.fits for plan in plans.values()):
        raise next(iter(plans.values())).misfit()
    return max((plan.on_host_bytes for plan in plans.values()), default=0)


# Output


def print_places(placement: Placement, title: str) -> None:
    """Prints the places, best first, and the reason for the first."""
    if not placement.places:
        return
    rows = table_rows(placement.places, datetime.now())
    # A column that tells nothing is left out.
    shown = [index for index in range(len(COLUMNS)) if any(row[index] != "–" for row in rows)]
    table = TextTable(title, tuple(COLUMNS[index] for index in shown),
                      [tuple(row[index] for index in shown) for row in rows], notes(placement.places))  # fmt: skip
    print_tables([table])
    print_wrapped(f"{reason(placement.places)}.")


def ask_to_submit(placement: Placement) -> None:
    """Asks whether to submit to the best place, where places were compared. Raises as `ask` does."""
    if placement.places:
        place = placement.places[0].name
        ask(f"Submit to {place}?", command="--partition auto", otherwise="Nothing was submitted", value=place)
