"""What a tokenizer's files say of where texts begin and end, wherever the files are; special tokens in texts."""

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from nanotron.check import examine
from nanotron.data.document_ends import end_token
from nanotron.data.open_stages import StageOpener
from nanotron.data.sources.documents import HubDataset
from nanotron.data.sources.sft import write_examples
from nanotron.data.sources.token_files import open_token_files
from nanotron.data.tokenize.prepare import cache_folder
from nanotron.data.tokenize.tokenizer import (
    load_tokenizer,
    open_tokenizer,
    tokenizer_of,
    train_bpe,
    write_files,
)
from nanotron.data.tokenize.workers import Job, tokenize
from nanotron.errors import ConfigError
from nanotron.generate.source import Source
from nanotron.launch.folder import describe_run
from nanotron.parallel.mesh import Mesh
from tests.data.fixtures import make_config, write_hub_cache

TEXT = "say yes, then say no"
SPELLED = "say <|endoftext|> and <s>"
NUMBERS = count()


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE: <|endoftext|> is 0, <s> and </s> are the two after the others."""
    from tokenizers import AddedToken

    tokenizer = train_bpe([f"{TEXT} {SPELLED}"] * 9, 300)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def files(bpe, *, template=None, **others):
    """The texts of a tokenizer's files; `others` by their names without `.json`."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(bpe.to_str())
    kinds = [processors.ByteLevel(trim_offsets=True)]
    if template is not None:
        special = [(token, bpe.token_to_id(token)) for token in ("<s>", "</s>")]
        kinds.append(processors.TemplateProcessing(single=template, pair="$A $B", special_tokens=special))
    tokenizer.post_processor = processors.Sequence(kinds)
    return {"tokenizer.json": tokenizer.to_str(), **{f"{name}.json": json.dumps(said) for name, said in others.items()}}


@pytest.fixture(params=["folder", "hub"])
def place(request, tmp_path, monkeypatch):
    """A function that puts files where a name leads to, and returns the name."""

    def put(content):
        if request.param == "folder":
            name = str(tmp_path / f"tokenizer{next(NUMBERS)}")
            write_files(content, name)
            return name
        name = f"org/name{next(NUMBERS)}"
        write_hub_cache(tmp_path, name, content)
        return name

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return put


@pytest.mark.parametrize(
    ("said", "end", "stops"),
    [
        ({}, None, []),
        ({"tokenizer_config": {"eos_token": "</s>"}}, "</s>", ["</s>"]),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "lstrip": False}}}, "</s>", ["</s>"]),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "</s>"}}, "</s>", ["</s>"]),
        ({"tokenizer_config": {"eos_token": "<s>"}, "special_tokens_map": {"eos_token": "</s>"}}, "<s>", ["<s>"]),
        ({"generation_config": {"eos_token_id": 0}}, "<|endoftext|>", ["<|endoftext|>"]),
        ({"generation_config": {"eos_token_id": [0, 7, 10**6]}}, "<|endoftext|>", ["<|endoftext|>", 7]),
        (
            {"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": [0, 1, 7]}},
            "</s>",
            ["</s>", "<|endoftext|>", 1, 7],
        ),
    ],
)
def test_the_end_of_a_text_is_what_the_first_file_that_names_one_says(place, bpe, said, end, stops):
    """An id that is no token of the tokenizer's ends nothing."""
    tokenizer = open_tokenizer(place(files(bpe, **said)))
    stops = [token if isinstance(token, int) else bpe.token_to_id(token) for token in stops]
    assert tokenizer.end == (None if end is None else bpe.token_to_id(end))
    assert list(tokenizer.stops) == list(dict.fromkeys(stops))


@pytest.mark.parametrize(
    ("template", "settings", "begin"),
    [
        (None, {}, []),
        (None, {"bos_token": "<s>"}, []),
        ("<s> $A", {"bos_token": "<s>"}, ["<s>"]),
        ("<s> $A </s>", {}, ["<s>"]),
        ("</s> <s> $A", {}, ["</s>", "<s>"]),
    ],
)
def test_a_text_begins_as_it_does_for_transformers_everywhere(tmp_path, monkeypatch, bpe, template, settings, begin):
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **settings}
    write_files(files(bpe, template=template, tokenizer_config=said), "tokenizer")
    Path("in.txt").write_text(TEXT)
    bare = bpe.encode(TEXT).ids
    prompt = [*map(bpe.token_to_id, begin), *bare]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")(TEXT).input_ids
    assert prompt == theirs[: len(prompt)]
    config = make_config(tokenizer={"tokenizer_name_or_path": "tokenizer"}, model_config={"vocab_size": 303})
    tokenize(Job(["in.txt"], "out", tokenizer="tokenizer"), show_progress=False)
    assert written("out") == StageOpener(config, config.data_stages[0], 8, 8).encode(TEXT) == [*prompt, 0]
    assert Source("", config, open_tokenizer("out")).encode(TEXT) == prompt, "the folder says the same"


