"""Settings of PyTorch's caching allocator that change how much of a GPU it reserves, from the user's variables.

Source: c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp of torch 2.13.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from can_train.errors import ConfigError, unknown_name
from can_train.memory.simulated.allocator import INTERVALS, LARGE_PAGE_BYTES, AllocatorSettings

# Variables with a user's allocator settings, in the order of torch 2.13: the first that is set wins, empty or not.
SETTINGS_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
OWN_SETTINGS: Final = "expandable_segments:True"  # can-train's settings
_MIB: Final = 2**20
_LARGEST_MIB: Final = 2**40  # beyond any device; larger numbers say the same
# Settings of PyTorch that no model of its allocator here follows.
_UNREAD: Final = ("backend", "roundup_bypass_threshold_mb")
_READ: Final = ("expandable_segments", "garbage_collection_threshold", "large_segment_size_mb", "max_split_size_mb",
                "max_non_split_rounding_mb", "per_process_memory_fraction", "roundup_power2_divisions")  # fmt: skip
# Settings of host memory, locks and CUDA graphs, which take nothing else of a GPU.
_ELSEWHERE: Final = re.compile(
    r"pinned_\w+|release_lock_on_\w+|graph_capture_record_stream_reuse|throw_on_cudamalloc_oom"
)
T = TypeVar("T")


def read_allocator_settings(
    environment: Mapping[str, str] = os.environ, default: str = OWN_SETTINGS
) -> AllocatorSettings:
    """Reads the user's settings, or `default` (can-train's) where there are none; raises ConfigError where PyTorch
    would, or where a number cannot be read.
    """
    given: dict[str, str] = {}
    for item in re.split(r",(?![^\[]*\])", "".join(allocator_settings(environment, default).split())):
        key, _, value = item.partition(":")
        if item and not (key and value):
            raise _malformed("An allocator setting is not written key:value", item, settings_variable(environment))
        given |= {key: value} if item else {}

    def take(key: str, rule: str, read: Callable[[str], T | None], default: T) -> T:
        if (text := given.pop(key, None)) is None:
            return default
        if (value := read(text)) is None:
            raise _malformed(f"{key} is not {rule}", f"{key}:{text}", settings_variable(environment))
        return value

    def mebibytes(key: str, least: int, default: float) -> float:
        def read(text: str) -> int | None:
            return min(int(text), _LARGEST_MIB) if text.isdecimal() and int(text) >= least else None

        return take(key, f"a whole number of MiB, at least {least}", read, default / _MIB) * _MIB

    # A page holds every allocation that has no segment of its own, up to 10 MiB.
    page = int(mebibytes("large_segment_size_mb", 11, LARGE_PAGE_BYTES))

    def open_share(text: str) -> float | None:
        return None if _share(text) == 1 else _share(text)

    rule = "a power of two, or a list of them by MiB, as [256:1,512:2,>:4]"
    return AllocatorSettings(
        expandable_segments=take("expandable_segments", "True or False", {"True": True, "False": False}.get, False),
        large_page_bytes=page,
        max_split_bytes=mebibytes("max_split_size_mb", page // _MIB, math.inf),
        max_rounding_bytes=int(mebibytes("max_non_split_rounding_mb", page // _MIB, page)),
        divisions=take("roundup_power2_divisions", rule, _divisions, AllocatorSettings.divisions),
        collection_threshold=take("garbage_collection_threshold", "between 0 and 1", open_share, 0.0),
        memory_fraction=take("per_process_memory_fraction", "above 0 and at most 1", _share, 1.0),
        ignored=tuple(
            f"{key}:{value}"
            for key, value in given.items()
            if not _ELSEWHERE.fullmatch(key) and (key, value) != ("backend", "native")
        ),
    )


def allocator_settings(environment: Mapping[str, str] = os.environ, default: str = OWN_SETTINGS) -> str:
    """Returns the user's allocator settings, or `default` (can-train's) where there are none."""
    return environment.get(settings_variable(environment), default)


def check_known(settings: AllocatorSettings) -> None:
    """Raises ConfigError where PyTorch has no setting of some name."""
    for setting in settings.ignored:
        name = setting.partition(":")[0]
        if name not in _UNREAD:
            raise unknown_name("setting of PyTorch's allocator", name, (*_READ, *_UNREAD))


def settings_expand(settings: str) -> bool:
    """Whether segments expand under allocator settings that an observation recorded."""
    return re.search(r"\bexpandable_segments\s*:\s*True\b", settings) is not None


def settings_variable(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the name of the variable that has the user's settings; empty where none has."""
    return next((name for name in SETTINGS_VARIABLES if name in environment), "")


def _malformed(rule: str, value: str, variable: str) -> ConfigError:
    return ConfigError(rule, value=value, remedy=f"Correct it in ${variable}, or unset {variable}")


def _share(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d*\.?\d+|\d+\.", text) and 0 < float(text) <= 1 else None


def _divisions(text: str) -> tuple[int, ...] | None:
    """Reads `4`, or a list of sizes in MiB with the divisions from each size to the next power of two. The first
    divisions hold for smaller sizes, too, and the divisions of `>` for all sizes larger than the last.
    """
    if (listed := re.fullmatch(r"\[(.*)\]", text)) is None:
        number = _power_of_two(text)
        return None if number is None else (number,) * INTERVALS
    divisions, last = [0] * INTERVALS, -1
    for item in filter(None, listed[1].split(",")):
        size, _, count = item.partition(":")
        value = 0 if count == "0" else _power_of_two(count)
        start = 0 if size == ">" else _power_of_two(size)
        if value is None or start is None:
            return None
        if size == ">":
            divisions[max(last, 0) + 1 :] = [value] * (INTERVALS - max(last, 0) - 1)
            continue
        index = min(start.bit_length() - 1, INTERVALS - 1)
        if last < 0:
            divisions[:index] = [value] * index
        divisions[index], last = value, index
    return tuple(divisions)


def _power_of_two(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text).bit_count() == 1 else None
