"""The validation loss is one number, whatever the layout, and training does not notice it."""

from math import log, prod

import pytest
import torch

from nanotron.data.feed import Feed
from nanotron.parallel.mesh import Mesh
from nanotron.training.evaluate import validation_loss
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes, parameter_specs, tied_stages
from tests.data.fixtures import make_config, random_documents, write_nanoset

EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.5}


def make_run_config(folder, held_out, layout, *, limit):
    dp, tp, pp, cp, *ep = layout
    model = {"num_hidden_layers": 2, "_use_doc_masking": True, "is_qwen2_config": True}
    model |= {"moe_config": EXPERTS} if ep else {}
    parallelism = {"dp": dp, "tp": tp, "pp": pp, "context_parallel_size": cp}
    parallelism |= {"expert_parallel_size": ep[0]} if ep else {}
    stages = [
        {
            "name": "a",
            "start_training_step": 1,
            "data": {"dataset": {"dataset_folder": folder}},
            "validation": {"dataset_folder": held_out},
        }
    ]
    return make_config(
        data_stages=stages, parallelism=parallelism,
        model_config=model, dtype="float64",
        micro_batch_size=2, batch_accumulation_per_replica=4 // dp, limit_val_batches=limit, val_check_interval=1,
    )  # fmt: skip


def validate_and_train(rank, world, folder, held_out, layout, limit, validates, optimizer=None):
    """Validation losses before two updates, and the updates' training losses; with these keys of the optimizer."""
    config = make_run_config(folder, held_out, layout, limit=limit)
    vars(config.optimizer).update(optimizer or {})
    mesh = Mesh(mesh_axes(config), rank)
    if world > 1:
        reductions = {spec.reduce_axes(mesh) for spec in parameter_specs(config).values()}
        mesh.create_groups(reductions, [stage for stages in tied_stages(config).values() for stage in stages])
    training = Training(config, mesh, "cpu")
    training.initialize()
    feed = Feed(config, mesh, device=torch.device("cpu"))
    losses, validations = [], []
    for update in (1, 2):
        if validates:
            found = validation_loss(training, feed.validation(update), mesh)
            validations.append(None if found is None else found.item())
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


def test_the_feed_says_which_batch_of_validation_is_looked_at(tmp_path):
    folders = str(tmp_path / "a"), str(tmp_path / "b")
    for name in ("a", "b"):
        write_nanoset(tmp_path / name, random_documents(30, seed=1))
    for dp in (1, 2):
        config = make_run_config(*folders, (dp, 1, 1, 1), limit=2)
        feed = Feed(config, Mesh(mesh_axes(config), dp - 1), device=torch.device("cpu"))
        assert [feed.validation_batch for _ in feed.validation(1)] == [1, 2]
        assert feed.validation_batch is None
        feed.close()


def test_validation_is_of_the_average_of_the_weights_on_every_layout_and_leaves_training_alone(pool, tmp_path):
    write_nanoset(tmp_path / "a", random_documents(60, seed=1))
    write_nanoset(tmp_path / "b", random_documents(17, seed=2))
    folders = str(tmp_path / "a"), str(tmp_path / "b")
    (plain,) = pool.run(1, validate_and_train, *folders, (1, 1, 1, 1), 1, True)
    (alone,) = pool.run(1, validate_and_train, *folders, (1, 1, 1, 1), 1, True, {"ema_decay": 0.5})
    assert alone[1] == plain[1]
    assert alone[0][0] == plain[0][0]
    assert alone[0][1] != plain[0][1]
    for layout, zero_stage in [((2, 1, 1, 1), 1), ((2, 1, 1, 1), 3), ((1, 2, 2, 1), 1)]:
        settings = {"ema_decay": 0.5, "zero_stage": zero_stage}
        for validations, losses in pool.run(prod(layout), validate_and_train, *folders, layout, 1, True, settings):
            assert validations == pytest.approx(alone[0], rel=1e-9)
            assert losses == pytest.approx(alone[1], rel=1e-9)


def test_replicas_that_share_experts_validate_together_though_one_runs_out_of_rows(pool, tmp_path):
    """Of 5 rows, the last batch of 4 has one, on the first replica: the other still takes part in each exchange."""
    write_nanoset(tmp_path / "a", random_documents(60, seed=1))
    write_nanoset(tmp_path / "b", [list(range(5 * 8 + 1))])
    folders = str(tmp_path / "a"), str(tmp_path / "b")
    (alone,) = pool.run(1, validate_and_train, *folders, (1, 1, 1, 1, 1), 0, True)
    (silent,) = pool.run(1, validate_and_train, *folders, (1, 1, 1, 1, 1), 0, False)
    assert alone[1] == silent[1]
    for layout in [(2, 1, 1, 1, 2), (2, 2, 1, 1, 2)]:
        for validations, losses in pool.run(prod(layout[:4]), validate_and_train, *folders, layout, 0, True):
            assert validations == pytest.approx(alone[0], rel=1e-12)
            assert losses == pytest.approx(alone[1], rel=1e-12)
    assert alone[0][0] == pytest.approx(log(257), abs=0.1), "the loss of tokens alone, without those of routers"
