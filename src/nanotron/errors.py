"""The one exception that means "the user can fix this"."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A mistake of the user's: one line per problem, each naming the key, the value, the rule and the fix.

    Entry points print the lines once, without a traceback, and exit with code 2.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
