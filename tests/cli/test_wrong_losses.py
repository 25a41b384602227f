"""Losses and metrics that would train or judge something else than they should, as a person gets to see them."""

import json
from pathlib import Path

import pytest

from can_train.cli.main import main
from fakes.own_tasks import CLASSIFIER, write_task

LOSS = 'return {"class": (nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(labels))}'
METRICS = 'return {"accuracy": ((model(points).argmax(1) == labels).sum(), len(labels))}'
LAYERS = "return nn.Sequential(nn.Linear(WIDTH, self.settings.hidden), nn.ReLU(), nn.Linear(self.settings.hidden, 2))"
EACH = 'nn.functional.cross_entropy(model(points), labels, reduction="none")'
PREDICT = """return {}

    def predict(self, model, batch):
        return model(batch[0])

    def measure(self, samples, predictions):
"""
LABELS = """        return {}

    def labels(self, samples):
        return [7 for _ in samples]
"""
LISTED = """
        class Listed(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = [nn.Linear(WIDTH, 2)]

            def forward(self, points):
                return self.layers[0](points)

        return Listed()"""


def method(name: str, arguments: str, returned: str) -> str:
    """Returns the lines of a method, which follow the metrics."""
    return f"return {{}}\n\n    def {name}(self{arguments and ', '}{arguments}):\n        return {returned}"


