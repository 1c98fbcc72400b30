"""Runs from their command line: what is printed, what is written, with which code they end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanotron.checkpoint.resume import newest_complete
from nanotron.launch import codes
from tests.commands import LONGEST_S, Command, nanotron

ROOT = Path(__file__).parents[2]
CONFIG = """
general: {project: tiny, seed: 1, timeout_s: 30}
parallelism: {tp: 2}
model:
  dtype: float32
  model_config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64, vocab_size: 64}
tokens: {sequence_length: 16, train_steps: 3, micro_batch_size: 1, batch_accumulation_per_replica: 2}
optimizer: {learning_rate_scheduler: {learning_rate: 1.0e-3, min_decay_lr: 1.0e-4}}
checkpoints: {checkpoints_path: run, checkpoint_interval: 100000}
data_stages: [{name: main, start_training_step: 1, data: {dataset: null}}]
"""
ONE_RANK = ["--override=parallelism.tp=1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a config of 2 ranks."""
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def driver(folder: Path, before: str = "", after: str = "") -> str:
    """A script that runs this rank between two pieces of code; `code` is the rank's exit code."""
    path = folder / "driver.py"
    start = "import os, sys\nfrom nanotron.launch.run import run_train"
    path.write_text("\n".join([start, before, "code = run_train()", after, "sys.exit(code)"]))
    return str(path)


