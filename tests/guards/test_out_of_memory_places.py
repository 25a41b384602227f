"""An out-of-memory is caught in few places, each for a reason: one for the steps of a training and the parts of an
evaluation, one that turns into an error what nothing can undo, and the trials of a size or of a placement.
"""

import ast

import pytest

from guards.sources import Source, package_sources, parse

STEPS = {
    "fit/rescue.py Try": "catches those of training steps and of evaluation: the micro-batch is undone and split",
    "adapters/framework_loop.py _WholeStep": "a step of another framework is undone, and computed in parts",
}
FATAL = {
    "fit/rescue.py fatal_out_of_memory": "turns those that nothing can undo into an error",
}
TRIALS = {
    "adapters/framework_loop.py FrameworkLoop._search": "limits are searched for with a copy of the model",
    "adapters/transformers_trainer.py MicroBatchTrainerMixin._movable_outputs.MovableContainer.add": "outputs move",
    "adapters/transformers_trainer.py MicroBatchTrainerMixin._whole_evaluation": "outputs move to the host",
    "adapters/transformers_trainer.py _Parts._measured": "how losses add up is tried with a few samples",
    "adapters/transformers_trainer.py _Parts._likeliest": "a sample shows whether items divide its loss",
    "adapters/framework_loop.py FrameworkLoop._draws": "whether random numbers are the reason is tried",
    "fit/batch_dependence.py _round_off": "whether another rounding is the reason is tried",
    "adapters/loss_ways.py Comparison._change_by_rounding": "whether another rounding is the reason is tried",
    "adapters/framework_loop.py FrameworkLoop._learn_kinds": "some samples of an evaluation are computed once more",
    "fit/explore.py _confirm_recorded": "the largest batch that is recorded to fit is tried",
    "fit/explore.py fit_by_probes.read": "a probe may be too large",
    "fit/explore.py seconds_per_sample": "a batch that is timed may be too large",
    "fit/explore.py Explorer._dependence_of": "whether samples depend on each other is tried with a few of them",
    "fit/explore.py Explorer.check_outputs": "metrics and predictions of a few samples are tried",
    "fit/explore.py Explorer._compile_for": "the batches that a model is compiled for may be too large",
    "fit/explore.py Explorer.evaluation_fits": "the costliest sample of an evaluation is tried before training",
    "fit/explore.py Explorer._mid_run": "state and gradients of a run are allocated as a trial",
    "fit/micro_batcher.py MicroBatcher.measure_dependence": "whether a split is exact is tried with a few samples",
    "fit/micro_batcher.py MicroBatcher.leaving_no_trace": "what a comparison must put back is copied before it",
    "fit/explore.py Explorer._module_costs": "a forward pass that saves nothing may take more than there is",
    "fit/rescue.py allocate_ballast": "the memory of the optimizer's state and step is allocated as a trial",
    "fit/planner.py Planner._runs_beside_data": "a step is tried beside the data",
    "fit/prediction.py _from_probes": "batches that check a prediction may be too large",
    "fit/sharding.py Shards._rehearsed": "the collectives of a pass are read from one sample, on a rank that has room",
    "fit/search.py _Search._try": "sizes are tried",
    "fit/search.py confirm_limit": "a remembered limit is tried",
    "memory/meters.py simulate_fit": "a batch is tried on a simulated GPU",
    "training/explain.py _on_rungs": "a step is recorded on each rung",
    "training/explain.py _savings": "changes of a step are tried",
    "training/inference.py copy_to_device": "a finished model may be too large for a device",
    "training/loading.py ResidentData.move_to_device": "data that do not fit stay on the host",
    "fit/offloaded_state.py keep_states": "the optimizers' state may not fit on the device again",
    "training/reference_models.py ReferenceModels._decide": "placements of a reference model are tried",
    "training/reference_models.py ReferenceModels._with_host_fallback": "the host may have to compute",
}
LOOKS = {
    "adapters/framework_loop.py FrameworkLoop._end_whole": "restores what a step of another framework has changed",
    "adapters/framework_loop.py FrameworkLoop._part": "lets it pass an except clause for errors of other kinds",
    "adapters/framework_loop.py _Parts._computed": "lets it pass an except clause for errors of other kinds",
    "adapters/lightning_sizes.py _copied": "lets it pass an except clause for errors of other kinds",
    "adapters/trainer_state.py undone": "restores the attributes of a Trainer",
    "factors/observing.py outcome_of": "names the outcome of an attempt",
    "fit/compiled.py CompiledModel.trying": "leaves it to the caller, where the compiler is not at fault",
    "fit/pass_state.py HeldState._visit_all": "lets it pass an except clause for errors of other kinds",
    "fit/prediction.py _from_probes": "lets it pass an except clause for errors of other kinds",
    "fit/rescue.py Rescue.record_foreign_memory": "reads the device at the moment at which memory ran out",
    "fit/sharding.py Shards.together": "enters the collectives that are left at once after any other error",
    "memory/out_of_memory.py CatchOutOfMemory.__exit__": "decides what the block catches",
    "runs/attempts.py _describe_end": "names the ending of an attempt",
    "training/read_ahead.py _Failure.of": "lets it pass from a process that reads samples to the one that computes",
    "training/sample_task.py Task.asked": "lets it pass an except clause for errors of other kinds",
    "training/session.py Session._damage": "lets it pass an except clause for errors of other kinds",
}


def places(source: Source) -> tuple[set[str], set[str]]:
    """Where a file catches an out-of-memory, and where it asks whether an error is one."""
    catches, asks = set[str](), set[str]()

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            name = f"{name}.{node.name}" if name else node.name
        place = f"{source.path} {name}"
        bases = node.bases if isinstance(node, ast.ClassDef) and node.name != "CatchOutOfMemory" else []
        if any("CatchOutOfMemory" in names(base) for base in bases):
            catches.add(place)
        if isinstance(node, ast.With) and any("CatchOutOfMemory" in names(item.context_expr) for item in node.items):
            catches.add(place)
        if isinstance(node, ast.Call) and "is_out_of_memory" in names(node.func):
            asks.add(place)
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(source.tree, "")
    return catches, asks


def names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)
    }


def test_an_out_of_memory_is_caught_where_it_is_listed() -> None:
    found = [places(source) for source in package_sources()]
    catches, asks = set[str]().union(*(one for one, _ in found)), set[str]().union(*(one for _, one in found))
    assert catches == (STEPS | TRIALS).keys()
    assert asks == (FATAL | LOOKS).keys()


@pytest.mark.parametrize(
    ("text", "catches", "asks"),
    [
        ("def one():\n    with CatchOutOfMemory():\n        pass", {"a.py one"}, set()),
        ("class One:\n    def two(self):\n        with x, y.CatchOutOfMemory() as z:\n            pass",
         {"a.py One.two"}, set()),
        ("class One(CatchOutOfMemory):\n    pass", {"a.py One"}, set()),
        ("def one(error):\n    return not is_out_of_memory(error)", set(), {"a.py one"}),
    ],
)  # fmt: skip
def test_a_place_is_found(text: str, catches: set[str], asks: set[str]) -> None:
    assert places(parse("a.py", text)) == (catches, asks)
