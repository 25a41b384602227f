import pytest

from can_train.memory.meters import segments_expand


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: True"},
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
    ],
)
def test_segments_expand_unless_the_user_has_other_settings(environment: dict[str, str]) -> None:
    assert segments_expand(environment)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["", "expandable_segments:False", "max_split_size_mb:64", "backend:cudaMallocAsync"])
def test_settings_of_the_users_own_are_left_as_they_are(name: str, value: str) -> None:
    assert not segments_expand({name: value})
