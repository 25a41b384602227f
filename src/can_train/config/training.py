"""Names and defaults of every task's training settings. A command-line flag exists for each scalar field here, with the
docstring under the field as its help. Imports neither torch nor Hydra.
"""

from dataclasses import dataclass

from can_train.config.checks import check_choice, check_range, number_or_off
from can_train.errors import ConfigError

FIND_BATCH_SIZE = ("auto", "max", "opt", "off")
ACCUMULATION = ("even", "divisor")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULES = ("cosine", "constant")
INTERVALS = ("step", "epoch")
LR_SCALES = ("auto", "none", "sqrt", "linear")
OVERSIZE = ("error", "skip")
DEFAULT_TARGET_MIB = 2048.0


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a run is trained."""

    epochs: int = 6
    """Passes over the training data."""
    batch_size: int = 0
    """Logical batch: samples that one optimizer step sees; 0 lets the device decide, once, before the first step."""
    find_batch_size: str = "auto"
    """auto: opt where a batch size was given, else max; max: largest that fits; opt: split it; off: as given."""
    accumulation: str = "even"
    """even: fewest micro-batches, sizes differing by at most 1; divisor: equal micro-batches."""
    find_batch_size_steps_per_trial: int = 3
    """Steps of one trial of the batch-size search."""
    gradient_accumulation_steps: int = 1
    """Batches of batch_size samples that make one optimizer step."""
    accumulation_threshold: float = 0.0
    """Units of the task's main feature up to which a batch that fits is not cut; 0 cuts whatever needs it."""
    accumulation_target_mib: str = "off"
    """Cut until a micro-batch costs no more than this many MiB; on: 2048."""
    accumulation_max_splits: int = 4
    """Most micro-batches planned to reach accumulation_target_mib; a rescue may exceed it, and says so."""
    preflight_threshold: str = "off"
    """Units of the main feature above which a batch becomes several optimizer steps. Changes what is optimised."""
    oversize: str = "error"
    """Samples that do not fit by themselves: error names them before the first step, skip leaves them out."""
    min_steps_per_epoch: int = 50
    """With max: never so large a batch that an epoch has fewer optimizer steps."""
    micro_batch_size: int = 0
    """Fixed number of samples on the device at once, without a search; 0 searches."""
    min_micro_batch_size: int = 1
    """Samples below which a batch is never split."""
    adaptive_micro_batch: bool = True
    """Rescue from out-of-memory: undo the micro-batch, split it and go on. Off, it is an error."""
    backoff_factor: float = 2.0
    """What a micro-batch that ran out of memory is divided by."""
    oom_retries: int = 3
    """Attempts at the smallest micro-batch, in case another process holds the memory."""
    regrow: bool = True
    """Let micro-batches grow back after a quiet stretch; off keeps the size that worked."""
    cuda_empty_cache_interval: int = 1000
    """Optimizer steps between releases of the allocator's cache; 0: never."""
    cuda_empty_cache_threshold_mib: str = "off"
    """Free memory below which the allocator's cache is released after a step, in MiB."""
    lr: float = 1e-3
    """Learning rate at the batch size it was chosen for (lr_batch_size)."""
    lr_batch_size: int = 64
    """Batch size that lr was chosen for."""
    lr_scale: str = "auto"
    """Learning rate against batch ÷ lr_batch_size: none, sqrt or linear; auto: sqrt under max, else none."""
    weight_decay: float = 1e-4
    """Weight decay of the optimizer."""
    optimizer: str = "adamw"
    """adamw, adam or sgd (with momentum 0.9)."""
    precision: str = "fp32"
    """fp32, bf16 or fp16 (mixed precision), fp64."""
    grad_clip_norm: float = 0.0
    """Largest gradient norm, applied once a step after unscaling; 0 turns it off."""
    scheduler: str = "cosine"
    """Learning-rate schedule: cosine (to zero, after the warm-up) or constant."""
    scheduler_interval: str = "step"
    """Whether the schedule moves after each optimizer step or after each epoch."""
    warmup_share: float = 0.05
    """Share of the schedule over which the learning rate rises linearly."""
    seed: int = 42
    """Seed of weights, data order and dropout."""
    deterministic: bool = False
    """Use deterministic algorithms only; an operation that has none is an error."""
    patience: int = 0
    """Epochs without a better validation loss before training stops; 0 never stops early."""
    val_interval: int = 1
    """Epochs between validations."""
    checkpoint_every: int = 100
    """Optimizer steps between checkpoints, beside the one after each epoch."""
    start_from: str = ""
    """Finished run, by its folder, whose best weights training starts from; empty: fresh weights."""
    use_adaptive_batch_size_factor: bool = True
    """Learn the safety factor from every run; off, graph_memory_safety_factor is used and nothing learned."""
    graph_memory_safety_factor: float = 0.6
    """Static safety factor, used where use_adaptive_batch_size_factor is off."""

    def __post_init__(self) -> None:
        self._check_numbers()
        check_choice("training.find_batch_size", self.find_batch_size, FIND_BATCH_SIZE)
        check_choice("training.accumulation", self.accumulation, ACCUMULATION)
        check_choice("training.oversize", self.oversize, OVERSIZE)
        check_choice("training.lr_scale", self.lr_scale, LR_SCALES)
        check_choice("training.optimizer", self.optimizer, OPTIMIZERS)
        check_choice("training.precision", self.precision, PRECISIONS)
        check_choice("training.scheduler", self.scheduler, SCHEDULES)
        check_choice("training.scheduler_interval", self.scheduler_interval, INTERVALS)

    @property
    def target_mib(self) -> float:
        """`accumulation_target_mib` as a number; infinite where it is off."""
        return number_or_off("training.accumulation_target_mib", self.accumulation_target_mib, on=DEFAULT_TARGET_MIB)

    @property
    def preflight_units(self) -> float:
        """`preflight_threshold` as a number; infinite where it is off."""
        return number_or_off("training.preflight_threshold", self.preflight_threshold)

    @property
    def free_threshold_mib(self) -> float:
        """`cuda_empty_cache_threshold_mib` as a number; infinite where it is off."""
        return number_or_off("training.cuda_empty_cache_threshold_mib", self.cuda_empty_cache_threshold_mib)

    def _check_numbers(self) -> None:
        for name in ("epochs", "find_batch_size_steps_per_trial", "gradient_accumulation_steps", "min_steps_per_epoch",
                     "lr_batch_size", "val_interval", "checkpoint_every", "accumulation_max_splits",
                     "min_micro_batch_size"):  # fmt: skip
            check_range(f"training.{name}", getattr(self, name), low=1)
        for name in ("batch_size", "micro_batch_size", "weight_decay", "grad_clip_norm", "seed", "patience",
                     "accumulation_threshold", "oom_retries", "cuda_empty_cache_interval"):  # fmt: skip
            check_range(f"training.{name}", getattr(self, name), low=0)
        check_range("training.backoff_factor", self.backoff_factor, above=1.0, high=1e6)
        if 0 < self.micro_batch_size < self.min_micro_batch_size:
            raise ConfigError(
                "A fixed micro-batch is not smaller than the smallest one allowed",
                value=f"training.micro_batch_size {self.micro_batch_size}, "
                f"training.min_micro_batch_size {self.min_micro_batch_size}",
                remedy="Change one of them",
            )
        # Reading them checks them.
        _ = (self.target_mib, self.preflight_units, self.free_threshold_mib)
        check_range("training.lr", self.lr, above=0.0)
        check_range("training.warmup_share", self.warmup_share, low=0.0, high=1.0)
        check_range("training.graph_memory_safety_factor", self.graph_memory_safety_factor, above=0.0, high=1.0)
