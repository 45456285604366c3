"""Shell completion of our commands: their options, choices and files.

Knows the commands' names and click's scripts, which call the command. Knows no option.
"""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
COMMANDS = (
    "spark-bench",
    "spark-build",
    "spark-check",
    "spark-inspect",
    "spark-replicas",
    "spark-run",
)


def script(shell: str) -> str:
    """The script for all commands; `shell` is one of `SHELLS`."""
    made = get_completion_class(shell)
    if made is None:
        raise KeyError(shell)
    empty = click.Command(None)  # the script only uses the command's name
    return "\n".join(made(empty, {}, name, variable(name)).source() for name in COMMANDS)


def variable(name: str) -> str:
    """The environment variable by which the shell queries the command `name`."""
    return f"_{name}_COMPLETE".replace("-", "_").upper()
