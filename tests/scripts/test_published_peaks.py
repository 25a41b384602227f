"""Predictions against peaks that others measured, of networks that need no package: an excerpt of the bench's table.

Source: GPUMemNet, Datasets/MLP (mlp_data_step1.csv, mlp_data_step2.csv) and its generated CNNs, on an A100, as
`nvidia-smi` shows it.
"""

from pathlib import Path

import pytest

from bench.prediction_measured import NO_WHOLE_STEP, Judged, Recorder, judge, measure, read_rows
from bench.published_peaks import NoDefinitionError, allow_foreign_torchvision, program_of
from bench.published_programs import reserved_by
from can_train.memory.catalogue import find_card
from can_train.memory.cuda_library import NoCudaDispatchError, compiled_library

MEASURED_MIB = {
    "input:2302_output:146_depth:2_arch:uniform_batch:897": 1733,
    "input:56_output:9_depth:6_arch:pyramid_batch:253": 1451,
    "input:2213_output:365_depth:1_arch:pyramid_batch:90": 1513,
    "input:331_output:51_depth:1_arch:pyramid_batch:134_act:gelu_dropout:0.34_dropout:False_batchnorm:True": 1453,
    "input:336_output:22_depth:9_arch:bottleneck_batch:198_act:swish_dropout:0.15_dropout:True_batchnorm:False": 1453,
    "input:965_output:193_depth:4_arch:uniform_batch:76_act:softplus_dropout:0.29_dropout:False_batchnorm:True": 1537,
    "input:1341_output:210_depth:10_arch:pyramid_batch:915_act:gelu_dropout:0.38_dropout:False_batchnorm:False": 1519,
}

IMAGES_MIB = {
    "input_channels:3_num_classes:183_depth:2_arch:uniform_base_filters:101_batch:46_input_size:88_act:leaky_relu"
    "_dropout:0.48_dropout:False_batchnorm:False": 2987,
    "input_channels:1_num_classes:721_depth:2_arch:pyramid_base_filters:78_batch:48_input_size:168_act:swish"
    "_dropout:0.18_dropout:False_batchnorm:False": 11811,
    "input_channels:1_num_classes:311_depth:2_arch:gradual_base_filters:81_batch:54_input_size:138_act:swish"
    "_dropout:0.27_dropout:False_batchnorm:True": 7061,
    "input_channels:1_num_classes:452_depth:3_arch:hourglass_base_filters:32_batch:38_input_size:198_act:selu"
    "_dropout:0.24_dropout:True_batchnorm:False": 10731,
    "input_channels:3_num_classes:424_depth:3_arch:uniform_base_filters:44_batch:52_input_size:166_act:gelu"
    "_dropout:0.15_dropout:False_batchnorm:True": 5211,
}
"""About a fifth of each is workspaces of cuDNN."""


def row(model: str) -> dict[str, str]:
    family = "cnn-generated" if "input_channels" in model else "mlp"
    return {"family": family, "model": model, "batch": model.partition("batch:")[2].partition("_")[0]}


