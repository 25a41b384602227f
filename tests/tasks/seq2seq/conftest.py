from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from can_train.training.sample_task import TaskContext
from can_train_tasks.seq2seq.settings import (
    DecodingSettings,
    LanguageSettings,
    LstmSettings,
    Seq2seqDatasetSettings,
    TransformerSettings,
)
from can_train_tasks.seq2seq.task import Seq2seq

SMALL: dict[str, Any] = {
    "lstm": LstmSettings(embedding=16, hidden=24, layers=2, dropout=0.0),
    "transformer": TransformerSettings(embedding=16, hidden=32, layers=2, heads=2, dropout=0.0),
}
# Each with an encoder of features, and a second table of embeddings.
SMALL |= {f"{name}+": replace(settings, features_encoder=True, share_embeddings=False)
          for name, settings in SMALL.items()}  # fmt: skip
MODELS = tuple(SMALL)
TURKISH = Path(__file__).parents[3] / "../shared/data/seq2seq/tur_inflection.train.tsv"
needs_turkish = pytest.mark.skipif(not TURKISH.is_file(), reason=f"{TURKISH} is not there")
MakeTask = Callable[..., Seq2seq]


@pytest.fixture(scope="session")
def make_task(tmp_path_factory: pytest.TempPathFactory) -> MakeTask:
    """Makes a task with a small model: of the synthetic language, or of the tables at `dataset`."""
    cache = tmp_path_factory.mktemp("cache")

    def make(model: str = "lstm", dataset: Seq2seqDatasetSettings | None = None, **decoding: float) -> Seq2seq:
        data = dataset or Seq2seqDatasetSettings(synthetic=LanguageSettings(words=300))
        settings = replace(DecodingSettings(), **decoding)
        context = TaskContext(settings=settings, dataset=data, model_name=model.rstrip("+"), model=SMALL[model],
                              cache=cache)  # fmt: skip
        return Seq2seq(context)

    return make
