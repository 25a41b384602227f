"""Observations for the tests of the state folder."""

from datetime import UTC, datetime, timedelta
from typing import Any

from can_train.factors.observations import Device, Observation, Started

V100 = Device(key="v100-16gb", name="Tesla V100-SXM2-16GB", total_bytes=16 * 2**30, driver="550.54")
A100 = Device(key="a100-40gb", name="NVIDIA A100-SXM4-40GB", total_bytes=40 * 2**30, driver="550.54")
KEY = "hcrl_ch_gat_teacher_normal"


def at(minute: float) -> str:
    """A time so many minutes into a day."""
    return (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute)).isoformat(timespec="microseconds")


def observation(number: int = 1, **changed: Any) -> Observation:
    """A run at a factor of 0.489 that peaked at 62 %; runs of higher number follow one another without overlap."""
    values: dict[str, Any] = {
        "run_id": f"run-{number}", "attempt": 1, "key": KEY, "device": V100,
        "start_time": at(10 * number), "end_time": at(10 * number + 5), "outcome": "ok",
        "factor": 0.489, "factor_reason": "small dataset (hcrl_ch/set_01) 0.65",
        "capacity_bytes": 10_000, "peak_allocated_bytes": 6_200, "tuned_limit": 1_000, "safe_limit": 489,
        "policy": {"name": "momentum", "options": {}},
        "used": 0.489, "logical_batch": 489, "largest_micro_batch": 489, "binding_limit": "memory",
    }  # fmt: skip
    return Observation(**{**values, **changed})


def out_of_memory(number: int = 1, **changed: Any) -> Observation:
    """The same run, ended by an out-of-memory."""
    return observation(number, **{"outcome": "oom", "peak_allocated_bytes": 9_900, **changed})


def started(number: int = 1, **changed: Any) -> Started:
    """The beginning of the same run."""
    values = {"run_id": f"run-{number}", "attempt": 1, "key": KEY, "device": V100, "start_time": at(10 * number)}
    return Started(**{**values, **changed})
