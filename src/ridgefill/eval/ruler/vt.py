"""Variable tracking: a chain of assignments in noise, after one worked example."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Sequence

from ridgefill.eval.ruler.draft import Draft, Prompt, largest
from ridgefill.eval.ruler.niah import NOISE

TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assigned the value {query}, they are: "
)
HOPS = 4
EXAMPLE_TOKENS = 500  # of the worked example, unless the fewest sentences it can have are more
EXAMPLE_LEAST = 5


def draft(rng: random.Random, count: Callable[[str], int]) -> Draft:
    """Draws the example, the chain and its value.

    Args:
        count: text -> tokens.
    """
    example = _example(rng, count)
    chain, value = _names(rng, 5), str(rng.randint(10_000, 99_998))
    seed = rng.getrandbits(64)

    def render(size: int) -> Prompt:
        text, prefix = _problem(random.Random(seed), chain, value, size)
        return Prompt(f"{example}\n{text}", prefix, tuple(chain))

    return Draft(render, HOPS + 1)


def _example(rng: random.Random, count: Callable[[str], int]) -> str:
    chain, value, seed = _names(rng, 3), str(rng.randint(10_000, 99_998)), rng.getrandbits(64)

    def text(size: int) -> str:
        return "".join(_problem(random.Random(seed), chain, value, size))

    size = largest(lambda n: count(text(n)), EXAMPLE_TOKENS, EXAMPLE_LEAST, 2 * EXAMPLE_LEAST)
    return f"{text(size or EXAMPLE_LEAST)} {' '.join(chain)}\n"


def _problem(rng: random.Random, chain: Sequence[str], value: str, size: int) -> tuple[str, str]:
    """Input and answer prefix; the assignments stand in order, at ``size`` repetitions of the noise."""
    lines = [NOISE] * size
    steps = [f"VAR {chain[0]} = {value}"]
    steps += [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(chain)]
    for i, place in enumerate(sorted(rng.sample(range(size), len(steps)))):
        lines.insert(place + i, steps[i])
    text = TEMPLATE.format(context="\n".join(lines), query=value)
    return text, PREFIX.format(count=len(chain), query=value)


def _names(rng: random.Random, letters: int) -> list[str]:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name != "VAR" and name not in names:
            names.append(name)
    return names
