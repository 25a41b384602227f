"""Trainers of TRL and sentence-transformers with the mixin: split by sample, or not split, with the plain weights."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from can_train import LoopSettings, MicroBatchTrainerMixin
from fakes.transformers_trainers import difference, weights

EXACT = 1e-9  # TRL computes logarithms of probabilities in single precision
WORDS = ["<pad>", "<end>", *(f"w{number}" for number in range(40))]

pytestmark = pytest.mark.slow


@pytest.fixture
def trl() -> ModuleType:
    return pytest.importorskip("trl", reason="trl is not installed")  # type: ignore[no-any-return]


@pytest.fixture
def sentences() -> ModuleType:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    return import_module("sentence_transformers")


def tokenizer() -> Any:
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    words = {word: number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<end>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **marks)


def language_model(kind: str = "GPT2LMHeadModel", **options: Any) -> nn.Module:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": len(WORDS)}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **drops, bos_token_id=1, eos_token_id=1, pad_token_id=0, **options)
    model: nn.Module = getattr(transformers, kind)(config).double()
    return model


def text(seed: int, words: int) -> str:
    drawn = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(word)}" for word in torch.randint(0, 40, (words,), generator=drawn))


def dataset(rows: list[dict[str, Any]]) -> Any:
    return import_module("datasets").Dataset.from_list(rows)


PREFERENCES = [
    {"prompt": text(i, 4), "chosen": f" {text(20 + i, 2 + i % 5)}", "rejected": f" {text(40 + i, 3 + i % 3)}"}
    for i in range(16)
]
COMPLETIONS = [
    {"prompt": text(i, 4), "completion": f" {text(20 + i, 2 + i % 5)}", "label": i % 2 == 0} for i in range(16)
]
TEXTS = [{"text": text(i, 4 + i % 7)} for i in range(16)]
PAIRS = [{"anchor": text(i, 3 + i % 4), "positive": text(20 + i, 2 + i % 5)} for i in range(16)]
SCORES = [{"sentence1": text(i, 3 + i % 4), "sentence2": text(20 + i, 4), "score": i % 5 / 4} for i in range(16)]


def options_in(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_strategy": "no", "per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 0.01,
        "optim": "sgd",
    }  # fmt: skip


def trained(base: Any, settings: LoopSettings | None, **arguments: Any) -> Any:
    kind: Any = base if settings is None else type("Mixed", (MicroBatchTrainerMixin, base), {})
    trainer = kind(**arguments, **({} if settings is None else {"loop_settings": settings}))
    trainer.train()
    return trainer


def of_trl(trl: Any, name: str, folder: Path, settings: LoopSettings | None, **options: Any) -> Any:
    rows = {"DPO": PREFERENCES, "Reward": PREFERENCES, "KTO": COMPLETIONS, "SFT": TEXTS}[name]
    is_reward = name == "Reward"
    model = language_model("GPT2ForSequenceClassification", num_labels=1) if is_reward else language_model()
    reference = {"ref_model": language_model()} if name in ("DPO", "KTO") else {}
    config = {**options_in(folder), "bf16": False, "gradient_checkpointing": False, **options}
    return trained(
        getattr(trl, f"{name}Trainer"), settings, model=model, args=getattr(trl, f"{name}Config")(**config),
        train_dataset=dataset(rows), processing_class=tokenizer(), **reference,
    )  # fmt: skip


SPLIT: list[tuple[str, dict[str, Any]]] = [
    ("DPO", {}),
    ("Reward", {}),
    ("SFT", {}),
    ("SFT", {"gradient_accumulation_steps": 2}),
]
SPLIT += [("KTO", {"loss_type": "apo_zero_unpaired"})]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options"), SPLIT)
@pytest.mark.parametrize("limit", [1, 3])
def test_trainers_of_trl_are_split_by_sample(
    trl: ModuleType, tmp_path: Path, name: str, options: dict[str, Any], limit: int
) -> None:
    plain = of_trl(trl, name, tmp_path, None, **options)
    whole = of_trl(trl, name, tmp_path, LoopSettings(learn=False), **options)
    cut = of_trl(trl, name, tmp_path, LoopSettings(limits=limit, learn=False), **options)
    assert torch.equal(weights(plain.model), weights(whole.model))
    assert plain._total_train_tokens == whole._total_train_tokens == cut._total_train_tokens
    assert 0 < difference(plain.model, cut.model) <= EXACT


WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("DPO", {"loss_type": ["aot"]}),
    ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}),
    ("KTO", {}),
    ("SFT", {"packing": True, "max_length": 16}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options"), WHOLE)
@pytest.mark.parametrize("limit", [1, 3])
def test_losses_of_trl_that_depend_on_the_whole_batch_are_not_split(
    trl: ModuleType, tmp_path: Path, name: str, options: dict[str, Any], limit: int
) -> None:
    plain = of_trl(trl, name, tmp_path, None, **options)
    whole = of_trl(trl, name, tmp_path, LoopSettings(limits=limit, learn=False), **options)
    assert torch.equal(weights(plain.model), weights(whole.model))


def of_sentences(
    sentences: Any, folder: Path, settings: LoopSettings | None, rows: list[Any], loss_of: Callable[[Any, Any], Any]
) -> Any:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    transformers.BertModel(
        transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes, **drops)
    ).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    parts = import_module("sentence_transformers.models")
    modules = [parts.Transformer(str(folder / "model")), parts.Pooling(16)]
    model = sentences.SentenceTransformer(modules=modules, device="cpu").double()
    torch.manual_seed(1)
    loss = loss_of(import_module("sentence_transformers.losses"), model)
    arguments = sentences.SentenceTransformerTrainingArguments(**options_in(folder))
    base = sentences.SentenceTransformerTrainer
    return trained(base, settings, model=model, args=arguments, train_dataset=dataset(rows), loss=loss)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [1, 3])
def test_a_loss_of_pairs_is_split(sentences: ModuleType, tmp_path: Path, limit: int) -> None:
    def loss_of(losses: Any, model: Any) -> Any:
        return losses.CosineSimilarityLoss(model)

    plain = of_sentences(sentences, tmp_path, None, SCORES, loss_of)
    cut = of_sentences(sentences, tmp_path, LoopSettings(limits=limit, learn=False), SCORES, loss_of)
    assert 0 < difference(plain.model, cut.model) <= 1e-10


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("MultipleNegativesRankingLoss", {}, "Train with CachedMultipleNegativesRankingLoss"),
        ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 4}, "mini_batch_size=2"),
    ],
)
def test_in_batch_negatives_of_sentence_transformers_are_not_split(
    sentences: ModuleType, tmp_path: Path, name: str, options: dict[str, Any], remedy: str, limit: int
) -> None:
    def loss_of(losses: Any, model: Any) -> Any:
        return getattr(losses, name)(model, **options)

    plain = of_sentences(sentences, tmp_path, None, PAIRS, loss_of)
    with pytest.warns(UserWarning, match=remedy):
        whole = of_sentences(sentences, tmp_path, LoopSettings(limits=limit, learn=False), PAIRS, loss_of)
    assert torch.equal(weights(plain.model), weights(whole.model))