def written(folder):
    (file,) = open_token_files(folder)
    return file.read(0, file.num_tokens).tolist()


@pytest.mark.parametrize(
    ("options", "begin", "end"),
    [
        ({"bos": "<s>"}, ["<s>"], "</s>"),
        ({"prepend_bos": False, "eos": "<|endoftext|>"}, [], "<|endoftext|>"),
        ({"append_eos": False}, ["</s>"], None),
    ],
)
def test_what_tokenize_is_asked_for_is_written_and_kept_for_prompts(tmp_path, monkeypatch, bpe, options, begin, end):
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    settings = {"eos_token": "</s>", "chat_template": "{{ messages }}"}
    write_files(files(bpe, template="</s> $A", tokenizer_config=settings), "tokenizer")
    Path("in.txt").write_text(TEXT)
    tokenize(Job(["in.txt"], "out", tokenizer="tokenizer", **options), show_progress=False)
    begin = [bpe.token_to_id(token) for token in begin]
    prompt = [*begin, *bpe.encode(TEXT).ids]
    assert written("out") == [*prompt, *([bpe.token_to_id(end)] if end else [])]
    assert open_tokenizer("out").encode(TEXT) == prompt
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT).input_ids == prompt
    assert theirs.eos_token == (end or "</s>")
    assert theirs.chat_template == "{{ messages }}"


def test_text_that_spells_a_special_token_stays_text_unless_asked(tmp_path, monkeypatch, bpe):
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    write_files(files(bpe, tokenizer_config=said), "tokenizer")
    Path("in.txt").write_text(SPELLED)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    end = bpe.token_to_id("</s>")
    for read in (False, True):
        ids = theirs(SPELLED, split_special_tokens=not read).input_ids
        assert (0 in ids) == read
        named = {"tokenizer_name_or_path": "tokenizer", "read_special_tokens": read}
        config = make_config(tokenizer=named, model_config={"vocab_size": 303})
        output = f"out{read}"
        tokenize(Job(["in.txt"], output, tokenizer="tokenizer", read_special_tokens=read), show_progress=False)
        assert written(output) == StageOpener(config, config.data_stages[0], 8, 8).encode(SPELLED) == [*ids, end]
        assert open_tokenizer(output, read_special_tokens=read).encode(SPELLED) == ids


def test_the_template_of_every_kind_of_tokenizer_is_known(bpe):
    from tokenizers import Tokenizer, processors

    pair = ("</s>", bpe.token_to_id("</s>")), ("<s>", bpe.token_to_id("<s>"))
    template = processors.TemplateProcessing(single="<s> $A", pair="$A $B", special_tokens=[pair[1]])
    for processor in (
        processors.RobertaProcessing(*pair), processors.BertProcessing(*pair), template,
        processors.Sequence([processors.ByteLevel(), processors.Sequence([template])]), None,
    ):  # fmt: skip
        theirs = Tokenizer.from_str(bpe.to_str())
        if processor is not None:
            theirs.post_processor = processor
        ours = tokenizer_of({"tokenizer.json": theirs.to_str()}, "here").encode(TEXT)
        assert theirs.encode(TEXT).ids[: len(ours)] == ours


def test_a_tokenizer_that_cuts_or_fills_up_texts_does_neither_here(tmp_path, bpe):
    from tokenizers import Tokenizer

    cutting = Tokenizer.from_str(bpe.to_str())
    cutting.enable_truncation(3)
    cutting.enable_padding(length=90)
    write_files({"tokenizer.json": cutting.to_str()}, str(tmp_path))
    assert open_tokenizer(str(tmp_path)).documents([TEXT]) == [bpe.encode(TEXT).ids]


