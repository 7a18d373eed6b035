"""Reduced-rank ridge: one reduction of what is read, shared by all layers of a split (docs/decisions/0009).

With G = X^T X + lambda I = V diag(g) V^T and B_l the ridge map of layer l, the r columns that keep most of what all
the maps give, each layer's keys and values counted alike, are the first r eigenvectors U of

    M = sum_l  F_l^T F_l / |fitted_l|^2        F_l = B_l V diag(g^1/2)

and then   z_r = D z,  D = U^T diag(g^-1/2) V^T  [r, K]        B_l ~ (F_l U) D.

Reading three states and giving keys and values then costs a row r columns a layer, not three times as many.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ridgefill.fit.solve import Spectrum


def reduce(
    spectrum: Spectrum,
    bases: Mapping[int, Tensor],
    lambda_rel: float,
    columns: int,
    parts: Mapping[int, int],
    rows: int,
) -> tuple[Tensor, dict[int, Tensor]]:
    """The shared reduction, and every layer's map of what it leaves.

    Args:
        spectrum: of X^T X, K columns.
        bases: layer -> Y^T X V, [d_out, K] (`solve.in_basis`).
        columns: r.
        parts: layer -> how many equal parts its outputs have that are to count alike.
        rows: of the moments; reduced columns get a variance of about 1.

    Returns:
        D [r, K] and layer -> [d_out, r], fp64.
    """
    shrunk = spectrum.shrinkage(lambda_rel)
    root = shrunk.sqrt()
    # Only which directions lead is wanted, not how far: fp32 will do, at a third of the time, made orthogonal again.
    total = torch.zeros_like(spectrum.vectors, dtype=torch.float32)
    for layer, basis in bases.items():
        for part in basis.chunk(parts[layer]):
            fitted = float((part.square() * (spectrum.values * shrunk.square())).sum())
            scaled = (part * (root / max(fitted, torch.finfo(part.dtype).tiny) ** 0.5)).float()
            total.addmm_(scaled.T, scaled)
    leading = torch.linalg.qr(torch.linalg.eigh(total)[1][:, -columns:].to(root.dtype))[0]
    scale = rows**0.5
    down = (leading.T * root) @ spectrum.vectors.T * scale
    return down, {layer: (basis * root) @ leading / scale for layer, basis in bases.items()}