@pytest.mark.parametrize(("model", "measured_mib"), [*MEASURED_MIB.items(), *IMAGES_MIB.items()])
def test_a_network_takes_what_others_have_measured(
    model: str, measured_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    published = {"gpu": "A100-40GB", "measured_mib": str(measured_mib), "measured_kind": "nvidia-smi", "notes": ""}
    judged = judge([row(model) | published], Recorder(), before=False)
    assert judged.predicted == [pytest.approx(measured_mib, abs=8, rel=0.002)]
    ((least_mib, most_mib),) = judged.ends
    assert least_mib <= measured_mib <= most_mib


def test_a_measurement_below_the_estimate_published_with_it_is_left_out() -> None:
    measured = {"family": "timm", "model": "sam2", "batch": "8", "measured_mib": "5623", "gpu": "A100-40GB"}
    judged = judge([{**measured, "notes": "FakeTensor estimate 14996"}], Recorder(), before=False)
    assert judged.left_out == {"sam2 at 8": NO_WHOLE_STEP}


def test_a_network_whose_last_layer_was_drawn_by_lot_has_no_definition() -> None:
    with pytest.raises(NoDefinitionError, match="by lot"):
        program_of(row("input:56_output:1_depth:6_arch:pyramid_batch:253"))


@pytest.mark.parametrize(
    ("family", "model", "num_weights", "num_trained"),
    [
        # As its authors print it.
        ("xlnet", "XLNetForSequenceClassification base", 117_310_466, 117_310_466),
        # Two products of rank 8 beside the queries and the values of 40 layers of width 5120.
        ("llm-lora", "Llama-2-13B LoRA r8", 13_015_864_320 + 6_553_600, 6_553_600),
    ],
)
def test_a_network_has_as_many_weights_as_its_name_says(
    family: str, model: str, num_weights: int, num_trained: int
) -> None:
    allow_foreign_torchvision()
    pytest.importorskip("transformers")
    published = {"family": family, "model": model, "batch": "1", "image_or_seq": "512"}
    parameters = list(program_of(published).model.parameters())
    assert sum(each.numel() for each in parameters) == num_weights
    assert sum(each.numel() for each in parameters if each.requires_grad) == num_trained


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("MnasNet", "MNASNet"), ("MobeNetV3Small", "MobileNetV3"), ("RegNetX400MF", "RegNet"), ("VGG19", "VGG"),
        ("efficientNet", "EfficientNet"), ("inception", "Inception3"), ("Xception", "Xception"),
    ],
)  # fmt: skip
def test_networks_are_found_by_the_names_of_tables(name: str, class_name: str) -> None:
    allow_foreign_torchvision()
    pytest.importorskip("timm" if name == "Xception" else "torchvision")
    row_of = {"family": "cnn", "model": name, "batch": "32", "image_or_seq": "224", "optimizer": "Adam"}
    assert type(program_of(row_of).model).__name__ == class_name


def test_rows_of_other_families_come_last_and_are_left_out_with_the_reason(tmp_path: Path) -> None:
    table = tmp_path / "measured.csv"
    table.write_text(
        "source,model,family,batch,gpu,measured_mib,measured_kind,notes\n"
        "a,UNet,diffusion,1,A100-40GB,36354,reserved,\n"
        f"b,{next(iter(MEASURED_MIB))},mlp,897,A100-40GB,1733,nvidia-smi,\n"
    )
    assert [one["family"] for one in read_rows(table, ["cnn", "mlp"], more=False)] == ["mlp"]
    rows = read_rows(table, ["cnn", "mlp"], more=True)
    assert [one["family"] for one in rows] == ["mlp", "diffusion"]
    assert "a A100-40GB, diffusion: no network of this family is defined here: 1 (UNet at 1)" in measure(
        rows[1:], 10, [], Recorder()
    )


def test_the_table_says_how_many_measurements_lie_in_the_stated_interval() -> None:
    judged = Judged(
        rows=5,
        models=["BERT"] * 4,
        measured=[16_000.0] * 4,
        predicted=[16_000.0, 16_160.0, 15_000.0, 16_000.0],
        ends=[(15_000, 17_000), (16_100, 17_000), (14_000, 15_500), (15_000, 17_000)],
        fake=[0.0] * 4,
    )
    (cells,) = judged.table_rows("bert")
    assert cells[:2] == ["bert", "4 of 5"]
    assert cells[2] == "0.5% (80 MiB)"
    assert cells[4:6] == ["25%", "50.0%; 25.0%, 25.0%"]


def test_a_saved_recording_is_read_again_and_a_row_without_one_is_left_out(tmp_path: Path) -> None:
    lot, card = row("input:56_output:1_depth:6_arch:pyramid_batch:253"), find_card("a100-40gb")
    with pytest.raises(NoDefinitionError, match="not recorded"):
        Recorder(folder=tmp_path, only_saved=True).record(lot, card)
    with pytest.raises(NoDefinitionError, match="by lot"):
        Recorder(folder=tmp_path).record(lot, card)
    with pytest.raises(NoDefinitionError, match="by lot"):
        Recorder(folder=tmp_path, only_saved=True).record(lot, card)


@pytest.mark.parametrize(
    ("program", "precision", "measured_mib"),
    [("gpt2 b8 bf16", "bf16", 14118), ("gpt2 b8 bf16 flash", "bf16", 6042), ("gpt2 b8 fp32", "fp32", 26872)],
)
def test_a_published_program_reserves_what_its_author_saw(program: str, precision: str, measured_mib: int) -> None:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")
    reserved = reserved_by(
        {"program": program, "precision": precision, "batch": "8", "gpu": "a100-40gb", "mib": str(measured_mib)}
    )
    assert reserved.error == pytest.approx(0, abs=0.005)
    assert reserved.is_inside
