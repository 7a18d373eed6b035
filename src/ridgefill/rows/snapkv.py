"""SnapKV's choice: the rows that the prompt's last rows look at, pooled over their neighbours (paper section 7)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from ridgefill.errors import SettingError
from ridgefill.rows.base import Budget, Prompt, Reader, Selector, check_budget
from ridgefill.rows.ranking import best, need_reader
from ridgefill.rows.settings import check_choice, check_count, written

POOLS = ("max", "avg")
_ASKED = "pooled attention rows"


@dataclass(frozen=True)
class PooledAttentionRows(Selector):
    """The rows with the most attention in their neighbourhood, in one layer up to the split (Li et al., 2024).

    Attention probabilities are summed over query rows and heads, then pooled along the rows, so that a row comes with
    those around it. The split layer counts, since its input is exact for every row. The prompt's last row runs after
    the rows are chosen: where the prompt ends with the question, the query rows are those before it.

    Attributes:
        budget: rows kept.
        window: query rows.
        kernel: rows pooled together, an odd number; 1 pools nothing.
        pool: "max" or "avg" (zeros beyond the ends).
        layer: the layer read, or None for the last full-attention layer up to the split.
    """

    budget: Budget = 0.10
    window: int = 32
    kernel: int = 7
    pool: str = "max"
    layer: int | None = None

    query_aware = True
    attends = True

    def __post_init__(self) -> None:
        check_budget(_ASKED, self.budget)
        check_count(f"{_ASKED}: a window", self.window)
        check_count(f"{_ASKED}: a kernel", self.kernel)
        check_choice(f"{_ASKED}: pool", self.pool, POOLS)
        if self.kernel % 2 == 0:
            raise SettingError(
                f"{_ASKED}: a kernel of {self.kernel}", "it has no row in its middle", "give an odd number"
            )
        if self.layer is not None:
            check_count(f"{_ASKED}: a layer", self.layer, 0)

    @property
    def layers(self) -> tuple[int | None]:
        """The one layer read, for the cost model; None where the split decides which."""
        return (self.layer,)

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool.

        Raises:
            SettingError: no model to read, or no full-attention layer up to the split.
        """
        reader = need_reader(prompt, _ASKED)
        queries = prompt.queries(self.window)
        if queries.stop == prompt.n:
            queries = range(max(0, prompt.n - 1 - len(queries)), prompt.n - 1)
        received = reader.lower((self._layer(reader),), queries).float().cpu().sum((0, 1))
        return best(prompt, pooled(received, self.kernel, self.pool), prompt.count(self.budget))

    def _layer(self, reader: Reader) -> int:
        return last_layer(reader.attention_layers, reader.split) if self.layer is None else self.layer

    def __str__(self) -> str:
        return written("snapkv", self)


def pooled(score: Tensor, kernel: int, pool: str) -> Tensor:
    """[m] largest or mean score over the ``kernel`` rows around each row of score [m]."""
    reduce = max_pool1d if pool == "max" else avg_pool1d
    return reduce(score[None, None], kernel, stride=1, padding=kernel // 2)[0, 0] if len(score) else score


def last_layer(attention_layers: tuple[int, ...], split: int) -> int:
    """The last of the full-attention layers up to the split.

    Raises:
        SettingError: there is none.
    """
    able = [i for i in attention_layers if i <= split]
    if not able:
        raise SettingError(
            f"rows chosen by attention at split {split}",
            "this model has no full-attention layer up to it",
            "use a deeper split, or rows that read no attention, such as lexical or protected",
        )
    return able[-1]
