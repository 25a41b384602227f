"""scripts/slurm-sandbox, as far as it can be tried without installing SLURM; tests/slurm has the rest."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.cluster import ACCOUNTING_VARIABLE, FOLDER_VARIABLE, PORT_VARIABLE, PORTS, Cluster, SandboxError
from sandbox.daemons import check_folder, running
from sandbox.files import gres_conf, slurm_conf, slurmdbd_conf
from sandbox.machine import hosts_with, hosts_without, require_packages


def cluster(folder: str = "/somewhere", port: int = 27000) -> Cluster:
    return Cluster.named_by({FOLDER_VARIABLE: folder, PORT_VARIABLE: str(port)})


def ports(one: Cluster) -> set[int]:
    return {one.port, one.accounting_port, one.database_port, *one.node_ports}


def test_two_sandboxes_share_neither_ports_nor_nodes() -> None:
    one, other = cluster(port=27000), cluster(port=27000 + PORTS)
    assert not ports(one) & ports(other)
    assert not {*one.nodes} & {*other.nodes}


def test_a_sandbox_takes_each_of_its_ports_once() -> None:
    assert len(ports(cluster())) == 3 + len(cluster().nodes)
    assert max(ports(cluster())) < cluster().port + PORTS


@pytest.mark.parametrize("port", ["a", "-1", "0", "65535", "1.5"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(SandboxError, match="is no port"):
        Cluster.named_by({PORT_VARIABLE: port})


def test_a_folder_too_deep_for_a_socket_is_refused() -> None:
    with pytest.raises(SandboxError, match=f"too long for a socket in it: set {FOLDER_VARIABLE}"):
        cluster("/" + "deep/" * 30)


def test_all_that_a_sandbox_writes_lies_in_its_folder() -> None:
    one = cluster("/one")
    for text in (slurm_conf(one, host="h", cgroups=True), gres_conf(one), slurmdbd_conf(one, host="h")):
        paths = re.findall(r"(?<=[=@])/\S+", text)
        assert paths
        assert [path for path in paths if not path.startswith("/one/")] == []


def test_without_cgroups_memory_is_looked_at() -> None:
    assert "OverMemoryKill" in slurm_conf(cluster(), host="h", cgroups=False)
    assert "OverMemoryKill" not in slurm_conf(cluster(), host="h", cgroups=True)


@pytest.mark.parametrize(
    ("accounting", "missing"), [("", "slurmctld, slurmd, munged, slurmdbd, mariadbd"),
                                ("off", "slurmctld, slurmd, munged"), ("/other:27100", "slurmctld, slurmd")]
)  # fmt: skip
def test_a_sandbox_needs_only_the_daemons_that_it_starts(
    monkeypatch: pytest.MonkeyPatch, accounting: str, missing: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("sandbox.machine.search_path", lambda: "/nowhere")
    with pytest.raises(SandboxError, match=rf"^not installed: {missing}; run"):
        require_packages(Cluster.named_by({ACCOUNTING_VARIABLE: accounting}))


OTHERS = ["127.0.0.1 localhost", "# a remark", "", "10.0.0.1 n27000-11", "127.0.0.1 n27000-1x"]


@given(st.lists(st.sampled_from(OTHERS)))
def test_the_hosts_of_others_are_left_as_they_are(lines: list[str]) -> None:
    nodes = cluster().nodes
    text = "".join(f"{line}\n" for line in lines)
    added = hosts_with(nodes, text)
    assert added.startswith(text)
    assert all(f"\n127.0.0.1 {node}\n" in f"\n{added}" for node in nodes)
    assert hosts_without(nodes, added) == text


@contextmanager
def process(**variables: str) -> Iterator[int]:
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
    with subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()  # it runs now
        yield started.pid
        started.kill()


def test_its_folder_is_one_that_only_root_may_write_to() -> None:
    assert Cluster.named_by({}).folder == Path("/var/lib/can-train-slurm")


OPEN_TO_OTHERS = {
    "the folder": lambda folder: folder.chmod(0o777),
    "a folder above": lambda folder: folder.parent.chmod(0o775),
    "a link": lambda folder: folder.symlink_to(folder.rename(folder.with_name("other"))),
    "another user's": lambda folder: os.chown(folder, 12345, 12345),
    "another user's above": lambda folder: os.chown(folder.parent, 12345, 12345),
}  # fmt: skip
"""What lets another user change what the daemons run."""


@pytest.mark.parametrize("way", OPEN_TO_OTHERS)
def test_a_folder_that_other_users_may_change_is_refused(tmp_path: Path, way: str) -> None:
    if "user" in way and os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    folder = tmp_path / "above" / "sandbox"
    folder.mkdir(parents=True, mode=0o755)
    check_folder(folder)
    OPEN_TO_OTHERS[way](folder)
    with pytest.raises(SandboxError, match=r"belongs to user|written to by other users"):
        check_folder(folder)


@pytest.mark.slow
def test_only_its_own_processes_are_a_sandboxs(tmp_path: Path) -> None:
    folder = str(tmp_path / "a")
    with (
        process(SLURM_SANDBOX_DAEMON_OF=folder) as own,
        process(SLURM_SANDBOX_DAEMON_OF=folder + "b"),
        process(SLURM_CONF=folder),
    ):
        assert [*running(cluster(folder)).values()] == [own]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["status", "stop", "wipe"])
def test_what_does_not_run_can_be_asked_for_and_stopped(tmp_path: Path, repository: Path, verb: str) -> None:
    ended = subprocess.run(
        [sys.executable, repository / "scripts" / "slurm-sandbox", verb],
        env={**os.environ, FOLDER_VARIABLE: str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    assert ended.returncode == (1 if verb == "status" else 0)
    assert not (tmp_path / "none").exists()
