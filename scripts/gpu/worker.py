"""The process that does one measurement. `gpu.processes.measure` starts it with two arguments: the job as JSON,
`{"part": name, ...}`, and the path to write the result to.
"""

import json
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from can_train.io.records import write_json_atomic
from can_train.memory.meters import is_simulated, open_meter
from gpu.configurations import Configuration


def describe_device(device: str) -> dict[str, Any]:
    """Returns the device, driver and versions that the results belong to."""
    meter = open_meter(device)
    return {
        "name": meter.name,
        "key": meter.key,
        "simulated": is_simulated(device),
        "total_bytes": meter.total_bytes,
        "free_bytes": meter.capacity_bytes,
        "driver": meter.driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch": torch.__version__,
        "torch_geometric": version("torch_geometric"),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "allocator_settings": {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")},
    }


def run(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Does a job and yields the results so far. Each job imports its modules here, to start clean."""
    if job["part"] == "device":
        yield describe_device(job["device"])
    elif job["part"] == "constants":
        from gpu.constants import measure_constants

        yield measure_constants(open_meter(job["device"]).device)
    elif job["part"] == "record":
        from gpu.trainer import record

        yield record(Configuration(**job["configuration"]), job["key"])
    else:
        from gpu.measurements import measure

        yield from measure(Configuration(**job["configuration"]))


def main() -> None:
    """Does the job of the command line and writes its results; an exception is written under `error`."""
    path = Path(sys.argv[2])
    result: dict[str, Any] = {}
    try:
        for result in run(json.loads(sys.argv[1])):
            write_json_atomic(path, result)
    except Exception as error:  # noqa: BLE001 - a measurement that fails must not end the others
        wrong = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        write_json_atomic(path, result | wrong)


if __name__ == "__main__":
    main()
