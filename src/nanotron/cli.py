"""The `nanotron` command. Every sub-command imports what it needs when it runs, so `--help` and `check` are fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from nanotron.errors import ConfigError, complain, say
from nanotron.launch.streams import open_streams

app = typer.Typer(name="nanotron", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

T = TypeVar("T", str, Path, list[str], list[Path], None)


def _expanded(given: T) -> T:
    """What every option and argument that takes a path does with it."""
    if isinstance(given, list):
        return [_expanded(path) for path in given]
    if given is None or not {"~", "$"} & set(str(given)):
        return given  # and nothing is imported, for `train` is to hear signals before that
    from nanotron.config.paths import expanded

    return type(given)(expanded(str(given)))


def _path(help: str) -> Any:
    """An argument that is a path."""
    return typer.Argument(help=help, show_default=False, callback=_expanded)


def _path_option(help: str, *names: str, show_default: str | bool = False) -> Any:
    """An option that is a path."""
    return typer.Option(*names, help=help, show_default=show_default, callback=_expanded)


ConfigFile = Annotated[Path, _path("YAML config of the run.")]
Overrides = Annotated[
    list[str],
    typer.Option("--override", help="Change one key: `tokens.train_steps=20`. Repeatable.", show_default=False),
]
NumProcesses = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Ranks that will be launched.", show_default="dp · cp · tp · pp")
]
Preflight = Annotated[
    bool,
    typer.Option("--preflight", help="Begin as `doctor` does, and end with 1 where something is out of line."),
]
ReadSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--read-special-tokens", help="Text that spells a special token becomes that token; else it stays text."
    ),
]


@app.callback()
def nanotron() -> None:
    """LLM pretraining with data, tensor, pipeline, context and expert parallelism, from a YAML config."""


# One function per command. A user's mistake is raised as ConfigError; `main` prints it.


@app.command()
def check(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006
    nproc: NumProcesses = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print only YAML, which loads again to the same config.")
    ] = False,
    no_code: Annotated[
        bool, typer.Option("--no-code", help="Run no code that the config names; for files that came from others.")
    ] = False,
    plot_lr: Annotated[bool, typer.Option("--plot-lr", help="Draw the learning rate of every update instead.")] = False,
) -> None:
    """Name every mistake in a config; without any, print it resolved, what was defaulted marked, and a summary.

    A schedule of one's own (pp_engine: file.py:function) is run to prove that it ends; functions that data_stages name
    (python: file.py:function) are only looked up in their files, and run when training starts.
    """
    from nanotron.check import examine, marked, summary
    from nanotron.config.document import dump

    checked = examine(config_file, override, nproc, code=not no_code)
    for notice in checked.notices:
        complain(notice)
    if plot_lr:
        from nanotron.report.lr_chart import lr_chart

        say(*lr_chart(checked.config))
    elif resolved:
        say(dump(checked.config.to_dict()), end="")
    else:
        say(marked(checked), "", *summary(checked.config, code=not no_code))


@app.command()
def doctor(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006
    nproc: NumProcesses = None,
    json: Annotated[bool, typer.Option("--json", help="Print every rank's numbers as one JSON object.")] = False,
) -> None:
    """Measure the devices, links, clocks and storage of a run, and name what is out of line, with exit code 1.

    Every rank takes part, for some seconds: those of `torchrun --no-python … nanotron doctor X.yaml`, or dp · cp · tp ·
    pp processes that are started on this machine. Nothing is trained.
    """
    from nanotron.config.load import lasting
    from nanotron.launch.parent import doctor as run

    with lasting(str(config_file)) as file:  # every rank reads it
        code = run(file, override, nproc=nproc, as_json=json)
    raise typer.Exit(code)


@app.command()
def explain(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006
    output: Annotated[
        Path | None, _path_option("File to write.", "--output", "-o", show_default="CONFIG with .html for its suffix")
    ] = None,
) -> None:
    """Write one training step as one HTML page: mesh, shards, every action, collective and transfer, and its code."""
    from nanotron.check import examine

    config = examine(config_file, override, files=False).config
    from nanotron.explain.page import write_explanation

    say(write_explanation(config, output or config_file.with_suffix(".html")))


@app.command("export-hf")
def export_hf(
    checkpoint: Annotated[str, _path("A step, or a folder of steps; may be a URL.")],
    target: Annotated[str, _path("Folder to write; may be a URL.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or float64.", show_default="the weights' own"),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (optimizer.ema_decay).")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face model folder: safetensors, config.json, tokenizer."""
    from nanotron.convert.folders import kind_of

    kind_of(checkpoint)  # a wrong folder is told before torch is imported
    from nanotron.convert.exporting import export_hf as run

    for notice in run(checkpoint, target, dtype=dtype, ema=ema):
        complain(notice)
    say(f"{target}: a Hugging Face model, made from {checkpoint}")


