"""The index of real trees of images, and the data set on it."""

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_trees import encoded, write_odd_tree, write_tree
from PIL import Image
from support import ROOT
from torch.utils.data import DataLoader

import image_folder
from amp_track import BadInput
from image_folder import (
    INDEX_FILE,
    ImageIndex,
    LabelledImage,
    LabelledImages,
    default_num_workers,
    open_index,
    stratified_split,
)
from resnet50 import evaluation_transform


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "images", {"001.ak47": 3, "002.american-flag": 2})


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    return write_odd_tree(tmp_path / "images")


def damage(file: Path) -> None:
    """In place, so that its folder does not change."""
    with file.open("r+b") as content:
        content.truncate(40)


def paths_of(index: ImageIndex) -> list[str]:
    return [image.path for image in index.images]


def test_labels_are_in_the_order_of_folders_with_names_and_numbers(odd: Path) -> None:
    index = open_index(odd, leave_out=["257.clutter"])
    assert [(item.number, item.name) for item in index.classes] == [
        (1, "ak47"), (2, "american-flag"), (3, "backpack"), (4, "baseball-bat"),
    ]  # fmt: skip
    assert Counter(image.label for image in index.images) == {0: 4, 1: 1, 3: 6}
    assert paths_of(index)[:4] == [
        f"001.ak47/{file}" for file in ("001_0001.jpg", "cmyk.JPG", "grey.jpg", "palette.jpg")
    ]


def test_any_sub_folder_is_a_class(tmp_path: Path) -> None:
    index = open_index(write_tree(tmp_path / "pets", {"dogs": 1, "cats": 1}))
    assert [(item.number, item.name) for item in index.classes] == [(None, "cats"), (None, "dogs")]


def test_bad_images_are_known_by_path_and_reason(odd: Path) -> None:
    bad = {image.path: image.reason for image in open_index(odd, leave_out=["257.clutter"]).bad_images}
    assert list(bad) == [
        "002.american-flag/text.jpg", "002.american-flag/truncated.jpg", "002.american-flag/zero.jpg", "003.backpack",
    ]  # fmt: skip
    assert bad["002.american-flag/text.jpg"] == "not an image"
    assert "truncated" in bad["002.american-flag/truncated.jpg"]
    assert bad["002.american-flag/zero.jpg"] == "an empty file"
    assert bad["003.backpack"] == "a class without images"


def test_bad_images_are_rejected_by_count_and_path(odd: Path) -> None:
    with pytest.raises(BadInput, match=r"4 bad images \(002.american-flag/text.jpg: not an image; .* 1 more;") as bad:
        open_index(odd).reject_bad_images()
    assert "--set bad_images=skip" in str(bad.value)
    assert "\n" not in str(bad.value)


def test_bad_images_that_are_left_out_are_reported(odd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_index(odd).report_bad_images()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{odd}: skipped 4 bad images (002.american-flag/text.jpg: not an image; ")


def test_a_good_tree_has_nothing_to_report(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = open_index(tree)
    index.reject_bad_images()
    index.report_bad_images()
    assert capsys.readouterr().err == ""


def test_the_second_opening_decodes_nothing(tree: Path) -> None:
    first = open_index(tree)
    written = (tree / INDEX_FILE).stat()
    damage(tree / "001.ak47/001_0001.jpg")
    assert open_index(tree) == first
    assert (tree / INDEX_FILE).stat().st_mtime_ns == written.st_mtime_ns
    assert (tree / INDEX_FILE).stat().st_ino == written.st_ino


def test_files_that_come_and_go_renew_their_class_alone(tree: Path) -> None:
    open_index(tree)
    damage(tree / "002.american-flag/002_0001.jpg")  # not looked at again: only its own folder is renewed
    (tree / "001.ak47/001_0000.jpg").write_bytes(encoded())
    (tree / "001.ak47/001_0002.jpg").unlink()
    index = open_index(tree)
    files = ["001_0000.jpg", "001_0001.jpg", "001_0003.jpg"]
    assert paths_of(index)[:3] == [f"001.ak47/{file}" for file in files]
    assert len(index.images) == 5
    assert open_index(tree) == index


def test_new_and_removed_classes_move_the_labels(tree: Path) -> None:
    open_index(tree)
    write_tree(tree, {"000.abacus": 1})
    for file in (tree / "001.ak47").iterdir():
        file.unlink()
    (tree / "001.ak47").rmdir()
    index = open_index(tree)
    assert [item.name for item in index.classes] == ["abacus", "american-flag"]
    assert Counter(image.label for image in index.images) == {0: 1, 1: 2}


def test_a_bad_image_mended_in_place_is_good(odd: Path) -> None:
    open_index(odd)
    file = odd / "002.american-flag" / "truncated.jpg"
    with file.open("wb") as content:
        content.write(encoded())
    index = open_index(odd)
    assert "002.american-flag/truncated.jpg" in paths_of(index)
    assert len(index.bad_images) == 3
    assert open_index(odd) == index


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1, "classes": [{}]}', '{"version": 0, "classes": []}'])
def test_an_index_that_is_damaged_or_of_another_version_is_made_anew(tree: Path, content: str) -> None:
    index = open_index(tree)
    (tree / INDEX_FILE).write_text(content)
    assert open_index(tree) == index
    assert json.loads((tree / INDEX_FILE).read_text())["version"] == 1


def test_an_index_that_cannot_be_beside_the_images_is_in_the_users_cache(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tree / INDEX_FILE).mkdir()  # nor can root write there
    index = open_index(tree)
    (kept,) = (tmp_path / "cache" / "amp_track").iterdir()
    damage(tree / "001.ak47/001_0001.jpg")
    assert open_index(tree) == index
    kept.unlink()
    kept.mkdir()
    assert open_index(tree).bad_images[0].path == "001.ak47/001_0001.jpg"
    assert "cannot be stored" in capsys.readouterr().err


@pytest.mark.nightly
def test_processes_that_index_at_once_agree(tree: Path) -> None:
    program = "import sys, pathlib, image_folder; print(len(image_folder.open_index(pathlib.Path(sys.argv[1])).images))"
    command = [sys.executable, "-c", program, str(tree)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "experiments"), os.environ["PYTHONPATH"]])}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].split() for process in processes] == [[b"5"]] * 3
    assert sorted(path.name for path in tree.iterdir()) == ["001.ak47", "002.american-flag", INDEX_FILE]
    assert len(open_index(tree).images) == 5


