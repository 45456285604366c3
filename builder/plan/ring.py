"""The length of the replay rings of recurrent states. Knows the option and its limits."""

from spark_engine.errors import OptionError
from spark_engine.plugins.state.replay_ring import LEAST, MOST

GDN_RING = 8  # records: on a GPU, and with drafts


def ring_length(requested: int | None, state_width: int, gpu: bool, drafts: int) -> int:
    """Records of each ring, without those for drafts. Raises OptionError for a length that no op
    supports."""
    if requested is None:
        return GDN_RING if (gpu or drafts) and state_width else 0
    if drafts and state_width and not requested:
        raise OptionError(
            f"--gdn-ring 0: drafts need a ring of {LEAST} to {MOST}, in which the wrong ones are "
            "overwritten; leave it out, or build with --drafts 0"
        )
    if requested and not LEAST <= requested <= MOST:
        raise OptionError(
            f"--gdn-ring {requested} is not possible; choose 0 or from {LEAST} to {MOST}"
        )
    return requested
