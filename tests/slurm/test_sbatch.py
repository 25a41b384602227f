"""The batch script, compared with saved records, and how a person's values get into it. `sbatch` reads a value between
quotes as a shell does, but for the backslash, which escapes there too (measured on SLURM 22.05).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError
from can_train.slurm.script import (
    Submission,
    check_folder,
    parameters,
    python_command,
    resources,
    script,
    with_sbatch_variables,
)

CODE = Path("/state/code/0123")
SUBMISSION = Submission(name="synthetic_gat_student_normal", state_dir=Path("/state"))
FULL = ClusterSettings(
    executor="slurm", partition="gpu", account="lab's", qos="high", time="2-12", nodes=2, gpus="a100:4", cpus=6,
    mem="64G", constraint="ib&a100", exclude="g[1-3]", max_parallel=4, signal_delay_s=300,
    setup=["module load cuda/12", "conda activate 'my env'"],
    additional={"comment": "a b", "mail_type": "END", "exclusive": True, "overcommit": False, "nice": 7},
)  # fmt: skip


def written(cluster: ClusterSettings, count: int = 1, folder: str = "/runs/a run/slurm", **text: Any) -> str:
    of_job = parameters(cluster, replace(SUBMISSION, **text), CODE)
    return script(Path(folder), of_job, count, python_command(cluster, CODE)).replace(
        shlex.quote(sys.executable), "PYTHON"
    )


@pytest.mark.parametrize(
    ("record", "cluster", "count", "text"),
    [
        ("least.sh", ClusterSettings(executor="slurm", time="90"), 1, {}),
        ("full.sh", FULL, 10, {"dependency": "afterok:17"}),
    ],
)
def test_the_script_is_as_it_was(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: str,
    cluster: ClusterSettings,
    count: int,
    text: dict[str, Any],
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert written(cluster, count, **text) + "\n" == (repository / "tests/fixtures/slurm" / record).read_text()


def as_sbatch_reads(line: str) -> str:
    """A directive's value as sbatch takes it: one word, whose backslashes escape wherever they stand."""
    (word,) = shlex.split(line)
    return re.sub(r"\\(.)", r"\1", word)


@example("a\\b 'c\\\\d")
@given(st.text(st.characters(exclude_categories=("C", "Z")) | st.sampled_from(" '\"$()\\`#;&|<>"), min_size=1))
def test_a_value_arrives_as_it_stands(value: str) -> None:
    cluster = ClusterSettings(time="90", account=value, additional={"comment": value})
    lines = written(cluster, name=value, folder="/runs").splitlines()
    for option in ("account", "comment", "job-name"):
        (line,) = (line for line in lines if line.startswith(f"#SBATCH --{option}="))
        assert as_sbatch_reads(line.removeprefix(f"#SBATCH --{option}=")) == value


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "a\x1bb", "\u2028"])
@pytest.mark.parametrize("place", ["account", "comment", "name", "setup"])
def test_a_value_that_could_end_its_line_is_refused(place: str, value: str) -> None:
    settings: dict[str, Any] = {"account": {"account": value}, "comment": {"additional": {"comment": value}},
                                "name": {}, "setup": {"setup": [f"echo {value}"]}}[place]  # fmt: skip
    with pytest.raises(ConfigError, match="line of"):
        written(ClusterSettings(time="90", **settings), **({"name": value} if place == "name" else {}))


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("output", "--runs-dir"),
        ("ntasks_per_node", "--gpus"),
        ("time", "--time"),
        ("signal", "signal_delay_s"),
        ("array", "Sweep"),
        ("outp", "--runs-dir"),
        ("clusters", "--clusters"),
    ],
)
def test_what_can_train_decides_itself_is_refused_with_the_way_to_it(option: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="An option of sbatch is set by can-train") as error:
        written(ClusterSettings(time="90", additional={option: "1"}))
    assert remedy in error.value.remedy


