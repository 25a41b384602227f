from pathlib import Path

import numpy as np
import pytest
import torch

from can_train.errors import ConfigError
from can_train_tasks.seq2seq.pair_tables import END, PAD, START, UNKNOWN, Pair, Vocabulary
from can_train_tasks.seq2seq.settings import Seq2seqDatasetSettings, TransformerSettings
from tasks.seq2seq.conftest import MODELS, TURKISH, MakeTask, needs_turkish

CPU = torch.device("cpu")


def pair(source: str, target: str, *features: str) -> Pair:
    return Pair(source=tuple(source), target=tuple(target), features=features)


def test_the_vocabulary_knows_what_the_training_pairs_hold_and_nothing_else() -> None:
    vocabulary = Vocabulary.of([pair("ab", "ba", "N")])
    assert vocabulary.features(pair("axb", "", "N", "V"))[1:] == [UNKNOWN]
    assert vocabulary.source(pair("axb", ""))[1::2] == [UNKNOWN, END]
    assert vocabulary.unknown([pair("ax", "yb")]) == {"x", "y"}


def test_a_feature_that_is_written_like_a_symbol_is_another_one() -> None:
    vocabulary = Vocabulary.of([pair("N", "N", "N")])
    (feature,), (symbol, _) = vocabulary.features(pair("N", "", "N")), vocabulary.source(pair("N", "", "N"))
    assert feature != symbol


@pytest.mark.parametrize("name", ["lstm", "lstm+"])
def test_features_are_read_before_the_source_or_by_an_encoder_of_their_own(make_task: MakeTask, name: str) -> None:
    sample, vocabulary = make_task(name).sample(0), make_task(name).vocabulary
    features, source = vocabulary.features(sample.pair), vocabulary.source(sample.pair)
    read = [sample.source.tolist(), None if sample.features is None else sample.features.tolist()]
    assert read == ([source, [*features, END]] if name.endswith("+") else [[*features, *source], None])


def test_an_encoder_of_features_needs_a_column_of_features(make_task: MakeTask, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("ev\tevler\n" * 50)
    task = make_task("lstm+", dataset=Seq2seqDatasetSettings(name="few", path=str(tmp_path / "train.tsv")))
    with pytest.raises(ConfigError, match="reads a column of features: the training table has none"):
        task.datasets()


@pytest.mark.parametrize("name", MODELS)
def test_two_tables_of_embeddings_learn_from_sources_and_from_targets_apart(make_task: MakeTask, name: str) -> None:
    task = make_task(name)
    model = task.build_model()
    batch = task.logical_batch(task.train_rows[:20], CPU, torch.float32, torch.Generator())
    total, _ = batch.losses(model, 0, 20)["cross_entropy"]
    total.backward()
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    assert len(tables) == (2 if name.endswith("+") else 1)
    if len(tables) > 1:
        ends = [float(each.weight.grad[START].abs().sum()) for each in tables if each.weight.grad is not None]
        # No source has a start.
        assert ends[0] == 0.0 < ends[1]


def test_what_follows_the_end_is_not_written() -> None:
    vocabulary = Vocabulary.of([pair("ab", "ab")])
    a, b, _ = vocabulary.target(pair("", "ab"))
    assert vocabulary.written([a, START, b, UNKNOWN, END, a, PAD]) == ("a", "b")


def test_parts_are_padded_to_their_own_longest_pair(make_task: MakeTask) -> None:
    task = make_task()
    rows = task.train_rows[np.argsort(task.batch_features(task.train_rows)[:, 0])][[0, 1, -1]]
    batch = task.logical_batch(rows, CPU, torch.float32, torch.Generator())
    lengths = [len(task.sample(int(row)).source) for row in rows]
    assert [batch.collated(*part).source.shape[1] for part in ((0, 2), (2, 3))] == [max(lengths[:2]), lengths[2]]


def test_the_decoder_reads_the_target_one_symbol_late(make_task: MakeTask) -> None:
    task = make_task()
    batch = task.collate([task.sample(int(row)) for row in task.train_rows[:4]])
    assert (batch.before[:, 0] == START).all()
    assert not (batch.before == END).any()
    assert torch.equal(batch.before[:, 1:], batch.target[:, :-1].masked_fill(batch.target[:, :-1] == END, PAD))


def test_without_a_development_table_a_tenth_is_kept(make_task: MakeTask, tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("".join(f"ev{number}\tevler{number}\n" for number in range(50)))
    task = make_task(dataset=Seq2seqDatasetSettings(name="few", path=str(path)))
    assert (len(task.train_rows), len(task.validation_rows)) == (45, 5)
    assert len(task.notices()) == 1


def test_copies_of_pairs_are_told_where_no_table_validates(make_task: MakeTask, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("ev\tevler\n" * 50 + "at\tatlar\n")
    dataset = Seq2seqDatasetSettings(name="few", path=str(tmp_path))
    assert make_task(dataset=dataset).notices()[-1].startswith("49 training pairs are a copy of another: ")
    (tmp_path / "dev.tsv").write_text("ev\tevler\n")
    assert make_task(dataset=dataset).notices() == ()


def test_symbols_and_features_that_only_tests_have_are_said(make_task: MakeTask, tmp_path: Path) -> None:
    for name, text in (("train", "a\tb\tN\n"), ("dev", "a\tb\tN\n"), ("test", "xa\tb\tN;V;PL\n")):
        (tmp_path / f"{name}.tsv").write_text(text)
    task = make_task(dataset=Seq2seqDatasetSettings(name="few", path=str(tmp_path)))
    assert task.notices() == ("1 symbol of test is not in the training data: x",
                              "2 features of test are not in the training data: PL V")  # fmt: skip


def test_heads_share_the_width_out() -> None:
    with pytest.raises(ConfigError, match=r"twice model\.heads"):
        TransformerSettings(embedding=12, heads=4)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_a_batch_by_heart(make_task: MakeTask, name: str) -> None:
    # Scores are in docs/seq2seq.md.
    task = make_task(name)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = task.logical_batch(task.train_rows[:64], CPU, torch.float32, torch.Generator())
    means = []
    for _ in range(15):
        total, symbols = batch.losses(model, 0, 64)["cross_entropy"]
        optimizer.zero_grad()
        (total / symbols).backward()
        optimizer.step()
        means.append(float(total.detach()) / symbols)
    assert means[-1] < 0.8 * means[0]


@needs_turkish
def test_the_real_sample_is_read_and_its_baselines_scored(make_task: MakeTask) -> None:
    task = make_task(dataset=Seq2seqDatasetSettings(name="turkish", path=str(TURKISH)))
    assert [len(samples) for samples in task.sets.values()] == [1000, 1000, 1000]
    assert task.sample(0).pair.features == ("V", "IND", "1", "PL", "PST", "POS", "DECL")
    scores = task.baselines(task.sets["test"])
    assert scores["copy of the source"]["exact_match"] == 0.009
    assert scores["most frequent suffix rule"]["exact_match"] == 0.376


def test_without_a_path_the_made_up_language_is_meant() -> None:
    assert Seq2seqDatasetSettings().is_synthetic
    assert not Seq2seqDatasetSettings(path="somewhere").is_synthetic
