"""Chat templates: from messages to text, and which characters of it the assistant says."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from nanotron.data.tokenize.tokenizer import TEMPLATE, read_files, settings_of
from nanotron.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Template


class ChatTemplate:
    """The chat template of a tokenizer, read from its files when first used."""

    def __init__(self, tokenizer_name: str) -> None:
        self._tokenizer_name = tokenizer_name

    @cached_property
    def _files(self) -> dict[str, str]:
        return read_files(self._tokenizer_name)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return settings_of(self._files, self._tokenizer_name)

    @cached_property
    def _template(self) -> Template:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        source = self._files.get(TEMPLATE, self._settings.get("chat_template"))
        if not isinstance(source, str):
            raise ConfigError(
                f"tokenizer {self._tokenizer_name!r} has no chat_template in its tokenizer_config.json; use a chat "
                "tokenizer, or a data set with the columns prompt and completion"
            )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment.from_string(source)

    def text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """The messages as the model sees them."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {name: self._settings[name] for name in names if name in self._settings}
        template = self._template
        from jinja2 import TemplateError

        try:
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **special)
        except (TemplateError, TypeError) as error:
            raise ConfigError(f"the chat template fails on these messages: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the ranges of characters that the assistant is to learn.

        A turn of the assistant is what the template adds to the conversation before it with the generation prompt.
        """
        whole = self.text(messages)
        learned = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.text(messages[:number], add_generation_prompt=True)
            until = whole if number + 1 == len(messages) else self.text(messages[: number + 1])
            if not (whole.startswith(before) and whole.startswith(until)):
                raise ConfigError(
                    f"the chat template of {self._tokenizer_name!r} changes earlier turns when a turn is added "
                    f"(message {number}); the assistant's part cannot be told, use another template"
                )
            learned.append((len(before), len(until)))
        return whole, learned


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter would escape characters for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"the chat template refuses the conversation: {message}")
