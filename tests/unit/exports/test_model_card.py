"""What an export takes from the folder of its base, and texts of people that are never replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from idlm.checkpoint import foreign_files, verify
from idlm.errors import UserError
from idlm.publish import publish
from idlm.semantics import Semantics
from idlm.train.checkpoint.base_files import BaseFiles, read_base_files
from idlm.train.checkpoint.export import export
from tests.tiny_training import tiny_model

OTHER = {
    "license": "other",
    "license_name": "llama-3.1-community-license-agreement",
    "license_link": "LICENSE",
}


@pytest.mark.parametrize(
    ("files", "license"),
    [
        ({}, {}),
        ({"README.md": "# no front matter\nlicense: mit\n"}, {}),
        ({"README.md": "---\nlicense: [broken\n---\n"}, {}),
        ({"README.md": "---\nlanguage: en\nlicense: mit\n---\n# x"}, {"license": "mit"}),
        (
            {"README.md": "---\nlicense: other\nlicense_name: l\nlicense_link: https://x.org/y\n---\n"},
            {"license": "other", "license_name": "l", "license_link": "https://x.org/y"},
        ),
        (
            {"README.md": "---\nlicense: other\nlicense_link: LICENSE.txt\n---\n", "LICENSE.txt": "text"},
            {"license": "other", "license_link": "LICENSE"},
        ),
        ({"README.md": "---\nlicense: other\nlicense_link: LICENSE\n---\n"}, {"license": "other"}),
        ({"LICENSE": "\n    Apache License\n  Version 2.0, January 2004\n"}, {"license": "apache-2.0"}),
        ({"LICENSE.md": "MIT License\n\nCopyright"}, {"license": "mit"}),
        ({"LICENSE": "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\nText"}, OTHER),
    ],
)
def test_the_licence_is_what_the_base_says(
    files: dict[str, str], license: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    base = read_base_files(tmp_path, tmp_path)
    assert base.license == license and base.name == tmp_path.name
    texts = [text.encode() for name, text in files.items() if name.startswith("LICENSE")]
    assert [base.license_text] == (texts or [None])


def test_a_base_in_a_cache_of_the_hub_has_its_name_there(tmp_path: Path) -> None:
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de289"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert read_base_files(folder, folder).name == "Qwen/Qwen3-0.6B"
    assert read_base_files(None, folder).name is None


def test_a_card_that_somebody_wrote_stays(tmp_path: Path) -> None:
    target, base = tmp_path / "out", BaseFiles(license_text=b"terms")
    target.mkdir()
    (target / "README.md").write_text("mine")
    model = tiny_model("qwen3")

    def write(card: str) -> str:
        export(model, None, Semantics(), target, dtype=None, base=base, card=card)
        verify(target)
        return (target / "README.md").read_text()

    assert write("first") == "mine" and (target / "LICENSE").read_bytes() == b"terms"
    (target / "README.md").unlink()
    assert [write("second"), write("third")] == ["second", "third"], "its own card is replaced"
    (target / "README.md").write_text("third, and more")
    verify(target)
    assert foreign_files(target, ["README.md", "config.json"]) == ["README.md"]
    assert write("fourth") == "third, and more"
    # The mechanism below refuses what an export does not leave out.
    with pytest.raises(UserError, match="IDLM-0306"), publish(target) as staging:
        (staging / "README.md").write_text("fifth")


def test_a_front_matter_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    values = {"base_model": "a/b", "license": "other", "license_name": "x y: z"}
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(values)}---\n\n# x\n---\nlicense: mit\n---\n")
    assert read_base_files(tmp_path, tmp_path).license == {"license": "other", "license_name": "x y: z"}
