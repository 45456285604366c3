"""The packages and every folder in them, by the names they are imported by (pyproject.toml)."""

from setuptools import find_packages, setup

PACKAGES = ("bench", "builder", "check", "models", "plugins", "runtime")
FOUND = find_packages(
    include=[pattern for package in PACKAGES for pattern in (package, f"{package}.*")]
)

setup(packages=["spark_engine", *(f"spark_engine.{name}" for name in FOUND)])
