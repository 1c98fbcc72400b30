"""Tokenize a data set into Nanosets, with the flags that scripts of Hugging Face's Nanotron use.

    python tools/preprocess_data.py --tokenizer-name-or-path TOKENIZER --output-folder FOLDER --n-tasks 8 \\
        hf --dataset NAME --column text --split train
    python tools/preprocess_data.py --tokenizer-name-or-path TOKENIZER --output-folder FOLDER --eos-token "</s>" \\
        jsonl --dataset FOLDER --column text --glob-pattern "*.jsonl"

The same code as `nanotron tokenize`, which also trains a tokenizer and reads more formats.
"""

from __future__ import annotations

import argparse
import os
import sys

from nanotron.config.paths import expanded
from nanotron.data.sources.documents import HubDataset
from nanotron.data.tokenize.command import run_tokenize
from nanotron.data.tokenize.workers import Job
from nanotron.errors import ConfigError
from nanotron.launch.streams import open_streams


def parse_arguments() -> argparse.Namespace:
    """The options and one of the sub-commands hf and jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer-name-or-path", required=True, help="a tokenizer.json, its folder, or a name")
    parser.add_argument("--output-folder", required=True, help="where to write the Nanoset")
    parser.add_argument("--eos-token", help="token appended to every document (default: none)")
    parser.add_argument("--n-tasks", type=int, default=8, help="processes that tokenize (default: 8)")
    parser.add_argument("--logging-dir", help="accepted and unused: progress is kept in the output folder")
    commands = parser.add_subparsers(dest="readers", required=True)
    hub = commands.add_parser("hf", help="a Hugging Face data set")
    hub.add_argument("--dataset", required=True, help="name, or folder written by save_to_disk")
    hub.add_argument("--column", default="text", help="column that holds the text (default: text)")
    hub.add_argument("--split", default="train", help="split of the data set (default: train)")
    lines = commands.add_parser("jsonl", help="JSONL files")
    lines.add_argument("--dataset", required=True, help="a file or a folder")
    lines.add_argument("--column", default="text", help="key that holds the text (default: text)")
    lines.add_argument("--glob-pattern", help="which files of the folder (default: all JSONL and parquet files)")
    return parser.parse_args()


def main() -> None:
    """Exit code 2 and one line for the user's mistakes."""
    open_streams()
    arguments = parse_arguments()
    source = arguments.dataset
    if arguments.readers == "jsonl" and arguments.glob_pattern:
        source = os.path.join(source, arguments.glob_pattern)
    try:
        job = Job(
            [expanded(source)],
            expanded(arguments.output_folder),
            tokenizer=expanded(arguments.tokenizer_name_or_path),
            eos=arguments.eos_token,
            append_eos=arguments.eos_token is not None,
            column=arguments.column,
            hub=HubDataset(split=arguments.split if arguments.readers == "hf" else "train"),
            workers=arguments.n_tasks,
        )
        run_tokenize(job)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
