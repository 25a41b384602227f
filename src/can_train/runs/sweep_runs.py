"""A sweep as one thing: its name, the labels of its runs by the settings that vary, and how its runs failed."""

import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from can_train.config.resolved import differences, flat_settings
from can_train.runs.run_folder import SweepRun
from can_train.runs.run_state import FAILURES, FINISHED
from can_train.runs.status import RunStatus

_MOST_NAME: Final = 40  # characters of the settings in a sweep's name
_NOT_IN_NAME: Final = re.compile(r"[^\w.-]+")
_CHOICES: Final = {"model_name": "model.", "dataset.name": "dataset.", "mode.name": "mode."}
"""Settings that choose a preset, and the group of settings that then differ, too."""
_VARYING: Final = re.compile(r"0x[0-9a-f]+|/[^\s:'\"]+|\d+(?:\.\d+)?")
"""Parts of an error that differ between runs that failed for one cause: addresses, paths and numbers."""
_MOST_EXAMPLES: Final = 3


def describe_sweep(configs: Sequence[Mapping[str, Any]]) -> list[SweepRun]:
    """Names a sweep, and labels each of its runs by the settings that vary.

    Args:
        configs: Configurations of its runs.
    """
    values = differences([flat_settings(config) for config in configs])
    for choice, group in _CHOICES.items():
        if choice in values:
            values = {name: row for name, row in values.items() if name == choice or not name.startswith(group)}
    short = {name: _short(name) for name in values}
    # Two settings of one last part, as model.hidden and task.hidden, keep their groups.
    names = {name: text if [*short.values()].count(text) == 1 else name for name, text in short.items()}
    joined = _NOT_IN_NAME.sub("_", "-".join(names.values()))[:_MOST_NAME].strip("-.") or "repeats"
    sweep = f"sweep-{joined}-{secrets.token_hex(2)}"
    return [SweepRun(name=sweep, label=" ".join(f"{names[name]}={row[index]}" for name, row in values.items()))
            for index in range(len(configs))]  # fmt: skip


def _short(name: str) -> str:
    group, _, last = name.rpartition(".")
    return group if last == "name" else last.removesuffix("_name")


# How runs failed


@dataclass(frozen=True, kw_only=True)
class FailedRuns:
    """Runs that ended for one cause.

    Attributes:
        state: Their state.
        why: The sentence about the first of them.
        runs: The runs.
        nodes: The number of runs by the node of their last attempt.
    """

    state: str
    why: str
    runs: Sequence[RunStatus]
    nodes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class FailingNode:
    """A node where runs failed.

    Attributes:
        failed: Number of runs whose last attempt failed there.
        finished: Number of runs that finished there.
    """

    node: str
    failed: int
    finished: int


def has_failed(status: RunStatus) -> bool:
    """Returns whether a run ended without a result, and nobody cancelled it. How one ended that another person has
    closed is not known.
    """
    return status.state.state in FAILURES and not status.facts.is_closed


def failures_by_cause(statuses: Iterable[RunStatus]) -> list[FailedRuns]:
    """Groups the failed runs by state and error, the most frequent cause first. Numbers and paths in an error do not
    count.
    """
    groups: dict[tuple[str, str], list[RunStatus]] = defaultdict(list)
    for status in filter(has_failed, statuses):
        groups[status.state.state, _VARYING.sub("#", status.state.sentence)].append(status)
    failed = [FailedRuns(state=runs[0].state.state, why=runs[0].state.sentence, runs=runs, nodes=_count_nodes(runs))
              for runs in groups.values()]  # fmt: skip
    return sorted(failed, key=lambda each: -len(each.runs))


def failures_by_node(statuses: Sequence[RunStatus]) -> list[FailingNode]:
    """Lists the nodes where runs failed, the worst first."""
    failed = _count_nodes([status for status in statuses if has_failed(status)])
    finished = _count_nodes([status for status in statuses if status.state.state == FINISHED])
    nodes = [FailingNode(node=node, failed=count, finished=finished.get(node, 0)) for node, count in failed.items()]
    return sorted(nodes, key=lambda each: (-each.failed, each.finished, each.node))


def last_node(status: RunStatus) -> str:
    """Returns the node of the last attempt of a run; empty: unknown."""
    if not status.facts.attempts:
        row = next((row for row in reversed(status.facts.answer.accounts) if row.nodes), None)
        return row.nodes if row else ""
    last = status.facts.attempts[-1]
    return (last.end.host if last.end else "") or last.start.host


def _count_nodes(statuses: Iterable[RunStatus]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for status in statuses:
        if node := last_node(status):
            counts[node] += 1
    return dict(counts)


def can_go_on(status: RunStatus) -> bool:
    """Returns whether `resume` continues a run: it has ended without a result."""
    facts = status.facts
    return not status.state.live and facts.result is None and facts.has_folder and not facts.is_closed
