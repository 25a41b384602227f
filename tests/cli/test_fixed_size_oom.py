"""A micro-batch whose size was given runs out of memory: every answer about the factor is the same, and cut."""

import json
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.factors.store import get_safety_factor_db
from can_train.training.dry_run import get_effective_safety_factor

pytestmark = pytest.mark.slow

KEY = "synthetic_gat_student_normal"
SETS = ("dataset.synthetic.seconds=5", "factor.policy=momentum")


def test_a_fatal_out_of_memory_with_a_fixed_micro_batch_cuts_the_factor_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*words, "--state-dir", str(tmp_path)]) == code, capsys.readouterr().err
        return capsys.readouterr().out

    line = ("--model", "gat", "--size", "student", "--dataset", "synthetic", "--device", "sim:24MiB", "--batch-size",
            "256", "--set", SETS[0], "--set", SETS[1], "--runs-dir", str(tmp_path / "runs"))  # fmt: skip
    said(*line, "--micro-batch-size", "256", "--no-adaptive-micro-batch", code=3)
    (listed,) = json.loads(said("factors", "--json"))["factors"]
    (shown,) = json.loads(said("factors", KEY, "--show", "--json"))["factors"]
    exported = json.loads(said("factors", "--export", "-"))[KEY]
    planned = json.loads(said(*line, "--dry-run", "--json"))["plans"][0]
    run = resolve(RunRequest(model="gat", size="student", dataset="synthetic", device="sim:24MiB", sets=SETS,
                             values={"paths.state_dir": str(tmp_path)}))  # fmt: skip
    store = get_safety_factor_db(tmp_path)
    answers = [*(one["safety_factor"] for one in (listed, shown, exported, planned)), store.get_factor(KEY),
               get_effective_safety_factor(run)]  # fmt: skip
    # The table of experience has 0.6 for this data set, from which momentum takes 0.15.
    assert answers == [pytest.approx(0.45)] * 6
    assert (listed["state"], listed["ooms"], store.get_stats(KEY)["num_runs"]) == ("learned", 1, 1)
