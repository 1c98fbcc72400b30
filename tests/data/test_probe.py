"""What `nanotron check` learns about the data without torch."""

import subprocess
import sys

import pytest

from nanotron.data.probe import dataset_problems, datasets_of, model_vocab_size, too_many_files, vocabulary_problems
from nanotron.data.sources.fingerprint import fingerprint_changes, fingerprint_files
from nanotron.errors import ConfigError
from tests.data.fixtures import make_config, random_documents, write_nanoset
from tests.data.test_feed import make_feed, stage


def probe_stages(config):
    """All that is found about the data, as `nanotron check` asks."""
    of_datasets = [problem for found in datasets_of(config) for problem in dataset_problems(found)]
    return [*of_datasets, *vocabulary_problems(config)]


def problems(folder, **changes):
    dataset = changes.pop("dataset", {})
    return [
        str(problem) for problem in probe_stages(make_config(data_stages=[stage(folder, dataset=dataset)], **changes))
    ]


def test_good_data_has_no_problem(nanoset):
    assert problems(str(nanoset)) == []
    assert problems(None) == []


def test_every_folder_with_a_problem_is_named_by_its_key(nanoset, tmp_path):
    found = problems([str(nanoset), str(tmp_path / "absent"), str(tmp_path / "x")], dataset={"dataset_weights": [1, 2]})
    assert [line.split(": ")[0] for line in found] == [
        "data_stages[0].data.dataset.dataset_weights",
        "data_stages[0].data.dataset.dataset_folder[1]",
        "data_stages[0].data.dataset.dataset_folder[2]",
    ]
    assert "has 2 in its list, but the folders of dataset_folder are 3" in found[0]


def test_many_folders_with_one_mistake_are_one_line(tmp_path):
    (line,) = problems([str(tmp_path / f"x{number}") for number in range(146)])
    assert line.startswith(f"data_stages[0].data.dataset.dataset_folder[0]: dataset folder '{tmp_path}/x0' does not")
    names = ", ".join(str(tmp_path / f"x{number}") for number in range(1, 6))
    assert line.endswith(f"; and the same of 145 more: {names}, …")


def test_more_files_than_a_rank_may_open_get_a_line(nanoset):
    config = make_config(data_stages=[stage([str(nanoset)])])
    count = len(list(nanoset.glob("*.ds")))
    assert too_many_files(config, most=2 * count) == []
    (problem,) = too_many_files(config, most=2 * count - 1)
    assert str(problem).startswith(
        f"data_stages[0].data.dataset.dataset_folder: {count} files of tokens, with their indices {2 * count} that a "
        f"rank may have open at once, of {2 * count - 1} that this machine allows; raise that (ulimit -Hn)"
    )


def test_a_truncated_index_is_found_before_the_run(tmp_path):
    path = write_nanoset(tmp_path / "a", [[1] * 10, [2] * 10])
    index = path.with_name(path.name + ".index")
    index.write_bytes(index.read_bytes()[:8])
    (line,) = problems(str(tmp_path / "a"))
    assert "the last document ends at token 10 (byte 0)" in line


def test_a_data_set_shorter_than_a_window_is_found(tmp_path):
    write_nanoset(tmp_path / "a", [[1] * 8])
    (line,) = problems(str(tmp_path / "a"))
    assert "holds 8 tokens, fewer than one window of tokens.sequence_length + 1 = 9" in line


def test_the_vocabulary_comes_from_the_config_then_from_the_tokenizer(nanoset):
    assert model_vocab_size(make_config()) == 257
    assert model_vocab_size(make_config(model_config={"vocab_size": None})) == 4096
    unknown = make_config(model_config={"vocab_size": None}, data_stages=[stage(str(nanoset))])
    with pytest.raises(ConfigError, match="set vocab_size or tokenizer_name_or_path"):
        model_vocab_size(unknown)
    no_tokenizer = {"tokenizer_name_or_path": str(nanoset)}
    unusable = make_config(model_config={"vocab_size": None}, data_stages=[stage(str(nanoset))], tokenizer=no_tokenizer)
    assert [problem.path for problem in probe_stages(unusable)] == [("tokenizer", "tokenizer_name_or_path")]
    (line,) = [str(problem) for problem in probe_stages(make_config(model_config={"vocab_size": 4000}))]
    assert line == (
        "model.model_config.vocab_size: 4000 is smaller than the tokenizer's vocabulary of 4096; set at least 4096"
    )


