"""What holds for a task of any kind. It dies of its batch where nothing rescues it. Where it is split, it ends with the
weights of an unlimited device, and with the same to the last bit where it is killed on the way.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from can_train.cli.main import main
from fakes.bitwise import assert_ends_like, final_state
from fakes.killed_runs import finish_killed, only_run


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small training of a task on simulated data, of 12 steps or more."""

    words: str
    gpu: str  # Too small for a logical batch; what is planned fits, since where memory runs out a process may differ
    settings: tuple[str, ...]
    killed_at: tuple[int, ...]  # Steps

    @property
    def line(self) -> list[str]:
        settings = [word for setting in self.settings for word in ("--set", setting)]
        return [*self.words.split(), "--dataset", "synthetic", *settings, "--precision", "fp64",
                "--checkpoint-every", "5", "--val-interval", "5"]  # fmt: skip


CASES = {
    "seq2seq": Case(
        words="--task seq2seq --epochs 3 --batch-size 64",
        gpu="sim:4MiB",
        settings=("dataset.synthetic.words=220", "model.hidden=24", "model.embedding=16", "model.dropout=0"),
        killed_at=(5,),
    ),
    "transformer": Case(
        words="--task seq2seq --model transformer --epochs 3 --batch-size 64",
        gpu="sim:3MiB",
        settings=("dataset.synthetic.words=220", "model.hidden=32", "model.embedding=16", "model.layers=1",
                  "model.heads=2", "model.dropout=0"),
        killed_at=(5,),
    ),
    "bendr": Case(
        words="--task bendr --epochs 5 --batch-size 16 --gradient-accumulation-steps 1",
        gpu="sim:2MiB",
        settings=("dataset.synthetic.seconds=40", "dataset.synthetic.recordings=2", "model.hidden=16",
                  "model.layers=1", "model.feedforward=32", "model.dropout=0"),
        killed_at=(5,),
    ),
    # The encoder is frozen for three epochs, and thawed between the two ends.
    "tracknet": Case(
        words="--task tracknet --epochs 6 --batch-size 8",
        gpu="sim:9MiB",
        settings=("dataset.synthetic.games=4", "dataset.synthetic.frames=20", "dataset.synthetic.width=64",
                  "dataset.width=64", "dataset.height=36", "model.width=4", "model.levels=2", "model.groups=2",
                  "training.thaw_epoch=3"),
        killed_at=(5, 40),
    ),
    "muon": Case(
        words="--task muon --epochs 4 --batch-size 32",
        gpu="sim:6MiB",
        settings=("dataset.synthetic.showers=120", "dataset.synthetic.muons_per_pev=100", "model.hidden=16"),
        killed_at=(5,),
    ),
}  # fmt: skip

TOLERANCE = 1e-10  # of weights after 12 steps in float64


def place(folder: Path) -> list[str]:
    return ["--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state")]


def trained(folder: Path, *line: str) -> Path:
    assert main([*line, *place(folder)]) == 0
    return only_run(folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gpu_too_small_for_the_batch_ends_a_plain_training_and_not_this_one(case: Case, tmp_path: Path) -> None:
    small = (*case.line, "--device", case.gpu)
    # Nothing is searched for: what fits is no question where the batch is computed whole.
    plain = ("--find-batch-size", "off", "--no-adaptive-micro-batch")
    assert main([*small, *plain, *place(tmp_path / "off")]) == 3
    whole = trained(tmp_path / "whole", *case.line, "--device", "cpu", "--micro-batch-size", "1000")
    split = trained(tmp_path / "split", *small)
    result = json.loads((split / "result.json").read_text())
    plans = [result["plan"], *result["plan"]["later"]]
    assert result["steps"] >= 12
    assert max(one["plan"]["most_parts"] for one in plans) > 1
    own, other = (final_state(run)["model"] for run in (split, whole))
    for weight in own:
        torch.testing.assert_close(own[weight], other[weight], rtol=TOLERANCE, atol=TOLERANCE)
    finish_killed(tmp_path / "killed", tmp_path / "killed" / "state", small, at=case.killed_at)
    assert_ends_like(only_run(tmp_path / "killed"), split)
