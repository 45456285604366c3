"""The error tree. A user's mistake and our own bug are different classes.

SparkError
├── UserError              something outside the program must change; the message says what
│   ├── CheckpointError    a checkpoint is incomplete, damaged or not understood
│   ├── OptionError        an option or combination of options cannot be honoured
│   ├── EngineError        an engine folder is damaged, foreign, newer, or missing
│   ├── CapacityError      the machine or the engine is too small for what was asked
│   └── RequestError       one request is malformed or over the engine's limits
└── InternalError          a bug in this project: please report it
    ├── GraphError         a graph is not legal at the stage it reached
    └── ExecutorError      an executor broke its contract
"""

import re

LONGEST = 300  # characters of a CheckpointError


class SparkError(Exception):
    """Root of every error raised on purpose by this project."""


class UserError(SparkError):
    """Something the user can fix. The message names the value and the remedy."""


class CheckpointError(UserError):
    """The checkpoint is incomplete, damaged, or of an unsupported kind.

    A message of more than `LONGEST` characters has shorter paths, and is cut in the middle where
    these do not suffice: it quotes names and values of files, which may be of any length.
    """

    def __init__(self, message: str) -> None:
        if len(message) > LONGEST:
            message = re.sub(r"\S{61,}", lambda word: f"…{word[0][-59:]}", message)
        cut = f"{message[:170]} … {message[-(LONGEST - 173) :]}"
        super().__init__(message if len(message) <= LONGEST else cut)


class OptionError(UserError):
    """An option has a value that cannot be honoured."""


class EngineError(UserError):
    """The engine folder is missing, damaged, for another target, or of a newer format."""


class CapacityError(UserError):
    """The request does not fit the machine or the engine's limits."""


class RequestError(UserError):
    """One request is malformed or over the engine's limits. Other requests are untouched.

    `param` names the field, where one is at fault; `code` is OpenAI's word for the case.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InternalError(SparkError):
    """A bug of ours."""


class GraphError(InternalError):
    """A graph is not legal at the stage it reached."""


class ExecutorError(InternalError):
    """An executor broke its contract."""
