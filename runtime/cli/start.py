"""The program `spark-run`: a server's engine process starts before the command line is read.

Its imports, which take as long as those of the command line, run meanwhile.
"""

import sys

from spark_engine.runtime.server.engine_client.early import EarlyProcess


def main() -> None:
    early = EarlyProcess() if "--serve" in sys.argv else None
    try:
        # imported here: the engine process is started before
        from spark_engine.runtime.cli.spark_run import main as run

        run(obj=early)
    finally:
        if early is not None:
            early.close()


if __name__ == "__main__":
    main()
