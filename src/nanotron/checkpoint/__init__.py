"""Checkpoints: boxes of global tensors in safetensors files, and an index written last.

What the trainer calls, module by module (only ``write`` and ``read`` import torch):

    write.Saver(checkpoints_path, rank, world, store, keep_last_n=…, keep_every=…)
        .save(step, pieces, state, texts)   copies to host memory, returns; files are written by a thread
        .poll()                             lines about saves that failed since the last call, the same on every rank
        .wait()                             blocks until the save in flight is over; whether the last save is complete
        .last_complete                      the newest step this saver has completed, or None
    read.load(checkpoint, pieces)           fills the pieces' tensors, whatever the layout that saved them
    resume.find_resume(…)                   which checkpoint a run continues from, by one process (``nanotron check``)
    resume.agree_resume(…)                  the same for all ranks, after every file's checksums were verified
    resume.newest_complete(checkpoints_path)
    documents.read_state(checkpoint)        state.json
    compare.check_model / check_data        refuse another model, or other data, with the differences
    compare.changed_keys(checkpoint, config) what else of the config is not as it was
    verify.refuse_damage(checkpoint, …)     the one check before anything is read: schemas, boxes, checksums

``checkpoint`` is the folder of one step, ``checkpoints_path`` the folder that holds the steps; both may be URLs.
The format is described byte for byte in docs/checkpoint-format.md.
"""
