"""The allocator's settings as torch 2.13 reads them; what its own parser made of each line is recorded here."""

import math

import pytest

from can_train.errors import ConfigError
from can_train.memory.allocator_settings import read_allocator_settings
from can_train.memory.meters import open_meter
from can_train.memory.simulated.allocator import AllocatorSettings

MIB = 2**20
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def read(text: str) -> AllocatorSettings:
    return read_allocator_settings({"PYTORCH_ALLOC_CONF": text})


def test_without_settings_segments_expand_and_else_they_are_pytorchs() -> None:
    assert read_allocator_settings({}) == AllocatorSettings(expandable_segments=True)
    assert read("") == AllocatorSettings()


@pytest.mark.parametrize("others", range(3))
def test_the_variable_that_torch_reads_is_the_first_that_is_set(others: int) -> None:
    environment = {name: f"max_split_size_mb:{30 + index}" for index, name in enumerate(VARIABLES)}
    environment = dict(list(environment.items())[others:])
    assert read_allocator_settings(environment).max_split_bytes == (30 + others) * MIB
    assert read_allocator_settings({**environment, VARIABLES[0]: ""}) == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "large_mib", "split_mib", "rounding_mib"),
    [
        ("", 20, math.inf, 20),
        ("max_split_size_mb:20", 20, 20, 20),
        ("max_split_size_mb:40, max_non_split_rounding_mb : 30,", 20, 40, 30),
        ("max_split_size_mb:40,max_split_size_mb:50", 20, 50, 20),
        ("large_segment_size_mb:64", 64, math.inf, 64),
        ("max_split_size_mb:12,large_segment_size_mb:11", 11, 12, 11),
    ],
)
def test_sizes_are_in_mebibytes(text: str, large_mib: int, split_mib: float, rounding_mib: int) -> None:
    found = read(text)
    sizes = (found.large_page_bytes, found.max_split_bytes, found.max_rounding_bytes)
    assert sizes == (large_mib * MIB, split_mib * MIB, rounding_mib * MIB)


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("4", [4] * 16),
        ("[256:1,512:2,1024:4,>:8]", [1] * 9 + [2, 4] + [8] * 5),
        ("[64:8,1024:4]", [8] * 7 + [0] * 3 + [4] + [0] * 5),
        ("[64:8,256:4,>:1]", [8] * 7 + [0, 4] + [1] * 7),
        ("[64:8 , >: 2]", [8] * 7 + [2] * 9),
        ("[>:4]", [0] + [4] * 15),
        ("[1024:4,64:8]", [4] * 6 + [8] + [4] * 4 + [0] * 5),
        ("[64:8,>:2,256:4]", [8] * 7 + [2, 4] + [2] * 7),
        ("[1:8,131072:4]", [8] + [0] * 14 + [4]),
        ("[65536:4,>:2]", [4] * 16),
        ("[64:0]", [0] * 16),
        ("[]", [0] * 16),
    ],
)
def test_divisions_are_one_number_or_a_list_by_size(text: str, divisions: list[int]) -> None:
    found = read(f"max_split_size_mb:40,roundup_power2_divisions:{text},expandable_segments:True")
    assert list(found.divisions) == divisions
    assert (found.expandable_segments, found.max_split_bytes) == (True, 40 * MIB)


@pytest.mark.parametrize(
    ("size", "interval"),
    [(1, 0), (MIB - 1, 0), (2 * MIB - 1, 0), (2 * MIB, 1), (3 * MIB, 1), (2**35, 15), (2**36, 15), (2**40, 15)],
)
def test_a_size_has_the_divisions_of_the_power_of_two_below_it(size: int, interval: int) -> None:
    assert AllocatorSettings(divisions=tuple(range(16))).divisions_of(size) == interval


@pytest.mark.parametrize("text", ["garbage_collection_threshold:0.8", "garbage_collection_threshold: .8"])
def test_shares_are_numbers(text: str) -> None:
    assert read(text).collection_threshold == 0.8
    assert read(f"{text},per_process_memory_fraction:1").memory_fraction == 1
    assert read(f"per_process_memory_fraction:0.5,{text}").memory_fraction == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19",
        "max_split_size_mb:abc",
        "max_split_size_mb:40.7",
        "max_split_size_mb:-1",
        "large_segment_size_mb:10",
        "large_segment_size_mb:64,max_split_size_mb:40",
        "max_split_size_mb:40,large_segment_size_mb:64",
        "large_segment_size_mb:64,max_non_split_rounding_mb:30",
        "max_non_split_rounding_mb:19",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:1",
        "garbage_collection_threshold:x",
        "per_process_memory_fraction:0",
        "per_process_memory_fraction:1.1",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[3:4]",
        "roundup_power2_divisions:[64:3]",
        "roundup_power2_divisions:[64:4",
        "roundup_power2_divisions:[64,4]",
        "roundup_power2_divisions:[64:8:4]",
        "roundup_power2_divisions:[64:8 128:4]",
        "expandable_segments:true",
        "expandable_segments",
        "max_split_size_mb:",
        "max_split_size_mb=40",
        "max_split_size_mb:40 expandable_segments:True",
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_rule_and_where_it_stands(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^\S.+: \S") as caught:
        read(text)
    assert caught.value.remedy == "Correct it in $PYTORCH_ALLOC_CONF, or unset PYTORCH_ALLOC_CONF"
    assert caught.value.value in "".join(text.split())


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        ("backend:cudaMallocAsync", ("backend:cudaMallocAsync",)),
        ("max_split_size_mb:40,shrinking:[a:1,b:2],other:x", ("shrinking:[a:1,b:2]", "other:x")),
        ("backend:native,pinned_num_register_threads:8,release_lock_on_cudamalloc:True", ()),
        ("graph_capture_record_stream_reuse:True,throw_on_cudamalloc_oom:True", ()),
    ],
)
def test_settings_that_may_change_memory_and_are_not_replayed_are_told(
    text: str, ignored: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(text).ignored == ignored
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    notices = open_meter("sim:1GiB").notices
    assert len(notices) == bool(ignored)
    assert all(notice.endswith(": " + ", ".join(ignored)) for notice in notices)


def test_a_simulated_gpu_has_the_settings_and_the_share_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5,large_segment_size_mb:64")
    meter = open_meter("sim:1GiB")
    assert meter.capacity_bytes == 512 * MIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:4")
    with pytest.raises(
        ConfigError, match="max_split_size_mb is not a whole number of MiB, at least 20: max_split_size_mb:4"
    ):
        open_meter("sim:1GiB")
