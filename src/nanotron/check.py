"""Every problem of a config at once: its keys, its rules, and what it points to on disk. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from nanotron.checkpoint.resume import find_resume, newest_complete
from nanotron.config import Config, DatasetStageArgs, ExistingCheckpointInit
from nanotron.config.cautions import CAUTIONS, DEFAULTS_THAT_DIFFER
from nanotron.config.document import Problem, dump, parse, show
from nanotron.config.keys import dotted, fields_of, fill, path_of, status_of, walk, was_filled
from nanotron.config.load import Reading, read_file
from nanotron.config.messages import nearest
from nanotron.config.rules import ACCUMULATION, BATCH_RAMP, RULES, Findings, Rule, declare
from nanotron.data.document_ends import mask_problems
from nanotron.data.order.skips import Skips
from nanotron.data.probe import (
    FoundDataset,
    dataset_problems,
    datasets_of,
    empty_documents,
    model_vocab_size,
    too_many_files,
    unended_texts,
    vocabulary_problems,
)
from nanotron.data.sources.nanoset import most_files
from nanotron.errors import ConfigError
from nanotron.launch.place import cpp_compiler
from nanotron.logging import human_format
from nanotron.models.families import family_of
from nanotron.models.hf_nanotron_names import matching
from nanotron.models.specs import is_hidden
from nanotron.pipeline.custom import find_problems, is_code, is_custom
from nanotron.pipeline.schedules import SCHEDULE_NAMES
from nanotron.training.topology import layers_of_stages, model_size, pipeline_schedule

PROBES: list[Rule] = []
"""Questions that look beyond the config: at parameters and packages."""
SCHEDULE_PROBES: list[Rule] = []
"""Questions to the schedule, which may be Python code that is run to answer them."""
FILE_PROBES: list[Rule] = []
"""Questions about files, which must lie on this machine to be answered."""


@dataclass(frozen=True)
class Checked:
    """A config without mistakes, what its file says, and a line for everything in it that is legal and surprising."""

    config: Config
    reading: Reading
    notices: list[str]


def check(config_file: str | os.PathLike[str], overrides: Sequence[str] = (), nproc: int | None = None) -> Config:
    """Return a config, resolved, for `nproc` ranks (None: as many as it asks for).

    Raises ConfigError with every mistake.
    """
    return examine(config_file, overrides, nproc).config


def examine(
    config_file: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    nproc: int | None = None,
    *,
    files: bool = True,
    code: bool = True,
) -> Checked:
    """Do what `check` does, and keep the notices; without `files`, data and checkpoints need not be here.

    Without `code`, none that the config names is run, and so a schedule in Python is not proven. Raises ConfigError
    with every mistake.
    """
    reading = read_file(config_file, overrides)
    if reading.config is not None:
        reading.config.fit_to(nproc)
        _ask(reading, reading.config, [*RULES, _fits(nproc)])
        probes = [*PROBES, *(SCHEDULE_PROBES if code or not runs_code(reading.config) else [])]
        _ask(reading, reading.config, [*probes, *FILE_PROBES, *_data_can_be_read(reading.config)] if files else probes)
    config = reading.value()
    if config.model.model_config.vocab_size is None:
        fill(config.model.model_config, "vocab_size", model_vocab_size(config))
    advice = sorted([*reading.notices, *_cautions(reading, config, files=files)], key=lambda problem: problem.place)
    return Checked(config, reading, [problem.line(reading.name) for problem in advice])


def _ask(reading: Reading, config: Config, rules: Sequence[Rule]) -> None:
    """Ask the rules whose keys are all sound, and report what they find."""
    for rule in rules:
        if all(reading.is_sound(path) for path in rule.keys):
            for name, text in rule.ask(config):
                reading.report(path_of(name), text)


def _cautions(reading: Reading, config: Config, *, files: bool) -> list[Problem]:
    found = [finding for rule in CAUTIONS for finding in rule.ask(config)]
    about_data = (
        [*empty_documents(config), *unended_texts(config), *too_many_files(config, most_files())] if files else []
    )
    found += [(dotted(line.path), line.text) for line in about_data]
    for name, line in DEFAULTS_THAT_DIFFER.items():
        if path_of(name) not in reading.document.places and (text := line(config)):
            found.append((name, text))
    document = reading.document
    return [Problem(path_of(name), text, document.place_of(path_of(name))) for name, text in found]


def runs_code(config: Config) -> bool:
    """Whether asking for the schedule of a config runs code that the config names."""
    return is_code(config.parallelism.pp_engine)


def summary(config: Config, *, code: bool = True) -> list[str]:
    """Return five lines: parameters, tokens, layout, layers of each rank, data.

    Without `code`, that of a schedule in Python is not run, so that it is not known which rank has which layers.
    """
    layout, tokens = config.parallelism, config.tokens
    steps, samples = tokens.train_steps, config.samples_by(tokens.train_steps)
    layers = _layers_of_ranks(config) if code or not runs_code(config) else "unknown: the schedule's code is not run"
    stages = [f"{stage.name}, from step {stage.start_training_step}: {_source(stage)}" for stage in config.data_stages]
    return [
        f"parameters  {model_size(config)}, vocabulary {config.model.model_config.vocab_size}, {config.model.dtype}",
        f"tokens      {human_format(samples * tokens.sequence_length)} in {steps} steps of"
        f" {_batch_sizes(config)} of {tokens.sequence_length}",
        f"layout      {layout.world_size} ranks: {layout}, zero stage {config.optimizer.zero_stage}",
        f"layers      {layers}",
        f"data        {' | '.join(stages)}",
    ]


def _batch_sizes(config: Config) -> str:
    """Write what steps are: `64 samples`, with a ramp `8 (the first 100), 16 (the next 200), then 64 samples`."""
    *ramp, (_, last) = config.batches(config.tokens.train_steps)
    parts = [f"{size} (the {'next' if index else 'first'} {steps})" for index, (steps, size) in enumerate(ramp)]
    return ", ".join([*parts, f"then {last} samples" if ramp else f"{last} samples"])


def _source(stage: DatasetStageArgs) -> str:
    """Write what a stage reads: `corpus stdlib`, `dataset_folder [data/a, data/b]`, `random tokens`."""
    dataset, skipped = stage.data.dataset, Skips(stage.data.skip_samples).skipped
    without = f" without {skipped:,} samples" if skipped else ""
    if dataset is None:
        return f"random tokens{without}"
    name = next(iter(fields_of(type(dataset))))
    return f"{name} {show(getattr(dataset, name))}{without}"


def _layers_of_ranks(config: Config) -> str:
    """Write which layers each pipeline rank holds: `rank 0: embedding, 0-12 | rank 1: 13-23, head`."""
    schedule, layers = pipeline_schedule(config), layers_of_stages(config)
    held: list[list[str]] = [[] for _ in range(config.parallelism.pp)]
    for stage, (rank, _) in sorted(schedule.holders.items()):
        lo, hi = layers[stage]
        held[rank] += ["embedding"] * (stage == 0)
        held[rank].append(f"{lo}-{hi - 1}" if hi - lo > 1 else f"{lo}")
        held[rank] += ["head"] * (stage == schedule.num_stages - 1)
    return " | ".join(f"pipeline rank {rank}: {', '.join(parts)}" for rank, parts in enumerate(held))


def _fits(nproc: int | None) -> Rule:
    """The rule that the layout needs exactly the ranks that are launched."""

    def ask(config: Config) -> Findings:
        layout = config.parallelism
        dp, cp, tp, pp = layout.dp, layout.context_parallel_size, layout.tp, layout.pp
        if nproc is None or nproc == layout.world_size:
            return
        if was_filled(layout, "dp"):
            if nproc < layout.world_size:
                yield (
                    "parallelism.dp",
                    f"auto: {layout.world_size} ranks are the fewest that hold this layout, but {nproc} are launched",
                )
            return
        context = f"context_parallel_size={cp} · " if cp > 1 else ""
        others = {"dp": cp * tp * pp, "tp": dp * cp * pp, "pp": dp * cp * tp}
        ep = layout.expert_parallel_size
        steps = others | {"dp": others["dp"] * ep}  # dp is a multiple of ep
        fits = [f"{axis}={nproc // rest}" for axis, rest in others.items() if nproc % steps[axis] == 0]
        fix = " or ".join(fits) if fits else f"dp={nproc}, tp=1, pp=1" + ", expert_parallel_size=1" * (nproc % ep > 0)
        yield (
            "parallelism",
            f"dp={dp} · {context}tp={tp} · pp={pp} makes {layout.world_size} ranks, but {nproc} are launched;"
            f" launch {layout.world_size}, or use {fix}",
        )

    return Rule(tuple(path_of(f"parallelism.{axis}") for axis in ("dp", "tp", "pp")), ask)


def _probe(*keys: str) -> Callable[[Callable[[Config], Findings]], None]:
    return declare(PROBES, keys)


def _schedule_probe(*keys: str) -> Callable[[Callable[[Config], Findings]], None]:
    return declare(SCHEDULE_PROBES, keys)


def _file_probe(*keys: str) -> Callable[[Callable[[Config], Findings]], None]:
    return declare(FILE_PROBES, keys)


@_schedule_probe("parallelism.pp_engine", "parallelism.pp", "parallelism.pp_virtual_stages", ACCUMULATION, BATCH_RAMP)
def _schedule_can_run(config: Config) -> Findings:
    layout = config.parallelism
    if layout.pp_engine not in SCHEDULE_NAMES and not is_custom(layout.pp_engine):
        guess = nearest(layout.pp_engine, SCHEDULE_NAMES)
        hint = f"; did you mean {guess}?" if guess else ""
        yield (
            "parallelism.pp_engine",
            f"{layout.pp_engine} is not one of {', '.join(SCHEDULE_NAMES)}, a .csv file or file.py:function{hint}",
        )
        return
    asked = layout.pp_engine, layout.pp, layout.pp_virtual_stages
    problems = find_problems(*asked, config.tokens.batch_accumulation_per_replica)
    yield from (_blame(line, "parallelism.pp_engine") for line in problems)
    for key, microbatches in {} if problems else config.ramp_microbatches.items():
        yield from ((key, f"in these steps {line}") for line in find_problems(*asked, microbatches))


@_probe("optimizer.weight_decay_exclude_named_params", "optimizer.groups", "model.model_config")
def _patterns_match_parameters(config: Config) -> Findings:
    specs = family_of(config.model.model_config).specs(config.model.model_config)
    names, optimizer = list(specs), config.optimizer
    lists = {"optimizer.weight_decay_exclude_named_params": optimizer.weight_decay_exclude_named_params}
    lists |= {f"optimizer.groups[{index}].params": group.params for index, group in enumerate(optimizer.groups)}
    for key, patterns in lists.items():
        for index, pattern in enumerate(patterns):
            try:
                if not matching(names, [pattern]):
                    yield f"{key}[{index}]", f"{pattern} matches no parameter; names are like {names[0]} and {names[2]}"
            except re.error as error:
                yield f"{key}[{index}]", f"{pattern} is not a regular expression: {error}"


@_probe("optimizer.groups", "model.model_config")
def _groups_suit_their_parameters(config: Config) -> Findings:
    specs = family_of(config.model.model_config).specs(config.model.model_config)
    for index, group in enumerate(config.optimizer.groups):
        key = f"optimizer.groups[{index}]"
        try:
            found = matching(specs, group.params)
        except re.error:
            continue
        if found and group.weight_decay and not any(specs[name].decay for name in found):
            yield (
                f"{key}.weight_decay",
                f"{group.weight_decay} on norms and biases only, which never decay; leave it out",
            )
        others = [name for name in specs if name in found and not is_hidden(specs[name])]
        if others and group.optimizer == "muon":
            yield f"{key}.optimizer", f"muon updates matrices of layers, and {others[0]} is none; match others only"


def _data_can_be_read(config: Config) -> list[Rule]:
    """A rule for each data set, so that what is wrong with one hides nothing that is wrong with another."""

    def ask(found: FoundDataset) -> Rule:
        keys = (found.path, (*found.path[:2], "sequence_length"), path_of("tokens.sequence_length"))
        return Rule(keys, lambda _: ((dotted(problem.path), problem.text) for problem in dataset_problems(found)))

    return [ask(found) for found in datasets_of(config)]


@_file_probe("data_stages[].data.dataset", "data_stages[].validation", "tokenizer", "model.model_config.vocab_size")
def _vocabulary_is_known(config: Config) -> Findings:
    for problem in vocabulary_problems(config):
        yield dotted(problem.path), problem.text


@_file_probe("data_stages[].data.dataset", "data_stages[].validation", "tokenizer", "model.model_config")
def _masks_find_documents(config: Config) -> Findings:
    for problem in mask_problems(config):
        yield dotted(problem.path), problem.text


@_probe("logging.wandb", "logging.trackio")
def _trackers_are_installed(config: Config) -> Findings:
    for name, asked in (("wandb", config.logging.wandb), ("trackio", config.logging.trackio)):
        if asked and find_spec(name) is None:
            fix = f"pip install {name}, or set it to false"
            yield f"logging.{name}", f"true, but the package {name} is not installed; {fix}"


@_file_probe("model.compile")
def _compiler_is_installed(config: Config) -> Findings:
    compiler = cpp_compiler()
    if config.model.compile is True and shutil.which(compiler) is None:
        yield (
            "model.compile",
            f"true, but the C++ compiler {compiler} is not installed; install it, name another in the environment"
            " variable CXX, or set it to false",
        )


@_file_probe("checkpoints.checkpoints_path", "checkpoints.resume_checkpoint_path", "s3_upload")
def _checkpoint_can_be_resumed(config: Config) -> Findings:
    resume, (path, copy) = config.checkpoints.resume_checkpoint_path, config.checkpoint_places
    if os.path.isfile(path):
        yield "checkpoints.checkpoints_path", f"{path} is a file; name a folder"
    elif "://" not in f"{path}{copy}{resume}":  # remote ones are looked at when the run starts
        try:
            find_resume(path, resume, copy=copy)
        except ConfigError as error:
            yield _blame(str(error), "checkpoints.resume_checkpoint_path")


@_file_probe("model.init_method")
def _initial_weights_exist(config: Config) -> Findings:
    init = config.model.init_method
    if not isinstance(init, ExistingCheckpointInit) or "://" in init.path:
        return
    names = os.listdir(init.path) if os.path.isdir(init.path) else []
    if (
        not {"index.json", "config.json", "checkpoint_metadata.json"} & set(names)
        and newest_complete(init.path) is None
    ):
        found = f"holds {', '.join(sorted(names)[:4]) or 'nothing'}" if os.path.isdir(init.path) else "is no folder"
        yield (
            "model.init_method.path",
            f"{init.path} {found}; name a checkpoint (with index.json), a folder of checkpoints, or a Hugging Face"
            " model folder (with config.json)",
        )


def _blame(line: str, otherwise: str) -> tuple[str, str]:
    """Split `section.key=value does not fit` into the key and the rest of the line."""
    found = re.match(r"([\w.\[\]]+\.[\w\[\]]+)=(.+)$", line, flags=re.DOTALL)
    return (found[1], found[2]) if found else (otherwise, line)


def marked(checked: Checked) -> str:
    """Return the config as YAML in which every key that the file leaves out is marked, with the rule that filled it."""
    text = dump(checked.config.to_dict())
    lines = text.splitlines()
    rules = {path: status_of(info).derived for path, _, info in walk(checked.config)}
    written = checked.reading.document.places
    for path, place in parse(text).places.items():
        is_leaf = not lines[place.line - 1].rstrip().endswith(":")
        if path not in written and path in rules and is_leaf:
            lines[place.line - 1] += f"  # default: {rules[path]}" if rules[path] else "  # default"
    return "\n".join(lines)
