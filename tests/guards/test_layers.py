"""A folder imports only from lower layers, and a heavy dependency has one home."""

import ast

import pytest

from guards.sources import Source, imported_modules, package_sources, parse, without_docstrings

LAYERS = {
    "cli": 9,
    "report": 8,
    "slurm": 7,
    "adapters": 6,
    "training": 5,
    "runs": 4,
    "factors": 3,
    "fit": 2,
    "memory": 1,
    "config": 1,
    "io": 0,
    "task": 0,
}
LEAVES = {"errors", "reporter"}
"""Modules that every layer may import and that import none, but for the reporter: it writes commands as errors do."""

DOORS = {"__init__", "__main__"}
"""The package's entrances, which open onto every layer."""

HOMES = {
    "typer": "cli",
    "rich": "cli",
    "hydra": "config",
    "hydra_zen": "config",
    "omegaconf": "config",
    "submitit": "slurm",
    "tensorboard": "runs",
    "mlflow": "runs",
    "wandb": "runs",
    # The launcher needs them nowhere: tasks do.
    "can_train_tasks": "",
    "torch_geometric": "",
    "sklearn": "",
    "h5py": "",
    "PIL": "",
}


SLURM_PROGRAMS = {"squeue", "sacct", "scontrol", "scancel", "sinfo", "sbatch", "srun"}
SLURM_CLIENT = "slurm/client.py"

RICH_WITH_MARKUP = {"Console", "TextColumn"}
RICH_PARTS = {"rich.box", "rich.console", "rich.live", "rich.progress", "rich.table", "rich.text"}
"""In a table or a console, text is markup as the console says; `Text` never is."""


def violations(source: Source) -> list[str]:
    if source.room in DOORS:
        return []
    imports = {module for module in imported_modules(source) if module.partition(".")[0] == "can_train"}
    return [f"{source.path} imports {module}" for module in sorted(imports) if not allowed(source.room, module)]


def allowed(room: str, module: str) -> bool:
    _, _, inside = module.partition(".")
    other = inside.partition(".")[0]
    if room in LEAVES:
        return (room, other) == ("reporter", "errors")
    if other == "__version__":
        return True
    return other == room or other in LEAVES or (other in LAYERS and LAYERS[other] < LAYERS[room])


def misplaced_imports(source: Source) -> list[str]:
    packages = {module.partition(".")[0] for module in imported_modules(source)}
    homeless = [package for package in packages if HOMES.get(package, source.room) != source.room]
    return [f"{source.path} imports {package}" for package in sorted(homeless)]


def slurm_calls(source: Source) -> list[str]:
    """Programs of SLURM that are named as the word of a command: alone, or before its options."""
    if source.path == SLURM_CLIENT:
        return []
    texts = [node.value for node in without_docstrings(source.tree) if isinstance(node, ast.Constant)]
    words = [text.split() for text in texts if isinstance(text, str) and text.strip()]
    commands = [each for each in words if len(each) == 1 or each[1].startswith("-")]
    return [f"{source.path} calls {each[0]}" for each in commands if each[0] in SLURM_PROGRAMS]


def test_every_room_of_the_house_has_a_layer() -> None:
    rooms = {source.room for source in package_sources()}
    assert rooms <= LAYERS.keys() | LEAVES | DOORS


def test_a_folder_imports_only_from_lower_layers() -> None:
    assert [found for source in package_sources() for found in violations(source)] == []


def test_a_heavy_dependency_is_imported_at_home_only() -> None:
    assert [found for source in package_sources() for found in misplaced_imports(source)] == []


def test_only_the_client_calls_the_programs_of_slurm() -> None:
    assert [found for source in package_sources() for found in slurm_calls(source)] == []


@pytest.mark.parametrize(
    "line", ['run("squeue", "--me")', "run(['scontrol', 'show'])", 'run("sacct -n -P", shell=True)']
)
def test_a_call_of_slurm_elsewhere_is_found(line: str) -> None:
    assert len(slurm_calls(parse("runs/past_runs.py", line))) == 1
    assert slurm_calls(parse(SLURM_CLIENT, line)) == []


def with_markup(source: Source) -> list[str]:
    """Rich's objects that would take brackets in a text, which may be anybody's, for markup; parts of Rich that have no
    way to leave it alone.
    """
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    plain = {id(call) for call in calls for each in call.keywords if each.arg == "markup" and is_false(each.value)}
    found = [call.func.id for call in calls if isinstance(call.func, ast.Name) and id(call) not in plain]
    parts = {module for module in imported_modules(source) if module.startswith("rich")}
    return [f"{source.path} uses {name}" for name in [*(RICH_WITH_MARKUP & {*found}), *(parts - RICH_PARTS)]]


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_what_rich_prints_is_never_markup() -> None:
    assert [found for source in package_sources() for found in with_markup(source)] == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("Console()", 1),
        ("Console(markup=True)", 1),
        ("TextColumn('{task.description}')", 1),
        ("from rich.panel import Panel", 1),
        ("from rich import print", 1),
        ("Console(markup=False)", 0),
        ("from rich.text import Text", 0),
    ],
)
def test_markup_of_rich_is_found(line: str, count: int) -> None:
    assert len(with_markup(parse("cli/output.py", line))) == count


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("fit/plan.py", "from can_train.factors.store import FactorStore"),
        ("fit/plan.py", "def f():\n    import can_train.cli.main"),
        ("training/train.py", "from can_train.adapters.framework_loop import LoopSettings"),
        ("factors/store.py", "from can_train import runs"),
        ("memory/meters.py", "from can_train.config import settings"),
        ("config/compose.py", "from can_train import solve_accumulation"),
        ("errors.py", "from can_train.reporter import Reporter"),
    ],
)
def test_an_import_from_the_same_or_a_higher_layer_is_found(path: str, line: str) -> None:
    assert len(violations(parse(path, line))) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("fit/plan.py", "from can_train.errors import ConfigError"),
        ("reporter.py", "from can_train.errors import with_command_name"),
        ("training/train.py", "from can_train.fit.search import find\nfrom can_train.runs import trackers"),
        ("fit/search.py", "from can_train.fit.rescue import rescued"),
        ("__main__.py", "from can_train.cli.main import run"),
    ],
)
def test_an_import_from_a_lower_layer_or_the_same_folder_is_let_pass(path: str, line: str) -> None:
    assert violations(parse(path, line)) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("slurm/submit.py", "import typer"),
        ("cli/train.py", "from hydra.core import x"),
        ("training/train.py", "import submitit"),
        ("training/train.py", "from can_train_tasks.can.settings import TASK"),
        ("fit/collate.py", "import torch_geometric"),
    ],
)
def test_a_heavy_import_away_from_home_is_found(path: str, line: str) -> None:
    assert len(misplaced_imports(parse(path, line))) == 1