def test_a_folder_that_is_missing_or_has_no_classes_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere: No such file or directory"):
        open_index(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="contains no class folders"):
        open_index(tmp_path)


def test_warnings_of_pil_stop_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 - 1)  # each is now a DecompressionBombWarning, an error here
    index = open_index(tree)
    assert len(index.images) == 5
    image, _ = LabelledImages(tree, index.images, lambda image: image)[0]
    assert image.size == (40, 30)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # and now an error to PIL too
    (tree / INDEX_FILE).unlink()
    assert all("decompression bomb" in image.reason for image in open_index(tree).bad_images)


def test_every_kind_of_image_is_loaded_in_rgb(odd: Path) -> None:
    index = open_index(odd)
    for image, label in LabelledImages(odd, index.images, lambda image: image):  # type: ignore[attr-defined]
        assert (image.mode, image.size) == ("RGB", (40, 30))
        assert label in (0, 1, 3, 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_loaded_beside_the_training(odd: Path, workers: int) -> None:
    index = open_index(odd, leave_out=["257.clutter"])
    data = LabelledImages(odd, index.images, evaluation_transform(32))
    context = "fork" if workers else None
    batches = list(DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=context))
    assert [tuple(images.shape) for images, _ in batches] == [(4, 3, 32, 32)] * 2 + [(3, 3, 32, 32)]
    assert torch.cat([labels for _, labels in batches]).tolist() == [0] * 4 + [1] + [3] * 6


@pytest.mark.parametrize(("breaks", "workers"), [(Path.unlink, 0), (damage, 0), (damage, 1)])
def test_an_image_that_breaks_later_is_named(tree: Path, breaks, workers: int) -> None:
    data = LabelledImages(tree, open_index(tree).images, evaluation_transform(32))
    breaks(tree / "001.ak47/001_0002.jpg")
    loader = DataLoader(data, num_workers=workers, multiprocessing_context="fork" if workers else None)
    with pytest.raises(OSError, match=r"001.ak47/001_0002.jpg: the image cannot be read any more"):
        list(loader)


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 1), (8, 7), (64, 8)])
def test_workers_leave_a_core_to_the_training(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert default_num_workers() == workers


def fake(sizes: list[int]) -> list[LabelledImage]:
    return [LabelledImage(f"{label}/{number}.jpg", label) for label, size in enumerate(sizes) for number in range(size)]


@pytest.mark.nightly
def test_the_split_of_caltech256_is_the_write_ups() -> None:
    images = fake([80] * 100 + [116] * 99 + [180] * 56 + [216])
    assert (len(images), images[-1].label + 1) == (29_780, 256)
    training, evaluation = stratified_split(images, seed=0)
    assert (len(training), len(evaluation)) == (26_802, 2_978)
    assert Counter(image.label for image in evaluation)[0] == 8
    assert stratified_split(images, seed=0) == (training, evaluation)
    assert stratified_split(images, seed=1) != (training, evaluation)


@pytest.mark.nightly
@given(sizes=st.lists(st.integers(0, 21), max_size=6), seed=st.integers(0, 9))
def test_every_split_has_each_image_once_and_trains_on_every_class(sizes: list[int], seed: int) -> None:
    images = fake(sizes)
    training, evaluation = stratified_split(images, seed=seed)
    assert Counter(training + evaluation) == Counter(images)
    assert {image.label for image in training} == {image.label for image in images}
    several = sum(size for size in sizes if size > 1)
    assert len(evaluation) == max(-(-several // 10), sum(size > 1 for size in sizes))


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "too many files"), OSError(errno.EIO, "I/O")])
@pytest.mark.nightly
def test_what_fails_of_the_machine_is_not_put_down_to_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    root = write_tree(tmp_path / "images", {"001.ak47": 2})
    whole = image_folder.read_image

    def fails(path: Path) -> None:
        raise error

    monkeypatch.setattr(image_folder, "read_image", fails)
    with pytest.raises(type(error)):
        open_index(root)
    assert not (root / INDEX_FILE).exists()
    monkeypatch.setattr(image_folder, "read_image", whole)
    index = open_index(root)
    assert index.bad_images == []
    monkeypatch.setattr(image_folder, "read_image", fails)
    with pytest.raises(type(error)) as raised:
        LabelledImages(root, index.images, lambda image: image)[0]
    assert raised.value is error
