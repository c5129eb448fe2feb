"""Which files are read, as bytes, and which part of them is held out."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import sysconfig

from dropless.train.errors import UserError

# One part in twenty is held out: enough for a steady figure, little enough to leave the text to
# training.
_HELD_OUT_PARTS = 20
# A file with a NUL byte in its first block is taken for binary, as grep and git do.
_SNIFF_BYTES = 8192
# UTF-16 and UTF-32 text is full of NUL bytes; its byte-order mark tells it apart.
_WIDE_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


@dataclasses.dataclass(frozen=True)
class Text:
    """The bytes of a run."""

    train: list[bytes]  # documents, or parts of them
    held_out: list[bytes]
    files: int
    skipped: int  # files of a folder that were empty, binary or unreadable
    source: str  # in words
    split: str  # in words

    def fingerprint(self) -> dict[str, int | str]:
        """Tells two texts apart, so that a resumed run is known to read the same one."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for document in part:
                digest.update(len(document).to_bytes(8, "little"))
                digest.update(document)
        return {
            "files": self.files,
            "train_bytes": sum(map(len, self.train)),
            "held_out_bytes": sum(map(len, self.held_out)),
            "sha256": digest.hexdigest(),
        }


def read_text(paths: tuple[str, ...], out: pathlib.Path, window_bytes: int) -> Text:
    """Reads files as they are and folders recursively; with none, the standard library's sources.

    In a folder, hidden entries, links to folders, and empty, binary or unreadable files are passed
    over and counted. A file that is named outright is read whatever it holds, and must not be
    empty. Nothing under ``out`` is read, so a run inside its own text folder does not train on its
    metrics.

    Raises:
      UserError: a path does not exist, a named file is empty or unreadable, or a folder holds no
      text.
    """
    if paths:
        named = [pathlib.Path(path) for path in paths]
        source = ", ".join(str(path) for path in named)
    else:
        named = [pathlib.Path(sysconfig.get_paths()["stdlib"])]
        source = "the sources of the running Python's standard library"
    found: dict[str, bytes] = {}
    skipped = 0
    for path in named:
        if path.is_dir():
            if path.resolve() == out.resolve():
                raise UserError(f"--out {out} is the text folder itself; name another folder.")
            documents, passed_over = _read_folder(path, out, standard_library=not paths)
            if not documents:
                raise UserError(
                    f"the folder {path} holds no text file ({passed_over} files passed over)."
                )
            found.update(documents)
            skipped += passed_over
        elif path.exists():
            if not path.is_file():  # a device may have no end, a pipe no writer
                raise UserError(f"{path} is neither a regular file nor a folder.")
            found[str(path.resolve())] = _read_named_file(path)
        else:
            raise UserError(f"the text file or folder {path} does not exist.")
    train, held_out, split = _split(found, window_bytes)
    return Text(train, held_out, len(found), skipped, source, split)


def _read_named_file(path: pathlib.Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"the text file {path} cannot be read: {error.strerror}.") from error
    if not content:
        raise UserError(f"the text file {path} is empty.")
    return content


def _read_folder(
    folder: pathlib.Path, out: pathlib.Path, standard_library: bool
) -> tuple[dict[str, bytes], int]:
    out = out.resolve()
    found: dict[str, bytes] = {}
    skipped = 0
    for parent, folders, files in os.walk(folder):
        here = pathlib.Path(parent)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and (here / name).resolve() != out
            and not (
                standard_library and name in ("site-packages", "dist-packages", "test", "tests")
            )
        )
        for name in sorted(files):
            if name.startswith(".") or (standard_library and not name.endswith(".py")):
                continue
            content = _read_if_text(here / name)
            if content is None:
                skipped += 1
            else:
                found[str((here / name).resolve())] = content
    return found, skipped


def _read_if_text(path: pathlib.Path) -> bytes | None:
    if not path.is_file():  # a pipe or a socket would block
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    head = content[:_SNIFF_BYTES]
    if not content or (b"\x00" in head and not head.startswith(_WIDE_BYTE_ORDER_MARKS)):
        return None
    return content


def _split(found: dict[str, bytes], least: int) -> tuple[list[bytes], list[bytes], str]:
    """Holds out whole files where there are many alike, and the end of each file otherwise.

    At least ``least`` bytes are held out, if there are as many.
    """
    documents = list(found.values())
    total = sum(map(len, documents))
    part = min(total, max(-(-total // _HELD_OUT_PARTS), least))
    if len(documents) >= _HELD_OUT_PARTS:
        # By content, not by name or place: the same text is split the same way on every machine.
        order = sorted(documents, key=lambda document: hashlib.sha256(document).digest())
        held_out, size = [], 0
        while size < part:
            held_out.append(order.pop())
            size += len(held_out[-1])
        if size <= 2 * part:  # else one huge file fell into it
            return order, held_out, f"{len(held_out)} of {len(documents)} files are held out"
    train, held_out = [], []
    for document in documents:
        cut = len(document) - -(-len(document) * part // total)
        train.append(document[:cut])
        held_out.append(document[cut:])
    percent = 100 * part / total
    return train, held_out, f"the last {percent:.0f} % of each file is held out"
