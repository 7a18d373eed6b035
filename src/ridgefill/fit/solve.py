"""Ridge regression from moments: one eigendecomposition serves every layer and every penalty (paper 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill.fit.moments import Centred


@dataclass(frozen=True)
class Spectrum:
    """Eigendecomposition of a split's centred Gram matrix, X^T X = V diag(w) V^T; fp64.

    Attributes:
        values: w, [d], ascending and not negative.
        vectors: V, [d, d], an eigenvector a column.
    """

    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, gram: Tensor) -> Spectrum:
        """Decomposes X^T X [d, d]."""
        values, vectors = torch.linalg.eigh(gram)
        return cls(values.clamp_min(0), vectors)

    def penalty(self, lambda_rel: float) -> float:
        """lambda = lambda_rel * tr(X^T X) / d."""
        return lambda_rel * float(self.values.sum()) / len(self.values)

    def shrinkage(self, lambda_rel: float) -> Tensor:
        """1 / (w + lambda), [d]; 0 for directions that X does not span, as in a pseudo-inverse."""
        damped = self.values + self.penalty(lambda_rel)
        floor = torch.finfo(damped.dtype).eps * len(damped) * damped[-1]
        return torch.where(damped > floor, 1 / damped, torch.zeros_like(damped))


#   A = Y^T X (X^T X + lambda I)^-1  =  (Y^T X V) diag(1 / (w + lambda)) V^T        b = y_bar - A x_bar
#
# The bracket does not depend on lambda, and V, w on neither layer nor lambda.


def in_basis(spectrum: Spectrum, moments: Centred) -> Tensor:
    """Y^T X V, [d_out, d_in]."""
    return moments.cross.to(spectrum.vectors.device) @ spectrum.vectors


def ridge(
    spectrum: Spectrum, moments: Centred, lambda_rel: float, basis: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ridge map of one layer.

    Args:
        spectrum: of the split's Gram matrix.
        moments: of the layer against the split.
        lambda_rel: scale-free penalty; 0 gives the least-squares map of smallest norm.
        basis: `in_basis` of the same arguments, if it is at hand.

    Returns:
        A [d_out, d_in] and b [d_out], fp64.
    """
    basis = in_basis(spectrum, moments) if basis is None else basis
    weight = (basis * spectrum.shrinkage(lambda_rel)) @ spectrum.vectors.T
    return weight, intercept(moments, weight)


def intercept(moments: Centred, weight: Tensor, down: Tensor | None = None) -> Tensor:
    """b [d_out], so that the mean row (reduced by D, where there is one) is given the mean."""
    mean = moments.x_mean.to(weight.device)
    return moments.y_mean.to(weight.device) - weight @ (mean if down is None else down @ mean)
