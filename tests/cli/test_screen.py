"""The whole screen of a training: in terminals of 50, 80 and 120 columns, and in a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from guards.sources import PACKAGE

pytestmark = pytest.mark.slow

TASK = """
import torch
import can_train
from torch import nn


class Digits(can_train.Task):
    training = {"lr": 0.01}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(400, 16, generator=generator)
        samples = [(image, int(image[:4].argmax())) for image in images]
        return {"train": samples[:320], "validation": samples[320:]}

    def model(self):
        return nn.Linear(16, 4)

    def loss(self, model, batch):
        images, labels = batch
        return {"error": (nn.functional.cross_entropy(model(images), labels, reduction="sum"), len(labels))}

    def metrics(self, model, batch):
        images, labels = batch
        return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}
"""

LINE = (sys.executable, "-P", "-m", "can_train", "--task", "digits.py:Digits", "--device", "sim:64MiB", "--epochs", "2")

VARYING = (
    # As long as before, since lines are broken by their length.
    (r"\d{8}-\d{6}-digits-[0-9a-f]{4}", "20260102-030405-digits-0000"),
    (r"\b\d{4}-\d{6}-[0-9a-f]{4}", "0102-030405-0000"),
    (r"(?<=\d{4})  [ \d,.]{9}(?=  [ \d.]+ KiB)", "          N"),
    (r"\d+ trials?", "N trials"),
    (r"\d:\d\d\b", "T:TT"),
    (r"\b\d+\.\d s\b", "T s"),
    (r"[\d,.]+/s\b", "N/s"),
    # A figure that is shorter leaves room for a bar, and a slow machine prints more lines of a stage.
    (r"  ━{4,9}(?!━)", ""),
    (r"(?m)^(training|judging|finding what fits in memory): (?!.*T s).*\n", ""),
)
"""What differs from run to run: ids, times, and how many trials a search had."""


def recorded(name: str) -> str:
    return (PACKAGE.parents[1] / "tests" / "fixtures" / "screens" / f"{name}.txt").read_text(encoding="utf-8")


def same_everywhere(text: str) -> str:
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text.strip("\n") + "\n"


def drawn(text: str) -> str:
    """Returns the lines that stay on a terminal: a bar that is drawn again replaces itself."""
    last = [re.split(r"\r|\x1b\[2K|\x1b\[1A", line)[-1] for line in text.replace("\r\n", "\n").split("\n")]
    return "\n".join(re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line).rstrip() for line in last)


def broken(text: str, columns: int) -> str:
    """Breaks the lines that are longer than a terminal is wide, as it does."""
    return "".join(line + "\n" for long in text.splitlines() for line in re.findall(f".{{1,{columns}}}", long) or [""])


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "digits.py").write_text(TASK)
    names = {"CAN_TRAIN_HOME": str(tmp_path / "state"), "PYTHONPATH": str(PACKAGE.parent), "TERM": "xterm"}
    left_out = ("COLUMNS", "LINES", "NO_COLOR", "CAN_TRAIN_COMMAND")
    return {name: value for name, value in os.environ.items() if name not in left_out} | names


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_a_terminal_shows_what_was_recorded(columns: int, tmp_path: Path, environment: dict[str, str]) -> None:
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with subprocess.Popen(LINE, cwd=tmp_path, env=environment, stdin=writer, stdout=writer, stderr=writer) as process:
        os.close(writer)
        text = b""
        # The last writer has closed it.
        with suppress(OSError):
            while part := os.read(reader, 2**16):
                text += part
        os.close(reader)
    assert process.returncode == 0, text.decode()
    assert broken(same_everywhere(drawn(text.decode())), columns) == recorded(f"{columns}-columns")


def test_a_pipe_gets_what_was_recorded(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(LINE, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=True)  # fmt: skip
    assert same_everywhere(done.stdout) == recorded("pipe")