@app.command("import-hf")
def import_hf(
    source: Annotated[str, _path("A Hugging Face model folder, or a checkpoint of Hugging Face's Nanotron.")],
    target: Annotated[str, _path("Folder of checkpoints to write step 0 into.")],
) -> None:
    """Turn a Hugging Face model, or a Hugging Face Nanotron's checkpoint, into a checkpoint (weights only)."""
    from nanotron.convert.folders import kind_of, read_model_config

    read_model_config(kind_of(source).path)  # a model that is not available is told before torch is imported
    from nanotron.convert.importing import import_weights

    checkpoint = import_weights(source, target, tell=complain)
    say(f"{checkpoint}: train on from it with model.init_method: {{path: {checkpoint}}}")


@app.command()
def init(
    preset: Annotated[str, typer.Option(help="Size of the model: tiny, 160m, 1b, 8b, 70b or 405b.")] = "tiny",
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Devices to train on (processes, on a CPU).")] = 1,
    output: Annotated[
        Path | None, _path_option("File to write; it must not exist.", "--output", "-o", show_default="print it")
    ] = None,
) -> None:
    """Write a commented starter config for a size of model and a number of devices."""
    from nanotron.config.presets import starter

    text = starter(preset, gpus)
    if output is None:
        say(text, end="")
    elif output.exists():
        raise ConfigError(f"--output {output}: exists already; name another file, or delete it")
    else:
        output.write_text(text, encoding="utf-8")
        say(f"{output}: next, `nanotron check {output}` and `nanotron train {output}`")


@app.command()
def inspect(
    path: Annotated[str, _path("A step's folder, the folder of the steps, or a data set.")],
    documents: Annotated[int, typer.Option(min=0, help="First documents of a data set to show.")] = 3,
    token_bytes: Annotated[
        int | None, typer.Option(help="Bytes per token, for flat .bin files: 2 or 4.", show_default=False)
    ] = None,
) -> None:
    """Show what a checkpoint holds, and verify every byte of it; or what a data set holds: documents, lengths, text."""
    from nanotron.data.inspect import inspect_dataset, is_dataset

    if is_dataset(path):
        lines = inspect_dataset(path, token_bytes=token_bytes, num_documents=documents)
    else:
        from nanotron.checkpoint.inspect import inspect_checkpoint, is_checkpoint

        if not is_checkpoint(path):
            raise ConfigError(
                f"{path}: neither a checkpoint (a step with index.json, or a folder of steps) nor a data set (.ds, "
                ".idx with .bin, .npy or .bin files)"
            )
        lines = inspect_checkpoint(path)
    for line in lines:
        say(line)


@app.command()
def plan(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006
    gpu: Annotated[str, typer.Option(help="Device: h100, h200, a100, b200, mi300x, cpu, …")] = "h100",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Devices with fast links between them.")] = 8,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes.", show_default="as many as dp · cp · tp · pp needs")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the fastest layout that fits, for the config's global batch.")
    ] = False,
    output: Annotated[
        Path | None,
        _path_option("With --search: file for the best config.", "--output", "-o", show_default="best-CONFIG"),
    ] = None,
) -> None:
    """Predict memory, traffic, bubble and speed of a layout before it runs; exit code 3 when it does not fit."""
    from nanotron.check import examine

    config = examine(config_file, override, files=False).config
    from nanotron.plan.command import plan as run
    from nanotron.plan.command import plan_search

    if search:
        best = output or config_file.with_name(f"best-{config_file.name}")
        raise typer.Exit(plan_search(config, gpu=gpu, per_node=gpus_per_node, nodes=nodes, output=best))
    raise typer.Exit(run(config, gpu=gpu, per_node=gpus_per_node, nodes=nodes))


