"""Checkpoints: where, when, how many, and what a run starts from."""

from __future__ import annotations

from nanotron.config.compat.retired import CHECKPOINTS, S3_UPLOAD, retires
from nanotron.config.keys import Derived, Float, Int, PathOrUrl, derived, key, required, section


@section
@retires(CHECKPOINTS)
class CheckpointsArgs:
    """Saving and resuming."""

    checkpoints_path: Derived[PathOrUrl] = derived("Folder of the checkpoints.", "runs/<general.project>", min_length=1)
    checkpoint_interval: Int = key(1000, "Steps from one checkpoint to the next.", gt=0)
    save_initial_state: bool = key(False, "Also save before the first step.")
    save_final_state: bool = key(True, "Also save after the last step.")
    resume_checkpoint_path: PathOrUrl | None = key(
        None,
        "What the first start takes: `auto` or null, nothing; a path, that step or the newest one there. Once the run"
        " has a step of its own, it goes on from the newest of those; with `never` that is refused.",
    )
    load_lr_scheduler: bool = key(
        True, "On the first start, from such a path, also restore the step and the data position."
    )
    load_optimizer: bool = key(True, "On the first start, from such a path, also restore the optimizer's state.")
    keep_last_n: Int | None = key(None, "Newest checkpoints to keep; null keeps all.", gt=0)
    keep_every: Int | None = key(None, "Steps whose multiples are kept whatever keep_last_n says.", gt=0)
    interval_minutes: Float | None = key(
        None, "Minutes after which a checkpoint is saved, beside checkpoint_interval; null is never.", gt=0, le=1e7
    )
    verify: bool = key(True, "Verify every file's checksum before loading.")
    preempt_grace_s: Float = key(
        60.0, "Seconds that a preempted run (SIGTERM, SIGINT, SIGUSR1) has until it is saved.", gt=0, le=1e7
    )


@section
@retires(S3_UPLOAD)
class S3UploadArgs:
    """Copies of the checkpoints, uploaded behind training."""

    upload_s3_path: PathOrUrl = required("URL of the folder that they go to.", example="s3://bucket/run", min_length=1)
    remove_after_upload: bool = required("Keep them only there; checkpoints_path then stays empty.", example=True)
