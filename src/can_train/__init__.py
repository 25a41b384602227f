"""can-train launches PyTorch training that fits: the names here are for people with a loop of their own."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from can_train.engine.batch_result import BatchResult
    from can_train.engine.finder import SizeSearch, find_max_size
    from can_train.engine.micro_batcher import MicroBatcher
    from can_train.errors import CanTrainError
    from can_train.memory.monitor import MemoryMonitor
    from can_train.memory.out_of_memory import is_out_of_memory
    from can_train.policy.accumulation import solve_accumulation
    from can_train.policy.affine import AffinePolicy
    from can_train.policy.factors import FactorPoint, MomentumPolicy
    from can_train.state.factor_store import get_safety_factor_db
    from can_train.training.effective_factor import get_effective_safety_factor
    from can_train.training.lightning_callback import MemoryMonitorCallback
    from can_train.training.prediction import PeakPrediction, predict_peak

__version__ = "0.1.0"

__all__ = [
    "AffinePolicy",
    "BatchResult",
    "CanTrainError",
    "FactorPoint",
    "MemoryMonitor",
    "MemoryMonitorCallback",
    "MicroBatcher",
    "MomentumPolicy",
    "PeakPrediction",
    "SizeSearch",
    "find_max_size",
    "get_effective_safety_factor",
    "get_safety_factor_db",
    "is_out_of_memory",
    "predict_peak",
    "solve_accumulation",
]

_HOMES: Final = {
    "AffinePolicy": "policy.affine",
    "BatchResult": "engine.batch_result",
    "CanTrainError": "errors",
    "FactorPoint": "policy.factors",
    "MemoryMonitor": "memory.monitor",
    "MemoryMonitorCallback": "training.lightning_callback",
    "MicroBatcher": "engine.micro_batcher",
    "MomentumPolicy": "policy.factors",
    "PeakPrediction": "training.prediction",
    "SizeSearch": "engine.finder",
    "find_max_size": "engine.finder",
    "get_effective_safety_factor": "training.effective_factor",
    "get_safety_factor_db": "state.factor_store",
    "is_out_of_memory": "memory.out_of_memory",
    "predict_peak": "training.prediction",
    "solve_accumulation": "policy.accumulation",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: `import can_train` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
