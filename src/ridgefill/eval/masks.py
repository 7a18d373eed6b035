"""Which scored tokens can show what a fill costs: novel tokens and key tokens (paper 3.1).

The mean over all tokens hides the damage: most tokens are copied from the text or follow from the last few. A novel
token cannot be copied; a key token is one that the prefix helps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

RUN = 8
RISE = 2.0  # nats


def novel(ids: Tensor, run: int = RUN) -> Tensor:
    """True where a token is "not inside any 8-token run that also appears earlier in the prompt" (paper 3.1).

    A run appears earlier if the same tokens also start at an earlier place. The two may overlap: in "a a a a ..."
    the run that starts at the second token repeats the one that starts at the first. The first occurrence of a
    passage is novel, the later ones are not; every token of a repeated run counts as inside it, its first one too.

    Args:
        ids: [n] the whole prompt, scored tokens included.
        run: tokens in a run.

    Returns:
        [n] bool, on the host.
    """
    tokens = ids.detach().cpu().to(torch.long).contiguous().numpy()
    inside = np.zeros(len(tokens), dtype=bool)
    raw, width = tokens.tobytes(), tokens.itemsize
    seen: set[bytes] = set()
    for i in range(len(tokens) - run + 1):
        piece = raw[i * width : (i + run) * width]
        if piece in seen:
            inside[i : i + run] = True
        seen.add(piece)
    return torch.from_numpy(~inside)


def key(nll_full: Tensor, nll_cut: Tensor, rise: float = RISE) -> Tensor:
    """True where the exact loss rises by more than ``rise`` nats when the context is cut to its end (paper 3.1).

    Args:
        nll_full: [m] nats of the exact model given the whole context.
        nll_cut: [m] nats of the same tokens given only the end of it.

    Returns:
        [m] bool.
    """
    return nll_cut - nll_full > rise
