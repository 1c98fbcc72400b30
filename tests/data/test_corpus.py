"""The embedded corpus: prepared once, whole, by one of many processes."""

import logging
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from nanotron.data.sources.token_files import open_token_files
from nanotron.data.tokenize import corpus
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, load_tokenizer, vocab_size


@pytest.fixture
def small_corpus(monkeypatch, tmp_path):
    """The first files of the standard library only, in a new working directory."""
    files = corpus.corpus_files()[:40]
    monkeypatch.setattr(corpus, "corpus_files", lambda: files)
    monkeypatch.chdir(tmp_path)
    return files


def test_the_corpus_is_the_standard_library_without_tests_tables_and_packages():
    files = corpus.corpus_files()
    assert any(path.name == "dataclasses.py" for path in files)
    assert not [path for path in files if {"test", "tests", "encodings", "site-packages"} & set(path.parts)]
    assert files == sorted(files)


def test_the_prepared_corpus_decodes_to_its_files_and_has_the_promised_vocabulary(small_corpus):
    folder = corpus.prepare_corpus()
    assert folder == corpus.CORPUS_FOLDER == "data/python-bpe4096"
    tokenizer = load_tokenizer(folder)
    assert vocab_size(tokenizer) == corpus.VOCAB_SIZE
    (tokens,) = open_token_files(folder)
    assert len(tokens.document_ends) == len(small_corpus)
    first = tokens.read(0, int(tokens.document_ends[0])).tolist()
    assert first[-1] == tokenizer.token_to_id(END_OF_TEXT)
    assert tokenizer.decode(first[:-1]) == small_corpus[0].read_text()
    assert sorted(os.listdir("data")) == ["python-bpe4096", "python-bpe4096.lock"]


def prepare_and_count(folder, log):
    original = corpus._prepare

    def prepare(folder):
        with open(log, "a") as file:
            file.write("prepared\n")
        original(folder)

    corpus._prepare = prepare
    corpus.prepare_corpus(folder)
    assert open_token_files(folder)[0].num_tokens > 0


def test_of_many_processes_one_prepares_and_all_find_it(small_corpus):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=prepare_and_count, args=("data/corpus", "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert Path("log").read_text() == "prepared\n"


def test_an_interrupted_preparation_is_not_taken_for_the_corpus(small_corpus, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="nanotron")

    def stop(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(corpus, "save_tokenizer", stop)
        with pytest.raises(KeyboardInterrupt):
            corpus.prepare_corpus("data/corpus")
    assert not corpus.is_prepared("data/corpus")
    corpus.prepare_corpus("data/corpus")
    assert corpus.is_prepared("data/corpus")
    assert caplog.text.count("preparing the embedded corpus in data/corpus, once") == 2
    corpus.prepare_corpus("data/corpus")
    assert caplog.text.count("preparing the embedded corpus") == 2


def test_waiting_for_another_process_is_said_with_its_name(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(corpus, "SOON_S", 0.05)
    monkeypatch.setattr(corpus, "SAY_S", 0.1)
    caplog.set_level(logging.INFO, logger="nanotron")
    path, waiting = f"{tmp_path}/corpus.lock", threading.Event()

    def wait() -> None:
        with corpus.file_lock(path):
            waiting.set()

    with corpus.file_lock(path):
        thread = threading.Thread(target=wait)
        thread.start()
        deadline = time.monotonic() + 30
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not waiting.is_set()
    thread.join()
    assert waiting.is_set()
    expected = f"waiting for process {os.getpid()} on {socket.gethostname()}, which holds {path}, for 0 s"
    assert caplog.messages[:2] == [expected] * 2
    assert [record.levelname for record in caplog.records[:2]] == ["INFO", "WARNING"]  # at first, once for all ranks
