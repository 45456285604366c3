"""A chat on the terminal: read a line, run a command or answer, again.

Knows this loop and Ctrl-C. `session` has the engine, `input` reads the keyboard, `screen` shows the
answer.
"""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import FrameType

from spark_engine.errors import UserError
from spark_engine.runtime.cli.terminal import commands as terminal_commands
from spark_engine.runtime.cli.terminal.commands import MARK, Next
from spark_engine.runtime.cli.terminal.conversation import ChatHistory
from spark_engine.runtime.cli.terminal.input import LineReader
from spark_engine.runtime.cli.terminal.screen import Screen
from spark_engine.runtime.cli.terminal.session import Answer, Session
from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api.common import Body
from spark_engine.runtime.text.reply_parts import Kind

WELCOME = "{model}, up to {context:,} tokens. /help lists the commands, Ctrl-D leaves."


class SecondInterrupt(KeyboardInterrupt):
    """A second Ctrl-C while the first stops an answer: ends the program."""


class TerminalChat:
    def __init__(
        self, session: Session, conversation: ChatHistory, keyboard: LineReader, screen: Screen
    ) -> None:
        self._session, self._conversation = session, conversation
        self._keyboard, self._screen = keyboard, screen

    def run(self) -> None:
        """Runs until the input ends, or /exit. Raises InternalError if the engine fails."""
        conversation = self._conversation
        self._screen.note(WELCOME.format(model=conversation.model, context=conversation.context))
        while True:
            try:
                line = self._keyboard.read()
                if line is None or self._take(line) is Next.LEAVE:
                    return
            except SecondInterrupt:
                raise
            except KeyboardInterrupt:  # the line was dropped
                continue

    def _take(self, line: str) -> Next:
        if not line.strip():
            return Next.ASK
        try:
            if line.startswith(MARK) and not line.startswith(2 * MARK):
                outcome = terminal_commands.run(line, self._conversation)
                if outcome.text:
                    self._screen.note(outcome.text)
                if outcome.next is Next.ANSWER:
                    self._answer()
                return outcome.next
            self._say(line.removeprefix(MARK) if line.startswith(MARK) else line)
        except UserError as error:
            self._screen.error(str(error))
        return Next.ASK

    def _say(self, text: str) -> None:
        """One message and its answer; removes a message that cannot be answered."""
        self._conversation.ask(text)
        try:
            self._answer()
        except UserError:
            self._conversation.take_back_question()
            raise

    def _answer(self) -> None:
        conversation = self._conversation
        with _interrupts() as stopped:
            prompt, images = self._session.prompt(conversation.prompt(), conversation.thinking)
            body = Body(**conversation.settings)
            answer = self._session.start(prompt, body, chat=True, images=images)
            parts = self._show(answer, stopped)
        conversation.reply(parts)
        conversation.totals.add(answer)
        conversation.used = len(answer.prompt) + len(answer.events)
        self._screen.note(figures(answer))
        if conversation.used >= conversation.context:
            self._screen.note(f"all {conversation.context:,} tokens are used: /new starts again")

    def _show(self, answer: Answer, stopped: Callable[[], bool]) -> Mapping[Kind, str]:
        parts, screen = dict.fromkeys(Kind, ""), self._screen
        try:
            for delta in chain.from_iterable(self._session.deltas(answer, stopped)):
                parts[delta.kind] += delta.text
                show = screen.thought if delta.kind is Kind.REASONING else screen.content
                show(delta.text)
        finally:
            self._screen.end()
        return parts


def figures(answer: Answer) -> str:
    count = len(answer.events)
    words = [f"{count} token{'' if count == 1 else 's'}"]
    if answer.finish is FinishReason.CANCELLED:
        words.append("stopped")
    elif answer.finish is FinishReason.LENGTH:
        words.append("cut at its limit")
    if answer.rate is not None:
        words.append(f"{answer.rate:.1f} tokens/s")
    if count:
        words.append(f"first in {answer.first_s:.2f} s")
    words.append(f"{answer.cached:,} of {len(answer.prompt):,} prompt tokens cached")
    if answer.drafts and answer.drafts[0]:
        words.append("{1} of {0} drafts kept".format(*answer.drafts))
    return f"[{', '.join(words)}]"


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C sets a flag, which is returned by a call; a second one raises
    SecondInterrupt.

    An engine's step is never interrupted.
    """
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise SecondInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
