"""How tests over generated traces are tried: how often, and without chance."""

from hypothesis import HealthCheck, Phase, settings


def tried(share: float = 1.0, shrink: bool = True) -> settings:
    """The same examples in every run: `share` of the profile's number (tests/conftest.py), at least
    two. `shrink`: what fails is tried again smaller, which may cost more than it tells."""
    phases = settings().phases if shrink else (Phase.generate,)
    return settings(
        max_examples=max(2, int(share * settings().max_examples)),
        derandomize=True,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
