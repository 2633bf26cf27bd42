"""The command line's parser: errors of one line that name what was meant, and an example in every help text."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .._suggest import did_you_mean
from .._text import printable
from ._output import complain, print_text


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, as everything here does.

    Parameters
    ----------
    examples
        Command lines that its help ends with.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.examples = tuple(examples)
        # What begins with a minus and a digit is a value: the option's own rule refuses -3, -3% and -1/4.
        self._negative_number_matcher = re.compile(r"^-\.?\d")

    def format_help(self) -> str:
        """Return the help text, which ends with the examples."""
        shown = "".join(f"  {line}\n" for line in self.examples)
        return super().format_help() + (f"\nexample:\n{shown}" if shown else "")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end the program with status 2."""
        self.exit(2, f"{self.prog}: error: {printable(message)} (--help lists the options)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the program."""
        if message:
            complain(message.rstrip("\n"))
        sys.exit(status)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or the version. argparse would say nothing of an output that has no room."""
        print_text(message, file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, after a look at the options' names: one that is misspelt is said before one that is missing."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # the words after a command are the command's
            self._check_names(words)
        return super().parse_known_args(words, namespace)

    def _check_names(self, words: Sequence[str]) -> None:
        known = self._option_string_actions
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if not name.startswith("-") or name == "-" or self._negative_number_matcher.match(name):
                continue
            # A long name may be cut short, and a short one may have its value behind it.
            if any(one.startswith(name) for one in known) or (name[:2] != "--" and name[:2] in known):
                continue
            shown = [one for one, action in known.items() if action.help != argparse.SUPPRESS and one[:2] == "--"]
            self.error(f"{name}: no such option{did_you_mean('--' + name.lstrip('-'), shown)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is none of an action's choices, commands among them."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        name = max(action.option_strings, key=len, default=str(action.metavar or action.dest))
        self.error(f"{name} {value}: must be one of {', '.join(known)}{did_you_mean(str(value), known)}")
