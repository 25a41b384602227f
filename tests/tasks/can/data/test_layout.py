import shutil
from pathlib import Path

import pytest

from can_train.errors import ConfigError, MissingDataError
from can_train_tasks.can.data.layout import LogFile, attack_kind, find_logs, unread_notes
from can_train_tasks.can.settings import CanDatasetSettings

NEWER = (
    "train_01_attack_free/attack-free-1.csv",
    "train_02_with_attacks/DoS-1.csv",
    "test_01_known_vehicle_known_attack/DoS-2.csv",
    "test_06_masquerade/speed-masquerade-1.csv",
)
OLDER = ("train_01/attack-free-1.csv", "train_01/DoS-1.csv", "test_01_known_vehicle_known_attack/DoS-2.csv")

FIXTURES = Path(__file__).parents[3] / "fixtures" / "can"


def lay_out(folder: Path, files: tuple[str, ...]) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


def by_name(name: str, root: Path) -> list[LogFile]:
    return find_logs(CanDatasetSettings(name=name), root)


def by_path(path: Path) -> list[LogFile]:
    return find_logs(CanDatasetSettings(path=str(path)), Path("nowhere"))


@pytest.mark.parametrize(
    "on_disk", ["hcrl-ch", "hcrl_ch", "can-train-and-test-v1.5/hcrl-ch", "can-train-and-test/hcrl_ch"]
)
def test_a_named_set_is_found_with_either_spelling_and_in_either_repository(tmp_path: Path, on_disk: str) -> None:
    folder = lay_out(tmp_path / on_disk, NEWER)
    assert [log.path for log in by_name("hcrl_ch", tmp_path)] == [folder / file for file in NEWER]


def test_roles_and_groups_come_from_the_folders_and_kinds_from_the_files(tmp_path: Path) -> None:
    lay_out(tmp_path / "set_01", NEWER)
    assert [(log.role, log.group, log.kind) for log in by_name("set_01", tmp_path)] == [
        ("train", "train_01_attack_free", "attack"),
        ("train", "train_02_with_attacks", "DoS"),
        ("test", "test_01_known_vehicle_known_attack", "DoS"),
        ("test", "test_06_masquerade", "speed-masquerade"),
    ]


def test_the_older_release_has_one_training_folder(tmp_path: Path) -> None:
    lay_out(tmp_path / "set_02", OLDER)
    assert [(log.role, log.kind) for log in by_name("set_02", tmp_path)] == [
        ("train", "DoS"), ("train", "attack"), ("test", "DoS"),
    ]  # fmt: skip


