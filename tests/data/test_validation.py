"""The validation loss is one number, whatever the layout, and training does not notice it."""

from math import prod

import pytest
import torch

from nanotron.data.feed import Feed
from nanotron.parallel.mesh import Mesh
from nanotron.training.evaluate import validation_loss
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes, tied_stages
from tests.data.fixtures import make_config, random_documents, write_nanoset


def make_run_config(folder, held_out, layout, *, limit):
    dp, tp, pp, cp = layout
    model = {"num_hidden_layers": 2, "_use_doc_masking": True, "is_qwen2_config": True}
    stages = [
        {
            "name": "a",
            "start_training_step": 1,
            "data": {"dataset": {"dataset_folder": folder}},
            "validation": {"dataset_folder": held_out},
        }
    ]
    return make_config(
        data_stages=stages, parallelism={"dp": dp, "tp": tp, "pp": pp, "context_parallel_size": cp},
        model_config=model, dtype="float64",
        micro_batch_size=2, batch_accumulation_per_replica=4 // dp, limit_val_batches=limit, val_check_interval=1,
    )  # fmt: skip


def validate_and_train(rank, world, folder, held_out, layout, limit, validates):
    """Validation losses before two updates, and the updates' training losses."""
    config = make_run_config(folder, held_out, layout, limit=limit)
    mesh = Mesh(mesh_axes(config), rank)
    if world > 1:
        mesh.create_groups(tied_stages=[stage for stages in tied_stages(config).values() for stage in stages])
    training = Training(config, mesh, "cpu")
    training.initialize()
    feed = Feed(config, mesh, device=torch.device("cpu"))
    losses, validations = [], []
    for update in (1, 2):
        if validates:
            validations.append(validation_loss(training, feed.validation(update), mesh))
        losses.append(training.step(update, feed.step(update).microbatches).read().lm_loss)
    feed.close()
    return validations, losses


@pytest.mark.parametrize("limit", [0, 1])
def test_the_validation_loss_is_the_same_on_every_layout_and_leaves_training_alone(pool, tmp_path, limit):
    write_nanoset(tmp_path / "a", random_documents(60, seed=1))
    write_nanoset(tmp_path / "b", random_documents(17, seed=2))
    folders = str(tmp_path / "a"), str(tmp_path / "b")
    (alone,) = pool.run(1, validate_and_train, *folders, (1, 1, 1, 1), limit, True)
    (silent,) = pool.run(1, validate_and_train, *folders, (1, 1, 1, 1), limit, False)
    assert alone[1] == silent[1]
    assert alone[0][0] != alone[0][1]
    for layout in [(2, 1, 1, 1), (1, 2, 2, 1), (1, 1, 1, 2)]:
        world = prod(layout)
        for validations, losses in pool.run(world, validate_and_train, *folders, layout, limit, True):
            assert validations == pytest.approx(alone[0], rel=1e-9)
            assert losses == pytest.approx(alone[1], rel=1e-9)