@pytest.mark.parametrize("option", [{"export": "NONE"}, {"export": "HOME,LANG"}, {"export_file": "/vars"}])
def test_a_job_that_starts_without_its_users_variables_gets_those_that_it_needs_from_its_script(
    option: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "slurm bin"
    programs.mkdir()
    for name, line in (("scontrol", "true"), ("srun", 'case "$*" in *--export=ALL*) printenv | sort; esac; exit 7')):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    text = written(ClusterSettings(time="90", additional=option), folder=str(tmp_path))
    # As SLURM starts it, without the variables of whoever submitted it.
    system = tmp_path / "bin"
    system.mkdir()
    for name in ("env", "base64", "printenv", "sort"):
        (system / name).symlink_to(shutil.which(name, path=os.defpath) or "")
    job = subprocess.run(["/bin/bash", "-c", f"PYTHON() {{ :; }}\n{text}"], env={"PATH": str(system)},
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert job.returncode == 7, job.stderr
    variables = dict(line.partition("=")[::2] for line in job.stdout.splitlines())
    assert variables["PYTHONPATH"] == f"{CODE}/src"
    assert variables["PYTHONSAFEPATH"] == "1"
    assert variables["SUBMITIT_EXECUTOR"] == "slurm"
    assert str(programs) in variables["PATH"].split(":")


def test_an_option_of_sbatch_with_a_flag_of_its_own_is_given_once() -> None:
    with pytest.raises(ConfigError, match=r"given twice: --mail-type and cluster\.additional\.mail-type"):
        written(ClusterSettings(time="90", mail_type="END", additional={"mail_type": "FAIL"}))


@pytest.mark.parametrize("nodes", ["[n1,n2]", "n1 n2", "n[1-3", "n1,", "choice(n1,n2)"])
def test_what_is_no_list_of_nodes_is_refused(nodes: str) -> None:
    for name in ("exclude", "nodelist"):
        with pytest.raises(ConfigError, match=f"cluster.{name} must list nodes"):
            ClusterSettings(**{name: nodes})


def test_an_option_is_a_name() -> None:
    with pytest.raises(ConfigError, match="no name of an option"):
        written(ClusterSettings(time="90", additional={"comment=x\n#SBATCH --exclusive": "1"}))


@pytest.mark.parametrize("folder", ["/runs/50%", "/runs/a\\b", "/runs/a\nb"])
def test_a_folder_that_slurm_would_take_for_another_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="--runs-dir"):
        check_folder(Path(folder))


def test_folders_with_anything_else_in_their_names_reach_the_shell_whole(tmp_path: Path) -> None:
    folder = tmp_path / "a 'b\" $(touch x) ;c"
    (line,) = (
        line for line in written(ClusterSettings(time="90"), folder=str(folder)).splitlines() if line.startswith("srun")
    )
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert words.stdout.splitlines()[-1] == str(folder)
    assert f"{folder}/%j_%t_log.out" in words.stdout.splitlines()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("status", "said"), [(0, "0"), (3, "3"), (137, "137")])
