"""The presets of pipelines, and settings for one stage."""

import pytest

from can_train.config.resolved import preset_folders, presets
from can_train.config.task_settings import load_task_settings
from can_train.errors import ConfigError
from can_train.runs.pipeline import PipelineStage, load_stages, select_stages, split_sets


@pytest.mark.parametrize("preset", presets("pipeline", preset_folders("can")))
def test_a_preset_has_stages_that_the_task_knows(preset: str) -> None:
    models = load_task_settings("can").models
    for stage in load_stages(preset, preset_folders("can")):
        spec = models[stage.model]
        assert stage.mode in spec.modes
        assert stage.size in spec.only_sizes.get(stage.mode, spec.sizes)
        assert {*stage.needs} == {one.role for one in spec.prerequisites.get(stage.mode, ())}


def test_unknown_presets_and_stages_are_said_nearest_first() -> None:
    with pytest.raises(ConfigError, match="Valid, nearest first: standard"):
        load_stages("standart", preset_folders("can"))
    with pytest.raises(ConfigError, match="Nearest of 7: curriculum"):
        select_stages(load_stages("standard", preset_folders("can")), ["curiculum"])


def test_stages_are_taken_in_the_order_of_the_pipeline() -> None:
    stages = select_stages(load_stages("standard", preset_folders("can")), ["fusion", "normal"])
    assert [stage.name for stage in stages] == ["normal", "fusion"]
    assert stages[0].title == "normal (gat teacher)"


def test_a_setting_is_for_all_stages_or_for_the_one_it_names() -> None:
    stages = [PipelineStage(name="a", model="m", sets=("x.y=1",)), PipelineStage(name="b", model="m")]
    sets = split_sets(["training.lr=0.1", "b:model.hidden=3", "x.path=c:d"], stages)
    assert sets == {
        "a": ["x.y=1", "training.lr=0.1", "x.path=c:d"],
        "b": ["training.lr=0.1", "model.hidden=3", "x.path=c:d"],
    }
    with pytest.raises(ConfigError, match="Unknown stage in --set: 'c'"):
        split_sets(["c:model.hidden=3"], stages)
