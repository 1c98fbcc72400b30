"""Weights from other programs, and for them, tensor by tensor on the CPU.

    folders.kind_of(path), read_model_config(path)     what a folder is, told without torch
    sources.open_weights(path, config)     weights of any folder we can read, box by box
    sources.load_weights(path, pieces, config)
    importing.import_weights(source, target)     a Hugging Face or Hugging Face Nanotron model -> our checkpoint
    exporting.export_hf(checkpoint, target)      our checkpoint -> a Hugging Face model folder

Neither transformers nor the original layout is needed; memory is bounded by one tensor.
"""
