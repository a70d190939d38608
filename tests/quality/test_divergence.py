"""The measure itself, against its definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accuracy import divergence


@pytest.mark.parametrize("noise", [1e-4, 0.05, 3.0])
def test_divergence_is_kl_of_the_softmaxes(noise: float) -> None:
    random = torch.Generator().manual_seed(7)
    expected = 5.0 * torch.randn(8, 3000, generator=random) + 40.0
    found = expected + noise * torch.randn(8, 3000, generator=random) - 17.0  # a shift changes no probability
    a, b = (torch.log_softmax(x.double(), -1) for x in (expected, found))
    result = divergence(expected, found)
    kl = (a.exp() * (a - b)).sum(-1).numpy()
    assert np.allclose(result.kl, kl, rtol=1e-5, atol=1e-7)
    assert np.array_equal(result.same, (a.argmax(-1) == b.argmax(-1)).numpy())
    assert result.mean_kl == pytest.approx(kl.mean(), rel=1e-5, abs=1e-7)


def test_equal_logits_do_not_diverge() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(1))
    result = divergence(logits, logits.clone())
    assert result.mean_kl == 0.0
    assert result.argmax == 1.0