def test_what_is_done_after_a_job_leaves_its_status_as_it_was(status: int, said: str) -> None:
    teardown = written(ClusterSettings(time="90")).partition("# teardown\n")[2]
    ended = subprocess.run(
        ["bash", "-c", f'PYTHON() {{ echo "${{@: -1}}"; return 9; }}\n(exit {status})\n{teardown}'],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (status, f"{said}\n")


@pytest.mark.parametrize(
    ("settings", "tasks"),
    [({"gpus": "2"}, 2), ({"gpus": "a100:4"}, 4), ({"gres": "gpu:a100:3"}, 3), ({"gres": "nvme:1,gpu:2"}, 2),
     ({"gres": "gpu:1(S:0)"}, 1), ({"gres": "gpu"}, 1), ({"gres": "nvme:8"}, 1), ({"gpus": "0"}, 1), ({}, 1)],
)  # fmt: skip
def test_there_is_a_task_for_each_gpu_of_a_node(settings: dict[str, Any], tasks: int) -> None:
    assert resources(ClusterSettings(**settings))["ntasks-per-node"] == tasks


def test_settings_without_a_parameter_of_submitit_are_written() -> None:
    text = written(ClusterSettings(time="90", gpus="2", mem_per_gpu="3G", cpus_per_gpu=2, tmp="1G", begin="now+1hour",
                                   nice="5", clusters="b"))  # fmt: skip
    options = ("mem-per-gpu=3G", "cpus-per-gpu=2", "tmp=1G", "begin=now+1hour", "nice=5", "clusters=b")
    assert all(f"#SBATCH --{option}\n" in text for option in options)


@pytest.mark.parametrize(
    "settings",
    [
        {"gpus": "many"},
        {"gpus": "a100"},
        {"gpus": "2", "gres": "gpu:2"},
        {"mem": "x"},
        {"time": "x"},
        {"ranks": 3, "gpus": "2"},
        {"mem": "1G", "mem_per_gpu": "1G"},
        {"cpus": 1, "cpus_per_gpu": 1},
        {"nice": "a lot"},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ClusterSettings(**settings)


def test_a_run_that_is_never_restarted_is_not_put_back_by_slurm_either() -> None:
    text = written(ClusterSettings(time="90", max_restarts=0))
    assert "#SBATCH --no-requeue" in text
    assert "#SBATCH --requeue" not in text


def test_a_variable_of_sbatch_is_taken_or_named() -> None:
    mine = {"SBATCH_PARTITION": "theirs", "SBATCH_ACCOUNT": "lab", "SBATCH_TIMELIMIT": "1", "SBATCH_EXCLUSIVE": "",
            "SBATCH_MEM_PER_GPU": "3G", "SBATCH_OUTPUT": "x", "SBATCH_REQ_SWITCH": "1", "SBATCH_SPREAD_JOB": "",
            "SBATCH_DEBUG": "1", "SLURM_CONF": "/c"}  # fmt: skip
    cluster, notices = with_sbatch_variables(ClusterSettings(partition="mine", mem="2G"), mine)
    assert cluster == ClusterSettings(partition="mine", mem="2G", account="lab", time="1", exclusive=True,
                                      additional={"switches": "1", "spread-job": True})  # fmt: skip
    taken = "SBATCH_ACCOUNT=lab, SBATCH_EXCLUSIVE=, SBATCH_REQ_SWITCH=1, SBATCH_SPREAD_JOB=, SBATCH_TIMELIMIT=1"
    assert notices == [f"The request of the job takes {taken}",
                       "SBATCH_DEBUG=1, SBATCH_OUTPUT=x has no effect: can-train sets it itself"]  # fmt: skip


def test_a_variable_that_means_nothing_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"^SBATCH_CPUS_PER_GPU: ") as error:
        with_sbatch_variables(ClusterSettings(), {"SBATCH_CPUS_PER_GPU": "few"})
    assert error.value.remedy == "Unset it: env -u SBATCH_CPUS_PER_GPU"


def test_variables_that_describe_the_job_around_a_submission_are_no_request() -> None:
    described = {"SBATCH_MEM_BIND_TYPE": "none", "SBATCH_CPU_BIND": "quiet", "SLURM_JOB_ID": "7"}
    assert with_sbatch_variables(ClusterSettings(), described) == (ClusterSettings(), [])


def set_up(tmp_path: Path, *lines: str, python: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the setup of a job, in which can-train only says what it is called with, up to the choice of Python."""
    of_job = parameters(ClusterSettings(setup=lines, python=python), SUBMISSION, CODE)["setup"]
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/bash\ncase $1 in -c) exec "$REAL" "$@";; -P) cat > /dev/null; echo "after ${@: -1}";; esac\n'
    )
    program.chmod(0o755)
    text = "\n".join([*of_job, 'echo "$python"']).replace(shlex.quote(sys.executable), str(program))
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False,
                          env={"PATH": "/usr/bin:/bin", "REAL": sys.executable})  # fmt: skip


def an_environment(tmp_path: Path, *, with_packages: bool) -> Path:
    """A folder with a Python that has can-train's packages, or has none."""
    (tmp_path / "env").mkdir()
    program = tmp_path / "env" / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {"" if with_packages else "-S"} "$@"\n')
    program.chmod(0o755)
    return program


def test_the_python_that_setup_lines_put_first_on_the_path_trains(tmp_path: Path) -> None:
    python = an_environment(tmp_path, with_packages=True)
    assert set_up(tmp_path, f"export PATH={python.parent}:$PATH").stdout == f"{python}\n"
    assert set_up(tmp_path, "export OTHER=1").stdout == f"{tmp_path}/python\n"
    assert set_up(tmp_path, f"export PATH={python.parent}:$PATH", python="python").stdout == f"{python}\n"
    assert set_up(tmp_path, python=str(python)).stdout == f"{python}\n"


def test_a_python_without_the_packages_of_can_train_ends_the_job_with_a_remedy(tmp_path: Path) -> None:
    python = an_environment(tmp_path, with_packages=False)
    ended = set_up(tmp_path, f"export PATH={python.parent}:$PATH")
    assert (ended.returncode, ended.stdout) == (1, "after 1\n")
    assert f"error: {python} does not have can-train's packages" in ended.stderr
    assert "torch, submitit, msgspec" in ended.stderr
    assert "cluster.python=" in ended.stderr
    ended = set_up(tmp_path, python="no-python")
    assert (ended.returncode, ended.stderr) == (127, "error: cluster.python is no program here: no-python\n")


@pytest.mark.parametrize(
    ("lines", "status", "word"),
    [(["module load gcc"], 127, "module load gcc"), (["set -e", "(exit 3)", "true"], 3, "exit 3"),
     (["if true; then", "ls /nonexistent", "fi"], 2, "ls /nonexistent")],
)  # fmt: skip
def test_a_setup_line_that_fails_ends_the_job_with_its_words(
    tmp_path: Path, lines: list[str], status: int, word: str
) -> None:
    ended = set_up(tmp_path, *lines)
    assert (ended.returncode, ended.stdout) == (status, f"after {status}\n")
    assert f"error: cluster.setup ended with exit status {status}: " in ended.stderr
    assert word in ended.stderr


def test_commands_that_fail_within_a_setup_line_and_are_handled_there_do_no_harm(tmp_path: Path) -> None:
    sourced = tmp_path / "activate"
    sourced.write_text("false\ngrep -q x /dev/null\ntrue\n")
    ended = set_up(tmp_path, f". {sourced}", "f() { false; true; }", "f", "[ -f /no ] && echo x", "false || true")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{tmp_path}/python\n", "")


def test_teardown_lines_run_after_a_training_whatever_its_end_and_change_no_status() -> None:
    teardown = written(ClusterSettings(time="90", teardown=["echo bye", "exit 4"])).partition("# teardown\n")[2]
    ended = subprocess.run(["bash", "-c", f"PYTHON() {{ echo after; }}\n(exit 3)\n{teardown}"], capture_output=True,
                           text=True, check=False)  # fmt: skip
    assert (ended.returncode, ended.stdout) == (3, "bye\nafter\n")


# Of these, `bash -n` refuses only the first two.
UNENDED = (["echo bye", "echo it's done"], ["echo bye", ")"], ["echo bye", "cat > /dev/null << END"],
           ["echo bye", "true \\"], ["echo bye", "true &"])  # fmt: skip


@pytest.mark.parametrize("lines", UNENDED)
def test_no_line_of_teardown_switches_off_what_is_done_after_it(lines: list[str]) -> None:
    teardown = written(ClusterSettings(time="90", teardown=lines)).partition("# teardown\n")[2]
    ended = subprocess.run(["bash", "-c", f"PYTHON() {{ echo after; }}\n(exit 3)\n{teardown}"], capture_output=True,
                           text=True, check=False)  # fmt: skip
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (3, "after")


@pytest.mark.parametrize("lines", UNENDED[2:])
def test_no_line_of_setup_takes_the_lines_after_it(tmp_path: Path, lines: list[str]) -> None:
    ended = set_up(tmp_path, *lines)
    assert (ended.returncode, ended.stdout) == (0, f"bye\n{tmp_path}/python\n")
    assert set_up(tmp_path, *lines[:-1], "here=1", lines[-1]).returncode == 0


@pytest.mark.parametrize("line", ["[ -f nothing ] && . nothing", "! true", "for f in no; do [ -f $f ] && . $f; done"])
def test_a_last_line_of_setup_whose_status_ends_no_script_ends_no_job(tmp_path: Path, line: str) -> None:
    assert set_up(tmp_path, "echo bye", line).stdout == f"bye\n{tmp_path}/python\n"
    assert "ended with exit status 1: false" in set_up(tmp_path, line, "false").stderr


def test_teardown_lines_have_the_functions_and_variables_of_setup_lines() -> None:
    text = written(ClusterSettings(time="90", setup=["put() { echo $1; }", "x=5"], teardown=["put $x"]))
    setup, _, rest = text.partition("# command")
    ended = subprocess.run(["bash", "-c", f"PYTHON() {{ :; }}\n{setup}\n{rest.partition('# teardown')[2]}"],
                           capture_output=True, text=True, check=False)  # fmt: skip
    assert ended.stdout == "5\n", ended.stderr


def test_a_job_finds_the_programs_of_slurm_whatever_its_setup_makes_of_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "SLURM's bin"
    folder.mkdir()
    (folder / "scontrol").touch(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    cluster = ClusterSettings(executor="slurm", setup=["export PATH=/usr/bin:/bin"])
    setup = parameters(cluster, SUBMISSION, CODE)["setup"]
    shell = subprocess.run(["bash", "-c", "\n".join([*setup, 'echo "$PATH"'])], capture_output=True, text=True,
                           check=True)  # fmt: skip
    assert shell.stdout == f"/usr/bin:/bin:{folder}\n"
