"""Targets that a trained model writes for sources without them, and the beam search against all targets there are."""

import csv
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import can_train
from can_train.cli.main import main
from can_train_tasks.seq2seq.encoder_decoders import Encoded, Seq2seqModel, write
from can_train_tasks.seq2seq.pair_tables import END, PAD, START, UNKNOWN, Pair, read_table, without_target_column
from can_train_tasks.seq2seq.scoring import score
from can_train_tasks.seq2seq.settings import LanguageSettings, Seq2seqDatasetSettings
from can_train_tasks.seq2seq.synthetic import write_language
from tasks.seq2seq.conftest import TURKISH, needs_turkish

A, B, FEATURE = 4, 5, 6
LONGEST = 3


class Whim(Seq2seqModel):
    """Draws the logits of the symbol that follows a text by the text."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def logits(self, text: tuple[int, ...]) -> Tensor:
        mixed = hash((self.seed, text)) % 2**31
        return 2 * torch.randn(FEATURE + 1, generator=torch.Generator().manual_seed(mixed))

    def encode(self, source: Tensor) -> Encoded:
        return Encoded(source[..., None].float(), source.float(), source == PAD)

    def decode(self, encoded: Encoded, target: Tensor) -> Tensor:
        raise NotImplementedError

    def begin(self, encoded: Encoded, width: int) -> Any:
        return torch.empty(len(encoded.memory), width, 0, dtype=torch.int64)

    def step(self, encoded: Encoded, state: Any, last: Tensor) -> tuple[Tensor, Any]:
        state = torch.cat([state, last[..., None]], dim=-1)
        rows = [self.logits(tuple(text)) for text in state[:, :, 1:].flatten(0, 1).tolist()]
        return torch.stack(rows).unflatten(0, last.shape), state

    def chosen(self, state: Any, beams: Tensor) -> Any:
        return state.gather(1, beams[..., None].expand_as(state))


def every_target(model: Whim) -> dict[tuple[int, ...], float]:
    """The log-likelihood of each target of at most `LONGEST` symbols."""
    ended = [(*text, END) for length in range(LONGEST) for text in product((A, B), repeat=length)]
    likelihoods = {}
    for target in [*ended, *product((A, B), repeat=LONGEST)]:
        shares = [model.logits(target[:at]).log_softmax(0)[symbol].item() for at, symbol in enumerate(target)]
        likelihoods[target] = sum(shares)
    return likelihoods


@pytest.mark.parametrize("seed", range(5))
def test_the_best_hypotheses_are_the_best_of_all_targets(seed: int) -> None:
    model = Whim(seed)
    every = every_target(model)
    best = sorted(every, key=lambda target: -every[target] / len(target))
    written = write(model, torch.tensor([[A]]), width=len(every), longest=LONGEST, symbols=FEATURE)
    found = [tuple(symbol for symbol in text if symbol != PAD) for text in written.symbols[0].tolist()]
    assert found == best
    assert written.log_likelihood[0].tolist() == pytest.approx([every[target] for target in best], abs=1e-5)


def test_a_narrow_beam_keeps_hypotheses_that_differ() -> None:
    written = write(Whim(0), torch.tensor([[A], [B]]), width=3, longest=LONGEST, symbols=FEATURE)
    for of_source in written.symbols.tolist():
        assert len({tuple(text) for text in of_source}) == 3
    assert not set(written.symbols.flatten().tolist()) & {START, UNKNOWN, FEATURE}


WITH_ENCODER = ("--set", "model.features_encoder=true", "--set", "model.share_embeddings=false")


@pytest.fixture(scope="module", params=[(), WITH_ENCODER], ids=["features in the source", "features apart"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on tables of the made-up language; its folder is in one with `words.train.tsv` and so on."""
    folder = tmp_path_factory.mktemp("targets")
    for name, text in write_language(LanguageSettings(words=120)).items():
        (folder / f"words.{name}.tsv").write_text(text)
    line = ["--task", "seq2seq", "--dataset", str(folder / "words.train.tsv"), "--epochs", "12", "--lr", "0.01",
            "--batch-size", "8", "--set", "model.hidden=32", "--set", "model.embedding=16", "--device", "cpu", "-q",
            "--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state")]  # fmt: skip
    assert main([*line, *request.param]) == 0
    (made,) = (folder / "runs").iterdir()
    return made


def predicted(run: Path, data: Path, out: Path, *words: str) -> list[dict[str, str]]:
    places = ["--state-dir", str(run.parent.parent / "state"), "--device", "cpu", "--quiet"]
    assert main(["predict", str(run), "--dataset", str(data), "--out", str(out), *words, *places]) == 0
    with out.open() as file:
        return list(csv.DictReader(file))


def cells(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]


@pytest.mark.parametrize("cut", ["the column is cut off", "the cells are empty", "the targets are there"])
def test_targets_written_without_the_true_ones_have_the_score_of_an_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: str
) -> None:
    test = run.parent.parent / "words.test.tsv"
    keep = {"the column is cut off": [0, 2], "the targets are there": [0, 1, 2]}
    lines = [[row[at] for at in keep[cut]] if cut in keep else [row[0], "", row[2]] for row in cells(test)]
    data = tmp_path / "data.tsv"
    data.write_text("".join("\t".join(row) + "\n" for row in lines))
    rows = predicted(run, data, tmp_path / "out.csv")
    truth = [Pair(source=(), target=tuple(target)) for _, target, _ in cells(test)]
    scored = score(truth, [tuple(row["prediction"]) for row in rows])
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "--device", "cpu"]) == 0
    judged = json.loads(capsys.readouterr().out)["judgement"]["test"]["test"]["model"]
    assert scored == {name: judged[name] for name in scored}
    assert judged["character_error_rate"] < 0.9
    assert [(row["source"], row["features"]) for row in rows] == [
        (source, features) for source, _, features in cells(test)
    ]


