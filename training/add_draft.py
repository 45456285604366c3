"""Put a trained draft head into a checkpoint: its tensors, and in config.json that it is there.

Knows files only. The tensors of the model stay bit for bit as they are; a head that is there
already is replaced.
  python -m training.add_draft --head FILE
"""

import argparse
from pathlib import Path

from training.quantize import CHECKPOINT, read_file, read_weights, write_checkpoint
from training.shape import DRAFT_PREFIX, TINY


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path, required=True, help="written by train_draft.py")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    stored = read_weights(arguments.checkpoint)
    model = {name: stored[name] for name in stored if not name.startswith(DRAFT_PREFIX)}
    head = read_file(arguments.head)
    write_checkpoint({**model, **head}, TINY, arguments.checkpoint)
    print(f"{len(head)} tensors of the head added to {len(model)} in {arguments.checkpoint}")


if __name__ == "__main__":
    main()
