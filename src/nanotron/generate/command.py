"""The two command lines: ``nanotron generate``, which starts the ranks itself, and ``run_generate.py`` for torchrun."""

from __future__ import annotations

import argparse
import json
import math
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch

from nanotron.config.paths import expanded
from nanotron.errors import ConfigError, complain
from nanotron.generate.decode import Decoder
from nanotron.generate.model import load_model
from nanotron.generate.sampling import Sampling
from nanotron.generate.source import Source, laid_out, open_source
from nanotron.generate.text import as_json, as_text, read_prompts, write
from nanotron.launch import codes
from nanotron.launch.host import exit_code, start_workers, watch_workers
from nanotron.launch.peers import Peers
from nanotron.launch.place import Place, choose_device, num_threads, schedule_as_batch
from nanotron.launch.watch import leave_now
from nanotron.parallel.mesh import Mesh
from nanotron.training.topology import mesh_axes

DEFAULT_PROMPTS = ("def ", "import os")  # of run_generate.py, as its users know it without prompts
TIMEOUT = timedelta(minutes=10)
STOP_GRACE_S = 5.0
INTERRUPTED = 130  # what shells say of a command that Ctrl-C ended


@dataclass(frozen=True)
class Request:
    """What is asked for, on whichever command line."""

    path: str
    prompts: tuple[str, ...] = ()
    batch_file: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 42
    tp: int | None = None
    """None: 1 in a single process, else as the model was trained."""
    pp: int | None = None
    batch_size: int = 16
    """Prompts that go through the model together."""
    json: bool = False
    read_special_tokens: bool = False
    ema: bool = False
    """With the average of the weights."""

    def check(self) -> None:
        """Raise ConfigError for numbers that mean nothing."""
        assert self.sampling
        for name, value in (("max-new-tokens", self.max_new_tokens), ("batch-size", self.batch_size)):
            if value < 1:
                raise ConfigError(f"--{name} {value}: use at least 1")
        for name, size in (("tp", self.tp), ("pp", self.pp)):
            if size is not None and size < 1:
                raise ConfigError(f"--{name} {size}: use at least 1")

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen; raises ConfigError for what is impossible."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def all_prompts(self) -> list[str]:
        """Those of the command line, then those of the file; raises ConfigError when there are none."""
        prompts = [*self.prompts, *(read_prompts(self.batch_file) if self.batch_file is not None else [])]
        if not prompts:
            raise ConfigError("no prompt: give --prompt TEXT or --batch-file FILE")
        return prompts


