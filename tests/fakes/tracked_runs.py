"""Reads back what trackers have written: from TensorBoard's files, MLflow's store, and W&B's offline folder."""

import json
import struct
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

_WANDB_HEAD = 7  # bytes before the first record of its files, which are logs of LevelDB
_WANDB_BLOCK = 2**15
_LAST_PARTS = (1, 4)  # kinds of a piece that ends a record: the whole of it, or its last part


@dataclass
class Read:
    """A run as a tracker has it: each figure's values with their steps, its settings, and how it ended."""

    figures: dict[str, list[tuple[int, float]]]
    settings: dict[str, Any] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    runs: int = 1


def read_back(name: str, folder: Path) -> Read:
    """Reads what a tracker has of the run in a folder."""
    with warnings.catch_warnings():
        # MLflow and TensorBoard do what is deprecated elsewhere.
        warnings.simplefilter("ignore")
        return {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[name](folder)


def _tensorboard(folder: Path) -> Read:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    figures = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    started = events.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    hparams = metadata.parse_session_start_info_plugin_data(started).hparams
    return Read(figures, {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()})


def _mlflow(folder: Path) -> Read:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = [run for run in client.search_runs(experiments) if run.info.run_name == folder.name]
    figures = {name: [(one.step, one.value) for one in client.get_metric_history(runs[0].info.run_id, name)]
               for name in runs[0].data.metrics}  # fmt: skip
    return Read(figures, dict(runs[0].data.params), [runs[0].info.status], len(runs))


def _wandb(folder: Path) -> Read:
    # Its types are those of whichever version of protobuf is installed.
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    read, ids = Read(defaultdict(list)), set()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in _wandb_records(path.read_bytes()):
            record = protocol.Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                read.settings |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            if record.HasField("history"):
                row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
                for name in row.keys() - {"step"}:
                    read.figures[name].append((row["step"], row[name]))
            if record.HasField("exit"):
                read.ends.append(str(record.exit.exit_code))
    read.runs = len(ids)
    return read


def _wandb_records(data: bytes) -> Iterator[bytes]:
    at, record = _WANDB_HEAD, b""
    while at + _WANDB_HEAD <= len(data):
        if _WANDB_BLOCK - at % _WANDB_BLOCK < _WANDB_HEAD:
            at += _WANDB_BLOCK - at % _WANDB_BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in _LAST_PARTS:
            yield record
            record = b""
