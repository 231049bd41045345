"""Images in class folders, `NNN.name/*.jpg` as in Caltech-256. Images are found and checked once, then only read.

Every visible sub-folder is a class. An image is recognized by its file extension, as in torchvision (.jpg, .jpeg, .png,
.ppm, .bmp, .pgm, .tif, .tiff, .webp). Other files, hidden files and deeper folders are ignored.

The index is stored as `amp_track-index.json` next to the class folders, or in the user's cache folder if that folder is
not writable. A class folder is checked again if its modification time has changed, and a bad image if the file has
changed: repairing a file does not change its folder. Delete the index to check everything again.
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
"""Version of the index's format; an index of another version is replaced."""
_PROGRESS_SECONDS = 3.0
_NAMED_PATHS = 3
"""Number of bad images that a message names; the index lists all."""

_MACHINES_ERRORS = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE}

OnBadImages = Literal["refuse", "skip"]


@dataclass(frozen=True)
class LabelledImage:
    """An image; `path` is relative to the parent of the class folders, `label` counts the class folders from 0."""

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
    """A class: its folder's name, and the names of its files."""

    folder: str
    modified_ns: int
    images: tuple[str, ...]
    bad: dict[str, _BadFile]

    @property
    def number(self) -> int | None:
        """The number in a name such as `001.ak47`; None without a number."""
        match = _numbered(self.folder)
        return int(match[1]) if match else None

    @property
    def name(self) -> str:
        """The name without the number: `ak47` for `001.ak47`."""
        match = _numbered(self.folder)
        return match[2] if match else self.folder


@dataclass(frozen=True)
class ImageIndex:
    """Every image below `root`.

    Labels are positions in `classes`, which are sorted by folder name; an empty class keeps its label.
    """

    root: Path
    classes: tuple[ClassFolder, ...]

    @property
    def file(self) -> Path:
        """The file of the index."""
        return next((file for file in _index_files(self.root) if file.exists()), _index_files(self.root)[0])

    @property
    def images(self) -> list[LabelledImage]:
        """The images that can be decoded, ordered by label and name."""
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
        """Raise `BadInput` if there are bad images."""
        if bad := self.bad_images:
            raise BadInput(
                f"{self.root}: {_counted(bad)} ({_listed(bad)}; {self.file} lists all). Repair or remove them, or skip "
                "them with --set bad_images=skip."
            )

    def report_bad_images(self) -> None:
        """Print on stderr which images are skipped."""
        if bad := self.bad_images:
            said = f"{self.root}: skipped {_counted(bad)} ({_listed(bad)}). {self.file} lists all of them."
            print(said, file=sys.stderr, flush=True)


class LabelledImages(Dataset[tuple[Any, int]]):
    """Images of an index with their labels: items are (transform(PIL image in RGB), label).

    Raises:
        OSError: an image that was good when the index was created cannot be decoded any more; names its path.
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
                f"{path}: the image cannot be read any more ({_reason(error, path)}). Repair or remove it, and start "
                "again."
            ) from error
        return self.transform(image), item.label


def open_index(root: Path, *, leave_out: Collection[str] = ()) -> ImageIndex:
    """Return the index of a folder of class folders, updated if necessary, with progress on stderr.

    Every new image is decoded completely, so that no training fails on a bad one later.

    Args:
        root: the folder of class folders.
        leave_out: names of sub-folders that are not classes.

    Raises:
        BadInput: the folder does not exist, or has no sub-folders.
    """
    modified_ns = _modification_times(root, leave_out)
    if not modified_ns:
        raise BadInput(f"{root}: contains no class folders. Name a folder with one sub-folder per class.")
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
    """Split images into training and evaluation images, stratified: Caltech-256's 29,780 into 26,802 and 2,978.

    The only image of a class goes to training. Evaluation gets at least as many images as there are classes.

    Args:
        images: the images to split.
        seed: seeds the split.
        one_in: evaluation gets one of this many images, rounded up.
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
    """Return the completely decoded image, converted to RGB from grey, CMYK, palette or RGBA."""
    with Image.open(path) as image:
        return image.convert("RGB")


def default_num_workers() -> int:
    """Return the number of loader processes: one per usable core except the training's, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores - 1)


def _modification_times(root: Path, leave_out: Collection[str]) -> dict[str, int]:
    """Return the modification time of every class folder in nanoseconds, ordered by name."""
    try:
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise BadInput(f"{root}: {error.strerror}. Name a folder with one sub-folder per class.") from error
    return {folder: (root / folder).stat().st_mtime_ns for folder in folders if folder not in leave_out}


def _image_files(folder: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if is_image_file(entry.name) and not entry.name.startswith(".") and not entry.is_dir()
    )


def _files_to_check(folder: Path, known: ClassFolder) -> list[str]:
    """Return the bad files of an unchanged folder that have changed."""
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
    """Decode every image, in threads (PIL releases the GIL), and return the bad ones."""
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
    changed_ns = _changed_ns(path)  # before reading: if the file changes meanwhile, it is checked again
    try:
        read_image(path)
    except Exception as error:  # PIL's decoders raise OSError, SyntaxError, struct.error, …
        if _is_the_machines(error):
            raise
        return _BadFile(_reason(error, path), changed_ns)
    return None


def _is_the_machines(error: Exception) -> bool:
    """Return True if the error means that memory, files or a disk failed, and not the image."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in _MACHINES_ERRORS


def _changed_ns(path: Path) -> int:
    """Return when content or permissions last changed; 0 if the file does not exist, as for a broken link."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return max(status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def _decoding_quietly() -> Iterator[None]:
    """Ignore PIL's warnings of large images, unusual palettes and damaged EXIF data: the image can still be read.

    Not for several threads at once: warning filters belong to the process.
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
    """Return the possible files of an index, the preferred one first."""
    digest = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return root / INDEX_FILE, user_cache_path("amp_track") / f"index-{digest}.json"


def _stored_classes(root: Path, modified_ns: dict[str, int]) -> dict[str, ClassFolder]:
    """Return the class folders that are unchanged since an index was stored, by name."""
    return {
        item.folder: item
        for file in reversed(_index_files(root))
        for item in _read(file)
        if modified_ns.get(item.folder) == item.modified_ns
    }


def _read(file: Path) -> list[ClassFolder]:
    """Return the class folders of an index file; none if it is missing, damaged or of another version."""
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _store(index: ImageIndex) -> None:
    text = json.dumps({"version": _VERSION, "classes": [asdict(item) for item in index.classes]})
    for file in _index_files(index.root):
        try:
            _write_whole(file, text)
        except OSError:
            continue
        return
    print(
        f"{index.root}: the index cannot be stored. The next run checks all images again.", file=sys.stderr, flush=True
    )


def _write_whole(file: Path, text: str) -> None:
    """Write a file atomically: other processes may write or read it at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
