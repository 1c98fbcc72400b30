"""Hugging Face data sets as a stage's data: tokenized once, cached, and read like any token file."""

import contextlib
import hashlib
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from nanotron.batch import IGNORED_LABEL, document_spans
from nanotron.data.feed import Feed
from nanotron.data.tokenize.chat import ChatTemplate
from nanotron.data.tokenize.prepare import prepare_data
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, train_bpe
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes
from tests.data.fixtures import make_config

TEXTS = [f"text number {number} says " + "hello there " * (number % 5 + 1) for number in range(60)]
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """The folder of a small chat tokenizer; the working directory is new."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(train_bpe(TEXTS, 300), "tokenizer", eos=END_OF_TEXT)
    config = json.loads(Path("tokenizer/tokenizer_config.json").read_text())
    Path("tokenizer/tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    return "tokenizer"


def save(columns, name="saved"):
    from datasets import Dataset

    Dataset.from_dict(columns).save_to_disk(name)
    return name


def config_for(tokenizer, dataset, **changes):
    stages = [{"name": "a", "start_training_step": 1, "data": {"dataset": dataset, **changes.pop("data", {})}}]
    model = {"vocab_size": 300, **changes.pop("model_config", {})}
    return make_config(
        data_stages=stages, model_config=model, tokenizer={"tokenizer_name_or_path": tokenizer}, **changes
    )


def rows(config, steps=1):
    feed = Feed(config, Mesh(), device=torch.device("cpu"))
    batches = [batch for step in range(1, steps + 1) for batch in feed.step(step).microbatches]
    feed.close()
    return feed, batches


def test_a_map_style_data_set_is_tokenized_once_and_cached(tokenizer):
    config = config_for(tokenizer, {"hf_dataset_or_datasets": save({"text": TEXTS})})
    prepare_data(config)
    (folder,) = [path for path in Path("data/hf").iterdir() if path.is_dir()]
    written = (folder / "00000_unshuffled.ds").stat().st_mtime_ns
    feed, batches = rows(config)
    assert (folder / "00000_unshuffled.ds").stat().st_mtime_ns == written
    stage = feed._stages[0].stage
    stream = [
        int(token) for index in range(len(stage.sources[0])) for token in stage.sources[0].window(index).tokens[1:]
    ]
    end = load_tokenizer(tokenizer).token_to_id(END_OF_TEXT)
    whole = [token for text in TEXTS for token in [*load_tokenizer(tokenizer).encode(text).ids, end]]
    assert stream == whole[1 : 1 + len(stream)]
    assert all((batch.positions[:, 0] == 0).all() for batch in batches)


def test_a_changed_data_set_is_tokenized_again(tokenizer):
    config = config_for(tokenizer, {"hf_dataset_or_datasets": save({"text": TEXTS})})
    prepare_data(config)
    save({"text": TEXTS[:50]})
    prepare_data(config)
    assert len([path for path in Path("data/hf").iterdir() if path.is_dir()]) == 2


def test_fractions_take_the_first_rows_and_several_data_sets_blend(tokenizer):
    names = {save({"text": TEXTS}, "one"): 0.5, save({"text": TEXTS[::-1]}, "two"): 1.0}
    feed, _ = rows(config_for(tokenizer, {"hf_dataset_or_datasets": names}))
    one, two = feed._stages[0].stage.sources
    assert (one.name, two.name) == ("one", "two")
    encoded = [len(encoding.ids) + 1 for encoding in load_tokenizer(tokenizer).encode_batch(TEXTS)]
    assert (one.num_tokens, two.num_tokens) == (sum(encoded[:30]), sum(encoded))


def test_prompts_and_completions_are_packed_whole_with_loss_on_completions_only(tokenizer):
    prompts, completions = ["what is 1", "say", "why so"], [" it is one", " hello", " because it says"]
    dataset = {"hf_dataset_or_datasets": save({"prompt": prompts, "completion": completions}), "sft_dataloader": True}
    config = config_for(
        tokenizer, dataset, sequence_length=63, micro_batch_size=1, batch_accumulation_per_replica=1,
        model_config={"is_qwen2_config": True, "_use_doc_masking": True},
    )  # fmt: skip
    _, (batch,) = rows(config)
    encode, end = load_tokenizer(tokenizer).encode, load_tokenizer(tokenizer).token_to_id(END_OF_TEXT)
    tokens, labels, starts = [], [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        whole = encode(prompt + completion).ids
        learned = [start >= len(prompt) for start, _ in encode(prompt + completion).offsets]
        starts += [len(tokens)] * (len(whole) + 1)
        tokens += [*whole, end]
        labels += [token if keep else IGNORED_LABEL for token, keep in zip(whole, learned, strict=True)] + [end]
    used = len(tokens)
    assert batch.tokens[0].tolist() == tokens + [0] * (63 - used)
    assert batch.labels[0].tolist() == labels[1:] + [IGNORED_LABEL] * (64 - used)
    assert batch.spans[0] == document_spans([sorted({*starts, used})], 63)[0]
    assert batch.positions[0, :used].tolist() == [number - start for number, start in enumerate(starts)]


def sft_losses(rank, world, folder, tokenizer, dataset, mode):
    """Of two steps, on rows that are cut over all ranks."""
    with contextlib.chdir(folder):
        config = config_for(
            tokenizer, dataset, sequence_length=24, dtype="float64", model_config={"_use_doc_masking": True},
            parallelism={"context_parallel_size": world, "cp_mode": mode},
        )  # fmt: skip
        mesh = Mesh(mesh_axes(config), rank)
        if world > 1:
            mesh.create_groups()
        training = Training(config, mesh, "cpu")
        training.initialize()
        feed = Feed(config, mesh, device=torch.device("cpu"))
        losses = [training.step(update, feed.step(update).microbatches).read().lm_loss for update in (1, 2)]
        feed.close()
        return losses


def test_prompts_and_completions_have_the_same_losses_when_rows_are_cut_over_ranks(tokenizer, tmp_path, pool):
    completions = [" hello" * (number % 9) for number in range(40)]
    dataset = {"hf_dataset_or_datasets": save({"prompt": ["say"] * 40, "completion": completions})}
    dataset["sft_dataloader"] = True
    (alone,) = pool.run(1, sft_losses, str(tmp_path), tokenizer, dataset, "ALL_GATHER")
    for mode in ("ALL_GATHER", "ALL_TO_ALL"):
        for cut in pool.run(2, sft_losses, str(tmp_path), tokenizer, dataset, mode):
            assert cut == pytest.approx(alone, rel=1e-12)


def test_every_example_is_in_one_row_and_long_ones_are_cut(tokenizer):
    completions = [" hello" * (number % 9) for number in range(40)] + [" there" * 100]
    dataset = save({"prompt": ["say"] * 41, "completion": completions})
    config = config_for(tokenizer, {"hf_dataset_or_datasets": dataset, "sft_dataloader": True}, sequence_length=24)
    feed, _ = rows(config)
    source = feed._stages[0].stage.sources[0]
    encode, end = load_tokenizer(tokenizer).encode, load_tokenizer(tokenizer).token_to_id(END_OF_TEXT)
    examples = [[*encode("say" + completion).ids, end][:25] for completion in completions]
    found = []
    for index in range(len(source)):
        window = source.window(index)
        assert len(window.tokens) == 25
        edges = [0, *window.starts.tolist(), 25]
        parts = [window.tokens[start:stop].tolist() for start, stop in itertools.pairwise(edges)]
        found += [part for part in parts if any(part)]
    assert found == examples


def test_a_row_that_examples_fill_exactly_is_not_cut(tokenizer):
    encode = load_tokenizer(tokenizer).encode
    dataset = save({"prompt": ["say", "why"] * 3, "completion": [" hello", " there"] * 3})
    exact = len(encode("say hello").ids) + len(encode("why there").ids) + 2
    config = config_for(
        tokenizer, {"hf_dataset_or_datasets": dataset, "sft_dataloader": True}, sequence_length=exact - 1
    )
    feed, _ = rows(config)
    source = feed._stages[0].stage.sources[0]
    assert len(source) == 3
    assert [np.count_nonzero(source.window(index).tokens == 0) for index in range(3)] == [2] * 3  # the end tokens only


def test_chat_messages_are_learned_where_the_assistant_speaks(tokenizer):
    conversation = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "it says"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "because"},
    ]
    text, learned = ChatTemplate(tokenizer).render(conversation)
    assert [text[start:stop] for start, stop in learned] == ["it says" + END_OF_TEXT, "because" + END_OF_TEXT]
    dataset = {"hf_dataset_or_datasets": save({"messages": [conversation] * 3}), "sft_dataloader": True}
    config = config_for(tokenizer, dataset, sequence_length=100, micro_batch_size=1, batch_accumulation_per_replica=1)
    _, (batch,) = rows(config)
    targets = batch.labels[0][batch.labels[0] != IGNORED_LABEL].tolist()
    spoken = load_tokenizer(tokenizer).decode(targets, skip_special_tokens=False)
    assert spoken.startswith(f"it says{END_OF_TEXT}because{END_OF_TEXT}")


@pytest.mark.parametrize("beside", [None, CHATML.replace("message.content", "message.content | upper")])
def test_the_template_renders_as_transformers_does(tokenizer, beside):
    from transformers import AutoTokenizer

    if beside:  # it counts, whatever tokenizer_config.json says
        Path(tokenizer, "chat_template.jinja").write_text(beside)
    theirs = AutoTokenizer.from_pretrained(os.path.abspath(tokenizer))
    conversation = [{"role": "user", "content": "a <b> & 'c'"}, {"role": "assistant", "content": "naïve"}]
    for prompt in (False, True):
        expected = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt)
        assert ChatTemplate(tokenizer).text(conversation, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, "saved: row 0 has the columns 'text'; an SFT data set has either 'messages' or"),
        ({"prompt": ["a"], "completion": [None]}, "saved: row 0 has the columns 'prompt', 'completion'"),
    ],
)
def test_a_data_set_that_is_not_sft_is_refused(tokenizer, columns, message):
    config = config_for(tokenizer, {"hf_dataset_or_datasets": save(columns), "sft_dataloader": True})
    with pytest.raises(ConfigError, match=message):
        prepare_data(config)


def test_a_conversation_that_the_template_cannot_write_is_named_by_its_row(tokenizer):
    said = {"role": "assistant", "content": "hello"}
    silent = {"role": "assistant", "content": None}
    for template, reason in [
        ("{{ message.content.strip() }}", "the chat template fails on these messages: 'None' has no attribute"),
        ("{{ '<' + message.content }}", "the chat template fails on these messages: can only concatenate str"),
        ("{{ message.content or raise_exception('no') }}", "the chat template refuses the conv.*: no"),
    ]:
        path = Path(tokenizer, "tokenizer_config.json")
        template = f"{{% for message in messages %}}{template}{{% endfor %}}"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
        dataset = {"hf_dataset_or_datasets": save({"messages": [[said], [silent]]}), "sft_dataloader": True}
        with pytest.raises(ConfigError, match=f"saved: row 1: {reason}"):
            prepare_data(config_for(tokenizer, dataset))


def test_examples_without_anything_to_learn_are_left_out_and_the_first_is_named(tokenizer, caplog):
    said, asked = {"role": "assistant", "content": "hello"}, {"role": "user", "content": "why"}
    whole = [[asked, said], [said], [asked, said]]
    dataset = save({"messages": [whole[0], [asked], whole[1], [], [asked], whole[2]]})
    config = config_for(tokenizer, {"hf_dataset_or_datasets": dataset, "sft_dataloader": True}, sequence_length=7)
    feed, _ = rows(config)
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert line == f"{dataset}: left out 3 of 6 examples, which have no text to learn; the first: row 1"
    other = config_for(
        tokenizer, {"hf_dataset_or_datasets": save({"messages": whole}, "whole"), "sft_dataloader": True},
        sequence_length=7,
    )  # fmt: skip
    same, _ = rows(other)
    source, expected = (one._stages[0].stage.sources[0] for one in (feed, same))
    assert len(source) == len(expected)
    for index in range(len(source)):
        assert source.window(index).tokens.tolist() == expected.window(index).tokens.tolist()


def test_texts_without_a_tokenizer_are_refused(tokenizer):
    config = config_for(None, {"hf_dataset_or_datasets": save({"text": TEXTS})})
    with pytest.raises(ConfigError, match=r"tokenizer.tokenizer_name_or_path: missing"):
        prepare_data(config)


def test_examples_with_tokens_that_the_model_does_not_know_are_refused(tokenizer):
    dataset = {
        "hf_dataset_or_datasets": save({"prompt": ["hi"] * 20, "completion": TEXTS[:20]}),
        "sft_dataloader": True,
    }
    with pytest.raises(ConfigError, match=r"00000_unshuffled.ds: token id \d+ at byte \d+ is not below vocab_size=200"):
        rows(config_for(tokenizer, dataset, model_config={"vocab_size": 200}))


def test_two_stages_of_folders_and_a_hub_data_set_stop_in_the_second_and_resume_on_another_dp(tokenizer):
    from tests.data.fixtures import random_documents, write_nanoset

    write_nanoset(Path("one"), random_documents(40, seed=1))
    write_nanoset(Path("two"), random_documents(40, seed=2))
    folders = {"dataset_folder": {"one": 3, "two": 1}}
    hub = {"hf_dataset_or_datasets": save({"text": TEXTS})}
    stages = [
        {"name": "first", "start_training_step": 1, "data": {"dataset": folders}},
        {"name": "second", "start_training_step": 3, "sequence_length": 12, "data": {"dataset": hub}},
    ]

    def digests(dp, steps, state=None):
        sizes = {"dp": dp, "micro_batch_size": 1, "batch_accumulation_per_replica": 4 // dp}
        named = {"tokenizer_name_or_path": tokenizer}
        config = make_config(data_stages=stages, model_config={"vocab_size": 300}, tokenizer=named, **sizes)
        feeds = [Feed(config, Mesh({"dp": dp}, rank), device=torch.device("cpu"), state=state) for rank in range(dp)]
        found = []
        for step in steps:
            rows = [
                row.numpy().tobytes() for feed in feeds for part in feed.step(step).microbatches for row in part.tokens
            ]
            found += [hashlib.sha256(row).hexdigest() for row in rows]
        for feed in feeds:
            feed.close()
        return found, feeds[0].state_dict()

    whole, end = digests(1, range(1, 8))
    before, state = digests(2, range(1, 5))
    after, resumed_end = digests(4, range(5, 8), state)
    assert before + after == whole
    assert resumed_end == end
    assert end["consumed"] == {"first": 8, "second": 20}
