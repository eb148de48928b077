"""What several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The folder with README.md and pyproject.toml."""
    return Path(__file__).resolve().parent.parent
