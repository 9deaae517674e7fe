"""Text that is not UTF-8: the name of its encoding, and the command that converts its file."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

WIDE = {f"utf-{bits}{end}": f"UTF-{bits}{end[1:].upper()}" for bits in (16, 32) for end in ("", "-le", "-be")}
PACKERS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_WESTERN = "À-ÖØ-Ýß-ïñ-öø-ýÿŒœ€‘’“”„…–—•«»°§©®¿¡£·´"
_CENTRAL = "ĄĆĘŁŃÓŚŹŻąćęłńóśźżÁČĎÉĚÍŇŘŠŤÚŮÝŽáčďéěíňřšťúůýžÄÖÜäöüßŐŰőű‘’“”„…–—«»§°"
_TURKISH = "ÇĞİÖŞÜçğıöşüâîû‘’“”…–—"
_CYRILLIC = "а-яё«»—–…№“”„’\u00a0"
_HAN = "一-鿿，。、！？：；（）《》「」“”‘’…—"
_HAN_AND_KANA = _HAN + "ぁ-ヿ"
_LATIN_NAMES = {
    "ISO-8859-1": _WESTERN,
    "WINDOWS-1252": _WESTERN,
    "ISO-8859-2": _CENTRAL,
    "WINDOWS-1250": _CENTRAL,
    "WINDOWS-1254": _TURKISH,
}
_OTHER_NAMES = {
    "WINDOWS-1251": _CYRILLIC,
    "KOI8-R": _CYRILLIC,
    "EUC-KR": "가-힣",
    "EUC-JP": _HAN_AND_KANA,
    "SHIFT_JIS": _HAN_AND_KANA,
    "GB2312": _HAN,
    "BIG5": _HAN,
    "GB18030": _HAN,
}
_USUAL_SHARE = 0.9


def wide_encoding(head: bytes) -> str | None:
    """Return UTF-16 or UTF-32, with its byte order where no mark says it, if `head` begins JSON in it."""
    encoding = json.detect_encoding(head)
    start = head.decode(encoding, "ignore").lstrip()
    return WIDE.get(encoding) if start[:1] in ("{", "[") else None


def likely_encoding(line: bytes) -> str | None:
    """Return the encoding in which `line`, which is not UTF-8, has the usual letters of a language; None
    where none has, for UTF-8 with a damaged character, and for what is no JSON."""
    foreign = _foreign(line.decode("utf-8", "replace"))
    if line[:1] not in (b"{", b"[") or 2 * foreign.count("\ufffd") < len(foreign):
        return None
    for name, usual in _LATIN_NAMES.items():
        # Words of other scripts are made of such letters alone.
        text = _read(line, name, usual)
        if text and not re.search(r"[^\W\d_a-zA-Z]{5}", text):
            return name
    for name, usual in _OTHER_NAMES.items():
        text = _read(line, name, usual)
        # Hardly a line of Japanese is without kana, by which it differs from Chinese in the same bytes.
        if text and (usual != _HAN_AND_KANA or re.search("[ぁ-ヿ]", text)):
            # The larger set of characters of the same language.
            return "GB18030" if name == "GB2312" else name
    return None


def _read(line: bytes, name: str, usual: str) -> str | None:
    """Return `line` as text if nine in ten of its characters outside of ASCII are `usual` ones."""
    try:
        text = line.decode(name)
    except UnicodeDecodeError:
        return None
    foreign = _foreign(text)
    share = len(re.findall(f"[{usual}]", foreign)) / max(1, len(foreign))
    return text if share >= _USUAL_SHARE else None


def _foreign(text: str) -> str:
    return re.sub(r"[\x00-\x7f]", "", text)


def convert_command(path: str | Path, encoding: str | None, packing: str | None) -> str:
    """Return the shell command that makes the file UTF-8, in its place; `packing` is a key of PACKERS."""
    file, part = shlex.quote(str(path)), shlex.quote(f"{path}.part")
    convert = f"iconv -f {encoding or 'ENCODING'} -t UTF-8"
    packer = PACKERS.get(packing or "")
    piped = f"{packer} -dc {file} | {convert} | {packer} -c" if packer else f"{convert} {file}"
    return f"{piped} > {part} && mv {part} {file}"
