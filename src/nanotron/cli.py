"""The `nanotron` command. Every sub-command imports what it needs when it runs, so `--help` and `check` are fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nanotron.errors import ConfigError

app = typer.Typer(name="nanotron", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ConfigFile = Annotated[Path, typer.Argument(help="YAML config of the run.", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option("--override", help="Change one key: `tokens.train_steps=20`. Repeatable.", show_default=False),
]
NumProcesses = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Ranks that will be launched.", show_default="dp · tp · pp")
]


@app.callback()
def nanotron() -> None:
    """LLM pretraining with data, tensor and pipeline parallelism, from a YAML config."""


# One function per command. A user's mistake is raised as ConfigError; `main` prints it.


@app.command()
def check(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006
    nproc: NumProcesses = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print only YAML, which loads again to the same config.")
    ] = False,
) -> None:
    """Name every mistake in a config; without any, print it resolved, what was defaulted marked, and a summary."""
    from nanotron.check import examine, marked, summary
    from nanotron.config.document import dump

    checked = examine(config_file, override, nproc)
    for notice in checked.notices:
        print(notice, file=sys.stderr)
    if resolved:
        print(dump(checked.config.to_dict()), end="")
    else:
        print(marked(checked), "", *summary(checked.config), sep="\n")


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 our bug, 2 the user's mistake (one line each, no traceback)."""
    try:
        app()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
