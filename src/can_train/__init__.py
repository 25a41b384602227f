"""can-train launches PyTorch training that fits: the names here are for people with a loop of their own."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from can_train.adapters.framework_loop import LoopSettings as LoopSettings
    from can_train.adapters.lightning_callback import MemoryMonitorCallback as MemoryMonitorCallback
    from can_train.adapters.lightning_callback import MicroBatchCallback as MicroBatchCallback
    from can_train.adapters.lightning_sizes import scale_batch_size as scale_batch_size
    from can_train.adapters.transformers_trainer import MicroBatchTrainerMixin as MicroBatchTrainerMixin
    from can_train.cli.planning import plan as plan
    from can_train.errors import CanTrainError as CanTrainError
    from can_train.factors.policies import AffinePolicy as AffinePolicy
    from can_train.factors.policies import FactorPoint as FactorPoint
    from can_train.factors.policies import MomentumPolicy as MomentumPolicy
    from can_train.factors.store import get_safety_factor_db as get_safety_factor_db
    from can_train.fit.micro_batcher import BatchResult as BatchResult
    from can_train.fit.micro_batcher import MicroBatcher as MicroBatcher
    from can_train.fit.packing import solve_accumulation as solve_accumulation
    from can_train.fit.peak_prediction import PeakPrediction as PeakPrediction
    from can_train.fit.prediction import predict_peak as predict_peak
    from can_train.fit.search import SizeSearch as SizeSearch
    from can_train.fit.search import find_max_size as find_max_size
    from can_train.memory.allocation_trace import MemoryPart as MemoryPart
    from can_train.memory.meters import simulated_gpu as simulated_gpu
    from can_train.memory.monitor import MemoryMonitor as MemoryMonitor
    from can_train.memory.out_of_memory import is_out_of_memory as is_out_of_memory
    from can_train.task import Feature as Feature
    from can_train.task import Phase as Phase
    from can_train.training.dry_run import CardPlan as CardPlan
    from can_train.training.dry_run import Plans as Plans
    from can_train.training.dry_run import get_effective_safety_factor as get_effective_safety_factor
    from can_train.training.predict import LoadedModel as LoadedModel
    from can_train.training.predict import load as load
    from can_train.training.sample_task import Task as Task
    from can_train.training.sample_task import TaskContext as TaskContext


__version__ = "0.1.0"

_HOMES: Final = {
    "cli.planning": ("plan",),
    "errors": ("CanTrainError",),
    "factors.policies": ("AffinePolicy", "FactorPoint", "MomentumPolicy"),
    "factors.store": ("get_safety_factor_db",),
    "fit.micro_batcher": ("BatchResult", "MicroBatcher"),
    "fit.packing": ("solve_accumulation",),
    "fit.peak_prediction": ("PeakPrediction",),
    "fit.prediction": ("predict_peak",),
    "fit.search": ("SizeSearch", "find_max_size"),
    "memory.allocation_trace": ("MemoryPart",),
    "memory.meters": ("simulated_gpu",),
    "memory.monitor": ("MemoryMonitor",),
    "memory.out_of_memory": ("is_out_of_memory",),
    "training.predict": ("LoadedModel", "load"),
    "training.sample_task": ("Task", "TaskContext"),
    "task": ("Feature", "Phase"),
    "training.dry_run": ("CardPlan", "Plans", "get_effective_safety_factor"),
    "adapters.framework_loop": ("LoopSettings",),
    "adapters.lightning_callback": ("MemoryMonitorCallback", "MicroBatchCallback"),
    "adapters.lightning_sizes": ("scale_batch_size",),
    "adapters.transformers_trainer": ("MicroBatchTrainerMixin",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: `import can_train` stays light."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
