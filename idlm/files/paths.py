"""Files that a caller names: UserError for what the system refuses to open; lines that may be packed; the
encoding of text that is not UTF-8, and the command that converts its file."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import shlex
import tomllib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from idlm.errors import UserError

DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, UnicodeDecodeError)
"""What reading a damaged or truncated file raises."""
PACKINGS = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}
"""Endings of compressed files, and how their content begins. No JSON begins so."""
POINTER = b"version https://git-lfs.github.com/spec/"
BOM = b"\xef\xbb\xbf"
WIDE = {f"utf-{bits}{end}": f"UTF-{bits}{end[1:].upper()}" for bits in (16, 32) for end in ("", "-le", "-be")}
PACKERS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_LETTERS = tomllib.loads(Path(__file__).with_name("encodings.toml").read_text(encoding="utf-8"))
"""Encodings, in the order in which they are tried, and the usual letters of their languages."""
_LAST_LATIN = "\u024f"
_USUAL_SHARE = 0.9


@contextmanager
def translate_path_errors(code: str, path: str | Path, *, fix: str) -> Iterator[None]:
    """Inside, an OSError becomes UserError `code` about `path`, or about the related file that failed."""
    try:
        yield
    except OSError as error:
        failed = str(path if error.filename is None else error.filename)
        raise UserError(code, f"cannot open {failed!r}: {error.strerror or error}", fix=fix) from error


def refuse_pointer(code: str, path: Path) -> None:
    """Raise UserError `code` for what a clone without Git LFS has in place of a large file."""
    head = b""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(len(POINTER))
    if head == POINTER:
        raise UserError(
            code,
            f"{path} is a pointer of Git LFS: the clone has no content of the file",
            fix=f"git -C {shlex.quote(str(path.parent))} lfs pull",
        )


def packing(file: BinaryIO, path: Path) -> str | None:
    """Return the key of PACKINGS of an open file, by its content and else by its name; None: plain text."""
    head = cast(io.BufferedReader, file).peek(8)
    found = next((suffix for suffix, magic in PACKINGS.items() if head.startswith(magic)), path.suffix)
    return found if found in PACKINGS else None


def unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    """Return the content of an open file, decompressed where it is compressed. Reading what is cut short or
    damaged raises one of DAMAGE. Only `.zst` cannot be positioned."""
    kind = packing(file, path)
    if kind is not None and not cast(io.BufferedReader, file).peek(1):
        raise EOFError("the file is empty")
    if kind == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if kind == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(file))
    if kind == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(file))
    if kind == ".zst":
        # Python's own module for it is of a later version than 3.11.
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
        return cast(BinaryIO, io.BufferedReader(stream))
    return file


@contextmanager
def opened(code: str, path: str | Path, *, key: str, fix: str) -> Iterator[BinaryIO]:
    """Yield the content of a file, decompressed where it is compressed. UserError `code` if `path`, which the
    option `key` names, is no file or cannot be opened, and for what reading raises if it is damaged."""
    with translate_path_errors(code, path, fix=fix):
        if not Path(path).is_file():
            raise UserError(code, f"{key}={str(path)!r} is not a file", fix=fix)
        refuse_pointer(code, Path(path))
        file = Path(path).open("rb")  # noqa: SIM115
    with file:
        try:
            yield unpacked(file, Path(path))
        except DAMAGE as error:
            what = f"{key}={str(path)!r} is incomplete or damaged: {json_problem(error)}"
            raise UserError(code, what, fix=f"copy or download the file again; or {fix}") from error


def json_lines(lines: Iterable[bytes], *, first: int = 1) -> Iterator[tuple[int, Any]]:
    """Yield number (from `first` on) and value of every line that is not blank; of one that is not JSON in
    UTF-8, the error of reading it."""
    for number, line in enumerate(lines, start=first):
        # With its end, a line that stops too early would be wrong in column 1 of the next one.
        content = line.removeprefix(BOM).rstrip(b"\r\n")
        if not content.strip():
            continue
        value: Any
        try:
            value = json_value(content.decode())
        except (ValueError, RecursionError) as error:
            value = error
        yield number, value


def json_value(text: str) -> Any:
    """Return the value of JSON. ValueError for what is none, also for an object that has a key twice: a
    reader would take the last one without a word."""
    return json.loads(text, object_pairs_hook=_without_repeated_keys)


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return found


def json_problem(error: Exception) -> str:
    """Return what is wrong in a line of JSON, and in which column or encoding; the caller adds the line."""
    if isinstance(error, UnicodeDecodeError):
        found = wide_encoding(error.object) or likely_encoding(error.object)
        return f"it is not UTF-8{f', it may be {found}' if found else ''}"
    return f"{error.msg}: column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def wide_encoding(head: bytes) -> str | None:
    """Return UTF-16 or UTF-32 if `head` begins with its mark, or JSON in it; with its byte order where there
    is no mark."""
    encoding = json.detect_encoding(head)
    is_marked = not encoding.endswith("e")
    return (
        WIDE.get(encoding)
        if is_marked or head.decode(encoding, "ignore").lstrip()[:1] in ("{", "[")
        else None
    )


def likely_encoding(line: bytes) -> str | None:
    """Return the encoding in which `line`, which is not UTF-8, has the usual letters of a language; None
    where none has, for UTF-8 with a damaged character, and for what is no text."""
    foreign = _foreign(line.decode("utf-8", "replace"))
    if re.search(rb"[\x00-\x08]", line) or 2 * foreign.count("\ufffd") < len(foreign):
        return None
    for name, usual in ((name, usual) for names, usual in _LETTERS.items() for name in names.split()):
        try:
            text = line.decode(name)
        except UnicodeDecodeError:
            continue
        foreign = _foreign(text)
        is_usual = len(re.findall(f"[{usual}]", foreign)) >= _USUAL_SHARE * max(1, len(foreign))
        # Words of other scripts are made of the letters outside of ASCII alone.
        is_foreign = usual[0] <= _LAST_LATIN and re.search(r"[^\W\d_a-zA-Z]{5}", text)
        # Hardly a line of Japanese is without kana, by which it differs from Chinese in the same bytes.
        is_chinese = name in ("EUC-JP", "SHIFT_JIS") and not re.search("[ぁ-ヿ]", text)
        if is_usual and not is_foreign and not is_chinese:
            # The larger set of characters of the same language.
            return "GB18030" if name == "GB2312" else name
    return None


def _foreign(text: str) -> str:
    return re.sub(r"[\x00-\x7f]", "", text)


def convert_command(path: str | Path, encoding: str | None, packing: str | None) -> str:
    """Return the shell command that makes the file UTF-8, in its place; `packing` is a key of PACKERS."""
    file, part = shlex.quote(str(path)), shlex.quote(f"{path}.part")
    convert = f"iconv -f {encoding or 'ENCODING'} -t UTF-8"
    packer = PACKERS.get(packing or "")
    piped = f"{packer} -dc {file} | {convert} | {packer} -c" if packer else f"{convert} {file}"
    return f"{piped} > {part} && mv {part} {file}"