def test_a_tokenizer_folder_without_one_is_a_problem_whatever_tells_the_vocabulary(nanoset, tmp_path):
    (tmp_path / "empty").mkdir()
    config = make_config(tokenizer={"tokenizer_name_or_path": str(tmp_path / "empty")})
    assert config.model.model_config.vocab_size is not None
    (line,) = [str(problem) for problem in probe_stages(config)]
    assert line.startswith(f"tokenizer.tokenizer_name_or_path: {tmp_path / 'empty'} holds no tokenizer.json; name a")


def test_a_function_that_the_users_file_lacks_is_a_problem_and_the_file_is_not_run(tmp_path):
    path = tmp_path / "own.py"

    def problem(reference, code="from os import sep as cut\ndef rows(): ...\nloop = rows\nraise SystemExit"):
        path.write_text(code)
        dataset = {"python": reference}
        stages = [{"name": "a", "start_training_step": 1, "data": {"dataset": dataset}}]
        return [str(problem) for problem in probe_stages(make_config(data_stages=stages))]

    assert problem(f"{path}:rows") == problem(f"{path}:loop") == problem(f"{path}:cut") == []
    assert problem(f"{path}:anything", "from elsewhere import *") == []
    key = f"data_stages[0].data.dataset.python: {path}:row"
    assert problem(f"{path}:row") == [f"{key} is refused: {path} has no function row; name one of rows"]
    assert problem(f"{path}:row", "") == [f"{key} is refused: {path} has no function row; define it there"]
    (line,) = problem(f"{path}:row", "def row(:")
    assert line.startswith(f"{key} cannot be read: {path} is not Python (")


def test_a_module_or_a_function_in_it_that_is_not_there_is_a_problem_and_nothing_of_it_is_run(tmp_path, monkeypatch):
    package = tmp_path / "outer" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("raise SystemExit")
    (package / "own.py").write_text("def rows(): ...\nraise SystemExit")
    (package / "lazy.py").write_text("def __getattr__(name): ...\nraise SystemExit")
    monkeypatch.chdir(tmp_path / "outer")
    key = "data_stages[0].data.dataset.python: "

    def problem(reference):
        stages = [{"name": "a", "start_training_step": 1, "data": {"dataset": {"python": reference}}}]
        return [str(line).removeprefix(key) for line in probe_stages(make_config(data_stages=stages))]

    assert problem("outer.inner.own:rows") == [
        "outer.inner.own:rows names no module: there is no outer; install it, put its folder into PYTHONPATH, or write "
        "file.py:function"
    ]
    assert problem("inner.own:rows")[0].endswith("there is no inner; to use the file here, write inner/own.py:function")
    monkeypatch.syspath_prepend(tmp_path)
    assert problem("outer.inner.own:rows") == problem("outer.inner.lazy:rows") == problem("os.path:join") == []
    assert problem("outer.absent.own:rows")[0].startswith("outer.absent.own:rows names no module: there is no outer.ab")
    assert problem("outer.inner.own:row") == [
        f"outer.inner.own:row is refused: {package}/own.py has no function row; name one of rows"
    ]


