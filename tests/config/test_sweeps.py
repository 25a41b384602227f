"""One line with lists of values stands for every combination of them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.config.compose import MOST_RUNS, RunRequest, expand, resolve
from can_train.errors import ConfigError


def swept(*sets: str) -> list[Sequence[str]]:
    return [request.sets for request in expand([RunRequest(model="gat", dataset="synthetic", sets=sets)])]


def test_a_range_is_swept_without_its_end() -> None:
    assert swept("training.seed=range(0,3)") == [("training.seed=0",), ("training.seed=1",), ("training.seed=2",)]


def test_the_last_setting_changes_fastest() -> None:
    assert swept("training.seed=1,2", "training.lr=0.1,0.01") == [
        ("training.seed=1", "training.lr=0.1"),
        ("training.seed=1", "training.lr=0.01"),
        ("training.seed=2", "training.lr=0.1"),
        ("training.seed=2", "training.lr=0.01"),
    ]


@pytest.mark.parametrize(
    "text", ["training.lr=0.1", "model.hidden=[1,2]", 'dataset.path="a,b"', "no equals sign", "a=("]
)
def test_what_is_no_sweep_stays_as_it_is(text: str) -> None:
    assert swept(text) == [(text,)]


def test_a_quoted_comma_is_no_end_of_a_value() -> None:
    assert swept('dataset.path="a,b",c') == [('dataset.path="a,b"',), ("dataset.path=c",)]


def test_a_choice_of_presets_is_swept() -> None:
    assert swept("memory=tight,muon") == [("memory=tight",), ("memory=muon",)]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("cluster.exclude=n1,n2", "exclude", "n1,n2"),
        ("+cluster.exclude=n[1-3,7]", "exclude", "n[1-3,7]"),
        ('cluster.nodelist="n1,n2"', "nodelist", "n1,n2"),
        ("cluster.constraint=[rack1|rack2]", "constraint", "[rack1|rack2]"),
        ("cluster.partition=a,b", "partition", "a,b"),
        ("cluster.account=007", "account", "007"),
        ("cluster.additional.mail-type=END,FAIL", "additional", {"mail-type": "END,FAIL"}),
        ("cluster.additional.mail-type=[END,FAIL]", "additional", {"mail-type": ["END", "FAIL"]}),
        ("cluster.additional.licenses=a:1,b:2", "additional", {"licenses": "a:1,b:2"}),
        ("cluster.additional.overcommit=true", "additional", {"overcommit": True}),
        ('cluster.setup=["module load a,b","x"]', "setup", ["module load a,b", "x"]),
    ],
)
def test_a_comma_in_what_a_job_asks_for_belongs_to_its_value(text: str, name: str, value: object) -> None:
    (request,) = expand([RunRequest(model="gat", dataset="synthetic", cluster="slurm", sets=(text,))])
    assert resolve(request).config["cluster"][name] == value


def test_a_comma_in_the_path_of_a_folder_belongs_to_it() -> None:
    (request,) = expand([RunRequest(model="gat", dataset="synthetic", sets=("paths.runs_dir=/a,b",))])
    assert resolve(request).paths.runs_dir == "/a,b"


@pytest.mark.parametrize(
    "text",
    ["cluster.nodes=1,2", "cluster.exclude=choice(n1,n2)", "cluster.comment=range(0,3)", "cluster.setup=a,b",
     "cluster=slurm,local", "factor.target=0.8,0.9", "monitor.interval=range(1,3)", "device=cpu,sim:1GiB"],
)  # fmt: skip
def test_what_decides_nothing_of_the_training_is_not_swept(text: str) -> None:
    with pytest.raises(ConfigError, match="Only settings of task, model, dataset, mode and training can be swept"):
        [resolve(request) for request in expand([RunRequest(model="gat", dataset="synthetic", sets=(text,))])]


@pytest.mark.parametrize("text", ["training.lr=interval(0,1)", "training.seed=range(3,3)"])
def test_values_without_number_and_an_empty_range_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="The values of the sweep cannot be listed"):
        swept(text)


def test_a_slip_does_not_start_a_million_runs() -> None:
    with pytest.raises(ConfigError, match=f"more than {MOST_RUNS}"):
        swept("training.seed=range(0,1000)", "training.lr=0.1,0.2")


def test_each_run_of_a_sweep_is_composed_by_itself() -> None:
    requests = expand([RunRequest(model="gat", dataset="synthetic", sets=("training.seed=range(0,2)",))])
    assert [resolve(request).training.seed for request in requests] == [0, 1]


@given(st.lists(st.integers(0, 99), min_size=2, max_size=5), st.lists(st.integers(0, 9), min_size=2, max_size=3))
def test_every_combination_occurs_once_for_each_time_it_was_asked_for(first: list[int], second: list[int]) -> None:
    def listed(values: list[int]) -> str:
        return ",".join(map(str, values))

    found = swept(f"training.seed={listed(first)}", f"training.epochs={listed(second)}")
    assert found == [(f"training.seed={a}", f"training.epochs={b}") for a in first for b in second]
