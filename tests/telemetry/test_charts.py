"""What is drawn of a curve with more points than fit."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf_vla.telemetry.charts import thin

NAN = float("nan")


def test_a_thinned_curve_averages_what_is_finite_in_each_block() -> None:
    """A metric that was not finite once must not erase its neighbours: with 100,000 iterations a block has 200 points."""
    steps = list(range(1, 1250))
    values = [float(step) for step in steps]
    values[0] = NAN
    values[3:6] = [NAN, float("inf"), NAN]
    x, y = thin(steps, values)
    assert len(x) == 417 and x[:3].tolist() == [2.0, 5.0, 8.0] and x[-1] == 1249.0
    np.testing.assert_array_equal(y[:3], [2.5, NAN, 8.0])
    np.testing.assert_allclose(y[3:], x[3:])


@pytest.mark.parametrize("values", [[1.0, NAN, 3.0], []])
def test_a_short_curve_is_unchanged(values: list[float]) -> None:
    x, y = thin(range(len(values)), values)
    np.testing.assert_array_equal(x, np.arange(len(values)))
    np.testing.assert_array_equal(y, values)
