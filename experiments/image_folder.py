"""Images in class folders, `NNN.name/*.jpg` as Caltech-256 has them: found and checked once, then only read.

Every sub-folder is a class, hidden ones left out. A file is taken for an image by its name's ending, as torchvision
does (.jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp): Thumbs.db, scripts and hidden files are passed over
without a word, and so is whatever lies deeper.

The index is kept as `amp_track-index.json` beside the class folders, or in the user's cache folder where nothing can be
written there. A class folder is looked at again when its modification time has changed, and a bad image when the file
has: one mended in place does not change its folder. Delete the index to have everything checked anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image, UnidentifiedImageError
from platformdirs import user_cache_path
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset
from torchvision.datasets.folder import is_image_file

from amp_track import BadInput

INDEX_FILE = "amp_track-index.json"
_VERSION = 1
"""Of the index's format: one of another version is made anew."""
_PROGRESS_SECONDS = 3.0
_NAMED_PATHS = 3
"""Bad images that a message names; the index has them all."""

_MACHINES_ERRORS = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE}

OnBadImages = Literal["refuse", "skip"]


@dataclass(frozen=True)
class LabelledImage:
    """`path` is relative to the folder of class folders, `label` counts the class folders from 0."""

    path: str
    label: int


@dataclass(frozen=True)
class BadImage:
    """A file that cannot be decoded, or a class folder without images. `path` is relative."""

    path: str
    reason: str


@dataclass(frozen=True)
class _BadFile:
    reason: str
    changed_ns: int


@dataclass(frozen=True)
class ClassFolder:
    """One class: its folder's name, and the names of the files in it."""

    folder: str
    modified_ns: int
    images: tuple[str, ...]
    bad: dict[str, _BadFile]

    @property
    def number(self) -> int | None:
        """1 of `001.ak47`; None where the folder's name has no number."""
        match = _numbered(self.folder)
        return int(match[1]) if match else None

    @property
    def name(self) -> str:
        """`ak47` of `001.ak47`."""
        match = _numbered(self.folder)
        return match[2] if match else self.folder


@dataclass(frozen=True)
class ImageIndex:
    """Every image below `root`. Labels are positions in `classes`, which are sorted by their folders' names; an empty
    class keeps its label."""

    root: Path
    classes: tuple[ClassFolder, ...]

    @property
    def file(self) -> Path:
        """Where it is kept."""
        return next((file for file in _index_files(self.root) if file.exists()), _index_files(self.root)[0])

    @property
    def images(self) -> list[LabelledImage]:
        """Those that can be decoded, in the order of labels and names."""
        return [
            LabelledImage(f"{item.folder}/{file}", label)
            for label, item in enumerate(self.classes)
            for file in item.images
        ]

    @property
    def bad_images(self) -> list[BadImage]:
        bad = []
        for item in self.classes:
            bad += [BadImage(f"{item.folder}/{file}", found.reason) for file, found in item.bad.items()]
            if not item.images and not item.bad:
                bad.append(BadImage(item.folder, "a class without images"))
        return bad

    def reject_bad_images(self) -> None:
        """Raise `BadInput` if there are any."""
        if bad := self.bad_images:
            raise BadInput(
                f"{self.root}: got {_counted(bad)} ({_listed(bad)}), expected images that can be decoded in every "
                "class folder; mend or remove them, or leave them out with --set bad_images=skip (all are named in "
                f"{self.file})"
            )

    def report_bad_images(self) -> None:
        """Say on stderr which are left out."""
        if bad := self.bad_images:
            said = f"{self.root}: left out {_counted(bad)} ({_listed(bad)}); all of them are named in {self.file}"
            print(said, file=sys.stderr, flush=True)