def test_sets_of_other_authors_are_found_by_name_without_their_tables_of_signals(tmp_path: Path) -> None:
    for name in ("X-CANIDS/raw/dump1.parquet", "X-CANIDS/signal/dump1.parquet", "CAN-MIRGU/Benign/Day_1/a.log",
                 "CAN-MIRGU/Attacks/Real_attacks/b.log"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = {name: [log.path.relative_to(tmp_path).as_posix() for log in by_name(name, tmp_path)]
             for name in ("x_canids", "can_mirgu")}  # fmt: skip
    assert found["x_canids"] == ["X-CANIDS/raw/dump1.parquet"]
    assert found["can_mirgu"] == ["CAN-MIRGU/Attacks/Real_attacks/b.log", "CAN-MIRGU/Benign/Day_1/a.log"]
    with pytest.raises(MissingDataError, match=r"no folder road or ROAD in .*\n.*zenodo"):
        by_name("road", tmp_path)


@pytest.mark.parametrize("name", ["road", "hcrl_ch"])
def test_a_folder_of_the_sets_name_in_the_current_folder_is_pointed_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(MissingDataError) as error:
        by_name(name, tmp_path / "data")
    assert error.value.remedy == f"The folder here is read with --dataset ./{name}"


def test_a_missing_set_tells_in_a_few_words_where_it_was_looked_for_and_who_publishes_it(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError) as error:
        by_name("hcrl_sa", tmp_path)
    for text in ("hcrl-sa or hcrl_sa", str(tmp_path), "can-train-and-test-v1.5 or can-train-and-test"):
        assert text in error.value.value
    for text in ("bitbucket.org", "--data-root DIR", "--dataset PATH", "--dataset synthetic"):
        assert text in error.value.remedy
    assert len(str(error.value).replace(str(tmp_path), "")) < 400


def test_an_unknown_name_lists_the_nearest_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'hcrl_hc'.\nNearest of 11: hcrl_ch"):
        by_name("hcrl_hc", tmp_path)


@pytest.mark.parametrize("missing", ["train", "test"])
def test_a_set_without_training_or_test_folders_is_refused(tmp_path: Path, missing: str) -> None:
    lay_out(tmp_path / "set_03", tuple(file for file in NEWER if not file.startswith(missing)))
    with pytest.raises(MissingDataError, match=rf"holds no folder named {missing}_.*\n.*train_01_attack_free.*test_01"):
        by_name("set_03", tmp_path)


def test_logs_that_are_all_named_by_their_roles_are_split_by_their_names(tmp_path: Path) -> None:
    for name in ("test_plateau", "train_1", "train_2", "test_normal"):
        (tmp_path / "SynCAN" / f"{name}.csv").parent.mkdir(exist_ok=True)
        (tmp_path / "SynCAN" / f"{name}.csv").touch()
    assert [(log.path.stem, log.role, log.group, log.kind) for log in by_name("syncan", tmp_path)] == [
        ("train_1", "train", "train_1", "attack"),
        ("train_2", "train", "train_2", "attack"),
        ("test_normal", "test", "test_normal", "attack"),
        ("test_plateau", "test", "test_plateau", "plateau"),
    ]
    (tmp_path / "SynCAN" / "drive.csv").touch()
    assert {log.role for log in by_name("syncan", tmp_path)} == {"log"}


def test_an_empty_split_folder_is_named(tmp_path: Path) -> None:
    (lay_out(tmp_path / "set_04", NEWER) / "test_05_suppress").mkdir()
    with pytest.raises(MissingDataError, match=r"test_05_suppress.* holds no logs"):
        by_name("set_04", tmp_path)


def test_a_file_by_path_is_one_log_whatever_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "drive.capture"
    path.touch()
    assert by_path(path) == [LogFile(path=path, role="log", group="drive.capture", kind="attack")]


def test_a_folder_by_path_with_train_and_test_folders_is_split_by_them(tmp_path: Path) -> None:
    assert [log.role for log in by_path(lay_out(tmp_path, NEWER))] == ["train", "train", "test", "test"]


def test_another_folder_gives_every_log_below_it_a_group_of_its_own(tmp_path: Path) -> None:
    lay_out(tmp_path, ("Soul/Fuzzy_dataset_KIA_Soul.txt", "Sonata/a.csv.gz", "b.LOG"))
    assert [(log.role, log.group) for log in by_path(tmp_path)] == [
        ("log", "Sonata/a.csv.gz"), ("log", "Soul/Fuzzy_dataset_KIA_Soul.txt"), ("log", "b.LOG"),
    ]  # fmt: skip


def test_tables_with_tabs_and_texts_named_dat_are_logs(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").touch()
    (tmp_path / "b.dat").write_text("1.5,0316,1,05,R\n")
    (tmp_path / "c.DAT").write_text("1.5,0316,1,05,R\n", encoding="utf-16")
    (tmp_path / "d.dat").write_bytes(bytes(range(200)))
    assert [log.group for log in by_path(tmp_path)] == ["a.tsv", "b.dat", "c.DAT"]


def test_linked_folders_are_followed_once_and_without_end(tmp_path: Path) -> None:
    lay_out(tmp_path, ("logs/a.csv", "logs/sub/b.csv", "elsewhere/c.csv", "elsewhere/deep/d.csv"))
    for link, target in (("far", "elsewhere"), ("loop", "logs"), ("sub/up", "logs"), ("again", "logs/sub")):
        (tmp_path / "logs" / link).symlink_to(tmp_path / target)
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "logs")
    groups = [log.group for log in by_path(tmp_path / "logs")]
    assert groups == ["a.csv", "far/c.csv", "far/deep/d.csv", "sub/b.csv"]


def test_files_that_are_no_logs_are_named_except_those_that_lie_beside_logs(tmp_path: Path) -> None:
    lay_out(tmp_path, ("a.csv", "README.txt", "x.pdf", "car.dbc", "capture_metadata.json", ".hidden.bak"))
    wanted = CanDatasetSettings(path=str(tmp_path))
    assert unread_notes(wanted, tmp_path) == []
    lay_out(tmp_path, tuple(f"b/{number}.log.bak" for number in range(7)))
    (note,) = unread_notes(wanted, tmp_path)
    assert note == (
        "7 files were not read as logs: b/0.log.bak, b/1.log.bak, b/2.log.bak, b/3.log.bak and 3 more; "
        "a file of any name is read where --dataset names it"
    )
    assert unread_notes(CanDatasetSettings(path=str(tmp_path / "a.csv")), tmp_path) == []


def test_files_that_are_no_logs_are_named_in_the_folders_of_a_layout(tmp_path: Path) -> None:
    lay_out(tmp_path / "set_01", (*NEWER, "train_01_attack_free/more.zip", "results.xlsx"))
    (note,) = unread_notes(CanDatasetSettings(name="set_01"), tmp_path)
    assert note.startswith("1 file was not read as logs: train_01_attack_free/more.zip; ")


def test_hidden_files_documents_and_other_suffixes_are_no_logs(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        (
            "a.csv",
            ".b.csv",
            ".cache/c.csv",
            "README.txt",
            "LICENSE.txt",
            "d.data",
            "thumbs.db",
            "e.csv.zip",
            "deep/er/f.txt",
        ),
    )
    (tmp_path / "folder.csv").mkdir()
    assert [log.group for log in by_path(tmp_path)] == ["a.csv", "deep/er/f.txt"]


def test_logs_of_every_format_and_compression_are_found(tmp_path: Path) -> None:
    names = ("a.asc", "b.TRC.gz", "c.csv.bz2", "d.log.xz", "e.txt.zst", "f.blf", "g.mf4", "h.pcap.gz", "i.pcapng")
    lay_out(tmp_path, (*names, "k.zst", "l.blf.gz", "capture_metadata.json"))
    shutil.copy(FIXTURES / "sqlite.db", tmp_path / "j.db")
    assert [log.group for log in by_path(tmp_path)] == [*names, "j.db"]


def test_logs_in_a_hidden_place_are_found_when_it_is_asked_for(tmp_path: Path) -> None:
    assert len(by_path(lay_out(tmp_path / ".data", ("a.csv",)))) == 1


def test_a_path_that_does_not_exist_is_refused_with_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"gone.*\nGive another path, or a data set: hcrl_ch, .*, synthetic"):
        by_path(tmp_path / "gone")


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"holds no logs: files named"):
        by_path(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("DoS-1.csv", "DoS"), ("force-neutral-2.csv", "force-neutral"), ("fuzzing-train.csv.gz", "fuzzing"),
        ("gear-test-1.csv", "gear"), ("attack-free-1.csv", "attack"), ("DoS_dataset.csv", "DoS"),
        ("Flooding_dataset_KIA_Soul.txt", "Flooding"), ("Malfunction1st_dataset_HY_Sonata.txt", "Malfunction"),
        ("Malfunction_2nd_dataset_HY_Sonata.txt", "Malfunction"), ("Fuzzy_attack_dataset.txt", "Fuzzy"),
        ("Attack_free_dataset.txt", "attack"), ("normal_run_data.txt", "attack"), ("capture.log", "attack"),
        ("labeled_TSC1.csv", "attack"), ("2024-01-05.log", "attack"), ("odd name", "attack"),
    ],
)  # fmt: skip
def test_the_attack_kind_is_read_from_published_file_names(name: str, kind: str) -> None:
    assert attack_kind(name) == kind
