r"""The summary at the top of RESULTS.md, made from the cells of the sections below it.

A text names a cell as `{row|column}`; a row is named by its first cell or cells, `{row|next cell|column}`. What stands
outside tables is found by a regular expression with a group: `{/median error is (\S+),}`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from bench.results_file import markdown

HEAD: Final = ("subject", "compared", "can-train", "the best other", "what can-train loses")
NONE: Final = "–"
NOTES: Final = """

The figures are those of the sections that the lines lead to, which name the machine and the versions and say how they
were measured. `scripts/bench/all` measures again what half an hour allows, and remakes this table."""


class Line(NamedTuple):
    """A line of the summary: what a section compares, and texts that name its cells."""

    section: str
    compared: str
    own: str
    other: str = NONE
    loses: str = NONE


LINES: Final = (
    Line(
        "finder",
        "largest batch found, as a share of what fits; trials; how many of 284 do not fit",
        "{can-train, with readings|mean share}; {can-train, with readings|trials}; "
        "{can-train, with readings|over the limit}",
        "Lightning, binsearch: {Lightning, binsearch|mean share}; {Lightning, binsearch|trials}; "
        "{Lightning, binsearch|over the limit}; its `max_val` raised: "
        "{Lightning, binsearch, `max_val` raised|mean share}; {Lightning, binsearch, `max_val` raised|trials}; "
        "{Lightning, binsearch, `max_val` raised|over the limit}",
        "peaks that vary by 8 %: {8 %|can-train, with readings|half} of the size that fails in half of the runs, "
        "Lightning {8 %|Lightning, binsearch, `max_val` raised|half}; sizes that mostly fail: "
        "{8 %|can-train, with readings|mostly fail} and {8 %|Lightning, binsearch, `max_val` raised|mostly fail}",
    ),
    Line(
        "survival",
        "10,000 steps over graphs of very different sizes: runs that end; mean fill of the GPU; speed",
        "{can-train, as its command line does|runs that end}; {can-train, as its command line does|fill}; "
        "{can-train, as its command line does|speed}",
        "torch_geometric, edges: {torch_geometric, edges|runs that end}; {torch_geometric, edges|fill}; "
        "{torch_geometric, edges|speed}; Lightning, power: {Lightning, power|runs that end}; {Lightning, power|fill}; "
        "{Lightning, power|speed}",
        "with `find_max_size`, which knows no costs: {can-train, `MicroBatcher(limits=find_max_size(…))`|fill}; "
        "{can-train, `MicroBatcher(limits=find_max_size(…))`|speed}",
    ),
    Line(
        "equivalence",
        "gradients in micro-batches of sentences: error, mean",
        "{can-train, `MicroBatcher`|gradient, mean}",
        "accelerate, the loop of its guide: {accelerate, the loop of its guide for sentences|gradient, mean}; "
        "Lightning: {Lightning, `accumulate_grad_batches=4`|gradient, mean}",
        "CPU ms a step: {can-train, `MicroBatcher`|CPU ms a step}, whole batches {whole batches|CPU ms a step}; where "
        "memory runs out {can-train, memory runs out in every third step|CPU ms a step}",
    ),
    Line(
        "prediction",
        "predicted peaks of simulated GPUs: error",
        "median {/median error is ([^,]+),}, largest {/the largest ([^ ]+)%\\.}%",
        "MemTracker on fake tensors: {MemTracker, fake tensors|median}, largest {MemTracker, fake tensors|largest}, of "
        "{MemTracker, fake tensors|batches}, it raises on the others; `accelerate estimate-memory`: "
        "{accelerate, `estimate-memory`|median}",
        "a loss over all pairs of a batch of which only a number is given: {contrastive|a number|error}, which it says",
    ),
    Line(
        "prediction-measured",
        "predicted peaks of real GPUs, as published, of timm's networks: error",
        "median {GPUMemNet A100-40GB, timm|error: median}, p95 {GPUMemNet A100-40GB, timm|p95}",
        "FakeTensor, median and p95: {GPUMemNet A100-40GB, timm|FakeTensor}",
        "{GPUMemNet A100-40GB, timm|under} of the peaks are more than 2 % above the prediction",
    ),
    Line(
        "plans",
        "plans of dry runs beside training: error",
        "median {/Over all \\d+: median ([^,]+),}, largest {/median [^|]*largest ([^,]+),}",
        loses="student GAT: largest {gat|student|largest}",
    ),
    Line(
        "startup",
        "CPU seconds to `--help`; to a plan; to the first step",
        "{`can-train --help`|CPU, s}; {a plan (`--dry-run`)|CPU, s}; {the first optimizer step|CPU, s}",
        '`import torch`: {`python -c "import torch"`|CPU, s}',
        "a plan and the first step take {a plan (`--dry-run`)|beside} and {the first optimizer step|beside} the import",
    ),
    Line(
        "planning",
        "planning beside the first epoch, sim:2GiB, the preset's batch",
        "{sim:2GiB|the preset's batch (64)|fresh|planning, s} s, "
        "{sim:2GiB|the preset's batch (64)|fresh|epochs} epochs; later "
        "{sim:2GiB|the preset's batch (64)|with an earlier run's limit|planning, s} s",
        "no planning: 0 s",
        "batches of 2,048 on sim:6GiB: {sim:6GiB|batches of 2,048|fresh|epochs} epochs, and "
        "{sim:6GiB|batches of 2,048|fresh|not tried} are not tried",
    ),
    Line(
        "policy",
        "laws in which the factor reaches the best; runs until then; out-of-memories in 40 runs",
        "{**mean**|affine|reached}; {**mean**|affine|runs}; {**mean**|affine|OOMs}",
        "proportional: {**mean**|proportional|reached}; {**mean**|proportional|runs}; {**mean**|proportional|OOMs}",
        "mean peak {**mean**|affine|peak}, proportional {**mean**|proportional|peak}; two populations: "
        "{two populations|affine|reached} and {two populations|proportional|reached} reached",
    ),
    Line(
        "learning",
        "real runs in a row until peaks are at the target",
        "{gat|0%|within}; 12 % hidden: {gat|12%|within}",
        "the momentum policy's peaks: {gat, policy momentum|62%|peaks}",
        "12 % hidden: out-of-memories rescued, run by run: {gat|12%|rescued}",
    ),
    Line(
        "engine",
        "time that micro-batching adds to a step",
        "GAT: {gat, teacher|64|overhead}",
        "a bare loop: 0%",
        "student VGAE: {vgae, student|64|overhead}; {engine|added, µs} µs a part",
    ),
    Line(
        "monitor",
        "time that looking at memory adds to a step, over an interval",
        "GAT: {teacher|cpu|amortised}",
        "a bare loop: 0%",
        "student: {student|cpu|amortised}",
    ),
    Line(
        "loops",
        "gradient of two ranks that cut their shares differently: error",
        "{MicroBatcher, each rank cuts as it needs|error}",
        "DDP: {DDP, each rank cuts as it needs|error}",
        "a model that is wrapped in DDP is refused",
    ),
    Line(
        "claims",
        "runs until the factor is learned, noise of 2 %: 10 %, median, 90 %",
        "{2%|can-train|runs: 10 %, median, 90 %}",
        "as described: {2%|described|runs: 10 %, median, 90 %}",
        "samples/s of a muon training, adaptive: {adaptive|samples/s} (peak {adaptive|against never}); always 2: "
        "{always 2|samples/s} (peak {always 2|against never})",
    ),
    Line(
        "slurm",
        "runs that finish; disturbances",
        "{ended as|seen}; {disturbances|seen}",
        loses="`submit` takes {`submit`|seen}",
    ),
    Line(
        "data",
        "parsing, M messages/s; batches of 512 graphs, µs a graph",
        "{parsing, M messages/s|can-train}; {batches of 512 graphs, µs a graph|can-train}",
        "{parsing, M messages/s|beside it}; {batches of 512 graphs, µs a graph|beside it}",
        "`--help`: {`can-train --help`, s|can-train} s; {`can-train --help`, s|beside it} s",
    ),
    Line(
        "scoring",
        "scoring a log, frames/s",
        "{from text to scores|frames/s}",
        loses="the whole command, start included: {the whole command|frames/s}",
    ),
    Line(
        "detect",
        "live detection, frames/s, slowest model",
        "{gat teacher|frames/s}",
        "a busy bus of 500 kbit/s: {/carries ([\\d,]+ to [\\d,]+)\\s+frames/s}",
        "start: {gat teacher|start, s} s",
    ),
    Line(
        "detectors",
        "MCC, unknown vehicles, known attacks; known vehicles, unknown attacks",
        "GAT {test_02_unknown_vehicle_known_attack|GAT}; {test_03_known_vehicle_unknown_attack|GAT}",
        "random forest {test_02_unknown_vehicle_known_attack|random_forest}; "
        "{test_03_known_vehicle_unknown_attack|random_forest}",
        "masquerade {test_06_masquerade|GAT}; VGAE on a real log {the run's own|MCC}, a table of IDs "
        "{the run's own|id_lookup}",
    ),
    Line(
        "reasons",
        "alarms that name an injected ID first",
        "{student GAT|less the usual}",
        "by frames, without a model: {student GAT|most above the usual}",
        "known vehicles and attacks: less the usual, frames: {test_01_known_vehicle_known_attack|student GAT}",
    ),
    Line(
        "bus",
        "simulated bus beside real logs: intervals' spread; payloads as before",
        "{version 2, seed 0|spread}; {version 2, seed 0|as before}",
        "in four logs: {in four logs|spread}; {in four logs|as before}",
        "masquerade leaves a decision tree nothing: ROC-AUC {masquerade|ROC-AUC}",
    ),
    Line(
        "chaos",
        "random command lines, and trainings that are killed or out of disk: cases, wrong ones",
        "{random command lines, in a process|cases}, {random command lines, in a process|wrong}; "
        "{a training and one of its writes, renames and flushes: killed, failed, full or read-only from there; then "
        "resumed|cases}, {a training and one of its writes, renames and flushes: killed, failed, full or read-only "
        "from there; then resumed|wrong}",
    ),
    Line(
        "history",
        "commands after 100,000 observations: CPU seconds (wall)",
        "`factors` {100,000|20,000|`factors`|later}, a training's look-up {100,000|20,000|a training's look-up|later}",
        loses="the first `factors`: {100,000|20,000|`factors`|first}; "
        "`runs --best mcc` of 20,000 runs: {100,000|20,000|`runs --best mcc`|later}",
    ),
)


class AbsentError(LookupError):
    """A text of the summary names what its section does not have."""


def summary(results: str) -> str:
    """Returns the summary of what RESULTS.md says, as a table with a note.

    Raises:
        AbsentError: A section, a row or a cell is not there, or is empty.
    """
    return markdown([HEAD, *(_cells(results, line) for line in LINES)]) + NOTES


def cell(section: str, names: Sequence[str]) -> str:
    """Returns a cell of a section: the names are the first cells of its row, and its column's."""
    *row, column = names
    for head, *body in _tables(section):
        if column in head:
            found = [cells[head.index(column)] for cells in body if cells[: len(row)] == row]
            if found and found[0]:
                return found[0]
    raise AbsentError(f"no cell {' | '.join(names)}")


def section_of(results: str, name: str) -> str:
    """Returns the text of a section of RESULTS.md."""
    found = re.search(f"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", results, re.DOTALL)
    if found is None:
        raise AbsentError(f"no section {name}")
    return found[1]


def _cells(results: str, line: Line) -> list[str]:
    section = section_of(results, line.section)
    texts = (re.sub(r"\{(.+?)\}", lambda found: _value(section, found[1]), text) for text in line[2:])
    return [_link(results, line.section), line.compared, *texts]


def _value(section: str, named: str) -> str:
    if not named.startswith("/"):
        return cell(section, named.split("|"))
    if found := re.search(named[1:], section):
        return found[1]
    raise AbsentError(f"no {named}")


def _link(results: str, name: str) -> str:
    """Returns a link to a section's heading, by the name that GitHub gives it."""
    heading = results.partition(f"<!-- {name}:begin -->")[0].rpartition("\n## ")[2].strip()
    anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    return f"[{name}](#{anchor})"


def _tables(section: str) -> Iterator[list[list[str]]]:
    for block in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
        rows = [[one.strip() for one in line.strip("|").split("|")] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]
