"""The recipes of images in scripts/container/."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "scripts" / "container"


def dockerfile() -> list[list[str]]:
    lines = (CONTAINER / "Dockerfile").read_text().splitlines()
    return [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]


def definition() -> dict[str, list[str]]:
    """The lines of each section of Apptainer's definition; the header has no name."""
    header, *sections = re.split(r"^%", (CONTAINER / "can-train.def").read_text(), flags=re.MULTILINE)
    texts = {"": header, **{section.partition("\n")[0]: section.partition("\n")[2] for section in sections}}
    return {name: [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
            for name, text in texts.items()}  # fmt: skip


def test_the_recipes_of_images_copy_files_that_exist_and_install_the_same() -> None:
    instructions, sections = dockerfile(), definition()
    assert {name for name, _ in instructions} <= {"FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"}
    assert set(sections) == {"", "files", "post", "runscript"}
    (image,) = [text for name, text in instructions if name == "FROM"]
    assert re.fullmatch(r"[\w/.-]+:[\d.]+[\w.-]*", image)
    assert sections[""] == ["Bootstrap: docker", f"From: {image}"]
    copied = [source for name, text in instructions if name == "COPY" for source in text.split()[:-1]]
    placed = [line.split() for line in sections["files"]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert [(source, f"/opt/can-train/{source}") for source in copied] == [tuple(pair) for pair in placed]
    assert [text for name, text in instructions if name == "RUN"] == sections["post"][1:]
