import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from can_train.errors import ConfigError, DataError, MissingDataError
from can_train.reporter import SilentReporter
from can_train_tasks.seq2seq.pair_tables import Pair, data_digest, data_files, find_tables, joined, read_table
from can_train_tasks.seq2seq.pair_tables import with_features_column as resolved
from can_train_tasks.seq2seq.settings import Seq2seqDatasetSettings

HERE = Path()
SYMBOLS = st.characters(exclude_categories=("Cs",), exclude_characters="\t\r\n; \ufeff")
WORDS = st.lists(st.text(SYMBOLS, min_size=1, max_size=5), min_size=1, max_size=6).map(tuple)


def dataset(path: Path, **changed: Any) -> Seq2seqDatasetSettings:
    return Seq2seqDatasetSettings(name="words", path=str(path), **changed)


def table(folder: Path, text: str, name: str = "words.train.tsv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=5), st.permutations([1, 2, 3]))
def test_what_is_written_is_read_whatever_the_order_of_columns(
    tmp_path: Path, lines: list[tuple[tuple[str, ...], ...]], columns: list[int]
) -> None:
    cols = dict(zip(("source_col", "target_col", "features_col"), columns, strict=True))
    found = dataset(tmp_path, **cols, source_sep="space", target_sep="; ", features_sep=";")
    texts = []
    for source, target, features in lines:
        cells = (joined(source, "space"), "; ".join(target), ";".join(features))
        texts.append("\t".join(cells[columns.index(number)] for number in (1, 2, 3)))
    path = table(tmp_path, "\n".join(texts) + "\n")
    assert read_table(path, found) == [Pair(source=a, target=b, features=c) for a, b, c in lines]


def test_characters_are_symbols_and_the_third_column_is_taken_for_features(tmp_path: Path) -> None:
    path = table(tmp_path, "ev\tevler\tN;PL\r\n\r\nkol\tkollar\tN;PL\n")
    pairs = read_table(path, resolved(dataset(path), path))
    assert pairs[0] == Pair(source=("e", "v"), target=("e", "v", "l", "e", "r"), features=("N", "PL"))
    assert len(pairs) == 2


def test_a_table_of_two_columns_has_no_features(tmp_path: Path) -> None:
    path = table(tmp_path, "cat\tK AE T\n")
    [pair] = read_table(path, resolved(dataset(path, target_sep=" "), path))
    assert pair == Pair(source=("c", "a", "t"), target=("K", "AE", "T"))


@pytest.mark.parametrize("given", ["file", "folder"])
def test_the_tables_beside_the_training_table_are_found(tmp_path: Path, given: str) -> None:
    train, dev, test = (table(tmp_path, "a\tb\n", f"tur.{name}.tsv") for name in ("train", "valid", "test"))
    found = dataset(train if given == "file" else tmp_path)
    assert data_files(found, HERE) == [train, dev, test]


def test_tables_that_are_given_win(tmp_path: Path) -> None:
    train, _, other = (table(tmp_path, "a\tb\n", name) for name in ("train.tsv", "dev.tsv", "other.tsv"))
    tables = find_tables(dataset(train, dev=str(other)), HERE)
    assert (tables.dev, tables.test) == (other, None)


def test_a_digest_is_that_of_the_content_wherever_it_lies(tmp_path: Path) -> None:
    digests = []
    for folder, text in (("one", "a\tb\n"), ("two", "a\tb\n"), ("three", "a\tc\n")):
        (tmp_path / folder).mkdir()
        digests.append(data_digest(dataset(table(tmp_path / folder, text)), HERE, SilentReporter()))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a b\na\tb\n", r"column 2, the target: .*words\.train\.tsv:1: 1 column"),
        ("a\tb\n\na b\n", r"as many columns as the first line: .*words\.train\.tsv:3: 1 column, not 2"),
        ("a\tb\na\tb\tN\n", r"as many columns as the first line: .*words\.train\.tsv:2: 3 columns, not 2"),
        ("a\tb\n\tb\n", r"a source: .*words\.train\.tsv:2: column 1 is empty"),
        ("\n", r"at least one pair: .* is empty"),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = table(tmp_path, text)
    with pytest.raises(DataError, match=said):
        read_table(path, resolved(dataset(path), path))


def test_a_table_in_another_encoding_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes("ok\tok\nçay\tçaylar\n".encode("latin-1"))
    with pytest.raises(DataError, match=re.escape("train.tsv:2")):
        read_table(path, dataset(path, features_col=0))


def test_data_that_are_absent_are_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="does not exist"):
        find_tables(dataset(tmp_path / "none"), HERE)
    with pytest.raises(MissingDataError, match="must hold one training table"):
        find_tables(dataset(tmp_path), HERE)
    with pytest.raises(MissingDataError, match=r"dataset\.dev is a table"):
        find_tables(dataset(table(tmp_path, "a\tb\n"), dev="none.tsv"), HERE)


def test_source_and_target_are_different_columns() -> None:
    with pytest.raises(ConfigError, match="both are column 2"):
        Seq2seqDatasetSettings(source_col=2)


@pytest.mark.parametrize(
    ("train", "dev", "test"),
    [
        ("turkish-train-medium", "turkish-dev", "turkish-test"),
        ("tgl.trn", "tgl.dev", "tgl.tst"),
        ("ang_large.train", "ang.dev", "ang.test"),
        ("train/ice_train.tsv", "dev/ice_dev.tsv", "test/ice_test.tsv"),
        ("train-low.tsv", "dev-low.tsv", "test.tsv"),
    ],
)
def test_the_tables_of_shared_tasks_are_found_by_their_names(tmp_path: Path, train: str, dev: str, test: str) -> None:
    for name in (train, dev, test):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    first, *others = (table(tmp_path, "a\tb\tN\n", name) for name in (train, dev, test))
    tables = find_tables(dataset(first), HERE)
    assert [tables.dev, tables.test] == others


def test_a_test_table_without_targets_is_left_out_unless_it_is_given(tmp_path: Path) -> None:
    train, covered = table(tmp_path, "a\tb\tN\n", "tur.trn"), table(tmp_path, "a\tN\n", "tur.tst")
    tables = find_tables(dataset(train), HERE)
    assert (tables.test, tables.covered) == (None, covered)
    assert [*tables.by_name.values()] == [train]
    assert find_tables(dataset(train, test=str(covered)), HERE).test == covered
