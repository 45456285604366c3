"""What tests of plans share with those of kernels: `make kernels` compiles, `make test` plans."""

from tests.plugins.conftest import planned as planned
