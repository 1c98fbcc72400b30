"""The `nanotron` command. Each sub-command imports what it needs when it runs, so that `--help` and `check` are fast.

A command is a function with `@app.command()`; its options' help is its documentation. User mistakes (ConfigError) raised
anywhere below are printed one line each, and the exit code is 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nanotron.errors import ConfigError

app = typer.Typer(
    name="nanotron",
    help="LLM pretraining with data, tensor and pipeline parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(help="YAML config of the run.", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option("--override", help="Change one key: `tokens.train_steps=20`. Repeatable.", show_default=False),
]
NumProcesses = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Ranks that will be launched.", show_default="dp · tp · pp")
]


@app.command()
def check(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006
    nproc: NumProcesses = None,
) -> None:
    """Name every mistake in a config, or print it resolved."""
    from nanotron.config import get_config_from_file
    from nanotron.config.document import dump

    print(dump(get_config_from_file(config_file, override).to_dict()))


# --- commands of other parts of nanotron: one function each, kept in alphabetical order ---------------------------------


def main() -> None:
    """Run the command line: exit code 0 done, 1 our bug, 2 the user's mistake."""
    try:
        app()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
