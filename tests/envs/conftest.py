import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # for tests.conformance
pytest.register_assert_rewrite("tests.conformance.vector_env")
