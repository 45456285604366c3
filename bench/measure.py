"""A whole bench of one server: warm up, run the load several times, compute the spread.

Knows the order of the steps; other modules do them.
"""

import random
import time
from collections.abc import Callable

from spark_engine.bench import machine
from spark_engine.bench.clients import Clients
from spark_engine.bench.figures import figures, spread
from spark_engine.bench.load import Json, Load, LoadPlan
from spark_engine.bench.timings import Server
from spark_engine.errors import OptionError
from spark_engine.progress import Progress


def measure(
    target: Server,
    plan: LoadPlan,
    shown: Progress,
    keep: Callable[[Json], None] = lambda _: None,
) -> Json:
    """The result: `runs` with all their figures, and the `spread` of each.

    `keep` receives the result so far after every run, since a later run may fail. Raises
    OptionError when the server cannot take the load, or answers nothing.
    """
    if plan.longest and target.most and plan.longest > target.most:
        words = f"a request may reach {plan.longest} tokens; {target.url} holds {target.most}"
        raise OptionError(f"{words}: give a smaller --input, --output, --turns or --shared")
    runs: list[Json] = []
    head = {
        "model": target.model,
        "url": target.url,
        "server_version": target.version,
        "seed": plan.seed,
        "targets": dict(plan.targets),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": machine.host(),
        "card": machine.card(plan.cards[0]),
        "cards": len(plan.cards),
        "repeats": plan.repeats,
    }
    result: Json = {}
    with Clients(target, plan.processes) as clients:
        if plan.warm:
            shown.say("warming up")
            warm = plan.draw(_random(plan.seed, -1), f"Run {plan.seed} 0.")
            few = Load(warm.scripts[: plan.warm], warm.width, warm.kind)
            _refuse_failure(figures(*clients.run(few), plan.targets), target)
        with shown.track("runs", plan.repeats) as step:
            for i in range(plan.repeats):
                load = plan.draw(_random(plan.seed, i), f"Run {plan.seed} {i + 1}.")
                with machine.Watch(*plan.cards) as watch:
                    row = figures(*clients.run(load), plan.targets)
                _refuse_failure(row, target)
                found = watch.summary()
                # the first alone, as in results of one card
                runs.append({**row, "card": next(iter(found.values()), None), "cards": found})
                last = {"load": load.kind, "on_card": machine.processes(*plan.cards)}
                result = {**head, **last, "spread": spread(runs), "runs": [*runs]}
                keep(result)
                step()
    return result


def _random(seed: int, run: int) -> random.Random:
    return random.Random(f"{seed} {run}")


def _refuse_failure(row: Json, target: Server) -> None:
    """A run in which nothing succeeded measures nothing."""
    if row["failed"] == row["requests"]:
        first = next(iter(row["errors"]), "nothing was asked")
        raise OptionError(f"{target.url} answered none of {row['requests']} requests: {first}")