def parser() -> argparse.ArgumentParser:
    """The options of ``run_generate.py``."""
    parser = argparse.ArgumentParser(
        prog="run_generate.py",
        description="Go on from prompts. torchrun starts one process per rank, tp · pp of them; without it, one "
        "process holds the whole model.",
    )
    option = parser.add_argument
    option("--ckpt-path", required=True, metavar="DIR", help="a step, a folder of steps, or a Hugging Face model")
    option("--prompt", action="append", metavar="TEXT", help="text to go on from; repeatable")
    option("--batch-file", metavar="FILE", help='more prompts, one per line; .jsonl: strings or {"prompt": …}')
    option("--max-new-tokens", type=int, default=128, metavar="N", help="longest continuation (128)")
    option("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    option("--top-k", type=int, metavar="K", help="choose among the K most likely tokens")
    option("--top-p", type=float, metavar="P", help="choose among the likeliest tokens of total mass P")
    option("--seed", type=int, default=42, metavar="N", help="seed of the choices (42)")
    option("--tp", type=int, default=0, metavar="N", help="tensor-parallel ranks; 0: as trained, or 1 in one process")
    option("--pp", type=int, default=0, metavar="N", help="pipeline stages; 0: as trained, or 1 in one process")
    option("--dp", type=int, default=1, choices=[1], help="only 1: one replica answers all prompts")
    option("--batch-size", type=int, default=16, metavar="N", help="prompts that go through the model together (16)")
    option("--json", action="store_true", help="print one JSON object per prompt instead of text")
    option("--read-special-tokens", action="store_true", help="a prompt that spells a special token holds that token")
    option("--ema", action="store_true", help="use the average of the weights (optimizer.ema_decay)")
    option("--use-cache", action="store_true", help="no effect: keys and values are always cached")
    return parser


def run_generate(argv: Sequence[str] | None = None) -> int:
    """Run this rank of ``run_generate.py`` and return its exit code."""
    asked = parser().parse_args(argv)
    return _run_rank(lambda: _request(asked))


def run_request(argv: Sequence[str]) -> int:
    """Run this rank of the request that is given as JSON, and return its exit code."""
    return _run_rank(lambda: Request(**json.loads(argv[0])))


def _run_rank(ask: Callable[[], Request]) -> int:
    try:
        request = ask()
        place = Place.from_environment(os.environ)
    except ConfigError as mistake:
        complain(mistake)
        return codes.USER_MISTAKE
    peers = Peers(place)
    try:
        _run(request, place, peers)
        peers.disband(codes.DONE)
        return codes.DONE
    except ConfigError as mistake:
        code = peers.say_once(str(mistake))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:  # the outermost frame: shown in full, and told to the caller by the exit code
        traceback.print_exc()
        code = codes.INTERNAL_ERROR
    if place.world > 1:  # groups cannot be taken down with the others
        leave_now(code)
    return code


def _request(asked: argparse.Namespace) -> Request:
    """What the options of ``run_generate.py`` ask for."""
    path, batch_file = expanded(asked.ckpt_path), asked.batch_file and expanded(asked.batch_file)
    prompts = tuple(asked.prompt or ())
    if not prompts and batch_file is None:
        prompts = DEFAULT_PROMPTS
    return Request(
        path, prompts, batch_file, asked.max_new_tokens, asked.temperature, asked.top_k, asked.top_p, asked.seed,
        asked.tp or None, asked.pp or None, asked.batch_size, asked.json, asked.read_special_tokens, asked.ema,
    )  # fmt: skip


def generate(request: Request) -> int:
    """``nanotron generate``: check the request, then answer it here, or by tp · pp ranks on this machine.

    Returns the exit code; raises ConfigError for the user's mistakes, before any rank is started.
    """
    tp, pp = request.tp or 1, request.pp or 1
    request, world = replace(request, tp=tp, pp=pp), tp * pp
    _prepare(request, world)
    if world == 1:
        place = Place()
        _run(request, place, Peers(place))
        return codes.DONE
    workers = start_workers(world, [json.dumps(asdict(request))], piped=False, entry=run_request)
    watch_workers(workers, stop_grace_s=STOP_GRACE_S, refresh=lambda: None)
    return INTERRUPTED if workers.asked_to_stop < math.inf else exit_code(workers)


@dataclass(frozen=True)
class _Prepared:
    """A request found possible: the model, laid out, and the prompts as text and as ids."""

    source: Source
    prompts: list[str]
    ids: list[list[int]]


def _prepare(request: Request, world: int) -> _Prepared:
    """Everything that can be wrong, before any weight is loaded."""
    request.check()
    prompts = request.all_prompts()
    source = open_source(request.path, read_special_tokens=request.read_special_tokens)
    trained, alone = source.config.parallelism, world == 1 and request.tp is None and request.pp is None
    tp = 1 if alone else request.tp or trained.tp
    pp = 1 if alone else request.pp or trained.pp
    config = laid_out(source.config, tp=tp, pp=pp)
    if tp * pp != world:
        raise ConfigError(
            f"tp={tp} · pp={pp} makes {tp * pp} ranks, but {world} were started; start {tp * pp}, "
            "or give other --tp and --pp"
        )
    return _Prepared(replace(source, config=config), prompts, [source.encode(prompt) for prompt in prompts])


def _run(request: Request, place: Place, peers: Peers) -> None:
    """This rank's whole work: set-up, weights, and the prompts in batches; rank 0 prints."""
    device, backend = choose_device(place)
    torch.set_num_threads(num_threads(None, place, os.environ))
    if place.world > 1:
        if backend == "gloo":
            schedule_as_batch()
        peers.gather(backend, device, TIMEOUT)
    prepared = _prepare(request, place.world)
    source, config = prepared.source, prepared.source.config
    mesh = Mesh(mesh_axes(config), place.rank)
    if place.world > 1:
        mesh.create_groups(timeout=TIMEOUT)
    if place.rank == 0:
        for note in (*source.notes, *_notes_on_length(request, prepared)):
            complain(f"note: {note}")
    model = load_model(source.path, config, mesh, device, peers.training_store, ema=request.ema)
    decoder = Decoder(model, mesh, device, source.ends)
    show = as_json if request.json else as_text
    for first in range(0, len(prepared.ids), request.batch_size):
        rows = slice(first, first + request.batch_size)
        steps = decoder.tokens(prepared.ids[rows], request.max_new_tokens, request.sampling, first)
        if place.rank == 0:
            for piece in show(prepared.prompts[rows], steps, source.tokenizer):
                write(piece)
        else:
            deque(steps, maxlen=0)


def _notes_on_length(request: Request, prepared: _Prepared) -> Iterator[str]:
    longest = max(map(len, prepared.ids)) + request.max_new_tokens
    limit = prepared.source.config.model.model_config.max_position_embeddings
    if limit is not None and longest > limit:
        yield (
            f"{longest} tokens with --max-new-tokens {request.max_new_tokens} go past the {limit} that the model is "
            "meant for; what comes after them is likely to be worse"
        )
