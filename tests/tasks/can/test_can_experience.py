import pytest

from can_train.factors.store import experience_factor
from can_train_tasks.can.settings import experience


@pytest.mark.parametrize(
    ("dataset", "mode", "factor", "reason"),
    [
        ("set_03", "normal", 0.45, "large dataset (set_02/03/04) 0.45"),
        ("hcrl_sa", "normal", 0.55, "medium dataset (hcrl_sa) 0.55"),
        ("synthetic", "normal", 0.6, "other dataset 0.6"),
        ("hcrl_ch", "autoencoder", 0.6175,
         "small dataset (hcrl_ch/set_01) 0.65 × autoencoder (reconstruction) 0.95 = 0.6175"),
        ("set_01", "curriculum", 0.585,
         "small dataset (hcrl_ch/set_01) 0.65 × curriculum (VGAE scoring) 0.9 = 0.585"),
        ("set_02", "knowledge_distillation", 0.3375,
         "large dataset (set_02/03/04) 0.45 × knowledge distillation (teacher caching) 0.75 = 0.3375"),
        ("my_log", "fusion", 0.48, "other dataset 0.6 × fusion (two models in memory) 0.8 = 0.48"),
    ],
)  # fmt: skip
def test_the_first_factor_is_explained_in_words(dataset: str, mode: str, factor: float, reason: str) -> None:
    assert experience_factor(*experience(dataset, mode)) == (factor, reason)