def torchrun(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two ranks, each a program of its own: seconds of imports that only a test of torchrun's own ways should take."""
    options = ("--standalone", "--nproc_per_node=2", script, "--config-file", "tiny.yaml")
    return nanotron(folder, "torchrun", *options, *arguments)


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`nanotron train` with two ranks."""
    return nanotron(folder, "train", "tiny.yaml", *arguments)


def train_alone(folder: Path, script: str = str(ROOT / "run_train.py")) -> subprocess.CompletedProcess[str]:
    """`python run_train.py`, or another script, as one rank."""
    return nanotron(folder, script, "--config-file", "tiny.yaml", *ONE_RANK)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_ranks_under_torchrun_log_once_and_take_their_groups_down(folder: Path) -> None:
    done = torchrun(folder, str(ROOT / "run_train.py"))
    assert done.returncode == codes.DONE, done.stderr
    steps = re.findall(r"iteration: (\d+) / 3 ", done.stdout)
    assert steps == ["1", "2", "3"], "one line per step, whatever the number of ranks"
    assert "destroy_process_group" not in done.stderr
    assert {"config.yaml", "environment.json", "metrics.jsonl", "3"} <= {
        path.name for path in (folder / "run").iterdir()
    }
    environment = json.loads((folder / "run/environment.json").read_text())
    assert environment["layout"] == {"pp": 1, "dp": 1, "cp": 1, "tp": 2}


def test_one_process_has_no_process_group_imports_little_and_its_losses_are_those_of_four(folder: Path) -> None:
    after = """
import torch.distributed as dist
assert not dist.is_initialized()
trackers = ("tensorboard", "wandb", "trackio")
heavy = (*trackers, "transformers", "datasets", "pandas", "pyarrow", "torch._dynamo", "typer", "rich")
assert not [name for name in heavy if name in sys.modules]
"""
    (folder / "four").mkdir()
    (folder / "four/tiny.yaml").write_text(CONFIG)
    command = [sys.executable, driver(folder, after=after), "--config-file", "tiny.yaml", *ONE_RANK]
    one = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert one.returncode == codes.DONE, one.stderr
    four = train(folder / "four", "--override=parallelism.pp=2")
    assert four.returncode == codes.DONE, four.stderr
    assert losses(folder) == pytest.approx(losses(folder / "four"), rel=1e-5)


def test_a_forked_rank_imports_nothing_that_its_parent_has_not(folder: Path) -> None:
    (folder / "driver.py").write_text("""
import sys
from nanotron.launch import parent, run

def entry(argv):
    there = set(sys.modules)
    code = run.run_train(argv)
    sys.stdout.write(" ".join(["imported:", *sorted(set(sys.modules) - there)]) + "\\n")
    return code

parent.run_train = entry
sys.exit(parent.train("tiny.yaml", sys.argv[1:], plain=True))
""")
    done = nanotron(folder, "driver.py", "parallelism.tp=1", "parallelism.pp=2", "logging.tensorboard=true")
    assert done.returncode == codes.DONE, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("imported:")] == ["imported:"] * 2


def test_a_mistake_is_printed_once_by_all_ranks_before_any_of_them_imports_torch(folder: Path) -> None:
    patient = "from nanotron.launch import run\nrun.ALONE_WAIT_S = 60"  # for ranks that start late on a busy machine
    script = driver(folder, patient, after="assert 'torch' not in sys.modules")
    done = torchrun(folder, script, "--override=parallelism.dp=3")
    lines = [line for line in done.stderr.splitlines() if "parallelism" in line]
    assert len(lines) == 1, done.stderr
    assert "dp=3 · tp=2 · pp=1 makes 6 ranks, but 2 are launched" in lines[0]
    worker_codes = re.findall(r"exitcode *: (-?\d+)", done.stderr)
    assert {"2"} <= set(worker_codes) <= {"2", "-15"}  # torchrun ends a rank that has hardly begun when rank 0 is done


def test_a_run_directory_that_cannot_be_written_is_told_once_and_ends_all_ranks(folder: Path) -> None:
    done = train(folder, "--override=general.run_dir=tiny.yaml/run")
    assert done.returncode == codes.USER_MISTAKE, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "INFO" not in line]
    assert "tiny.yaml/run (Not a directory)" in line
    assert "general.run_dir" in line


def test_a_run_with_nothing_left_to_train_leaves_its_description_as_it_was(folder: Path) -> None:
    assert train_alone(folder).returncode == codes.DONE
    before = {name: (folder / "run" / name).read_text() for name in ("config.yaml", "environment.json")}
    config = CONFIG.replace("train_steps: 3", "train_steps: 2")
    (folder / "tiny.yaml").write_text(config)
    done = train_alone(folder)
    assert done.returncode == codes.DONE, done.stderr
    assert "nothing left to train: step 3 of tokens.train_steps=2" in done.stdout + done.stderr
    assert {name: (folder / "run" / name).read_text() for name in before} == before


def test_a_failure_that_cannot_be_recorded_is_still_told(folder: Path) -> None:
    spoil = "import shutil, nanotron.training.step\ndef step(*_, **__):\n    shutil.rmtree('run'); open('run', 'w')\n"
    spoil += "    raise ValueError('what really went wrong')\nnanotron.training.step.Training.step = step"
    script = driver(folder, spoil)
    done = train_alone(folder, script)
    assert done.returncode == codes.INTERNAL_ERROR
    assert done.stderr.splitlines()[-1].startswith("failed first: rank 0")
    assert done.stderr.splitlines()[-1].endswith("ValueError: what really went wrong")


def test_a_missing_config_is_the_users_mistake(folder: Path) -> None:
    done = nanotron(folder, ROOT / "run_train.py", "--config-file", "no.yaml")
    assert done.returncode == codes.USER_MISTAKE
    assert "no.yaml" in done.stderr
    assert "Traceback" not in done.stderr


FAIL_ON_RANK_ONE = """
import nanotron.training.step
good = nanotron.training.step.Training.step
def step(self, update, *arguments, **options):
    if update == 2 and os.environ["RANK"] == "1":
        raise ValueError("rank one is broken")
    return good(self, update, *arguments, **options)
nanotron.training.step.Training.step = step
"""


def test_code_of_the_users_that_exits_ends_the_run_as_a_mistake_told_once(folder: Path) -> None:
    (folder / "own.py").write_text("def f():\n    yield list(range(64)) * 9\n    exit(0)\n")
    config = CONFIG.replace("{dataset: null}", '{dataset: {python: "own.py:f"}, num_loading_workers: 1}')
    (folder / "tiny.yaml").write_text(config)
    done = train(folder, "--override=tokens.train_steps=50")
    assert done.returncode == codes.USER_MISTAKE, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"{folder}/own.py, line 3, in f: sys.exit(0) ended the run; code that a config names has to "
    )


def test_every_rank_names_the_one_that_failed_first(folder: Path) -> None:
    done = torchrun(folder, driver(folder, before=FAIL_ON_RANK_ONE))
    named = [line for line in done.stderr.splitlines() if line.startswith("failed first: ")]
    assert named
    assert all(re.match(r"failed first: rank 1 on .*step 2.*ValueError: rank one is broken$", line) for line in named)
    assert done.stderr.count('    raise ValueError("rank one is broken")') == 1, "one traceback"
    report = done.stderr.split("Root Cause")[1]
    assert re.search(r"traceback : failed first: rank 1 on .*ValueError: rank one is broken$", report, re.MULTILINE)
    record = json.loads((folder / "run/failures/rank-1.json").read_text())
    assert (record["rank"], record["kind"], record["where"]["step"]) == (1, "own", 2)
    assert json.loads((folder / "run/failures/rank-0.json").read_text())["kind"] == "peer"


def wait_for_steps(folder: Path, process: Command) -> None:
    metrics, deadline = folder / "run/metrics.jsonl", time.monotonic() + LONGEST_S
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step was made in time"
        time.sleep(0.05)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def start_long_run(folder: Path) -> Command:
    """A run that goes on until something happens to it, and not because a rank of a busy machine is slow."""
    patient = f"--override=general.timeout_s={LONGEST_S}"
    process = Command(folder, "train", "tiny.yaml", "--override=tokens.train_steps=1000000", patient)
    wait_for_steps(folder, process)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_told_to_stop_saves_and_goes_on_from_there(folder: Path, number: signal.Signals) -> None:
    process = start_long_run(folder)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == codes.PREEMPTED, errors
    assert errors.splitlines()[-1] == "stopped after a complete checkpoint; the same command goes on from it"
    saved = newest_complete(str(folder / "run"))
    assert saved is not None
    stopped = len(losses(folder))
    assert int(Path(saved).name) == stopped
    again = train(folder, f"--override=tokens.train_steps={stopped + 1}")
    assert again.returncode == codes.DONE, again.stderr
    assert len(losses(folder)) == stopped + 1


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_ended(folder: Path) -> None:
    first = start_long_run(folder)
    wait_for_steps(folder, first)
    second = train(folder)
    assert second.returncode == codes.USER_MISTAKE, second.stderr
    assert second.stderr.count("another run is at work in run (process ") == 1, "said once for all ranks"
    for rank in children(first.pid):
        os.kill(rank, signal.SIGKILL)
    first.wait()
    assert train(folder).returncode == codes.DONE, "a killed run leaves nothing behind"


def test_a_killed_rank_is_named_in_the_last_line(folder: Path) -> None:
    process = start_long_run(folder)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == codes.INTERNAL_ERROR
    assert errors.splitlines()[-1].endswith(": ended by SIGKILL")
    assert errors.splitlines()[-1].startswith("failed first: rank 1 on ")


ENDLESS = """
import os, time

class rows:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        self.given = getattr(self, "given", 0) + 1
        while os.environ["RANK"] == "1" and self.given > 8:
            time.sleep(0.01)
        return [index % 64] * 17
"""


def test_a_rank_whose_data_never_comes_is_named_with_its_last_action_and_stack_and_not_those_that_wait(
    folder: Path,
) -> None:
    (folder / "data.py").write_text(ENDLESS)
    config = CONFIG.replace("timeout_s: 30", "timeout_s: 4, heartbeat_s: 0.8")
    config = config.replace("dataset: null", "dataset: {python: 'data.py:rows'}")
    (folder / "tiny.yaml").write_text(config.replace("train_steps: 3", "train_steps: 1000"))
    done = train(folder)
    assert done.returncode == codes.INTERNAL_ERROR
    last = done.stderr.splitlines()[-1]
    assert re.match(r"failed first: rank 1 on \S+ \(stage 0, step \d+, action idle, at data/feed\.py:\d+ _wait\)", last)
    assert "lives, but did not go on: " in last
    assert "failed first: rank 0" not in done.stderr
    assert "all ranks have waited 2 s for rank 1:\nrank 0 on " in done.stderr
    record = json.loads((folder / "run/failures/rank-1.json").read_text())
    assert record["kind"] == "stuck"
    assert "thread data_0:" in record["traceback"]
    assert "in __getitem__" in record["traceback"]


def test_the_ranks_save_and_end_when_their_parent_is_killed(folder: Path) -> None:
    process = start_long_run(folder)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + LONGEST_S
    while any(Path(f"/proc/{rank}/stat").exists() for rank in ranks):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.1)
    assert newest_complete(str(folder / "run")) == f"{folder}/run/{len(losses(folder))}"


TOLD_AT_ONCE = """
import os, signal, sys
from nanotron.cli import main
from nanotron.launch import signals

listen = signals.StopSignals.__init__
def told(self):
    listen(self)
    print([name for name in ("torch", "nanotron.config", "nanotron.launch.parent") if name in sys.modules], flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
signals.StopSignals.__init__ = told
main()
"""


def test_a_signal_to_stop_is_heard_before_the_imports_that_take_seconds(folder: Path) -> None:
    command = [sys.executable, "-c", TOLD_AT_ONCE, "train", "tiny.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (codes.PREEMPTED_UNSAVED, "[]\n")
    assert done.stderr == "told to stop before the first step\n"


def test_a_mistake_that_one_rank_alone_finds_is_printed_once_and_ends_all(folder: Path) -> None:
    """A launcher that gives rank 1 another command, and ends nobody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    script = driver(folder, before="from nanotron.launch import run\nrun.ALONE_WAIT_S = 0")
    command = [script, "--config-file", "tiny.yaml"]
    ranks = []
    for rank, others in (("0", []), ("1", ["--override=tokens.sequence_length=0"])):
        environment = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        ranks.append(Command(folder, *command, *others, environment=environment))
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [codes.USER_MISTAKE] * 2, errors
    assert re.match(r"rank 1: .*tokens.sequence_length", errors[0])
    assert errors[1] == ""
