"""Predictions against peaks that others measured, of networks that need no package: an excerpt of the bench's table.

Source: GPUMemNet, Datasets/MLP (mlp_data_step1.csv, mlp_data_step2.csv), on an A100, as `nvidia-smi` shows it.
"""

from pathlib import Path

import pytest

from bench.prediction_measured import MORE_CONTEXT, Recorder, kernels_of, reserved_mib
from bench.published_peaks import NoDefinitionError, program_of
from can_train.memory.catalogue import find_card
from can_train.memory.cuda_dispatch import NoCudaDispatchError, compiled_library

CONTEXT_MIB = 1429
"""What the driver shows of that card beyond PyTorch's allocator: fitted on half of the table."""

MEASURED_MIB = {
    "input:2302_output:146_depth:2_arch:uniform_batch:897": 1733,
    "input:56_output:9_depth:6_arch:pyramid_batch:253": 1451,
    "input:2213_output:365_depth:1_arch:pyramid_batch:90": 1513,
    "input:331_output:51_depth:1_arch:pyramid_batch:134_act:gelu_dropout:0.34_dropout:False_batchnorm:True": 1453,
    "input:336_output:22_depth:9_arch:bottleneck_batch:198_act:swish_dropout:0.15_dropout:True_batchnorm:False": 1453,
    "input:965_output:193_depth:4_arch:uniform_batch:76_act:softplus_dropout:0.29_dropout:False_batchnorm:True": 1537,
    "input:1341_output:210_depth:10_arch:pyramid_batch:915_act:gelu_dropout:0.38_dropout:False_batchnorm:False": 1519,
}


def row(model: str) -> dict[str, str]:
    return {"family": "mlp", "model": model, "batch": model.partition("batch:")[2].partition("_")[0]}


@pytest.mark.parametrize(("model", "measured_mib"), MEASURED_MIB.items())
def test_a_network_takes_what_others_have_measured(
    model: str, measured_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    predicted_mib = reserved_mib(program_of(row(model)), find_card("a100-40gb")) + CONTEXT_MIB
    assert predicted_mib == pytest.approx(measured_mib, abs=8)


def test_a_network_whose_last_layer_was_drawn_by_lot_has_no_definition() -> None:
    with pytest.raises(NoDefinitionError, match="by lot"):
        program_of(row("input:56_output:1_depth:6_arch:pyramid_batch:253"))


def test_a_saved_recording_is_read_again_and_a_row_without_one_is_left_out(tmp_path: Path) -> None:
    lot, card = row("input:56_output:1_depth:6_arch:pyramid_batch:253"), find_card("a100-40gb")
    with pytest.raises(NoDefinitionError, match="not recorded"):
        Recorder(folder=tmp_path, only_saved=True).trace(lot, card)
    with pytest.raises(NoDefinitionError, match="by lot"):
        Recorder(folder=tmp_path).trace(lot, card)
    with pytest.raises(NoDefinitionError, match="by lot"):
        Recorder(folder=tmp_path, only_saved=True).trace(lot, card)


@pytest.mark.parametrize(
    ("family", "model", "more_mib"),
    [
        ("mlp", "input:56_output:9_depth:6_arch:pyramid_batch:253_batchnorm:True", 0),
        ("cnn-generated", "depth:6_arch:pyramid_batch:253_batchnorm:False", 250),
        ("cnn-generated", "depth:6_arch:pyramid_batch:253_batchnorm:True", 292),
        ("torchvision", "VGG16", 250),
        ("timm", "vgg16", 292),
    ],
)
def test_a_row_tells_what_cudnn_adds_to_its_context(family: str, model: str, more_mib: int) -> None:
    assert MORE_CONTEXT[kernels_of({"family": family, "model": model})] == more_mib
