"""Datasets of the library `datasets`: folders and splits, of training and of held-out data."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.train.check import check_config
from idlm.train.config.data import DataConfig, HeldOutConfig, SourceConfig, held_out_config
from idlm.train.config.schema import EvalConfig, TrainConfig
from idlm.train.data.base import Encoder
from tests.errors import refused
from tests.unit.data.cached import config_of, contents, read, write_lines

MASK = 190


@pytest.fixture
def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer, mask_token_id=MASK, use_chat_template=True)


def lines(path: Path, *texts: str) -> Path:
    return write_lines(path, *({"text": text} for text in texts))


def test_a_folder_of_data_files_is_converted_under_the_data_cache(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    home = tmp_path / "home"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(home))
    folder = lines(tmp_path / "folder" / "train.jsonl", "Sam has 1.", "Sam has 2.", "Sam has 3.").parent
    config = config_of(folder, source="hf")
    first = read(config, encoder)
    assert first.num_samples == 3 and first.sample(2).origin.endswith("[train]:3)")
    assert (tmp_path / "cache" / "datasets").is_dir() and not home.exists()
    assert read(config, encoder).directory == first.directory


def test_words_for_missing_values_are_texts_of_a_table(tmp_path: Path, encoder: Encoder) -> None:
    path = tmp_path / "folder" / "train.csv"
    path.parent.mkdir()
    path.write_text(
        "".join(f"{text}\n" for text in ("prompt,response,system", "a,null,", "b,NA,NULL", "c,None,x"))
    )
    found = contents(read(config_of(path.parent, source="hf"), encoder))
    assert found == contents(read(config_of(path, source="csv"), encoder))


def test_numbers_and_truth_values_of_a_table_are_its_texts(tmp_path: Path, encoder: Encoder) -> None:
    path = tmp_path / "folder" / "train.csv"
    path.parent.mkdir()
    path.write_text("question,answer,label,enable_thinking\n1,007,1,true\n2,1.50,,\n3,True,1,false\n")
    path.with_name("test.csv").write_text("question,answer,label,enable_thinking\nwords,b,1,true\n")
    found = contents(read(config_of(path.parent, source="hf"), encoder))
    assert found == contents(read(config_of(path, source="csv"), encoder))
    path.write_text("question,answer,label,enable_thinking\na,1,0,\n")
    with pytest.raises(UserError, match="IDLM-0202.*label=0"):
        read(config_of(path.parent, source="hf"), encoder)


def test_a_configuration_of_a_dataset_is_chosen(tmp_path: Path, encoder: Encoder) -> None:
    folder, listed = tmp_path / "folder", []
    for name, text in (("main", "Sam has 1."), ("other", "Sam has 2.")):
        lines(folder / name / "train.jsonl", text)
        listed.append({"config_name": name, "data_files": f"{name}/*.jsonl"})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(listed)}\n---\n")
    with pytest.raises(UserError, match=r"(?s)IDLM-0232.*\['main', 'other'\].*data\.subset names one"):
        read(config_of(folder, source="hf"), encoder)
    (part,) = DataConfig(sources=[SourceConfig(path=str(folder), source="hf", subset="other")]).parts()
    for config in (config_of(folder, source="hf", subset="other"), part):
        config.cache_dir = str(tmp_path / "cache")
        sample = read(config, encoder).sample(0)
        assert "Sam has 2." in encoder.tokenizer.decode(sample.token_ids)
    assert held_out_config(part, None, "test").subset == "other"
    assert held_out_config(part, "elsewhere", None).subset is None


def test_arrow_is_read_as_a_stream_and_as_a_file(tmp_path: Path, encoder: Encoder) -> None:
    import pyarrow

    table = pyarrow.table({"text": ["Sam has 1.", "Sam has 2."]})
    for name, new in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with new(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
        path, cache = str(tmp_path / f"{name}.arrow"), str(tmp_path / "cache")
        assert read(DataConfig(source="hf", path=path, cache_dir=cache), encoder).num_samples == 2


def test_datasets_that_cannot_be_had_are_named(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "Sam"}])}).save_to_disk(str(saved))
    with pytest.raises(UserError, match=r"IDLM-0232.*no split 'trian'; did you mean 'train'"):
        read(DataConfig(source="hf", path=str(saved), split="trian"), encoder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused(r"IDLM-0232.*someone/somewhere", read, DataConfig(source="hf", path="someone/somewhere"), encoder)


def test_held_out_data_takes_the_split_that_eval_names(tmp_path: Path, encoder: Encoder) -> None:
    import datasets

    made = {name: datasets.Dataset.from_list([{"text": text}]) for name, text in SPLITS.items()}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
    lines(tmp_path / "files" / "train.jsonl", SPLITS["train"])
    lines(tmp_path / "files" / "test.jsonl", SPLITS["test"])
    for name in ("saved", "files"):
        path = str(tmp_path / name)
        data = DataConfig(source="hf", path=path, cache_dir=str(tmp_path / "cache"))
        for held_out in (held_out_config(data, path, "test"), held_out_config(data, None, "test")):
            sample = read(held_out, encoder).sample(0)
            assert SPLITS["test"] in encoder.tokenizer.decode(sample.token_ids)
        error = refused(r"IDLM-0232.*no split 'validation'", read, held_out_config(data, path, None), encoder)
        assert error.fix == "set eval.split to one of: test", "not one that is trained on"
        with pytest.raises(UserError, match=r"(?s)IDLM-0232.*fix: set data.split to one of: train, test"):
            read(DataConfig(source="hf", path=path, cache_dir=data.cache_dir, split="dev"), encoder)
    for split in ("train+test", "train[:1]+test", "all"):
        both = DataConfig(source="hf", path=path, cache_dir=data.cache_dir, split=split)
        assert read(both, encoder).num_samples == 2


SPLITS = {"train": "Sam has 1.", "test": "Lea has 2."}


def test_a_dataset_of_one_split_is_held_out_whole_or_not_at_all(tmp_path: Path, encoder: Encoder) -> None:
    import datasets

    datasets.Dataset.from_list([{"text": "Sam has 1."}]).save_to_disk(str(tmp_path / "one"))
    data = DataConfig(source="hf", path=str(tmp_path / "more"), cache_dir=str(tmp_path / "cache"))
    assert read(held_out_config(data, str(tmp_path / "one"), None), encoder).num_samples == 1
    same = held_out_config(DataConfig(**vars(data) | {"path": str(tmp_path / "one")}), None, "test")
    assert isinstance(same, HeldOutConfig)
    other = held_out_config(same, None, None, "b")
    assert (other.subset, other.trained_split) == ("b", "")
    refused(r"IDLM-0232.*no split 'test'(?s:.*)eval\.holdout holds out a share", read, same, encoder)


def test_the_split_that_is_trained_on_is_not_evaluated(tmp_path: Path) -> None:
    def problems(**given: Any) -> str:
        config = TrainConfig(output_dir=str(tmp_path / "out"))
        config.data = DataConfig(source="hf", path="a/b")
        config.eval = EvalConfig(every=1, **given)
        return refused("IDLM-0504", check_config, config).message

    assert "eval.split=train of a/b is trained on" in problems(split="train")
    assert "eval.split=train of a/b is trained on" in problems(path="a/b", split="train")
    for allowed in ({"split": "test"}, {"path": "c/d", "split": "train"}, {"path": "a/b"}, {}):
        assert "is trained on" not in problems(**allowed)


def test_cells_of_a_table_hold_turns_as_json(tmp_path: Path, encoder: Encoder) -> None:
    path, turns = tmp_path / "folder" / "train.csv", [{"role": "user", "content": "Sam"}]
    path.parent.mkdir()
    with path.open("w") as file:
        csv.writer(file).writerows([("prompt", "response"), (json.dumps(turns), "1"), (str(turns), "2")])
    refused("IDLM-0202.*:2: prompt=.*not JSON", read, config_of(path.parent, source="hf"), encoder)
    found = contents(read(config_of(path.parent, source="hf", on_bad_record="skip"), encoder))
    same = write_lines(tmp_path / "same.jsonl", {"prompt": "Sam", "response": "1"})
    assert found == contents(read(same, encoder))


def test_a_folder_whose_name_is_a_pattern_is_read_by_its_files(tmp_path: Path, encoder: Encoder) -> None:
    folder = lines(tmp_path / "folder [1]" / "train.jsonl", "Sam has 1.").parent
    refused("IDLM-0232.*pattern(?s:.*)data.source=auto", read, config_of(folder, source="hf"), encoder)
    assert read(config_of(folder), encoder).num_samples == 1