class LabelledImages(Dataset[tuple[Any, int]]):
    """Images of an index with their labels: items are (transform of a PIL image in RGB, label).

    Raises:
        OSError: an image that was good when the index was made cannot be decoded any more; names its path.
    """

    def __init__(self, root: Path, images: Sequence[LabelledImage], transform: Callable[[Any], Any]) -> None:
        self.root = root
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        item = self.images[index]
        path = self.root / item.path
        try:
            with _decoding_quietly():
                image = read_image(path)
        except Exception as error:
            if _is_the_machines(error):
                raise
            raise OSError(
                f"{path}: got {_reason(error, path)}, expected the image that was there when the folder was indexed; "
                "mend or remove it and start again"
            ) from error
        return self.transform(image), item.label


def open_index(root: Path, *, leave_out: Collection[str] = ()) -> ImageIndex:
    """The index of a folder of class folders: read where it is up to date, else made, with progress on stderr.

    Every image is decoded completely when it is first met, so that no training meets a bad one later.

    Args:
        leave_out: names of sub-folders that are no classes.

    Raises:
        BadInput: there is no such folder, or it has no sub-folders.
    """
    modified_ns = _modification_times(root, leave_out)
    if not modified_ns:
        raise BadInput(f"{root}: got no class folders, expected a folder with one sub-folder for each class")
    known = _stored_classes(root, modified_ns)
    unchecked = {
        folder: _files_to_check(root / folder, known[folder]) if folder in known else _image_files(root / folder)
        for folder in modified_ns
    }
    bad = _find_bad([root / folder / file for folder, files in unchecked.items() for file in files])
    classes = tuple(
        _checked_class(root / folder, modified_ns[folder], known.get(folder), unchecked[folder], bad)
        for folder in modified_ns
    )
    index = ImageIndex(root, classes)
    if any(known.get(item.folder) != item for item in classes):
        _store(index)
    return index


