"""Other programs, and the ends of what they wrote."""

from pathlib import Path

from can_train.slurm.client import output_of, run_command, tail


def test_a_program_says_its_output_its_complaint_or_why_there_is_none() -> None:
    said = run_command(["sh", "-c", "echo out; echo why >&2; exit 3"], seconds=60)
    assert (said.status, said.output, said.complaint) == (3, "out\n", "why\n")
    late = run_command(["sleep", "60"], seconds=0.1)
    assert (late.status, late.complaint) == (None, "sleep has no answer after 0.1 s")
    assert run_command(["no-such-program"], seconds=60).status is None


def test_only_a_program_that_succeeds_has_an_output() -> None:
    assert output_of(["echo", "x"], seconds=60) == "x\n"
    assert output_of(["sh", "-c", "echo x; exit 1"], seconds=60) is None
    assert output_of(["no-such-program"], seconds=60) is None


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 2**20 + b"\nthe end\n")
    assert tail(log).endswith("\nthe end\n")
    assert len(tail(log)) <= 2**16
    assert tail(tmp_path / "none") == ""