@app.command()
def report(
    runs: Annotated[list[Path], _path("Directories of runs (general.run_dir); several are drawn over each other.")],
    output: Annotated[
        Path | None, _path_option("File to write.", "--output", "-o", show_default="report.html in the first run")
    ] = None,
) -> None:
    """Write one run or several as one HTML page: loss, speed, memory, health, timeline, config and environment."""
    from nanotron.report.page import write_report

    say(write_report(runs, output))


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/config.md instead, for people.")] = False,
) -> None:
    """Print the JSON Schema of a config file, with which an editor completes keys and marks mistakes."""
    import json

    from nanotron.config.reference import reference
    from nanotron.config.schema import json_schema
    from nanotron.pipeline.schedules import SCHEDULE_NAMES

    text = reference() if markdown else json.dumps(json_schema(SCHEDULE_NAMES), indent=1, ensure_ascii=False) + "\n"
    say(text, end="")


@app.command()
def slurm(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes.", show_default="as many as dp · cp · tp · pp needs")
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, help="Ranks of a node, each with a GPU of its own.")] = 8,
    cpu: Annotated[bool, typer.Option("--cpu", help="Ask for no GPUs.")] = False,
    time: Annotated[str, typer.Option(help="Limit of the job, as sbatch reads it.")] = "24:00:00",
    sbatch: Annotated[
        list[str], typer.Option(help="A further option of sbatch: `--partition=big`. Repeatable.", show_default=False)
    ] = [],  # noqa: B006
    submit: Annotated[bool, typer.Option("--submit", help="Hand the script in.")] = False,
    preflight: Preflight = False,
) -> None:
    """Write a Slurm batch script for a run, which is queued again when it was preempted and has saved."""
    from nanotron.check import examine
    from nanotron.launch import slurm

    config = examine(config_file, override, nodes * per_node if nodes else None).config
    world = config.parallelism.world_size
    per_node = min(per_node, world) if nodes is None else per_node
    if nodes is None and world % per_node:
        raise ConfigError(
            f"--per-node {per_node}: does not divide the {world} ranks of the layout; choose one that does"
        )
    argv = ["--config-file", str(config_file.absolute()), *(f"--override={change}" for change in override)]
    argv += ["--preflight"] * preflight
    text = slurm.script(
        config, argv, nodes=nodes or world // per_node, per_node=per_node, gpus=not cpu, time=time, options=sbatch
    )
    path = slurm.write_script(config, text)
    say(f"{path}: job {slurm.submit(path)}" if submit else f"{path}: next, `sbatch {path}`")


@app.command()
def timeline(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006
    schedule: Annotated[
        list[str],
        typer.Option(help="A schedule to draw. Repeatable, to compare.", show_default="parallelism.pp_engine"),
    ] = [],  # noqa: B006
    costs: Annotated[
        str | None,
        typer.Option(
            help="Times of F, B and W: `profile` measures them here, `flops` counts, `1:1:1` gives them for a rank's"
            " whole share, `trace` takes them from --run.",
            show_default="trace with --run, else profile",
        ),
    ] = None,
    transfer: Annotated[float, typer.Option(help="Time of one transfer between ranks, in the costs' unit.")] = 0.0,
    run: Annotated[Path | None, _path_option("Folder of a run with a pipeline trace, to draw too.", "--run")] = None,
    step: Annotated[int | None, typer.Option(help="Traced step of that run.", show_default="its last")] = None,
    output: Annotated[
        list[Path],
        _path_option(
            "File to write: .svg, .html, .json (Chrome trace) or .csv (the schedule). Repeatable.", "--output", "-o"
        ),
    ] = [],  # noqa: B006
) -> None:
    """Draw when every pipeline action of a run will happen, and when it did."""
    from nanotron.check import check as checked
    from nanotron.plan.timeline import as_csv, predict

    config = checked(config_file, [*override, "checkpoints.resume_checkpoint_path=null"])  # nothing is resumed here
    picture = predict(config, costs=costs, transfer=transfer, schedules=schedule, run=run, step=step)
    for path in output:
        if path.suffix == ".csv":
            path.write_text(as_csv(config), encoding="utf-8")
        else:
            picture.write(path)
    say(picture.text())


