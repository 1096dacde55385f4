import argparse
import inspect
import itertools
import os
import unittest.mock
from pathlib import Path

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

from titan_ext.base import stdlib_corpus
from titan_ext.base.stdlib_corpus import STDLIB_CORPUS, make_corpus, register_stdlib_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a hundred pieces."""
    pieces = [*itertools.islice(stdlib_corpus._stdlib_pieces(), 100)]
    with unittest.mock.patch.object(stdlib_corpus, "_stdlib_pieces", return_value=pieces):
        return make_corpus(tmp_path_factory.mktemp("data") / "corpus")


def _content(folder: Path) -> tuple[list[str], str]:
    return (
        stdlib_corpus._load(str(folder))["text"],
        (folder / "tokenizer" / "tokenizer.json").read_text(),
    )


@pytest.mark.slow
def test_made_again_it_is_the_same(tmp_path: Path):
    assert _content(make_corpus(tmp_path / "again")) == _content(make_corpus())


def test_it_is_the_standard_library():
    pieces = {row["path"]: row["text"] for row in stdlib_corpus._stdlib_pieces()}
    assert len(pieces) > 3000
    assert sum(map(len, pieces.values())) > 5_000_000
    together = [pieces[f"argparse.py#{i}"] for i in range(sum("argparse.py#" in p for p in pieces))]
    assert "".join(together) == inspect.getsource(argparse)
    assert not any("site-packages" in path or "/test/" in path for path in pieces)


def test_two_containers_on_one_disk_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process of another container, with the id of this one, is at work beside it."""
    rows = [{"path": "a.py#0", "text": "def f(x):\n    return x\n"}]
    monkeypatch.setattr(stdlib_corpus, "_stdlib_pieces", lambda: iter(rows))
    other = tmp_path / f"corpus.{os.getpid()}"
    (other / "tokenizer").mkdir(parents=True)
    (tmp_path / "corpus").mkdir()  # an empty folder is no corpus
    assert _content(make_corpus(tmp_path / "corpus"))[0] == [rows[0]["text"]]
    assert (other / "tokenizer").is_dir()
    monkeypatch.setattr(stdlib_corpus, "_stdlib_pieces", lambda: pytest.fail("made again"))
    assert make_corpus(tmp_path / "corpus") == tmp_path / "corpus"


def test_tokenizer_round_trip(corpus: Path):
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(corpus / "tokenizer"))
    text = "def f(x):\n    return x  # café\n"
    ids = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert tokenizer.get_vocab_size() == 2048
    assert ids[0] == tokenizer.bos_id
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(ids[1:-1]) == text
    assert len(ids) < len(text)


def test_titan_loads_it_by_name(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stdlib_corpus, "default_folder", lambda: corpus)
    register_stdlib_corpus()
    assert STDLIB_CORPUS in DATASETS
    batches = [next(iter(_loader(corpus, rank)))[0]["input"].tolist() for rank in (0, 1, 0)]
    assert batches[0] == batches[2]
    assert batches[0] != batches[1], "data-parallel ranks read different files"


def _loader(corpus: Path, rank: int) -> HuggingFaceTextDataLoader:
    return HuggingFaceTextDataLoader.Config(dataset=STDLIB_CORPUS).build(
        dp_world_size=2,
        dp_rank=rank,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=str(corpus / "tokenizer")),
        seq_len=64,
        local_batch_size=2,
    )
