import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from can_train.io.records import (
    json_text,
    open_atomic,
    open_to_append,
    place_refusal,
    read_text,
    remove_folder,
    sketch,
    text_or_nothing,
    write_bytes_atomic,
    write_json_atomic,
    write_new_atomic,
    write_text_atomic,
)


def test_a_file_is_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_bytes_atomic(tmp_path / "a", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new"}


def test_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    write_text_atomic(tmp_path / "a", "né")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "né"


def named_in_latin_1(folder: Path) -> Path:
    path = folder / os.fsdecode(b"caf\xe9.csv")
    path.write_text("1,2")
    return path


def test_the_name_of_a_file_that_is_not_utf_8_is_written_as_an_escape(tmp_path: Path) -> None:
    name = named_in_latin_1(tmp_path).name
    write_json_atomic(tmp_path / "a.json", {"file": name})
    assert json.loads(read_text(tmp_path / "a.json")) == json.loads(json_text({"file": name})) == {"file": name}
    write_text_atomic(tmp_path / "a.html", f"<p>é {name}")
    assert read_text(tmp_path / "a.html") == "<p>é caf\\udce9.csv"


def test_a_digest_takes_names_that_are_not_utf_8_and_a_file_by_itself_may_be_renamed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = named_in_latin_1(folder)
    of_folder, of_file = sketch([folder]), sketch([path])
    renamed = path.rename(folder / "cafe.csv")
    assert sketch([folder]) != of_folder
    assert sketch([renamed]) == of_file


def test_only_a_regular_file_is_read_and_a_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "text"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to a device").symlink_to("/dev/zero")
    for name in ("pipe", "link to a device"):
        with pytest.raises(OSError, match="not a regular file"):
            read_text(tmp_path / name)
        assert text_or_nothing(tmp_path / name) == ""


def test_a_failure_while_writing_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with suppress(ZeroDivisionError), open_atomic(tmp_path / "a") as file:
        file.write(b"ne")
        raise ZeroDivisionError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old"}


def test_the_file_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    with open_atomic(tmp_path / "a") as file:
        file.write(b"data")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"data"


@pytest.mark.parametrize(("umask", "mode"), [(0o027, 0o640), (0o002, 0o644), (0o077, 0o600)])
def test_the_permissions_follow_the_umask_but_no_group_may_write(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_bytes_atomic(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_the_longest_name_is_possible(tmp_path: Path) -> None:
    write_bytes_atomic(tmp_path / ("n" * 255), b"data")
    assert (tmp_path / ("n" * 255)).read_bytes() == b"data"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        write_bytes_atomic(tmp_path / "missing" / "a", b"")


def test_a_number_that_json_does_not_know_is_refused_before_anything_changes(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "a", {"x": 1.5})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json_atomic(tmp_path / "a", {"x": float("nan")})
    assert json.loads((tmp_path / "a").read_text()) == {"x": 1.5}
    assert len(list(tmp_path.iterdir())) == 1


def no_hard_links(file: Path, name: Path) -> None:
    raise OSError(errno.EOPNOTSUPP, "no hard links here")


def link_whose_answer_is_lost(file: Path, name: Path) -> None:
    os.link(file, name)
    raise FileExistsError(errno.EEXIST, "the repeated request finds it there")


@pytest.mark.parametrize("link", [os.link, no_hard_links, link_whose_answer_is_lost])
def test_a_new_file_never_takes_a_name_that_is_taken(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    path = tmp_path / "file.json"
    write_new_atomic(path, b"first", link=link)
    with pytest.raises(FileExistsError):
        write_new_atomic(path, b"second", link=link)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("file.json", b"first")]


def test_without_hard_links_a_name_that_another_is_giving_away_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".file.json.claim").touch()
    with pytest.raises(FileExistsError):
        write_new_atomic(tmp_path / "file.json", b"second", link=no_hard_links)
    assert [entry.name for entry in tmp_path.iterdir()] == [".file.json.claim"]


def test_a_file_is_appended_to_and_read(tmp_path: Path) -> None:
    for text in ("é", "b"):
        with open_to_append(tmp_path / "a", reads=True) as file:
            file.write(text)
            file.seek(0)
            assert file.read() == {"é": "é", "b": "éb"}[text]
    with open_to_append(tmp_path / "a") as file:
        file.write("c")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "ébc"


def test_a_link_or_a_pipe_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("link", "a link, which is not followed"), ("dangling", "a link, which is not followed"),
                      ("pipe", "not a regular file"), ("/dev/null", "not a regular file")):  # fmt: skip
        with pytest.raises(OSError, match=why):
            open_to_append(tmp_path / name)
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "new").exists()


def test_a_place_is_refused_before_anything_is_computed_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert place_refusal(tmp_path / "new.csv") == place_refusal(tmp_path / "file") == ""
    assert place_refusal(tmp_path / "folder", as_folder=True) == ""
    assert place_refusal(tmp_path / "folder") == f"{tmp_path / 'folder'} is a folder"
    assert place_refusal(tmp_path / "none" / "new.csv") == f"{tmp_path / 'none'} is not there"
    assert place_refusal(tmp_path / "file" / "new.csv") == f"{tmp_path / 'file'} is a file"


@contextmanager
def another_user() -> Iterator[None]:
    """Root may remove everything, and becomes a user who may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def made_run(folder: Path) -> Path:
    """A folder with two files. Its path is relative: pytest closes the folders above it to other users."""
    folder.chmod(0o777)
    (run := Path("run") / "inner").mkdir(parents=True)
    (run / "weights").touch()
    (run.parent / "config").touch()
    return run.parent


@pytest.mark.parametrize("way", ["closed", "sticky"])
def test_a_folder_that_may_be_renamed_but_not_emptied_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = made_run(tmp_path)
    if way == "sticky" and os.geteuid() != 0:
        pytest.skip("the folder must be another user's")
    (run / "inner").chmod(0o1777 if way == "sticky" else 0o555)
    if way == "sticky":
        run.chmod(0o777)
    with another_user(), pytest.raises(PermissionError):
        remove_folder(run)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config", "inner", "run", "weights"]
    (run / "inner").chmod(0o755)
    remove_folder(run)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("removed", ["", "weights"])
def test_a_folder_has_its_name_again_only_where_nothing_of_it_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = made_run(tmp_path)

    def fail(folder: Path, **options: bool) -> None:
        if removed:
            (folder / "inner" / removed).unlink()
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder))

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(OSError, match="busy"):
        remove_folder(run)
    assert run.is_dir() == (not removed)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_set_aside_where_errors_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = made_run(tmp_path)
    (run / "inner").chmod(0o555)
    with another_user():
        remove_folder(run, ignore_errors=True)
    assert not run.exists()