@app.command()
def tokenize(
    inputs: Annotated[
        list[str] | None,
        _path("Text, .jsonl (also .gz, .zst) or .parquet files, globs, folders of them, or a Hugging Face data set."),
    ] = None,
    output: Annotated[str | None, _path_option("Folder to write.", "--output", "-o")] = None,
    tokenizer: Annotated[
        str | None, _path_option("A tokenizer.json, a folder with one, or a Hugging Face name.")
    ] = None,
    train_bpe: Annotated[
        int | None, typer.Option(min=1, help="Train a byte-level BPE of this many tokens on the input instead.")
    ] = None,
    eos: Annotated[
        str | None, typer.Option(help="Token appended to every document.", show_default="the tokenizer's own")
    ] = None,
    no_eos: Annotated[bool, typer.Option("--no-eos", help="Append nothing.")] = False,
    bos: Annotated[
        str | None, typer.Option(help="Token that begins every document.", show_default="the tokenizer's own, if any")
    ] = None,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Begin with nothing.")] = False,
    read_special_tokens: ReadSpecialTokens = False,
    column: Annotated[str, typer.Option(help="Column that holds the text.")] = "text",
    split: Annotated[str, typer.Option(help="Split of a Hugging Face data set.")] = "train",
    config_name: Annotated[
        str | None, typer.Option(help="Configuration of a Hugging Face data set.", show_default=False)
    ] = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="Stream a Hugging Face data set.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that tokenize.", show_default="one per core")
    ] = None,
    stdlib: Annotated[
        bool, typer.Option("--stdlib", help="Prepare the embedded default corpus, and nothing else.")
    ] = False,
) -> None:
    """Turn text into Nanosets. After a kill, the same command goes on from the shards that were finished."""
    import os

    from nanotron.data.sources.documents import HubDataset
    from nanotron.data.tokenize.command import prepare_default_corpus, run_tokenize
    from nanotron.data.tokenize.workers import Job

    if stdlib:
        prepare_default_corpus(output)
        return
    if not inputs or output is None:
        raise ConfigError("name at least one input and --output FOLDER, or use --stdlib for the embedded corpus")
    job = Job(
        inputs, output, tokenizer, train_bpe, eos, not no_eos, bos, not no_bos, read_special_tokens, column,
        HubDataset(config_name, split, streaming), workers or os.cpu_count() or 1,
    )  # fmt: skip
    run_tokenize(job)


@app.command()
def generate(
    checkpoint: Annotated[str, _path("A step, a folder of steps, or a Hugging Face model folder.")],
    prompt: Annotated[
        list[str], typer.Option("--prompt", help="Text to go on from. Repeatable.", show_default=False)
    ] = [],  # noqa: B006
    batch_file: Annotated[
        str | None, _path_option('More prompts, one per line; .jsonl: strings or {"prompt": …}.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest continuation.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Choose among this many most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest tokens of this total mass.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choices.")] = 42,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks that share every matrix.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Stages that share the layers.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that go through the model together.")] = 16,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt instead of text.")] = False,
    read_special_tokens: ReadSpecialTokens = False,
    ema: Annotated[bool, typer.Option("--ema", help="With the average of the weights (optimizer.ema_decay).")] = False,
) -> None:
    """Write the text that a model goes on with; it may have been trained on any layout."""
    from nanotron.generate.command import Request
    from nanotron.generate.command import generate as run

    request = Request(
        checkpoint, tuple(prompt), batch_file, max_new_tokens, temperature, top_k, top_p, seed, tp, pp, batch_size,
        json, read_special_tokens, ema,
    )  # fmt: skip
    raise typer.Exit(run(request))


@app.command()
def train(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006
    nproc: NumProcesses = None,
    plain: Annotated[bool, typer.Option("--plain", help="Log lines instead of the live display.")] = False,
    smoke: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Stop after step N of the real schedule, saved (tokens.stop_after); the next start goes on from it.",
            show_default=False,
        ),
    ] = None,
    allow_data_change: Annotated[
        bool, typer.Option("--allow-data-change", help="Resume although the data differs from the checkpoint's.")
    ] = False,
    preflight: Preflight = False,
) -> None:
    """Train on this machine, one process per rank, and show the run while it goes."""
    from nanotron.launch.signals import StopSignals

    signals = StopSignals()  # before the imports that take seconds
    from nanotron.config.load import lasting
    from nanotron.launch.parent import train as run

    with lasting(str(config_file)) as file:  # every rank reads it
        code = run(
            file,
            [*override, *([f"tokens.stop_after={smoke}"] if smoke else [])],
            nproc=nproc,
            plain=plain,
            allow_data_change=allow_data_change,
            preflight=preflight,
            stop_signals=signals,
        )
    raise typer.Exit(code)


@app.command()
def watch(
    run: Annotated[str, _path("Directory of the run (general.run_dir).")],
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live display.")] = False,
) -> None:
    """Show a run that another process trains."""
    from nanotron.launch.parent import watch as show

    raise typer.Exit(show(run, plain=plain))


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 internal error, 2 the user's mistake (one line each)."""
    open_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        complain(error)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        complain(f"{error.filename}: {(error.strerror or str(error)).lower()}")
        sys.exit(2)


if __name__ == "__main__":
    main()
