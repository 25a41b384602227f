"""Other users who may change a file or a folder: its owner, its group, everybody."""

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Account:
    """A user.

    Attributes:
        uid: Number of the user.
        private_gid: Number of the group that has no other member; None: there is none.
    """

    uid: int
    private_gid: int | None = None

    @classmethod
    def current(cls) -> "Account":
        """Returns the user of this process."""
        uid = os.geteuid()
        with suppress(KeyError):
            user = pwd.getpwuid(uid)
            group = grp.getgrgid(user.pw_gid)
            if group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}:
                return cls(uid=uid, private_gid=group.gr_gid)
        return cls(uid=uid)


def other_writer(status: os.stat_result, account: Account, *, is_passed: bool = False) -> str:
    """Returns a sentence about another user who may change a file or a folder: `it belongs to eve`; empty: nobody.

    Args:
        status: Status of the file, the folder or the link itself.
        account: The user.
        is_passed: Whether the folder is only on the way to a file. Then a sticky bit is enough: it lets nobody
            replace the files of another user (/tmp).
    """
    mode = status.st_mode
    if status.st_uid not in (0, account.uid):
        owner = f"user {status.st_uid}"
        with suppress(KeyError):
            owner = pwd.getpwuid(status.st_uid).pw_name
        return f"it belongs to {owner}"
    # The mode of a link means nothing.
    if stat.S_ISLNK(mode) or (is_passed and mode & stat.S_ISVTX):
        return ""
    if mode & stat.S_IWOTH:
        return "every user may write to it"
    # The members of group 0 are administrators.
    if mode & stat.S_IWGRP and status.st_gid not in (0, account.private_gid):
        group = str(status.st_gid)
        with suppress(KeyError):
            group = grp.getgrgid(status.st_gid).gr_name
        return f"the group {group} may write to it"
    return ""


def is_private_group(status: os.stat_result, account: Account) -> bool:
    """Returns whether the mode of a file lets a group write that has no member but the user."""
    return bool(status.st_mode & stat.S_IWGRP) and status.st_gid == account.private_gid


def places_on_the_way(path: Path) -> Iterator[Path]:
    """Lists the folders and the links that lead to a path, where links lead included, but for the path's own end."""
    end, seen = Path(os.path.realpath(path)), set[Path]()
    waiting = [Path(os.path.abspath(path)), end]  # noqa: PTH100 - `absolute` keeps `..`
    while waiting:
        place = waiting.pop()
        for folder in (place, *place.parents):
            if folder in seen:
                continue
            seen.add(folder)
            if folder.is_symlink():
                waiting.append(Path(os.path.abspath(folder.parent / folder.readlink())))  # noqa: PTH100
            if folder != end:
                yield folder
