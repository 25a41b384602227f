"""The allocator under can-train's settings, and beside its model."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
    pytest.mark.cuda,
]


def in_a_new_process(code: str, environment: dict[str, str]) -> str:
    """Runs code where CUDA has not been touched and the allocator has no settings but those given."""
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=plain | environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


RESERVE = """
import torch
from can_train.memory.meters import open_meter
meter = open_meter("cuda")
held = torch.empty(30 * 2**20, dtype=torch.uint8, device=meter.device)
print(meter.allocated_bytes() // 2**20, meter.peak_reserved_bytes() // 2**20)
"""


@pytest.mark.parametrize(
    ("environment", "reserved"), [({}, "30 40"), ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "30 30")]
)
def test_segments_expand_unless_the_user_has_settings(environment: dict[str, str], reserved: str) -> None:
    assert in_a_new_process(RESERVE, environment) == reserved


REPLAY = """
import random
import torch
from can_train.memory.allocator_settings import read_allocator_settings
from can_train.memory.simulated.allocator import CachingAllocator
from can_train.memory.meters import open_meter

meter = open_meter("cuda")
model = CachingAllocator(meter.total_bytes, settings=read_allocator_settings())
choose = random.Random(0)
live = []
for step in range(3000):
    if live and choose.random() < 0.49:
        tensor, block = live.pop(choose.randrange(len(live)))
        tensor = None
        model.free(block)
    else:
        size = choose.randint(1, choose.choice((4096, 3 * 2**20, 60 * 2**20)))
        try:
            tensor = torch.empty(size, dtype=torch.uint8, device=meter.device)
        except torch.OutOfMemoryError:
            tensor = None
        block = model.malloc(size)
        assert (block is None) == (tensor is None), step
        if block is not None:
            live.append((tensor, block))
    if step % 700 == 699:
        meter.release()
        model.release_cached()
    measured = torch.cuda.memory_allocated(meter.device), torch.cuda.memory_reserved(meter.device)
    modelled = model.allocated_bytes, model.reserved_bytes
    assert measured == modelled, (step, measured, modelled)
print("agree")
"""


ROUNDED = "roundup_power2_divisions:[16:8,32:4,>:2]"


@pytest.mark.parametrize(
    "settings",
    [
        "expandable_segments:True",
        "expandable_segments:False",
        "large_segment_size_mb:64",
        "large_segment_size_mb:32,expandable_segments:True",
        "max_split_size_mb:20",
        "max_split_size_mb:40,max_non_split_rounding_mb:30",
        "max_split_size_mb:40,expandable_segments:True",
        # Rounded sizes are often equal. Of equal blocks in separate segments the lowest address is taken: the driver's
        # choice, which the model does not know.
        f"{ROUNDED},expandable_segments:True",
        "per_process_memory_fraction:0.03,garbage_collection_threshold:0.6",
        "per_process_memory_fraction:0.03,max_split_size_mb:30",
        "per_process_memory_fraction:0.03,expandable_segments:True",
    ],
)
def test_the_model_of_the_allocator_reserves_what_the_allocator_does(settings: str) -> None:
    assert in_a_new_process(REPLAY, {"PYTORCH_CUDA_ALLOC_CONF": settings}) == "agree"
