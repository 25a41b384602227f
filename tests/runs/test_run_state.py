"""What state a run is in: a table of what SLURM, the run's files and its processes may say together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from can_train.runs.registry import CancelRecord, JobRecord
from can_train.runs.run_state import (
    CAUSES,
    LIVE,
    AttemptFacts,
    RunFacts,
    error_in_words,
    infer_attempt_state,
    infer_run_state,
    last_error_line,
    live_row,
)
from can_train.runs.scheduler import AccountRow, QueueRow, SchedulerAnswer
from fakes.run_facts import CLUSTER, JOBS, RUN, attempt, job, minute, of_job, recorded, slurm_job, text_of

NO_SLURM = SchedulerAnswer(silent={CLUSTER: "Unable to contact slurm controller"}, local=CLUSTER)
FORGOTTEN = SchedulerAnswer()


def begun(example: str, ending: str | None = None, **values: Any) -> Any:
    return attempt(1, JOBS[example], ending, **values)


def without_reasons(answer: SchedulerAnswer) -> SchedulerAnswer:
    """What sacct says in the first seconds after a job's end."""
    return replace(answer, accounts=[replace(row, reason="") for row in answer.accounts])


def held_until(time: str, *attempts: AttemptFacts) -> RunFacts:
    """A job whose start is set for later, by a person or by a requeue."""
    row = QueueRow(job=slurm_job("9"), state="PENDING", reason="BeginTime", start=time)
    return RunFacts(run=RUN, jobs=[job("9")], attempts=attempts, answer=SchedulerAnswer(queue=[row]))


def restarted(state: str, second: AttemptFacts) -> RunFacts:
    """A job that was started again while the process of its first attempt trained on."""
    answer = SchedulerAnswer(queue=[QueueRow(job=slurm_job("9"), state=state, nodes="n1")])
    return RunFacts(run=RUN, jobs=[job("9")], attempts=[attempt(1, "9"), second], answer=answer)


def packed(ending: str, **values: Any) -> RunFacts:
    """A run whose job trains another one, too, and is active."""
    answer = SchedulerAnswer(queue=[QueueRow(job=slurm_job("9"), state="COMPLETING", nodes="n1")])
    return RunFacts(
        run=RUN, jobs=[job("9", packed_with=2)], attempts=[attempt(1, "9", ending, **values)], answer=answer
    )


def packed_until(state: str, ending: str, **values: Any) -> RunFacts:
    """A run whose job trained another one, too, and ended in a state."""
    answer = SchedulerAnswer(accounts=[AccountRow(job=slurm_job("9"), state=state, nodes="n1")])
    return replace(packed(ending, **values), answer=answer)


def waits_for_others(*attempts: AttemptFacts, resumed: Sequence[JobRecord] = ()) -> RunFacts:
    """A run whose job trains another one, too, and waits in the queue again."""
    row = QueueRow(job=slurm_job("9"), state="PENDING", reason="BeginTime")
    ended = AccountRow(job=slurm_job("10"), state="FAILED", nodes="n1", exit_code="3:0")
    return RunFacts(run=RUN, jobs=[job("9", packed_with=2), *resumed], attempts=attempts,
                    answer=SchedulerAnswer(queue=[row], accounts=[ended] if resumed else []))  # fmt: skip


def cancelled_as_it_was_put_back(ending: str | None = None) -> RunFacts:
    """An element of an array, of which the accounting knows only that it was put back."""
    answer = SchedulerAnswer(accounts=[AccountRow(job=slurm_job("9_1"), state="REQUEUED", nodes="n1")])
    return RunFacts(run=RUN, jobs=[job("9_1")], attempts=[attempt(1, "9_1", ending)], answer=answer,
                    cancels=[CancelRecord(run_id="r", time=minute(20))])  # fmt: skip


