"""What a submission comes to: what is the same, what is waited for, what goes together. No SLURM is asked."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun, plain_to_yaml, with_absolute_paths
from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError, MissingDataError, RunError
from can_train.factors.observations import write_record
from can_train.fit.factor_rule import RememberedLimit, RememberedLimits
from can_train.io.records import utc_now
from can_train.io.units import memory_text
from can_train.runs.past_runs import data_files, identity
from can_train.runs.registry import JobRecord, Registry, RunRecord
from can_train.runs.run_folder import RunFolder
from can_train.slurm.client import Accounting, Node, Partition
from can_train.slurm.script import with_cluster_defaults
from can_train.slurm.submission_plan import (
    UNKNOWN,
    JobDevice,
    check_options,
    check_requests,
    expectation,
    job_device,
    plan_submission,
)
from fakes.made_runs import begin
from fakes.run_facts import CLUSTER
from fakes.samples import observation

MAIN = Partition(name="main", is_default=True, nodes=(Node(name="a", cpus=8, memory_mib=8000, gpus={"t4": 2}),))


def run(tmp_path: Path, **request: Any) -> ResolvedRun:
    paths = {"paths.runs_dir": str(tmp_path / "runs"), "paths.state_dir": str(tmp_path / "state")}
    values = request.pop("values", {}) | paths
    given = {"model": "gat", "dataset": "synthetic", "cluster": "slurm", **request}
    return with_absolute_paths(resolve(RunRequest(**given, values=values)))


def entered(tmp_path: Path, run_id: str, *jobs: str, **fields: Any) -> RunRecord:
    record = RunRecord(run_id=run_id, path=str(tmp_path / "runs" / run_id), **{"key": "k", "time": utc_now(), **fields})
    RunFolder(Path(record.path)).make(run(tmp_path).config)
    registry = Registry(tmp_path / "state")
    registry.add(record)
    for job in jobs:
        kind, _, number = job.partition(":")
        registry.add(JobRecord(run_id=run_id, executor=kind, job_id=number, time=utc_now(), host="h", log_path="",
                               cluster=CLUSTER if kind == "slurm" else ""))  # fmt: skip
    return record


def test_the_identity_is_of_what_a_run_does_and_not_of_where(tmp_path: Path) -> None:
    first = identity(run(tmp_path), "code", [])
    assert identity(run(tmp_path / "elsewhere", values={"cluster.mem": "3G"}), "code", []) == first
    assert identity(run(tmp_path, cluster="local"), "code", []) == first
    assert identity(run(tmp_path), "other code", []) != first
    assert identity(run(tmp_path, values={"training.seed": 7}), "code", []) != first
    assert identity(run(tmp_path, device="cpu"), "code", []) != first


def test_the_identity_changes_with_the_data(tmp_path: Path) -> None:
    logs = [tmp_path / "logs" / name for name in ("a.csv", "b/c.csv")]
    for log in logs:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("1\n")
    mine = run(tmp_path, dataset=str(tmp_path / "logs"))
    assert data_files(mine) == logs
    before = identity(mine, "code", logs)
    assert identity(mine, "code", data_files(mine)) == before
    os.utime(logs[1], ns=(1, 1))
    assert identity(mine, "code", logs) != before
    (tmp_path / "logs").rename(tmp_path / "gone")
    with pytest.raises(MissingDataError):
        data_files(mine)


MIXED = Partition(
    name="mixed",
    is_default=True,
    nodes=(
        Node(name="n1", cpus=8, memory_mib=8000, gpus={"": 2}, features=("rtx3090", "ib")),
        Node(name="n2", cpus=8, memory_mib=8000, gpus={"v100": 2}),
        Node(name="n3", cpus=8, memory_mib=8000, gpus={"strange": 2}),
        Node(name="n4", cpus=8, memory_mib=8000),
    ),
)


@pytest.mark.parametrize(
    ("values", "cards"),
    [
        ({}, ["rtx-3090-24gb", "v100-16gb", "v100-32gb"]),
        ({"cluster.exclude": "n[2-3]"}, ["rtx-3090-24gb"]),
        ({"cluster.nodelist": "n2"}, ["v100-16gb", "v100-32gb"]),
        ({"cluster.constraint": "ib&x"}, ["rtx-3090-24gb", "v100-16gb", "v100-32gb"]),
        ({"cluster.constraint": "ib"}, ["rtx-3090-24gb"]),
        ({"cluster.constraint": "[t4|p100_16gb]*2"}, ["t4-16gb", "p100-16gb"]),
        ({"cluster.gpus": "t4:2"}, ["t4-16gb"]),
        ({"cluster.gres": "nvme:1,gpu:t4:2(S:0)"}, ["t4-16gb"]),
        ({"cluster.gres": "gpu:t4"}, ["t4-16gb"]),
        ({"cluster.additional": {"gpus": "t4:1"}}, ["t4-16gb"]),
        ({"cluster.additional": {"tres_per_task": "cpu=4,gres/gpu:t4=1"}}, ["t4-16gb"]),
        ({"cluster.additional": {"gpus-per-task": 1}, "cluster.exclude": "n1,n3"}, ["v100-16gb", "v100-32gb"]),
    ],
)
def test_the_gpu_of_a_job_is_the_one_it_asks_for_else_those_that_it_may_get(
    tmp_path: Path, values: dict[str, Any], cards: list[str]
) -> None:
    asked = run(tmp_path, values=values)
    completed = replace(asked, cluster=with_cluster_defaults(asked.cluster, MIXED, "auto"))
    assert list(job_device(completed, [MIXED]).cards) == cards


@pytest.mark.parametrize(
    ("places", "request_", "unknown"),
    [
        ([], {}, "SLURM does not answer, and no option names the job's GPU"),
        ([], {"values": {"cluster.gpus": "2"}}, "SLURM does not answer, and no option names the kind of the job's GPU"),
        ([], {"values": {"cluster.gpus": "odd:2"}}, "The catalogue has no GPU called odd"),
        ([MIXED], {"values": {"cluster.gpus": "1"}}, "The catalogue has no GPU called strange"),
        ([Partition(name="p", is_default=True, nodes=(Node(name="n", cpus=1, memory_mib=1000, gpus={"": 1}),))], {},
         "Nothing tells which GPUs partition p has"),
    ],
)  # fmt: skip
def test_a_gpu_that_nothing_names_is_not_guessed(
    tmp_path: Path, places: list[Partition], request_: dict[str, Any], unknown: str
) -> None:
    ((planned,),) = plan_submission([run(tmp_path, **request_)], "code", places).groups
    assert job_device(planned.run, places).unknown == unknown


def test_a_run_whose_plan_needs_the_host_has_its_whole_share_of_the_memory_of_a_node(tmp_path: Path) -> None:
    place = Partition(name="p", is_default=True,
                      nodes=(Node(name="g", cpus=64, memory_mib=512 * 1024, gpus={"t4": 4}),))  # fmt: skip
    plans = [plan_submission([run(tmp_path)], "code", [place], on_host=on_host) for on_host in ((), (40 * 2**30,))]
    assert [plan.groups[0][0].run.cluster.mem for plan in plans] == ["32G", "128G"]
    assert (
        plans[1].notices[0].endswith("needs 40.00 GiB of the host for tensors of its GPU: the job asks for --mem 128G")
    )


def test_a_job_without_a_gpu_has_its_share_of_the_memory_it_asks_for(tmp_path: Path) -> None:
    ((planned,),) = plan_submission([run(tmp_path, device="cpu", values={"cluster.mem": "6G"})], "code", [MIXED]).groups
    assert job_device(planned.run, [MIXED]) == JobDevice(memory_mib=6144)


def test_each_gpu_of_a_job_is_a_process(tmp_path: Path) -> None:
    ((planned,),) = plan_submission(
        [run(tmp_path, values={"cluster.gpus": "t4:2", "cluster.nodes": 3})], "c", []
    ).groups
    assert job_device(planned.run, []).ranks == 6


def test_runs_that_ask_for_the_same_go_together(tmp_path: Path) -> None:
    runs = [run(tmp_path, values={"training.seed": 1}), run(tmp_path, values={"cluster.mem": "3G"}), run(tmp_path)]
    order = plan_submission(runs, "code", [MAIN])
    assert [[one.index for one in group] for group in order.groups] == [[0, 2], [1]]
    settled = order.groups[0][0].run
    assert (settled.cluster.gpus, settled.cluster.cpus, settled.cluster.mem) == ("1", 4, "4000M")
    assert settled.config["cluster"]["mem"] == "4000M"
    assert len({one.identity for group in order.groups for one in group}) == 2


def requested(tmp_path: Path, *places: Partition, **values: Any) -> tuple[ClusterSettings, list[str]]:
    values = {f"cluster.{name}": value for name, value in {"partition": "main,b", **values}.items()}
    plan = plan_submission([run(tmp_path, values=values)], "code", [MAIN, *places])
    return plan.groups[0][0].run.cluster, list(plan.notices)


def test_a_job_of_several_partitions_asks_for_the_least_of_their_defaults(tmp_path: Path) -> None:
    small = Partition(name="b", default_time_min=90, nodes=(Node(name="c", cpus=3, memory_mib=6000, gpus={"t4": 1}),))
    cluster, notices = requested(tmp_path, small)
    assert (cluster.time, cluster.cpus, cluster.mem, cluster.partition) == ("1:30:00", 3, "4000M", "main,b")
    assert notices == []
    cluster, notices = requested(tmp_path, small, gpus="2")
    assert (cluster.time, cluster.cpus) == ("1-0:00:00", 4)
    assert notices == ["Partition b cannot take this job: A node has at most 1 GPUs (asked for 2)"]


@pytest.mark.parametrize(("minutes", "time"), [(5, "1-0:00:00"), (60, "1:00:00"), (9000, "2-0:00:00")])
def test_the_default_time_is_the_partitions_unless_it_is_minutes(tmp_path: Path, minutes: int, time: str) -> None:
    place = Partition(name="b", default_time_min=minutes, max_time_min=2880, nodes=MAIN.nodes)
    assert requested(tmp_path, place, partition="b")[0].time == time


def test_ranks_without_gpus_share_the_processors_and_the_memory_of_a_node(tmp_path: Path) -> None:
    cluster, _ = requested(tmp_path, partition="main", ranks=4)
    assert (cluster.gpus, cluster.ranks_per_node, cluster.cpus, cluster.mem) == ("0", 4, 2, "8000M")
    with pytest.raises(ConfigError, match="at most 8 processors: asked for 9: 9 of 1 each") as error:
        requested(tmp_path, partition="main", ranks=9)
    assert error.value.remedy.startswith("Give --ranks less")


def test_mounts_of_a_preset_have_no_effect_on_a_job_without_a_container(tmp_path: Path) -> None:
    asked, notice = run(tmp_path), "cluster.container_mounts has no effect without --container"
    for settings, notices in (
        ({"container_mounts": ["/a:/b"]}, [f"{notice}: the job runs in no container"]),
        ({"container_mounts": ["/a:/b"], "container": "docker://image"}, []),
        ({}, []),
    ):
        of_preset = replace(asked, cluster=replace(asked.cluster, **settings))
        assert plan_submission([of_preset], "code", [MAIN]).notices == notices


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_cluster_whose_jobs_train_in_a_container_needs_an_image(tmp_path: Path, runtime: str) -> None:
    with pytest.raises(ConfigError, match=rf"needs an image: cluster.container_runtime={runtime}, and no --container"):
        requested(tmp_path, partition="main", container_runtime=runtime)


def test_a_job_whose_nodes_may_have_different_gpus_is_told_so(tmp_path: Path) -> None:
    mixed = replace(MIXED, name="b", nodes=MIXED.nodes[1:3])
    _, notices = requested(tmp_path, mixed, partition="b", nodes=2)
    assert notices[-1].startswith("The nodes of the job may have different GPUs (strange, v100)")
    for settings in ({"nodes": 1}, {"nodes": 2, "gpus": "v100:1"}, {"nodes": 1, "gpus": "0"}):
        assert "different GPUs" not in str(requested(tmp_path, mixed, partition="b", **settings)[1])


ACCOUNTING = Accounting(
    qualities=[{"Name": "normal"}, {"Name": "long"}],
    associations=[
        {"Account": "lab", "User": "me", "Partition": "", "QOS": "normal", "DefaultQOS": "", "ParentName": ""}
    ],
)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"exclude": "a,n[1-2]"}, "Unknown node: 'n1'"), ({"nodelist": "b"}, "Unknown node: 'b'"),
     ({"qos": "lon"}, "Unknown QOS: 'lon'"), ({"account": "lap"}, "Unknown account: 'lap'"),
     ({"reservation": "r"}, "The cluster has no reservation: 'r'"),
     ({"constraint": "[ib*2&nope*1]"}, "Unknown feature of nodes (--constraint): 'nope'")],
)  # fmt: skip
def test_a_name_that_the_cluster_does_not_have_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("scontrol", "sbatch"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    nodes = [replace(node, features=["ib", "a100"]) for node in MAIN.nodes]
    place = replace(MAIN, accounting=ACCOUNTING, nodes=nodes)
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_submission([run(tmp_path, values={f"cluster.{n}": v for n, v in values.items()})], "code", [place])


def test_a_duplicate_run_is_left_out_unless_it_is_forced(tmp_path: Path) -> None:
    mine = run(tmp_path)
    digest = identity(mine, "code", [])
    duplicate_run = entered(tmp_path, "a", identity=digest)
    Path(duplicate_run.path, "result.json").write_text("{}")
    order = plan_submission([mine, run(tmp_path, values={"training.seed": 1})], "code", [MAIN])
    assert [found.known.record for found in order.duplicate_runs] == [duplicate_run]
    assert [[one.index for one in group] for group in order.groups] == [[1]]
    assert plan_submission([mine], "code", [MAIN], force=True).duplicate_runs == []
    assert plan_submission([mine], "other code", [MAIN]).duplicate_runs == []


def test_what_has_finished_is_not_waited_for_and_what_never_will_is_refused(tmp_path: Path) -> None:
    parent = entered(tmp_path, "20261121-a")
    with pytest.raises(RunError, match="ended without finishing") as error:
        plan_submission([run(tmp_path)], "code", [MAIN], after=["2026"])
    assert "can-train resume 20261121-a" in error.value.remedy
    Path(parent.path, "result.json").write_text("{}")
    order = plan_submission([run(tmp_path)], "code", [MAIN], after=["2026"])
    assert (order.after, order.dependency) == (["20261121-a"], "")


def test_a_process_of_this_machine_is_not_waited_for(tmp_path: Path) -> None:
    parent = entered(tmp_path, "a", "local:17")
    begin(Path(parent.path), start_time=utc_now())
    with pytest.raises(RunError, match="The run cannot be waited for"):
        plan_submission([run(tmp_path)], "code", [MAIN], after=["a"])


@pytest.mark.parametrize(("setting", "what"), [("qos", "QOS"), ("account", "account"), ("partition", "partition")])
def test_a_wrong_name_that_nobody_typed_has_its_source(
    tmp_path: Path, setting: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    place, file = replace(MAIN, accounting=ACCOUNTING), tmp_path / "config.yaml"
    asked = [run(tmp_path, values={f"cluster.{setting}": "lon"})]

    def remedy() -> str:
        with pytest.raises(ConfigError, match=f"Unknown {what}: 'lon'") as refused:
            plan_submission(asked, "code", [place])
        return refused.value.remedy

    assert "names it" not in remedy()
    file.write_text(f"{setting}: lon\n")
    monkeypatch.setenv("CAN_TRAIN_CONFIG", str(file))
    assert remedy().endswith(f". Your settings file {file} names it")
    monkeypatch.setenv(f"SBATCH_{setting.upper()}", "lon")
    assert remedy().endswith(f". SBATCH_{setting.upper()}=lon names it")


@pytest.mark.parametrize(("most_min", "advice"), [("00:03:00", "another --qos or --partition, which allows --time 4"),
                                                  ("00:05:00", "or --time 4 or more")])  # fmt: skip
def test_a_quality_of_service_decides_which_time_is_advised(tmp_path: Path, most_min: str, advice: str) -> None:
    columns = ("Flags", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins", "GrpTRES", "GrpTRESMins", "MinTRES", "MaxTRESPU",
               "MaxTRESPA")  # fmt: skip
    tiny = dict.fromkeys(columns, "") | {"Name": "tiny", "MaxWall": most_min}
    place = replace(MAIN, accounting=Accounting(qualities=[tiny], associations=[], default_account="lab"))
    time = {"cluster.time": "3"} if most_min == "00:05:00" else {}
    with pytest.raises(ConfigError) as error:
        check_requests([run(tmp_path, values={"cluster.qos": "tiny", **time})], [place])
    assert advice in str(error.value)


def test_a_setup_that_no_shell_can_read_is_refused(tmp_path: Path) -> None:
    check_options(ClusterSettings(executor="slurm", setup=["if true; then", "module load x", "fi"]))
    with pytest.raises(ConfigError, match=r"cluster.setup is no script .* can read: line 3: syntax error: unex"):
        check_options(ClusterSettings(executor="slurm", setup=["if true; then", "module load x"]))
    with pytest.raises(ConfigError, match=r"cluster.teardown is no script .* can read: line 1: unexpected EOF"):
        check_options(ClusterSettings(executor="slurm", teardown=["echo it's done"]))


def test_a_run_that_waits_for_another_one_trains_its_own_weights(tmp_path: Path) -> None:
    parent = entered(tmp_path, "a")
    Path(parent.path, "result.json").write_text("{}")
    ((ordered,),) = plan_submission([run(tmp_path)], "code", [MAIN], after=["a"]).groups
    assert ordered.run.training == run(tmp_path).training


def test_the_newest_finished_run_of_the_same_memory_says_what_to_expect(tmp_path: Path) -> None:
    mine = run(tmp_path)
    result = {"plan": {"plan": {"logical_batch": 512}}, "micro_batch_size": 64, "peak_memory_bytes": 3 * 2**29,
              "device": "t4"}  # fmt: skip
    older = {**result, "micro_batch_size": 1}
    runs: list[RunRecord] = []
    other = {**mine.config, "model": {}}
    for name, settings, said in (
        ("o", mine.config, older),
        ("a", mine.config, result),
        ("b", other, result),
        ("c", mine.config, {}),
        ("d", mine.config, None),
    ):
        runs.append(entered(tmp_path, name, key=mine.key))
        Path(runs[-1].path, "config.yaml").write_text(plain_to_yaml(settings))
        if said is not None:
            Path(runs[-1].path, "result.json").write_text(json.dumps(said))
    assert expectation(mine, runs) == "a had batch 512, micro-batches of up to 64, peak 1.50 GiB on t4"
    # However many have failed since.
    failed = [entered(tmp_path, f"failed-{number}", key=mine.key) for number in range(30)]
    assert expectation(mine, [*runs, *failed]).startswith("a had batch 512")
    assert expectation(mine, runs[2:]) == UNKNOWN
    assert expectation(run(tmp_path, model="vgae"), runs) == UNKNOWN


@pytest.mark.parametrize(("fit", "limits", "asks_for_all"), [
    ("auto", {"offload_optimizer": True}, True),
    ("auto", {"recompute": ("layers.0",)}, False),
    ("split", {"offload_optimizer": True}, False),
    ("offload", {}, True),
])  # fmt: skip
def test_a_job_asks_for_memory_of_the_host_where_the_last_run_needed_it(
    tmp_path: Path, fit: str, limits: dict[str, Any], asks_for_all: bool
) -> None:
    place = Partition(name="p", is_default=True, nodes=(Node(name="n", cpus=8, memory_mib=200_000, gpus={"t4": 1}),))
    asked = run(tmp_path, values={"training.fit": fit})
    found = RememberedLimit(tuned_limit=1.0, capped=False, base_bytes=1.0, measured_ratio=1.0)
    known = {"": RememberedLimits(training=found, evaluation=found, **limits)}
    write_record(tmp_path / "state", observation(key=asked.key, limits=known))
    plan = plan_submission([asked], "code", [place])
    ((planned,),) = plan.groups
    assert (planned.run.cluster.mem == memory_text(200_000)) == asks_for_all
    assert any("kept tensors on the host" in notice for notice in plan.notices) == (asks_for_all and fit == "auto")


def test_programs_of_slurm_are_asked_once_for_all_runs_with_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "{name}" >> "{tmp_path}/asked"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    runs = [
        run(tmp_path, values={"training.seed": seed, "cluster.mem": mem}) for seed in range(5) for mem in ("1G", "2G")
    ]
    assert len(plan_submission(runs, "code", [MAIN]).groups) == 2
    assert sorted((tmp_path / "asked").read_text().split()) == ["sbatch", "sbatch", "srun", "srun"]