def stratified_split(
    images: Sequence[LabelledImage], *, seed: int, one_in: int = 10
) -> tuple[list[LabelledImage], list[LabelledImage]]:
    """Training and evaluation images, every class split alike: 29,780 of Caltech-256 become 26,802 and 2,978.

    The only image of a class goes to training. Where a tenth is fewer than there are classes, evaluation gets as many
    images as there are classes.

    Args:
        one_in: evaluation gets one image in so many, rounded up.
    """
    sizes = Counter(image.label for image in images)
    alone = [image for image in images if sizes[image.label] == 1]
    several = [image for image in images if sizes[image.label] > 1]
    if not several:
        return alone, []
    labels = [image.label for image in several]
    count = max(-(-len(several) // one_in), len(set(labels)))
    training, evaluation = train_test_split(several, test_size=count, random_state=seed, stratify=labels)
    return training + alone, evaluation


def read_image(path: Path) -> Image.Image:
    """The image, decoded completely, in RGB: grey, CMYK, palette and RGBA ones are converted."""
    with Image.open(path) as image:
        return image.convert("RGB")


def default_num_workers() -> int:
    """Processes to decode and resize images in: one for each usable core but the training's own, 8 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores - 1)


def _modification_times(root: Path, leave_out: Collection[str]) -> dict[str, int]:
    """Of every class folder, in nanoseconds, in the order of their names."""
    try:
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise BadInput(f"{root}: got {error.strerror}, expected a folder with a sub-folder for each class") from error
    return {folder: (root / folder).stat().st_mtime_ns for folder in folders if folder not in leave_out}


def _image_files(folder: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if is_image_file(entry.name) and not entry.name.startswith(".") and not entry.is_dir()
    )


def _files_to_check(folder: Path, known: ClassFolder) -> list[str]:
    """Of a folder that has not changed: bad files that have."""
    return [file for file, bad in known.bad.items() if _changed_ns(folder / file) != bad.changed_ns]


def _checked_class(
    folder: Path, modified_ns: int, known: ClassFolder | None, checked: Iterable[str], bad: dict[Path, _BadFile]
) -> ClassFolder:
    good_before, bad_before = (known.images, known.bad) if known is not None else ((), {})
    good_now = [file for file in checked if folder / file not in bad]
    bad_now = {file: bad[folder / file] for file in checked if folder / file in bad}
    still_bad = {file: found for file, found in bad_before.items() if file not in good_now}
    return ClassFolder(folder.name, modified_ns, tuple(sorted([*good_before, *good_now])), still_bad | bad_now)


def _find_bad(paths: Sequence[Path]) -> dict[Path, _BadFile]:
    """Decode every image, in threads: PIL lets others run meanwhile."""
    if not paths:
        return {}
    bad = {}
    said = time.monotonic()
    with _decoding_quietly(), ThreadPoolExecutor() as threads:
        for count, (path, found) in enumerate(zip(paths, threads.map(_check, paths), strict=True), start=1):
            if found is not None:
                bad[path] = found
            if time.monotonic() - said > _PROGRESS_SECONDS:
                said = time.monotonic()
                print(f"checked {count:,} of {len(paths):,} images", file=sys.stderr, flush=True)
    return bad


def _check(path: Path) -> _BadFile | None:
    changed_ns = _changed_ns(path)  # first: if it changes meanwhile, it is looked at again
    try:
        read_image(path)
    except Exception as error:  # PIL raises whatever its decoders come across: OSError, SyntaxError, struct.error, …
        if _is_the_machines(error):
            raise
        return _BadFile(_reason(error, path), changed_ns)
    return None


def _is_the_machines(error: Exception) -> bool:
    """Whether it says that memory, files or a disk failed, and nothing about the image."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in _MACHINES_ERRORS


def _changed_ns(path: Path) -> int:
    """When content or permissions last changed; 0 where there is no such file, as behind a broken link."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return max(status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def _decoding_quietly() -> Iterator[None]:
    """PIL warns of large images, odd palettes and damaged EXIF data, none of which keeps an image from being read.

    Not for several threads at once: filters of warnings belong to the process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reason(error: Exception, path: Path) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image" if path.stat().st_size else "an empty file"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def _counted(bad: Sequence[BadImage]) -> str:
    return f"{len(bad):,} bad image{'s' if len(bad) > 1 else ''}"


def _listed(bad: Sequence[BadImage]) -> str:
    listed = "; ".join(f"{image.path}: {image.reason}" for image in bad[:_NAMED_PATHS])
    return f"{listed}; and {len(bad) - _NAMED_PATHS:,} more" if len(bad) > _NAMED_PATHS else listed


def _numbered(folder: str) -> re.Match[str] | None:
    return re.fullmatch(r"(\d+)\.(.+)", folder)


def _index_files(root: Path) -> tuple[Path, Path]:
    """Where an index may be kept, the better place first."""
    digest = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return root / INDEX_FILE, user_cache_path("amp_track") / f"index-{digest}.json"


def _stored_classes(root: Path, modified_ns: dict[str, int]) -> dict[str, ClassFolder]:
    """The class folders by name that have not changed since an index was made."""
    return {
        item.folder: item
        for file in reversed(_index_files(root))
        for item in _read(file)
        if modified_ns.get(item.folder) == item.modified_ns
    }


def _read(file: Path) -> list[ClassFolder]:
    """The class folders that an index has; none where there is no index of this version."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["version"] != _VERSION:
            return []
        return [
            ClassFolder(
                item["folder"],
                item["modified_ns"],
                tuple(item["images"]),
                {name: _BadFile(**found) for name, found in item["bad"].items()},
            )
            for item in stored["classes"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, or damaged
        return []


def _store(index: ImageIndex) -> None:
    text = json.dumps({"version": _VERSION, "classes": [asdict(item) for item in index.classes]})
    for file in _index_files(index.root):
        try:
            _write_whole(file, text)
        except OSError:
            continue
        return
    print(f"{index.root}: the index could not be kept; the images will be checked again", file=sys.stderr, flush=True)


def _write_whole(file: Path, text: str) -> None:
    """Several processes may do so at once, and others read meanwhile: each sees a whole index."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
