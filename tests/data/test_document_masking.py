"""With document masking, from files to losses, no document hears of another; without it, later ones do."""

import pytest
import torch

from nanotron.batch import IGNORED_LABEL
from nanotron.data.feed import Feed
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training
from tests.data.fixtures import make_config, write_nanoset


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