SETS = 'return {"train": samples[:200], "validation": samples[200:250], "test": samples[250:]}'
# The lines of a task, in the place of which lines, and the error.
WRONG = {
    "mean, n": (LOSS, f'return {{"class": ({EACH}.mean(), len(labels))}}',
                "The sum of 'class' that MyTask.loss returns is a mean"),
    "mean, 1": (LOSS, f'return {{"class": ({EACH}.mean(), 1)}}', "Give the sum of n items"),
    "sum, 1": (LOSS, f'return {{"class": ({EACH}.sum(), 1)}}', "denominators of 'class' that MyTask.loss returns"),
    "detached": (LOSS, f'return {{"class": ({EACH}.sum().detach(), len(labels))}}',
                 "The loss that MyTask.loss returns has no gradient"),
    "frozen": (LAYERS, f"{LAYERS}.requires_grad_(False)", "No parameter of the model is trained"),
    "no parameters": (LAYERS, LISTED, "MyTask.model returned a model without parameters: Listed"),
    "metrics": (METRICS, 'return {"accuracy": (model(points).argmax(1) == labels, len(labels))}',
                "'accuracy' is (a tensor of shape (8,), 8)"),
    "no metrics": (METRICS, "return 0.5", "MyTask.metrics did not return {name: (sum, denominator)}: float"),
    "predictions": (METRICS, "return {}\n\n    def predict(self, model, batch):\n        return 1.0",
                    "MyTask.predict did not return a prediction for each sample: float"),
    "measures": (METRICS, f"{PREDICT}        return {{'f1': 'good'}}",
                 "MyTask.measure did not return {name: number}: 'f1' is 'good'"),
    "labels": (METRICS, PREDICT + LABELS,
               "MyTask.labels returned a class without a probability: 7 to 7"),
    "labels of some": (METRICS, PREDICT + LABELS.replace("7 for", "None for"),
                       "whole number for each sample, the number of its class from 0: None for sample 0"),
    "labels, shares": (METRICS, PREDICT + LABELS.replace("7 for", "0.5 for"), "class from 0: 0.5 for sample 0"),
    "no labels": (METRICS, PREDICT + LABELS.replace("[7 for _ in samples]", "7"), "class from 0: 7."),
    "predicted text": (METRICS, PREDICT.replace("model(batch[0])", '["a"] * len(batch[1])') + LABELS,
                       "MyTask.predict must return a probability of each class where samples have labels: 'a'"),
    "sampler": (METRICS, method("sampler", "epoch", "[]"), "nor a weight for each: it returned none"),
    "ragged sampler": (METRICS, method("sampler", "epoch", "[[1], [2, 3]]"), "MyTask.sampler failed: ValueError"),
    "denominators": (METRICS, method("denominators", "samples", "{'other': len(samples)}"),
                     "no denominator of 'class', a term that MyTask.loss returns: it names 'other'. Return {'class'"),
    "a denominator": (METRICS, method("denominators", "samples", "len(samples)"),
                      "MyTask.denominators did not return {term: number}: int"),
    "no denominator": (METRICS, method("denominators", "samples", "{'class': None}"), "number}: 'class' is None"),
    "feature nan": (METRICS, method("features", "sample", "{'n': float('nan')}"),
                    "MyTask.features must return finite numbers of 0 or more by name: 'n' is nan for sample 0"),
    "feature -1": (METRICS, method("features", "sample", "{can_train.Feature('n'): -1}"), "'n' is -1 for sample 0"),
    "feature text": (METRICS, method("features", "sample", "{'n': '3'}"), "'n' is '3' for sample 0"),
    "no features": (METRICS, method("features", "sample", "3"), "0 or more by name: 3 for sample 0 of train"),
    "validation": (SETS, SETS.replace("samples[200:250]", "[]"), "The validation set is empty"),
    "validation sets": (SETS, SETS.replace("samples[200:250]", "{'a': []}"), "under the name 'validation/a'"),
    "test": (SETS, SETS.replace("samples[250:]", "[]"), "The test set is empty"),
    "training": ('"epochs": 2', '"epochs": "two"', "training = {'epochs': 'two'}, and epochs: 'two' is not a whole"),
    "training, any": ('"epochs": 2', '"epochs": object', "and it is no number, text, list or dict"),
    "no training": ('training = {"lr": 0.01, "lr_batch_size": 32, "epochs": 2}', 'training = ["lr"]',
                    "MyTask.training must be a dict of training settings: ['lr']"),
    "phase": (METRICS, method("phases", "", '[can_train.Phase(name="a", loss=self.loss, training={"lr": "x"})]'),
              "training.lr must be a number: 'x'"),
    "keys": (SETS, f"samples = [dict(x=x, y=y, **dict.fromkeys(['extra'] * y)) for x, y in samples]\n        {SETS}",
             "sample['extra'] is there in sample"),
}  # fmt: skip
# The remedies of the errors, as they are typed.
MENDED = {
    "mean, n": f'n = len(labels)\n        mean = {EACH}.mean()\n        return {{"class": (mean * n, n)}}',
    "mean, 1": f'n = len(labels)\n        mean = {EACH}.mean()\n        return {{"class": (mean * n, n)}}',
    "sum, 1": f'n = len(labels)\n        total = {EACH}.sum()\n        return {{"class": (total, n)}}',
    "no parameters": LISTED.replace("[nn.Linear(WIDTH, 2)]", "nn.ModuleList([nn.Linear(WIDTH, 2)])"),
}


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns the exit code of a dry run of a task."""
    monkeypatch.chdir(tmp_path)

    def run(before: str, after: str, *words: str) -> int:
        assert before in CLASSIFIER
        write_task(tmp_path, CLASSIFIER.replace(before, after))
        return main(("--task", "my_file.py:MyTask", "--device", "cpu", *words))

    return run


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("words", [("--dry-run",), ("--epochs", "1")], ids=["plan", "training"])
def test_what_would_train_or_judge_something_else_is_an_error_before_the_first_step(
    planned, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], wrong: str
) -> None:
    before, after, message = WRONG[wrong]
    assert planned(before, after, *words) == 2
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/*/steps*"))


@pytest.mark.parametrize("wrong", MENDED)
def test_the_remedy_of_the_error_works(planned, capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    assert planned(WRONG[wrong][0], MENDED[wrong], "--dry-run") == 0
    assert "depend on the rest" not in capsys.readouterr().err


def test_a_measure_that_lacks_an_import_fails_before_the_first_step(
    planned, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(METRICS, f"{PREDICT}        return {{'f1': numpy.mean(predictions)}}", "--epochs", "1") == 2
    said = capsys.readouterr().err
    assert "MyTask.measure failed: NameError: name 'numpy' is not defined" in said
    assert "1/1" not in said


JUDGED = {
    "a number": ("1.5", "MyTask.baselines did not return {baseline: {metric: number}}: float"),
    "numbers of baselines": ("{'mean': 1.5}", "MyTask.baselines['mean'] did not return {name: number}: float"),
    "text": ("{'mean': {'f1': 'good'}}", "MyTask.baselines['mean'] did not return {name: number}: 'f1' is 'good'"),
}


@pytest.mark.parametrize("wrong", JUDGED)
def test_baselines_without_numbers_are_an_error_of_one_sentence(
    planned, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    returned, message = JUDGED[wrong]
    assert planned(METRICS, f"return {{}}\n\n    def baselines(self, samples):\n        return {returned}",
                   "--epochs", "1") == 3  # fmt: skip
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "Traceback" not in said


def test_a_score_that_is_not_finite_has_a_row_without_a_number(
    planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = (
        f"{PREDICT}        return {{'f1': torch.tensor(float('nan')), 'top': float('inf'), 'sure': 0.5}}\n\n"
        "    def baselines(self, samples):\n        return {'mean': {'f1': float('nan'), 'sure': torch.tensor(1)}}"
    )
    assert planned(METRICS, after, "--epochs", "1") == 0
    printed = capsys.readouterr().out
    (result,) = tmp_path.glob("runs/*/result.json")
    (judged,) = json.loads(result.read_text())["judgement"]["test"].values()
    assert {name: judged["model"][name] for name in ("f1", "top", "sure")} == {"f1": None, "top": None, "sure": 0.5}
    assert judged["baselines"] == {"mean": {"f1": None, "sure": 1.0}}
    table = [line.split()[-3:] for line in printed.split("Scores\n")[1].split("\n\n")[0].splitlines()]
    assert [table[0], *table[2:]] == [["f1", "top", "sure"], ["–", "–", "0.5"], ["–", "–", "1"]]


def test_a_measure_that_a_few_samples_do_not_have_is_no_error_and_leaves_nothing_in_the_task(planned, capsys) -> None:
    after = (
        f"{PREDICT}        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        if len(samples) < 10:\n            raise ValueError('too few')\n"
        "        return {'calls': self.calls}"
    )
    assert planned(METRICS, after, "--epochs", "1") == 0
    assert "calls" in capsys.readouterr().out


NOT_FINITE = {
    "layer": (LAYERS, f"{LAYERS[:-1]}, nn.LogSoftmax(1), nn.Hardtanh(-math.inf, math.inf), Log())",
              "first in the output of 5 (Log) ("),
    "parameter": (LAYERS, f"model = {LAYERS[7:]}\n        model[2].bias.data[0] = math.inf\n        return model",
                  "first in the parameter 2.bias (1 infinite of 2 values)."),
    "input": ("cross_entropy(model(points)", "cross_entropy(model(points * math.nan)",
              "first in the input of the model (Sequential) ("),
    "loss": (EACH.replace('"none"', '"sum"'), EACH.replace('"none"', '"sum"') + " * math.inf",
             "though all outputs of layers are finite."),
}  # fmt: skip
LOG = """

class Log(nn.Module):
    def forward(self, values):
        return values.log()
"""


@pytest.mark.parametrize("kind", list(NOT_FINITE))
def test_a_loss_that_is_not_finite_at_first_names_the_first_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before, after, expected = NOT_FINITE[kind]
    assert before in CLASSIFIER
    write_task(tmp_path, "import math\n" + CLASSIFIER.replace(before, after) + LOG)
    assert main(("--task", "my_file.py:MyTask", "--device", "sim:64MiB", "--epochs", "1")) == 3
    error = capsys.readouterr().err
    assert "The loss is not finite before the first update: step 0" in error
    assert expected in error
