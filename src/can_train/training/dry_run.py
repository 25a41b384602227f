"""What can be said of a run without data and without a trial: what `--dry-run` prints below the configuration."""

from can_train.config.resolved import ResolvedRun
from can_train.memory.meters import open_meter
from can_train.policy.plan import resolve_mode
from can_train.reporter import SilentReporter
from can_train.training.effective_factor import factor_rule


def dry_run_lines(run: ResolvedRun) -> list[str]:
    """Writes the plan as far as it is decided; writes no file.

    Raises:
        DeviceError: The device cannot be used.
    """
    meter = open_meter(run.device)
    factor = factor_rule(run, meter.key, SilentReporter()).decide(None).choice
    return [
        f"plan for {meter.key} ({meter.capacity_bytes / 2**30:.1f} GiB usable):",
        f"  key            {run.key}",
        f"  logical batch  {_logical_batch(run)}",
        f"  micro-batches  {_micro_batches(run)}",
        f"  safety factor  {factor.factor:.4g}: {factor.reason}",
    ]


def _logical_batch(run: ResolvedRun) -> str:
    training = run.training
    mode = resolve_mode(training.find_batch_size, batch_size_given=training.batch_size > 0)
    if mode == "max" and not training.micro_batch_size:
        floor = f"an epoch keeps at least {training.min_steps_per_epoch} steps"
        return f"the largest that fits, found before the first step; {floor}"
    batch = (training.batch_size or training.lr_batch_size) * training.gradient_accumulation_steps
    return f"{batch} as asked for"


def _micro_batches(run: ResolvedRun) -> str:
    training = run.training
    if training.micro_batch_size:
        return f"of {training.micro_batch_size}, fixed"
    if training.find_batch_size == "off":
        return f"of {training.batch_size or training.lr_batch_size}, as given"
    return "as many as the safe limit needs, found by trial on the device"
