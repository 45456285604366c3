"""Does one job: reads a body or compiles a form, and turns an error into a message.

Knows grammars; knows no process.
"""

import traceback
from collections.abc import Sequence

import msgspec

from spark_engine.errors import CapacityError, RequestError
from spark_engine.runtime.server.prompts import contract
from spark_engine.runtime.server.prompts.limits import (
    MORE_MEMORY,
    MOST_HEADER,
    MOST_WORDS,
    WALL_PER_CPU_S,
    WALL_S,
)
from spark_engine.runtime.server.prompts.preparer import Preparer
from spark_engine.runtime.server.prompts.read_bodies import READS
from spark_engine.runtime.structured.constraints import constraint_for
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer, need


class Handler:
    """Does jobs for one engine, one at a time. Keeps no state of a job."""

    def __init__(
        self,
        setup: contract.Setup,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        grammars: Grammars | None = None,
    ) -> None:
        """Raises OptionError as `Preparer` does. `grammars`: of the same tokenizer and engine."""
        self.preparer = Preparer(setup, tokenizer, template)
        self.grammars = grammars
        if tokenizer is not None and grammars is None:
            limits, eos = setup.info.limits, setup.info.eos_token_ids
            self.grammars = make_grammars(tokenizer, limits.vocab, eos)

    def handle(self, header: bytes, blobs: Sequence[bytes]) -> tuple[bytes, list[bytes]]:
        """The header and the blobs of the answer. No job makes it raise."""
        try:
            result, found = self._do(contract.decode_job(header), blobs)
            answer = contract.encode(result)
            if len(answer) > MOST_HEADER:
                words = f"what the request asks for next to its prompt has {len(answer)} bytes"
                raise RequestError(f"{words}; at most {MOST_HEADER} are supported")
            return answer, found
        except MemoryError:
            words = f"reading the request took more than {MORE_MEMORY >> 20} MiB of memory"
            return contract.encode(_refused(RequestError(f"{words}: send a shorter one"))), []
        except (RequestError, CapacityError) as error:
            return contract.encode(_refused(error)), []
        except BaseException:  # also a panic of a Rust library
            return contract.encode(contract.Broken(traceback.format_exc()[-10 * MOST_WORDS :])), []
        finally:
            self.preparer.forget()
            if self.grammars is not None:
                self.grammars.forget()

    def _do(
        self, job: contract.PromptJob, blobs: Sequence[bytes]
    ) -> tuple[contract.Result, list[bytes]]:
        if job.kind is not contract.JobKind.FORM:
            count = len(blobs) - len(job.fetched)
            rows = zip(job.fetched, blobs[count:], strict=True)
            self.preparer.fetched = {row.url: row.error or data for row, data in rows}
            self.preparer.seen = job.seen
            try:
                return READS[job.kind](self.preparer, blobs[:count])
            except contract.NotFetched as error:
                return contract.Fetch(tuple(error.urls)), []
        form = msgspec.msgpack.decode(blobs[0], type=contract.FormAsked)
        tokenizer, grammars = need(self.preparer.tokenizer), self.grammars
        assert grammars is not None
        asked = form.fields, form.tools, form.tool_choice
        known = self.preparer.reader.formats, tokenizer, grammars
        thinking, parallel = form.thinking, form.parallel
        found = constraint_for(*asked, *known, thinking=thinking, parallel=parallel)
        return contract.Done(), [b"" if found is None else found.grammar.encode()]


def make_grammars(tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> Grammars:
    """Compiles grammars. A worker's CPU time is the limit: wall time would depend on the machine's
    load."""
    return Grammars(lambda: tokenizer, vocab, eos, most_s=WALL_S * WALL_PER_CPU_S)


def _refused(error: RequestError | CapacityError) -> contract.BodyRefused:
    kinds = (kind.__name__ for kind in type(error).__mro__)
    kind = next(k for k in kinds if k in contract.ERRORS or k == CapacityError.__name__)
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    words = str(error) or type(error).__name__
    if len(words) > MOST_WORDS:
        words = f"{words[:MOST_WORDS]}…"
    return contract.BodyRefused(kind, words.encode(errors="replace").decode(), param, code)