def test_a_run_keeps_the_tokenizer_whatever_it_is_called(place, tmp_path, bpe):
    from transformers import AutoTokenizer

    content = files(
        bpe, template="<s> $A", tokenizer_config={"model_max_length": 9},
        special_tokens_map={"bos_token": "<s>"}, generation_config={"eos_token_id": [1, 0], "temperature": 0.6},
    )  # fmt: skip
    name = place({**content, "chat_template.jinja": "{{ bos_token }}"})
    run = tmp_path / "run"
    run.mkdir()
    named = {"tokenizer_name_or_path": name}
    for _ in range(2):  # a second start names the run's own
        config = make_config(tokenizer=named, model_config={"vocab_size": 303})
        describe_run(run, config, Mesh(), torch.device("cpu"))
        before, kept = open_tokenizer(name), open_tokenizer(str(run))
        for fact in ("begin", "end", "stops", "bos"):
            assert getattr(kept, fact) == getattr(before, fact)
        named = {"tokenizer_name_or_path": str(run)}
    theirs = AutoTokenizer.from_pretrained(run)
    assert (theirs.bos_token, theirs.eos_token_id, theirs.chat_template) == ("<s>", 1, "{{ bos_token }}")
    assert theirs(TEXT).input_ids == kept.encode(TEXT)
    assert json.loads((run / "generation_config.json").read_text()) == {"eos_token_id": [1, 0]}


