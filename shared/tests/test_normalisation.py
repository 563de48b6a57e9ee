"""Numbers to [-1, 1] and back."""

import numpy as np
import pytest
import torch

from flywheel_shared.normalisation import QuantileNorm, summarise


def test_quantile_norm_maps_percentiles_to_the_ends_and_back():
    values = np.random.default_rng(0).normal(size=(5000, 3)) * [1, 10, 0.1]
    norm = QuantileNorm(summarise(values), 5)
    q01, q99 = np.quantile(values, (0.01, 0.99), axis=0)
    ends = norm.normalise(torch.tensor(np.stack([q01, q99]), dtype=torch.float32))
    torch.testing.assert_close(ends[:, :3], torch.tensor([[-1.0] * 3, [1.0] * 3]))
    assert not ends[:, 3:].any()
    inside = torch.tensor(values[(np.abs(values) < np.abs(q01)).all(1)][:50], dtype=torch.float32)
    torch.testing.assert_close(norm.restore(norm.normalise(inside)), inside, rtol=1e-4, atol=1e-5)


def test_what_lies_outside_the_percentiles_is_clamped():
    norm = QuantileNorm(summarise(np.linspace(-1, 1, 101)[:, None]), 1)
    assert norm.normalise(torch.tensor([[50.0]])).item() == 1
    assert norm.restore(torch.tensor([[7.0]])).item() == pytest.approx(norm.q99.item())


def test_a_constant_dim_passes_as_it_is():
    values = np.stack([np.zeros(100), np.linspace(0, 1, 100)], axis=1)
    norm = QuantileNorm(summarise(values), 2)
    given = torch.tensor([[0.0, 0.5]])
    torch.testing.assert_close(norm.restore(norm.normalise(given)), given)
