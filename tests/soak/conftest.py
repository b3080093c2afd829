"""What the soak has from the whole runs."""

from tests.e2e.conftest import tiny  # noqa: F401  # pytest finds it here