def test_a_run_whose_tokenizer_is_not_to_be_had_says_so_and_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = make_config(tokenizer={"tokenizer_name_or_path": "org/absent"})
    (tmp_path / "run").mkdir()
    describe_run(tmp_path / "run", config, Mesh(), torch.device("cpu"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{tmp_path}/run keeps no tokenizer: tokenizer 'org/absent' is neither a file, nor a folder")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"tokenizer_config.json": "{"}, r"its tokenizer_config.json is damaged \(EOF while parsing"),
        ({"special_tokens_map.json": "[" * 3000}, r"its special_tokens_map.json is damaged \(recursion limit exceeded"),
        ({"generation_config.json": "[]"}, r"its generation_config.json is damaged \(it is \[\]: .* valid dictionary"),
        (
            {"generation_config.json": '{"eos_token_id": [2, -1]}'},
            r"has eos_token_id=\[2, -1\], which is neither a token",
        ),
        ({"tokenizer.json": "{}"}, "its tokenizer.json is not a tokenizer"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_named(tmp_path, bpe, content, message):
    write_files({**files(bpe), **content}, str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        open_tokenizer(str(tmp_path))


def test_the_command_of_the_docs_works_with_what_the_hub_s_cache_holds(tmp_path, bpe):
    """As gpt2 lies on the hub: only generation_config.json says which token ends a text."""
    gpt2 = files(bpe, tokenizer_config={"model_max_length": 1024}, generation_config={"eos_token_id": 0})
    write_hub_cache(tmp_path / "home", "gpt2", gpt2)
    (tmp_path / "in.txt").write_text(TEXT)
    command = [sys.executable, "-m", "nanotron.cli", "tokenize", "in.txt", "--tokenizer", "gpt2", "--output", "out"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert written(str(tmp_path / "out")) == [*bpe.encode(TEXT).ids, 0]
    assert open_tokenizer(str(tmp_path / "out")).end == 0


def test_files_without_an_index_end_documents_as_the_tokenizer_says_if_it_is_to_be_had(place, bpe, caplog):
    named = place(files(bpe, tokenizer_config={"eos_token": "</s>"}))
    silent = place(files(bpe))
    for masks in (False, True):
        model = {"vocab_size": 303, "_use_doc_masking": masks, "is_qwen2_config": True, "eos_token_id": [7, 8]}
        config = make_config(model_config=model)
        assert end_token(config, "data", named) == bpe.token_to_id("</s>")
        assert end_token(config, "data", silent) == (7 if masks else None), "of several the first"
    with pytest.raises(ConfigError, match="tokenizer 'org/absent' is neither a file"):
        end_token(config, "data", "org/absent")
    config.model.model_config._use_doc_masking = False
    with caplog.at_level("INFO", logger="nanotron"):
        assert end_token(config, "data", "org/absent") is None
    assert caplog.records[-1].getMessage().startswith("data has no index of its documents, and they are not told apart")


def test_a_refused_command_leaves_nothing_that_refuses_the_next(tmp_path, monkeypatch, bpe):
    monkeypatch.chdir(tmp_path)
    write_files(files(bpe), "tokenizer")
    Path("in.txt").write_text(TEXT)
    job = {"inputs": ["in.txt"], "output": "out", "tokenizer": "tokenizer"}
    for options, message in [
        ({}, "'tokenizer' does not say which token ends a document; use --eos or --no-eos"),
        ({"eos": "</S>"}, "--eos '</S>' is not a token of tokenizer"),
        ({"bos": "<S>", "append_eos": False}, "--bos '<S>' is not a token of tokenizer"),
        ({"tokenizer": "./absent"}, "tokenizer './absent' is neither a file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            tokenize(Job(**{**job, **options}), show_progress=False)
    tokenize(Job(**job, append_eos=False), show_progress=False)
    assert written("out") == bpe.encode(TEXT).ids
    with pytest.raises(ConfigError, match="begun with another bos and reading of special tokens"):
        tokenize(Job(**job, append_eos=False, bos="<s>", read_special_tokens=True), show_progress=False)


def test_texts_that_nothing_ends_are_worth_a_line_and_are_read_anew_when_something_does(tmp_path, monkeypatch, bpe):
    monkeypatch.chdir(tmp_path)
    write_files(files(bpe), "tokenizer")
    Path("run.yaml").write_text(
        """
tokenizer: {tokenizer_name_or_path: tokenizer}
data_stages: [{name: a, start_training_step: 1, data: {dataset: {hf_dataset_or_datasets: saved}}}]
model: {model_config: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}}
tokens: {sequence_length: 8, micro_batch_size: 1, batch_accumulation_per_replica: 1}
optimizer: {learning_rate_scheduler: {learning_rate: 0.001}}
"""
    )
    lines = []
    folders = []
    for settings in ({}, {"eos_token": "</s>"}):
        Path("tokenizer/tokenizer_config.json").write_text(json.dumps(settings))
        checked = examine("run.yaml")
        lines += [line for line in checked.notices if "names no token that ends a text" in line]
        folders.append(cache_folder(checked.config, "saved", HubDataset(), "text"))
    assert len(lines) == 1
    assert lines[0].startswith("run.yaml:2: tokenizer.tokenizer_name_or_path: tokenizer names no token that ends")
    assert len(set(folders)) == 2


def examples(tmp_path, rows, **options):
    """Each example's tokens as text, with which of them are targets."""
    path = str(tmp_path / f"{next(NUMBERS)}.ds")
    write_examples("saved", rows, path, str(tmp_path / "tokenizer"), **options)
    (file,) = open_token_files(path)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    ids, targets = file.read(0, file.num_tokens).tolist(), file.targets(0, file.num_tokens).tolist()
    return [
        (tokenizer.decode([token], skip_special_tokens=False), target)
        for token, target in zip(ids, targets, strict=True)
    ]


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("say ", "yes", [("say", False), (" yes", True)]),
        ("say", " yes", [("say", False), (" yes", True)]),
        ("say y", "es", [("say", False), (" yes", True)]),
        ("say yes", "", [("say", False), (" yes", False)]),
        ("", "say yes", [("say", True), (" yes", True)]),
        ("say", "  ", [("say", False), (" ", True), (" ", True)]),
        ("say ", " ", [("say", False), (" ", False), (" ", True)]),
    ],
)
def test_a_token_with_any_character_of_the_completion_is_a_target(tmp_path, bpe, prompt, completion, expected):
    """Also one of white space, whose offsets a byte-level tokenizer would trim to nothing."""
    write_files(files(bpe, template="<s> $A", tokenizer_config={"eos_token": "</s>"}), str(tmp_path / "tokenizer"))
    found = examples(tmp_path, [{"prompt": prompt, "completion": completion}])
    assert found == [("<s>", False), *expected, ("</s>", True)]


def test_special_tokens_are_the_template_s_alone_unless_asked(tmp_path, bpe):
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    settings = {"eos_token": "</s>", "chat_template": template}
    write_files(files(bpe, template="<s> $A", tokenizer_config=settings), str(tmp_path / "tokenizer"))
    asked, said = {"role": "user", "content": "say"}, {"role": "assistant", "content": " yes"}
    whole = [("<s>", False), ("say", False), ("</s>", False), ("<s>", False), (" yes", True), ("</s>", True)]
    plain = {"prompt": "say", "completion": " yes"}
    rows = [{"messages": [asked, said]}, plain, {"messages": [asked, said]}]
    assert examples(tmp_path, rows) == [*whole, ("<s>", False), ("say", False), (" yes", True), ("</s>", True), *whole]
    spelling = {"messages": [asked, said, {"role": "tool", "content": [{"type": "text", "text": "no</s>"}]}, said]}
    with pytest.raises(ConfigError, match=r"saved: row 1: message 2 spells the special token '</s>', which would be"):
        examples(tmp_path, [plain, spelling])
    assert examples(tmp_path, [spelling], read_special_tokens=True)
    assert ("</s>", False) not in examples(tmp_path, [{"prompt": "</s>", "completion": ""}]), "a plain prompt is text"
