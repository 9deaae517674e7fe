"""Files of a tokenizer that are not read: pipes, devices, what is too large, and templates from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from idlm.files.paths import check_file

TEMPLATE_FOLDER = "additional_chat_templates"
"""Where a tokenizer keeps templates beside its first one, as *.jinja."""
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def unusable_files(directory: Path, names: Iterable[str]) -> list[str]:
    """Return the files of `names`, and the templates, that must not be read, each with the reason. The text
    of a template reaches prompts and answers, so one that links to a file outside of the folder would show
    it. A cache of the hub keeps the files of its snapshots beside them: these are inside."""
    templates = [directory / name for name in TEMPLATE_FILES]
    templates += sorted(directory.glob(f"{TEMPLATE_FOLDER}/*.jinja"))
    home = directory.resolve()
    inside = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    problems = []
    for path in dict.fromkeys((*(directory / name for name in names), *templates)):
        if not path.exists():
            continue
        name = path.relative_to(directory).as_posix()
        try:
            check_file(path)
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            continue
        if path in templates and not any(path.resolve().is_relative_to(folder) for folder in inside):
            problems.append(f"{name}: it links to a file outside of the folder")
    return problems
