"""Where documents end in data without an index of them: after the tokenizer's end token, else after the model's.

A mask that finds no document does nothing, and nothing shows it. So masking is refused for data of which no token is
known that ends documents, and for files in which there is none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from nanotron.config import Config, NanosetDatasetsArgs
from nanotron.data.order.windows import TokenFile
from nanotron.data.probe import DataProblem, datasets_of
from nanotron.data.sources.remote import local_folder
from nanotron.data.sources.token_files import open_token_files
from nanotron.data.tokenize.tokenizer import open_tokenizer, tokenizer_file
from nanotron.errors import ConfigError
from nanotron.logging import get_logger

logger = get_logger(__name__)

BLOCK = 2**14  # tokens that are looked at together
MOST_BLOCKS = 64  # of one data set, evenly spread


def end_token(config: Config, name: str, tokenizer: str | None) -> int | None:
    """The token that ends documents in the data set `name`, which has no index of them; None: no documents are known.

    The tokenizer says it. The model's eos_token_id (of several the first), which may be a mere default, is asked only
    where documents are masked. Raises ConfigError where they are, and neither knows.
    """
    model = config.model.model_config
    end = None if tokenizer is None else _end_of(tokenizer, name, is_needed=model._use_doc_masking)
    if end is not None or not model._use_doc_masking:
        return end
    if model.eos_token_id is None:
        raise ConfigError(
            f"{name} has no index of its documents, and neither a tokenizer nor model.model_config.eos_token_id says "
            "which token ends one, so _use_doc_masking: true would find none; name the tokenizer, set eos_token_id, or "
            "set _use_doc_masking to false"
        )
    return model.eos_token_id[0] if isinstance(model.eos_token_id, list) else model.eos_token_id


def _end_of(tokenizer: str, name: str, *, is_needed: bool) -> int | None:
    """The end token of a tokenizer; one that is not to be had matters only where it is needed."""
    try:
        return open_tokenizer(tokenizer).end
    except ConfigError as error:
        if is_needed or os.path.exists(tokenizer):
            raise
        logger.info(f"{name} has no index of its documents, and they are not told apart: {error}")
        return None


def end_token_of_files(
    config: Config, dataset: NanosetDatasetsArgs, folder: str, files: Sequence[TokenFile]
) -> int | None:
    """The token that ends documents in those of a folder's files that have no index; None where all have one."""
    if all(file.knows_documents for file in files):
        return None
    inside = tokenizer_file(folder) if os.path.isdir(folder) else None
    return end_token(config, folder, dataset.tokenizer_name or config.tokenizer.tokenizer_name_or_path or inside)


def mask_problems(config: Config) -> Iterator[DataProblem]:
    """The folders in which `_use_doc_masking` would find no document, as far as evenly spread tokens tell."""
    if not config.model.model_config._use_doc_masking:
        return
    for path, dataset, _ in datasets_of(config):
        if not isinstance(dataset, NanosetDatasetsArgs):
            continue
        for number in range(len(dataset.dataset_folder)):
            problem = _mask_problem(config, dataset, number)
            if problem is not None:
                yield DataProblem((*path, "dataset_folder", number), problem)


def _mask_problem(config: Config, dataset: NanosetDatasetsArgs, number: int) -> str | None:
    try:
        folder = local_folder(dataset, number)
        files = open_token_files(folder, token_bytes=dataset.token_size_in_bytes)
    except (ConfigError, OSError):
        return None  # reported with what else is wrong with the folder
    try:
        end = end_token_of_files(config, dataset, folder, files)
        if end is None or _occurs(end, [file for file in files if not file.knows_documents]):
            return None
    except ConfigError as error:
        return str(error)
    return (
        f"{folder}: token {end}, which ends documents, is not among the tokens looked at, so _use_doc_masking: true "
        "would find none; name the tokenizer with which the files were written, set model.model_config.eos_token_id, "
        "or set _use_doc_masking to false"
    )


def _occurs(token: int, files: Sequence[TokenFile]) -> bool:
    """Whether the token is met in blocks that are evenly spread over the files."""
    blocks = max(1, MOST_BLOCKS // len(files))
    return any(
        bool((file.read(first, min(first + BLOCK, file.num_tokens)) == token).any())
        for file in files
        for first in range(0, file.num_tokens, max(BLOCK, -(-file.num_tokens // blocks)))
    )
