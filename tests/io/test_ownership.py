"""Who may change a file, from its owner and its mode alone."""

import os
import stat
from pathlib import Path

import pytest

from can_train.io.ownership import Account, is_private_group, other_writer, places_on_the_way

OWN, OTHER, PRIVATE, SHARED = 4001, 4002, 5001, 5002
ACCOUNT = Account(uid=OWN, private_gid=PRIVATE)
FILE, FOLDER, LINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK


def status(mode: int, uid: int = OWN, gid: int = SHARED) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("found", "who"),
    [(status(FILE | 0o644), ""), (status(FOLDER | 0o755), ""), (status(FILE | 0o600), ""),
     (status(FILE | 0o644, uid=0), ""), (status(FILE | 0o444, uid=OTHER), "it belongs to user 4002"),
     (status(FILE | 0o646), "every user may write to it"), (status(FILE | 0o646, uid=0), "every user may write to it"),
     (status(FOLDER | 0o1777, uid=0, gid=0), "every user may write to it"),
     (status(FILE | 0o664), "the group 5002 may write to it"), (status(FILE | 0o664, gid=PRIVATE), ""),
     (status(FILE | 0o664, gid=0), ""), (status(LINK | 0o777), ""),
     (status(LINK | 0o777, uid=OTHER), "it belongs to user 4002")],
)  # fmt: skip
def test_the_user_and_root_are_the_only_ones_who_may_write(found: os.stat_result, who: str) -> None:
    assert other_writer(found, ACCOUNT) == who


@pytest.mark.parametrize(
    ("mode", "who"), [(0o1777, ""), (0o1775, ""), (0o777, "every user may write to it"),
                      (0o775, "the group 5002 may write to it")]
)  # fmt: skip
def test_a_sticky_folder_is_safe_to_pass(mode: int, who: str) -> None:
    assert other_writer(status(FOLDER | mode, uid=0), ACCOUNT, is_passed=True) == who


def test_a_group_is_private_where_it_is_the_users_and_may_write() -> None:
    assert is_private_group(status(FILE | 0o664, gid=PRIVATE), ACCOUNT)
    assert not is_private_group(status(FILE | 0o644, gid=PRIVATE), ACCOUNT)
    assert not is_private_group(status(FILE | 0o664, gid=SHARED), ACCOUNT)


def test_the_way_to_a_place_has_the_links_and_where_they_lead(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner" / "end").mkdir(parents=True)
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(tmp_path / "real")
    way = {*places_on_the_way(tmp_path / "first" / "inner" / "end")} - {tmp_path, *tmp_path.parents}
    assert {str(place.relative_to(tmp_path)) for place in way} == {
        "first", "second", "real", "real/inner", "first/inner", "first/inner/end",
    }  # fmt: skip


def test_links_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert tmp_path in {*places_on_the_way(tmp_path / "a" / "x")}