@pytest.mark.slow
@needs_turkish
def test_a_published_table_without_targets_has_the_score_of_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The beginnings of its tables, and few steps: enough that targets differ.
    for name in ("train", "dev", "test"):
        table = TURKISH.with_name(f"tur_inflection.{name}.tsv").read_text().splitlines(keepends=True)
        (tmp_path / f"tur.{name}.tsv").write_text("".join(table[:200]))
    folders = ["--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state")]
    line = ["--task", "seq2seq", "--dataset", str(tmp_path / "tur.train.tsv"), "--epochs", "4", "--lr", "0.01",
            "--batch-size", "8", "--set", "model.hidden=32", "--set", "model.embedding=16", "-q"]  # fmt: skip
    assert main([*line, *folders, "--device", "cpu"]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    truth = cells(tmp_path / "tur.test.tsv")
    bare = tmp_path / "bare.tsv"
    bare.write_text("".join(f"{source}\t{features}\n" for source, _, features in truth))
    rows = predicted(made, bare, tmp_path / "out.csv")
    scored = score([Pair(source=(), target=tuple(target)) for _, target, _ in truth],
                   [tuple(row["prediction"]) for row in rows])  # fmt: skip
    capsys.readouterr()
    assert main(["evaluate", str(made), "--json", "--device", "cpu", "--state-dir", str(tmp_path / "state")]) == 0
    judged = json.loads(capsys.readouterr().out)["judgement"]["test"]["test"]["model"]
    assert scored == {name: judged[name] for name in scored}


def test_several_targets_of_a_source_are_ranked(run: Path, tmp_path: Path) -> None:
    test = run.parent.parent / "words.test.tsv"
    words = ("--set", "task.beam_width=4", "--set", "task.n_best=3")
    rows = predicted(run, test, tmp_path / "out.csv", *words)
    assert [row["rank"] for row in rows[:6]] == ["1", "2", "3"] * 2
    for start in range(0, len(rows), 3):
        of_source = rows[start : start + 3]
        assert len({row["prediction"] for row in of_source}) == 3
        # Per symbol and end; a target that was broken off has none, and is the longest.
        means = [float(row["log_likelihood"]) / (len(row["prediction"]) + 1) for row in of_source]
        assert means == sorted(means, reverse=True)
    narrow = predicted(run, test, tmp_path / "narrow.csv", "--set", "task.beam_width=4")
    assert [row["prediction"] for row in narrow] == [row["prediction"] for row in rows[::3]]


def test_more_targets_than_hypotheses_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(run), "--set", "task.n_best=3", "--device", "cpu"]) == 2
    assert "task.n_best is at most task.beam_width: n_best 3, beam_width 1" in capsys.readouterr().err


def test_a_loaded_model_writes_the_targets_of_text(run: Path, tmp_path: Path) -> None:
    test = run.parent.parent / "words.test.tsv"
    model = can_train.load(run, device="cpu", state_dir=tmp_path)
    written = model.predict([(source, features) for source, _, features in cells(test)])
    assert [str(each) for each in written] == [row["prediction"] for row in predicted(run, test, tmp_path / "out.csv")]
    assert math.exp(written[0][0].log_likelihood) < 1.0


@pytest.mark.parametrize(
    ("line", "has_features", "expected"),
    [("a\tb\tN;PL", True, (1, 3)), ("a\tN;PL", True, (1, 2)), ("a\tb", False, (1, 0)), ("a", False, (1, 0))],
)
def test_the_columns_of_a_table_without_targets_are_found(
    tmp_path: Path, line: str, has_features: bool, expected: tuple[int, int]
) -> None:
    path = tmp_path / "table.tsv"
    path.write_text(f"{line}\n")
    columns = without_target_column(Seq2seqDatasetSettings(path=str(path)), path, has_features=has_features)
    assert (columns.source_col, columns.features_col) == expected
    (pair,) = read_table(path, columns, with_targets=False)
    assert pair == Pair(source=("a",), target=(), features=("N", "PL") if has_features else ())


def judged_on(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    places = ["--state-dir", str(run.parent.parent / "state"), "--device", "cpu"]
    assert main(["evaluate", str(run), "--dataset", str(data), "--json", *places]) == 0
    judgement: dict[str, Any] = json.loads(capsys.readouterr().out)["judgement"]
    return judgement


def test_a_run_without_features_does_not_read_the_features_of_other_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = write_language(LanguageSettings(words=40))
    with_features = tmp_path / "other.tsv"
    with_features.write_text(tables.pop("test"))
    for name, text in {**tables, "bare": with_features.read_text()}.items():
        (tmp_path / f"words.{name}.tsv").write_text(
            "".join(f"{s}\t{t}\n" for s, t, _ in map(str.split, text.splitlines()))
        )
    line = ["--task", "seq2seq", "--dataset", str(tmp_path / "words.train.tsv"), "--epochs", "2", "--lr", "0.01",
            "--set", "model.hidden=16", "--set", "model.embedding=8", "--device", "cpu", "-q",
            "--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state")]  # fmt: skip
    assert main(line) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert judged_on(run, with_features, capsys) == judged_on(run, tmp_path / "words.bare.tsv", capsys)
    model = can_train.load(run, device="cpu", state_dir=tmp_path / "state")
    bare, given = model.predict(["kitap", ("kitap", "N;PL")])
    assert bare == given


def test_a_table_without_features_is_refused_where_the_run_has_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "bare.tsv"
    table.write_text("ev\tevler\n")
    assert main(["evaluate", str(run), "--dataset", str(table), "--device", "cpu"]) == 2
    assert "column 3, the features" in capsys.readouterr().err
