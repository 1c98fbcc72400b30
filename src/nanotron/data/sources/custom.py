"""A user's own data: a Python function named in the config (examples/custom_data.py shows one).

    data: {dataset: {python: "examples/custom_data.py:counting", arguments: {step: 3}}}

It returns either an iterable of documents, each a text or a sequence of token ids, read as a stream; or an object with
__len__ and __getitem__ whose items are rows of sequence_length + 1 token ids, read in shuffled order like a token file.
A list whose first item is a text is one of documents.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from nanotron.config import CustomDatasetArgs
from nanotron.data.order.windows import Window, starts_after, token_array
from nanotron.errors import ConfigError
from nanotron.logging import get_logger

logger = get_logger(__name__)

SAY_S = 60.0


def custom_functions(dataset: CustomDatasetArgs) -> list[tuple[str, dict[str, Any]]]:
    """Each function that a data set names, with its keyword arguments."""
    arguments = dataset.arguments
    if isinstance(arguments, dict):
        return [(reference, arguments) for reference in dataset.python]
    return list(zip(dataset.python, arguments, strict=True))


@contextmanager
def blamed(reference: str, where: str = "") -> Iterator[None]:
    """Tell of what a user's code raises as of a mistake in it: what was asked of it, the error, file and line."""
    try:
        yield
    except (ConfigError, ModuleNotFoundError):
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"python: {reference}{where} raises {type(error).__name__}: {error} ({frame.filename}, line "
            f"{frame.lineno}, in {frame.name}); correct the code"
        ) from error


@contextmanager
def named_while_slow(what: str) -> Iterator[None]:
    """Say every minute that what is inside, which may never end, has not ended yet."""
    ended = threading.Event()

    def tell() -> None:
        waited = 0.0
        while not ended.wait(SAY_S):
            waited += SAY_S
            logger.warning(f"{what} for {waited:.0f} s")

    threading.Thread(target=tell, name="slow", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `package.module:function` names."""
    place, separator, name = reference.rpartition(":")
    if not separator or not name.isidentifier():
        raise ConfigError(f"python: {reference!r} is not of the form file.py:function or module:function")
    if place.endswith(".py"):
        if not os.path.isfile(place):
            raise ConfigError(f"python: {reference!r} names no file; relative paths start at the working directory")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with blamed(reference):
            spec.loader.exec_module(module)
    else:
        try:
            with blamed(reference):
                module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigError(f"python: {reference!r} cannot be imported: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"python: {place} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def call_function(reference: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What the function returns; arguments that do not fit it, or no data, are the user's mistake."""
    try:
        signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"python: {reference} {error}; dataset.arguments gives it {dict(arguments)}") from None
    except ValueError:
        pass  # written in C, without a signature: the call itself tells
    with blamed(reference), named_while_slow(f"python: {reference} has not returned"):
        data = function(**arguments)
    if isinstance(data, str | bytes | Mapping) or not (isinstance(data, Iterable) or _is_indexed(data)):
        raise ConfigError(
            f"python: {reference} returns {type(data).__name__}; an iterable of documents, or an object with __len__ "
            "and __getitem__, is needed"
        )
    return data


def reference_problem(reference: str) -> str | None:
    """Why `load_function` would refuse a reference, as far as can be told without running the user's code."""
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        return f"{reference} is not of the form file.py:function or module:function; write it so"
    try:
        path = place if place.endswith(".py") else _source_of(place)
    except ModuleNotFoundError as error:
        return f"{reference} names no module: there is no {error.name}; {_fix(place)}"
    if path is None:
        return None
    if not os.path.isfile(path):
        return f"{reference} names no file; give the path of one that exists, from the working directory"
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError) as error:
        return f"{reference} cannot be read: {path} is not Python ({error}); correct the file"
    if {name, "*", "__getattr__"} & _names_in(tree):
        return None
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    fix = f"name one of {', '.join(functions)}" if functions else "define it there"
    return f"{reference} is refused: {path} has no function {name}; {fix}"


def _source_of(module: str) -> str | None:
    """The file of a module's source, found without importing anything of it; raises ModuleNotFoundError.

    None where only an import can tell: a module without source, or one that another makes as it runs.
    """
    if module in sys.modules:
        return None
    path, origin = None, None
    names = module.split(".")
    for end in range(1, len(names) + 1):
        part = ".".join(names[:end])
        found = find_spec(part) if end == 1 else PathFinder.find_spec(part, path)
        if found is None:
            raise ModuleNotFoundError(name=part)
        path, origin = found.submodule_search_locations, found.origin
        if path is None and end < len(names):
            return None
    return origin if origin and origin.endswith(".py") else None


def _fix(module: str) -> str:
    file = f"{module.replace('.', '/')}.py"
    if os.path.isfile(file):
        return f"to use the file here, write {file}:function"
    return "install it, put its folder into PYTHONPATH, or write file.py:function"


def _names_in(tree: ast.Module) -> set[str]:
    """Every name that a file's code may bind at its top level, `*` for those of a star import; rather too many."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def gives_rows(data: Any) -> bool:
    """Whether a user's data are rows, asked for by number. A text is no row: a list of texts is one of documents."""
    return _is_indexed(data) and (len(data) == 0 or not isinstance(data[0], str))


def _is_indexed(data: object) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


class CustomRows:
    """An indexed source over a user's rows."""

    def __init__(
        self,
        name: str,
        rows: Sequence[Sequence[int]],
        sequence_length: int,
        *,
        vocab_size: int,
        eos_id: int | None = None,
    ) -> None:
        """`eos_id` marks the end of documents; without it, it is not known where they begin."""
        self.name = name
        self._rows = rows
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        if len(rows) == 0:
            raise ConfigError(f"{name} gives no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def window(self, index: int) -> Window:
        """Row number `index`, checked for its length and its token ids."""
        where, length = f"{self.name}: row {index}", self._sequence_length + 1
        needed = f"a sequence of sequence_length + 1 = {length} token ids"
        with blamed(self.name, f": row {index}"):
            row = self._rows[index]
        tokens = token_array(row, where, self._vocab_size, needed=needed)
        if tokens.shape != (length,):
            raise ConfigError(
                f"{where} has {len(tokens)} token ids; sequence_length + 1 = {length} are needed. To give documents of "
                "any length, return an iterator over them"
            )
        return Window(tokens, None if self._eos_id is None else starts_after(tokens, self._eos_id))

    def fingerprint(self) -> dict[str, Any]:
        """The number of rows."""
        return {"windows": len(self._rows)}
