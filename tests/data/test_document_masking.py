"""With document masking, from files to losses, no document hears of another; without it, later ones do."""

import numpy as np
import pytest
import torch
import yaml

from nanotron.batch import IGNORED_LABEL, Span
from nanotron.check import check
from nanotron.data.document_ends import mask_problems
from nanotron.data.feed import Feed
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, save_tokenizer, train_bpe
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training
from tests.data.fixtures import make_config, random_documents, write_nanoset


def loss_of_last_document(folder, first_document, *, masking):
    """The loss over the last of three documents in a row that begins with `first_document`."""
    write_nanoset(folder, [first_document, [40, 41, 42, 43], [7, 8, 9, 10, 11, 12]])
    stages = [{"name": "a", "start_training_step": 1, "data": {"dataset": {"dataset_folder": str(folder)}}}]
    model = {"is_qwen2_config": True, "_use_doc_masking": masking, "num_hidden_layers": 2}
    config = make_config(
        data_stages=stages, model_config=model, dtype="float64", sequence_length=14, micro_batch_size=1,
        batch_accumulation_per_replica=1,
    )  # fmt: skip
    feed = Feed(config, Mesh(), device=torch.device("cpu"))
    (batch,) = feed.step(1).microbatches
    feed.close()
    training = Training(config, Mesh(), "cpu")
    training.initialize()
    labels = batch.labels.clone()
    labels[:, :9] = IGNORED_LABEL
    return training.pipeline.evaluate([batch._replace(labels=labels)])["lm"].item()


@pytest.mark.parametrize("masking", [True, False])
def test_changing_one_document_changes_another_only_without_masking(tmp_path, masking):
    before = loss_of_last_document(tmp_path / "a", [1, 2, 3, 4, 5], masking=masking)
    after = loss_of_last_document(tmp_path / "b", [101, 102, 103, 104, 105], masking=masking)
    assert (before == after) == masking


END = 2  # the default of eos_token_id
DOCUMENTS = [[token for token in document if token != END] + [END] for document in random_documents(60)]
TOKENS = np.concatenate([np.array(document, "<u2") for document in DOCUMENTS])


def masked(dataset, **changes):
    """A config that masks the documents of a data set."""
    stages = [{"name": "a", "start_training_step": 1, "data": {"dataset": dataset}}]
    model = {"_use_doc_masking": True, **changes.pop("model_config", {})}
    return make_config(data_stages=stages, model_config=model, **changes)


def batches(config):
    """Everything that three steps are fed."""
    feed = Feed(config, Mesh(), device=torch.device("cpu"))
    found = [batch for step in (1, 2, 3) for batch in feed.step(step).microbatches]
    feed.close()
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in found]


@pytest.mark.parametrize("kind", [".npy", ".bin", ".ds"])
def test_documents_of_files_without_an_index_end_with_the_end_token_and_are_masked_alike(tmp_path, kind):
    path = write_nanoset(tmp_path / "indexed", DOCUMENTS)
    if kind == ".npy":
        np.save(tmp_path / "tokens.npy", TOKENS)
    else:
        TOKENS.tofile(tmp_path / f"tokens{kind}")
    expected = batches(masked({"dataset_folder": str(path.parent)}))
    (tmp_path / "flat").mkdir()
    (tmp_path / f"tokens{kind}").rename(tmp_path / "flat" / f"tokens{kind}")
    flat = masked({"dataset_folder": str(tmp_path / "flat"), "token_size_in_bytes": 2})
    assert list(mask_problems(flat)) == []
    assert batches(flat) == expected
    assert any(spans is not None for *_, spans in expected)


def test_rows_of_a_python_function_are_masked_at_the_end_token(tmp_path):
    (tmp_path / "own.py").write_text("def rows(): return [[1, 2, 3, 4, 2, 6, 7, 8, 2]] * 9")
    dataset = {"python": f"{tmp_path}/own.py:rows"}
    tokens, labels, positions, spans = batches(masked(dataset))[0]
    assert (tokens[0], positions[0]) == ([1, 2, 3, 4, 2, 6, 7, 8], [0, 1, 0, 1, 2, 0, 1, 2])
    assert labels[0] == [2, -100, 4, 2, -100, 7, 8, 2]
    assert spans[0] == (Span(0, 2, 0, 2), Span(2, 5, 2, 5), Span(5, 8, 5, 8))
    with pytest.raises(ConfigError, match=r"own.py:rows has no index of its documents, and neither a tokenizer nor"):
        batches(masked(dataset, model_config={"eos_token_id": None}))


def test_a_mask_that_would_find_no_document_is_refused_before_the_run(tmp_path):
    np.save(tmp_path / "a.npy", np.where(TOKENS == END, 3, TOKENS))
    dataset = {"dataset_folder": [str(tmp_path)]}
    (line,) = map(str, mask_problems(masked(dataset)))
    assert line.startswith(
        f"data_stages[0].data.dataset.dataset_folder[0]: {tmp_path}: token 2, which ends documents, is"
    )
    (line,) = map(str, mask_problems(masked(dataset, model_config={"eos_token_id": None})))
    assert "neither a tokenizer nor model.model_config.eos_token_id says which token ends one" in line
    assert list(mask_problems(masked(dataset, model_config={"_use_doc_masking": False}))) == []
    save_tokenizer(train_bpe(["ab"], 257), str(tmp_path), eos=END_OF_TEXT)  # token 0 ends its documents
    assert list(mask_problems(masked(dataset))) == []
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(masked(dataset, tokenizer={}).to_dict()))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"dataset_folder.*token 2, which ends documents, is not among the tokens"):
        check(tmp_path / "config.yaml")