def test_one_weight_and_one_mapping_of_arguments_is_needed_for_each_source():
    own = "examples/custom_data.py:counting"
    hub = {"hf_dataset_or_datasets": ["a", "b"], "hf_dataset_splits": ["train", "test"], "dataset_weights": [1, 2, 3]}

    def found(dataset):
        stages = [{"name": "a", "start_training_step": 1, "data": {"dataset": dataset}}]
        lines = [str(problem) for problem in probe_stages(make_config(data_stages=stages))]
        return [line.removeprefix("data_stages[0].data.dataset.") for line in lines if line.startswith("data_stages")]

    assert found(hub) == [
        "dataset_weights: has 3 in its list, but the data sets (names × splits) are 4; give one for each"
    ]
    assert found({**hub, "dataset_weights": [1, 1, 1, 0]})[0].startswith("dataset_weights: dataset_weights[3]=0.0")
    assert found({**hub, "dataset_weights": [1, 1, 1, 2], "streaming": True}) == []
    (line,) = found({"hf_dataset_or_datasets": []})
    assert line == "hf_dataset_or_datasets: names no data set; name at least one, and a split of it"
    (line,) = found({"hf_dataset_or_datasets": ["a", "b", "a"]})
    assert line == "hf_dataset_or_datasets: a is named twice; name it once, and say its share with dataset_weights"
    assert found({"python": [own, own], "arguments": [{"step": 1}]}) == [
        "arguments: has 1 in its list, but the functions of python are 2; give one for each"
    ]
    (line,) = found({"python": [own, "absent.py:f"], "arguments": {}, "dataset_weights": [1, 2]})
    assert line.startswith("python[1]: absent.py:f names no file")


def test_probing_imports_neither_torch_nor_transformers(nanoset):
    script = (
        "import sys\nfrom nanotron.config import get_config_from_dict\nimport nanotron.data.probe\n"
        "import nanotron.data.open_stages, nanotron.data.tokenize.corpus\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def fingerprints(folders):
    feed = make_feed(make_config(data_stages=[stage(folders)]))
    feed.close()
    return feed.fingerprints()


def test_fingerprints_tell_which_file_changed_and_not_where_it_lies(tmp_path):
    write_nanoset(tmp_path / "a", random_documents(30, seed=1))
    write_nanoset(tmp_path / "moved", random_documents(30, seed=1))
    write_nanoset(tmp_path / "longer", random_documents(31, seed=1))
    write_nanoset(
        tmp_path / "other",
        [[token + 1 for token in document] for document in random_documents(30, seed=1, vocab_size=256)],
    )
    saved = fingerprints(str(tmp_path / "a"))
    assert fingerprint_changes(saved, saved) == []
    assert fingerprint_changes(saved, fingerprints(str(tmp_path / "moved"))) == []
    (line,) = fingerprint_changes(saved, fingerprints(str(tmp_path / "longer")))
    assert line.startswith(f"stage 'stable' source 0 ({tmp_path / 'longer'}): 00000_unshuffled.ds was ")
    (line,) = fingerprint_changes(saved, fingerprints(str(tmp_path / "other")))
    assert "hash was" in line
    (line,) = fingerprint_changes(saved, fingerprints([str(tmp_path / "a"), str(tmp_path / "moved")]))
    assert line == "stage 'stable' had 1 sources and now has 2"


@pytest.mark.parametrize(("place", "seen"), [(0, True), (2**20, False), (3 * 2**20 - 1, True)])
def test_the_first_and_the_last_mebibyte_are_hashed_and_no_more_is_read(tmp_path, place, seen):
    path = tmp_path / "tokens.ds"
    path.write_bytes(bytes(3 * 2**20))
    before = fingerprint_files([str(path)])
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    assert (fingerprint_files([str(path)]) != before) == seen


def test_keys_that_a_data_set_cannot_honour_are_problems(nanoset, tmp_path):
    hub = {"hf_dataset_or_datasets": {"some/name": 0.5}, "streaming": True}
    stages = [
        {"name": "a", "start_training_step": 1, "data": {"dataset": hub, "shuffle_block": 8}, "validation": hub},
        {"name": "b", "start_training_step": 2, "data": {"dataset": {"python": "absent.py:f"}}},
    ]
    found = [str(problem).split(": ")[0] for problem in probe_stages(make_config(data_stages=stages))]
    assert sorted(set(found)) == [
        "data_stages[0].data.dataset.hf_dataset_or_datasets",
        "data_stages[0].validation.hf_dataset_or_datasets",
        "data_stages[0].validation.streaming",
        "data_stages[1].data.dataset.python",
        "tokenizer.tokenizer_name_or_path",
    ]