CASES: dict[str, tuple[RunFacts, str, str]] = {
    # name: (what is known, state, part of the sentence)
    "a result counts, whatever the accounting says": (
        of_job("fail", begun("fail", "failed"), result={"best_validation_loss": 0.25, "best_epoch": 3}),
        "finished", "best validation loss 0.25 after epoch 3"),
    "held": (of_job("held"), "queued", "held by its user"),
    "its start set for later": (
        held_until("2026-11-30T05:42:00"), "queued",
        "its start was set for later; it starts at 2026-11-30 05:42:00 at the earliest"),
    "put back, and held for a moment": (
        held_until("", attempt(1, "9", "time_limit")), "queued", "put back into the queue, and is held; before that"),
    "a limit above the partition's": (of_job("ptl"), "queued", "is above the partition's, and it can never start"),
    "its dependency never satisfied, and still in the queue": (of_job("child2"), "never started", "did not finish"),
    "its dependency never satisfied, and out of the queue": (of_job("child"), "never started", "did not finish"),
    "the same where squeue has forgotten it": (
        of_job("child", answer=recorded("child", squeue=False)), "never started", "did not finish"),
    "the same where the accounting has not heard why": (
        of_job("child", answer=without_reasons(recorded("child"))), "never started", "did not finish"),
    "the same without accounting": (
        of_job("child", answer=recorded("child", sacct=False)), "never started", "did not finish"),
    "cancelled while it waited": (of_job("cpend"), "cancelled", "before it started"),
    "cancelled while it waited, without accounting": (
        of_job("cpend", answer=recorded("cpend", sacct=False)), "cancelled", "before it started"),
    "cancelled while it ran, which it survived long enough to save": (
        of_job("crun", begun("crun", "terminated")), "cancelled", "saved"),
    "killed before it could say so": (of_job("crun", begun("crun")), "cancelled", ""),
    "failed by itself, then cancelled as a whole": (of_job("crun", begun("crun", "failed")), "cancelled", ""),
    "an error": (of_job("fail", begun("fail", "failed", message="no such data")), "failed", "no such data"),
    "an error before the training began": (
        of_job("fail", log_tail="x\nImportError: no torch\nbye\n"), "failed", "exit code 3; ImportError: no torch"),
    "ended by a signal": (of_job("kill9", begun("kill9")), "failed", "signal 9 (SIGKILL)"),
    "ended by a signal, as was found out": (
        of_job("kill9", begun("kill9", "killed", message="killed by signal 9")), "failed", "killed by signal 9"),
    "a log that could not be opened": (of_job("nolog"), "never started", "log file that cannot be opened"),
    "memory of the host, which only a step tells": (of_job("oom", begun("oom")), "host out-of-memory", "50M"),
    "the same where another rank failed of it": (
        of_job("oom", begun("oom", "failed", message="connection lost")), "host out-of-memory", ""),
    "the same where another rank was terminated for it, and saved": (
        of_job("oom", begun("oom", "terminated")), "host out-of-memory", ""),
    "cancelled and saved, where the log remembers an earlier attempt": (
        of_job("crun", begun("crun", "terminated"), log_tail=text_of("oom")), "cancelled", "saved"),
    "the same without accounting, as the log says": (
        of_job("oom", begun("oom"), answer=recorded("oom", sacct=False), log_tail=text_of("oom")),
        "host out-of-memory", ""),
    "the same, as the process found out": (
        of_job("fail", begun("fail", "host_oom", message="more than 400M")), "host out-of-memory", "more than 400M"),
    "memory of the GPU": (
        of_job("fail", begun("fail", "gpu_oom", message="needs 3 GiB")), "CUDA out-of-memory", "needs 3 GiB"),
    "memory of the GPU for one sample": (
        of_job("fail", begun("fail", "gpu_oom", message="too big", details={"one_sample": True, "cards": "T4, L4"})),
        "CUDA out-of-memory", "would hold it: T4, L4"),
    "memory of the GPU, then its job was cancelled": (
        of_job("crun", begun("crun", "gpu_oom", message="needs 3 GiB")), "CUDA out-of-memory", ""),
    "a limit without an ending": (of_job("timeout", begun("timeout")), "time limit", "its limit of 00:01:00 was up"),
    "a limit, saved by SIGTERM": (of_job("timeout", begun("timeout", "terminated")), "time limit", "saved"),
    "a limit that a process failed of": (of_job("timeout", begun("timeout", "failed")), "time limit", ""),
    "a limit, without accounting": (
        of_job("timeout", begun("timeout"), answer=recorded("timeout", sacct=False)), "time limit", "1:00"),
    "a limit, as the log says": (
        of_job("timeout", begun("timeout", "terminated"), answer=FORGOTTEN,
               log_tail=text_of("timeout")), "time limit", "as its log says"),
    "preempted, as the log says": (
        of_job("preempt", begun("preempt"), answer=FORGOTTEN, log_tail=text_of("preempted")), "preempted", ""),
    "preempted, and back where the setup failed": (
        RunFacts(run=RUN, jobs=[job("9")], attempts=[attempt(1, "9", "terminated")], answer=SchedulerAnswer(accounts=[
            AccountRow(job=slurm_job("9"), state="PREEMPTED"),
            AccountRow(job=slurm_job("9"), state="FAILED", nodes="n2", exit_code="2:0")]),
            log_tail=f"{text_of('preempted')}error: cluster.setup ended with exit status 2: ls\n"),
        "failed", "exit code 2; error: cluster.setup ended with exit status 2: ls"),
    "a node that failed": (of_job("node2", begun("node2")), "node failure", "of n2"),
    "a node that failed, as the log says": (
        of_job("node2", begun("node2"), answer=FORGOTTEN, log_tail=text_of("node_failure")), "node failure", ""),
    "cancelled, as the log says": (
        of_job("crun", begun("crun"), answer=FORGOTTEN, log_tail=text_of("cancelled")), "cancelled", ""),
    "put back after a preemption": (
        of_job("preempt", begun("preempt", "terminated")), "queued", "before that: preempted"),
    "put back after its node failed": (of_job("node", begun("node")), "queued", "before that: node failure"),
    "warned, and not put back": (
        of_job("fail", begun("fail", "time_limit")), "time limit", "warned"),
    "ended without a result": (of_job("ok", begun("ok")), "failed", "without a result"),
    "finished, and its result gone": (of_job("ok", begun("ok", "finished")), "finished", "result.json is gone"),
    "a job that SLURM has forgotten, which printed nothing": (
        of_job("ok", answer=FORGOTTEN), "never started", "no longer knows"),
    "a job that SLURM has forgotten, which began": (
        of_job("ok", begun("ok"), answer=FORGOTTEN), "failed", "without a record"),
    "an element of an array, cancelled by can-train while the array waited": (
        of_job("ok", answer=FORGOTTEN, cancels=[CancelRecord(run_id="r", time=minute(20))]),
        "cancelled", "before it started"),
    "cancelled by can-train, and SLURM has forgotten it": (
        of_job("ok", begun("ok"), answer=FORGOTTEN, cancels=[CancelRecord(run_id="r", time=minute(20))]),
        "cancelled", ""),
    "a process that works": (
        RunFacts(run=RUN, attempts=[attempt(1, alive=True)]), "running", "process 7 of this machine"),
    "a process that is gone": (RunFacts(run=RUN, attempts=[attempt(1, alive=False)]), "failed", "without a record"),
    "a process that was cancelled": (
        RunFacts(run=RUN, attempts=[attempt(1, ending="terminated")]), "cancelled", "SIGTERM"),
    "Ctrl-C": (RunFacts(run=RUN, attempts=[attempt(1, ending="interrupted")]), "cancelled", "Ctrl-C"),
    "a background process that has not begun": (
        RunFacts(run=RUN, jobs=[job("7", executor="local")], job_alive=True), "running", "starting"),
    "a background process that never began": (
        RunFacts(run=RUN, jobs=[job("7", executor="local")], job_alive=False, log_tail="error: no data\n"),
        "failed", "error: no data"),
    "nothing was started": (RunFacts(run=RUN), "never started", "no job was started"),
    "here after it had been a job": (
        of_job("fail", begun("fail", "failed"), attempt(2, alive=True)), "running", "process 7"),
    "waiting for the process of an earlier attempt": (
        restarted("RUNNING", replace(attempt(2, "9", restarts=1), waits_for="it waits for process 5")),
        "running", "on n1; it waits for process 5"),
    "put back, since an earlier attempt trained on": (
        restarted("PENDING", attempt(2, "9", "in_use", message="process 5 did not end", restarts=1)),
        "queued", "before that: requeued, process 5 did not end"),
    "an earlier attempt trained on for too long": (
        restarted("FAILED", attempt(2, "9", "in_use", message="process 5 did not end", restarts=1)),
        "failed", "process 5 did not end"),
    "one of a pack, while SLURM preempts its job": (
        packed("terminated"), "running", "an attempt ended (by SIGTERM, saved)"),
    "one of a pack, which was cancelled": (
        replace(packed("terminated"), cancels=[CancelRecord(run_id="r", time=minute(20))]),
        "cancelled", "by SIGTERM, saved"),
    "one of a pack, which failed": (packed("failed", message="no such data"), "failed", "no such data"),
    **{f"one of a pack that ended by {ending}, where its job waits for the others": (
        waits_for_others(attempt(1, "9", ending, message="no such data")), state, "no such data")
       for ending, state in (("failed", "failed"), ("gpu_oom", "CUDA out-of-memory"))},
    **{f"one of a pack that ended by {ending}, where its job waits to go on": (
        waits_for_others(attempt(1, "9", ending)), "queued", "before that: ")
       for ending in ("time_limit", "killed", "terminated")},
    "one of a pack that failed again in a job of its own, where the first job waits for the others": (
        waits_for_others(attempt(1, "9", "failed", message="no such data"),
                         attempt(2, "10", "failed", message="no such file"), resumed=[job("10", 15)]),
        "failed", "no such file"),
    **{f"one of a pack that failed before its job was {state.lower()}": (
        packed_until(state, "failed", message="no such data"), "failed", "no such data")
       for state in ("CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY")},
    "one of a pack that was saved as its job was cancelled": (
        packed_until("CANCELLED", "terminated"), "cancelled", "saved"),
    "put back, and cancelled before it was in the queue again": (
        cancelled_as_it_was_put_back("terminated"), "cancelled", "while its job was put back into the queue, saved"),
    "the same, killed before it could save": (
        cancelled_as_it_was_put_back(), "cancelled", "while its job was put back into the queue"),
    "put back, and out of the queue, and nobody knows why": (
        replace(cancelled_as_it_was_put_back("terminated"), cancels=[CancelRecord(run_id="r", time=minute(2))]),
        "failed", "it left the queue, and SLURM does not say why"),
    "suspended": (restarted("SUSPENDED", attempt(2, "9", restarts=1)), "suspended", "on n1"),
    "suspended by a signal": (restarted("STOPPED", attempt(2, "9", restarts=1)), "suspended", "on n1"),
    "suspended before it began": (
        RunFacts(run=RUN, jobs=[job("9")], answer=restarted("SUSPENDED", attempt(1)).answer), "suspended", "on n1"),
    "submitted again after it had failed": (
        RunFacts(run=RUN, jobs=[job(JOBS["fail"]), job(JOBS["held"], 30, reason="host out-of-memory: 600M not 400M")],
                 attempts=[begun("fail", "failed")], answer=recorded("held")),
        "queued", "submitted again (host out-of-memory: 600M not 400M)"),
    "submitted again, and that job cancelled before it began": (
        RunFacts(run=RUN, jobs=[job(JOBS["fail"]), job(JOBS["cpend"], 30)], attempts=[begun("fail", "failed")],
                 answer=recorded("cpend")), "cancelled", "before it started"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_state_is(name: str) -> None:
    facts, state, part = CASES[name]
    found = infer_run_state(facts)
    assert found.state == state
    assert part in found.sentence
    assert found.certain


UNSAVED = "by SIGTERM, before a checkpoint"


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [(of_job("crun", begun("crun", "terminated", message=UNSAVED)), "before a checkpoint"),
     (of_job("crun", begun("crun", "killed", message="killed by signal 9")), ""),
     (of_job("timeout", begun("timeout", "terminated", message=UNSAVED)),
      "its limit of 00:01:00 was up, before a checkpoint"),
     (packed("terminated", message=UNSAVED), f"on n1; an attempt ended ({UNSAVED}), its job has not"),
     (replace(cancelled_as_it_was_put_back(), attempts=[attempt(1, "9_1", "terminated", message=UNSAVED)]),
      "while its job was put back into the queue")],
)  # fmt: skip
def test_an_attempt_that_was_stopped_before_a_checkpoint_has_saved_nothing(facts: RunFacts, sentence: str) -> None:
    assert infer_run_state(facts).sentence == sentence


def test_a_job_that_waits_for_the_others_of_a_pack_is_no_job_of_the_run_that_failed() -> None:
    """`cancel` would call the run cancelled, and `resume` would refuse to start it."""
    assert live_row(waits_for_others(attempt(1, "9", "failed"))) is None
    assert live_row(waits_for_others(attempt(1, "9", "time_limit"))) is not None


@pytest.mark.parametrize(
    ("facts", "state", "part"),
    [
        (of_job("ok", begun("ok"), answer=NO_SLURM), "running", "does not answer here"),
        (of_job("ok", answer=NO_SLURM), "queued", "does not answer here"),
        (of_job("ok", begun("ok", "terminated"), answer=NO_SLURM), "queued", "does not answer here"),
        (
            of_job(
                "ok", begun("ok", "terminated"), answer=NO_SLURM, cancels=[CancelRecord(run_id="r", time=minute(12))]
            ),
            "cancelled",
            "does not answer here",
        ),
        (
            of_job(
                "ok", begun("ok", "terminated"), answer=NO_SLURM, cancels=[CancelRecord(run_id="r", time=minute(9))]
            ),
            "queued",
            "does not answer here",
        ),
        (
            of_job("ok", answer=NO_SLURM, cancels=[CancelRecord(run_id="r", time=minute(2))]),
            "cancelled",
            "does not answer here",
        ),
        (
            of_job("ok", begun("ok"), answer=NO_SLURM, cancels=[CancelRecord(run_id="r", time=minute(12))]),
            "running",
            "does not answer here",
        ),
        (RunFacts(run=RUN, attempts=[attempt(1, host="there")]), "running", "process 7 of there"),
        (RunFacts(run=RUN, jobs=[job("7", executor="local")]), "running", "on here"),
        (RunFacts(run=RUN, has_folder=False), "failed", "/runs/r is gone"),
    ],
)
def test_what_is_not_certain_is_said_to_be_so(facts: RunFacts, state: str, part: str) -> None:
    found = infer_run_state(facts)
    assert (found.state, found.certain) == (state, False)
    assert part in found.sentence


def test_an_error_is_certain_also_where_no_slurm_answers() -> None:
    found = infer_run_state(of_job("ok", begun("ok", "failed", message="no such data"), answer=NO_SLURM))
    assert (found.state, found.sentence, found.certain) == ("failed", "no such data", True)


@pytest.mark.parametrize(("example", "state"), [("ok", "finished"), ("timeout", "time limit"), ("crun", "cancelled")])
def test_of_a_run_whose_folder_is_gone_slurm_may_know_the_end(example: str, state: str) -> None:
    found = infer_run_state(of_job(example, has_folder=False))
    assert found.state == state
    assert "/runs/r is gone" in found.sentence


def test_every_cause_is_one_of_the_vocabulary() -> None:
    assert {state for _, state, _ in CASES.values()} == {*CAUSES, *LIVE}


@pytest.mark.parametrize(
    ("example", "state"), [("preempt", "preempted"), ("node", "node failure"), ("requeue", "requeued")]
)
def test_each_attempt_of_a_job_that_was_put_back_has_its_own_ending(example: str, state: str) -> None:
    first = attempt(1, JOBS[example], "terminated")
    second = attempt(2, JOBS[example], "finished", restarts=1)
    facts = of_job(example, first, second)
    assert infer_attempt_state(first, facts).state == state
    assert infer_attempt_state(second, facts).state == "finished"


def state_of_first(*attempts: AttemptFacts, **values: Any) -> tuple[str, str]:
    facts = RunFacts(run=RUN, jobs=[job("9")], attempts=attempts, **values)
    state = infer_attempt_state(attempts[0], facts)
    return state.label, state.sentence


def test_nobody_cancelled_an_attempt_whose_job_came_back() -> None:
    result, back = {"best_validation_loss": 0.25, "best_epoch": 3}, attempt(2, "9", "finished", restarts=1)
    # SLURM is not asked about a finished run.
    assert state_of_first(attempt(1, "9", "terminated"), back, result=result) == ("requeued", "by SIGTERM, saved")
    assert state_of_first(attempt(1, "9"), back, result=result) == ("requeued", "")
    another = attempt(2, "10", "finished")
    assert state_of_first(attempt(1, "9", "terminated"), another, result=result) == ("cancelled", "by SIGTERM, saved")
    waits = SchedulerAnswer(queue=[QueueRow(job=slurm_job("9"), state="PENDING")])
    assert state_of_first(attempt(1, "9", "terminated"), answer=waits) == ("requeued", "by SIGTERM, saved")


def test_whether_an_attempt_was_cancelled_is_not_certain_while_its_job_leaves() -> None:
    leaves = SchedulerAnswer(queue=[QueueRow(job=slurm_job("9"), state="COMPLETING")])
    assert state_of_first(attempt(1, "9", "terminated"), answer=leaves) == ("cancelled?", "by SIGTERM, saved")
    cancels = [CancelRecord(run_id="r", time=minute(20))]
    ended = state_of_first(attempt(1, "9", "terminated"), answer=leaves, cancels=cancels)
    assert ended == ("cancelled", "by SIGTERM, saved")


def test_an_attempt_of_a_suspended_job_is_suspended() -> None:
    answer = SchedulerAnswer(queue=[QueueRow(job=slurm_job("9"), state="SUSPENDED", nodes="n1")])
    assert state_of_first(attempt(1, "9"), answer=answer) == ("suspended", "")


ERRORS = """
KeyError: 'no such metric'
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB
AssertionError
KeyboardInterrupt
error: There is no such data
[rank1]: ValueError: x
0: ValueError: x
terminate called after throwing an instance of 'c10::Error'
CUDA error: device-side assert triggered
srun: error: n1: task 0: Segmentation fault (core dumped)
srun: error: Unable to create step for job 12: More processors requested than permitted
slurmstepd: error: execve(): python: No such file or directory
/var/spool/slurmd/job12/slurm_script: line 12: module: command not found
/var/spool/slurmd/job12/slurm_script: line 5: 12345 Killed                  python x
sh: 1: nvidia-smi: not found
/usr/bin/env: 'python3': No such file or directory
/usr/bin/python: No module named can_train
python: can't open file '/x.py': [Errno 2] No such file or directory
Killed
Segmentation fault (core dumped)
Bus error
Fatal Python error: Segmentation fault
[2026-01-01 10:00:00,123][__main__][ERROR] - boom
2026-01-01 10:00:00 ERROR root: boom
FATAL:   could not open image /x.sif: no such file
Lmod has detected the following error: The following module(s) are unknown: "cuda/99"
python: error while loading shared libraries: libcuda.so.1: cannot open shared object file
cp: error writing 'x': No space left on device
EnvironmentNameNotFound: Could not find conda environment: x
train.py: error: unrecognized arguments: --foo
mpirun noticed that process rank 0 with PID 0 on node n1 exited on signal 9 (Killed).
double free or corruption (out)
""".strip().splitlines()


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_of_a_program_is_recognized_whatever_is_printed_after_it(line: str) -> None:
    found = last_error_line(f"epoch 1\n{line}\nA batch of 64 fits.\ncan-train: y\n")
    assert found == line.removeprefix("[rank1]: ").removeprefix("0: ")


@pytest.mark.parametrize(
    "line",
    [
        "epoch 3: loss 0.25, relative error: 1e-6",
        "PATH=/usr/bin:/error: ERROR: x",
        'export FOO="error: x"',
        "A batch of 64 fits in memory. 12 out-of-memory errors were rescued.",
        "note: CUDA out-of-memory error in mid-run: the batch is split",
        "/x.py:12: UserWarning: CUDA initialization: no NVIDIA driver",
        "BASH_FUNC_module%%=() {  eval x: command not found",
        "0 errors, 3 warnings",
        "srun: error: n1: task 0: Exited with exit code 2",
    ],
)
def test_a_line_that_is_no_error_is_no_cause(line: str) -> None:
    assert last_error_line(f"{line}\n") == ""
    assert error_in_words(f"{line}\n")[:60] == f"no error was printed; last line: {line}"[:60]


def test_the_exception_of_a_traceback_is_its_error_whatever_its_name() -> None:
    trace = "Traceback (most recent call last):\n  File x\n    y\nqueue.Empty\n"
    assert last_error_line(f"{trace}bye\n") == "queue.Empty"
    labelled = "".join(f"[rank0]: {line}\n" for line in trace.splitlines())
    assert last_error_line(f"{labelled}bye\n") == "queue.Empty"


def test_a_last_line_of_any_length_is_cut_to_a_line_of_the_table() -> None:
    assert error_in_words(f"{'x' * 900}\n") == f"no error was printed; last line: {'x' * 46}…"
    facts = of_job("fail", log_tail=f"LS_COLORS={'rs=0:' * 200}\n")
    assert infer_run_state(facts).sentence.startswith("exit code 3; no error was printed; last line: LS_COLORS=rs=0:")
    assert len(infer_run_state(facts).sentence) <= len("exit code 3; ") + 80
    assert len(last_error_line(f"KeyError: {'x' * 900}")) == 240


def test_the_last_line_is_the_trainings_own() -> None:
    log = "note: a\nerror: b\n\nsrun: error: n1: task 0: Exited with exit code 2\nslurmstepd: error: x\ncan-train: y\n"
    assert last_error_line(log) == "error: b"
    assert last_error_line("") == ""


def test_a_failed_line_of_setup_is_named_with_the_error_that_it_printed() -> None:
    ended = "error: cluster.setup ended with exit status 1: source /sw/init"
    assert error_in_words(f"loading\n/sw/init: Stale file handle\n{ended}\n") == (
        f"{ended}; it printed: /sw/init: Stale file handle"
    )
    assert error_in_words(f"OSError: of an earlier attempt\nloading\n{ended}\n") == ended
