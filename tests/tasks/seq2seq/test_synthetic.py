import doctest
from pathlib import Path

from can_train_tasks.seq2seq import synthetic
from can_train_tasks.seq2seq.pair_tables import read_table
from can_train_tasks.seq2seq.settings import LanguageSettings, Seq2seqDatasetSettings
from can_train_tasks.seq2seq.synthetic import inflect, synthetic_tables, write_language

SMALL = LanguageSettings(words=200)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(synthetic).failed == 0


def test_the_same_settings_give_the_same_bytes_and_others_do_not() -> None:
    assert write_language(SMALL) == write_language(SMALL)
    assert write_language(SMALL) != write_language(LanguageSettings(words=200, seed=1))


def test_the_reader_reads_every_form_back_and_no_pair_is_in_two_tables(tmp_path: Path) -> None:
    tables = synthetic_tables(tmp_path, SMALL)
    dataset = Seq2seqDatasetSettings(features_col=3)
    read = {name: read_table(path, dataset) for name, path in tables.by_name.items()}
    assert {name: len(pairs) for name, pairs in read.items()} == {"train": 200, "dev": 20, "test": 20}
    everything = [pair for pairs in read.values() for pair in pairs]
    assert len(set(everything)) == len(everything)
    for pair in everything:
        _, case, number, *possessor = pair.features
        assert "".join(pair.target) == inflect("".join(pair.source), number, "".join(possessor), case)


def test_tables_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    tables = synthetic_tables(tmp_path, SMALL)
    tables.train.write_text("a\tb\n")
    assert synthetic_tables(tmp_path, SMALL) == tables
    assert tables.train.read_text() == "a\tb\n"
