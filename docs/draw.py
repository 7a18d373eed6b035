"""Draws rows.svg, the picture of how-it-works.md: which (row, layer) cells run, which are only written."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

LAYERS, SPLIT, ROWS, LEADING, TAIL = 10, 4, 40, 2, 8


def draw(path: Path) -> None:
    """Writes the picture."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    cells = (
        (0, 0, ROWS, SPLIT, "#4c78a8", "lower layers: exact for every row"),
        (0, SPLIT, LEADING, LAYERS - SPLIT, "#1f3f66", "leading rows: exact"),
        (
            LEADING,
            SPLIT,
            ROWS - LEADING - TAIL,
            LAYERS - SPLIT,
            "#f2cf5b",
            "filled rows: predicted input, K and V only",
        ),
        (ROWS - TAIL, SPLIT, TAIL, LAYERS - SPLIT, "#2e8b57", "tail: exact, reads the filled rows"),
    )
    for x, y, width, height, color, label in cells:
        axes.add_patch(Rectangle((x, y), width, height, facecolor=color, label=label))
    for layer in range(LAYERS + 1):
        axes.axhline(layer, color="white", linewidth=0.8)
    axes.axhline(SPLIT, color="black", linewidth=1.6)
    axes.annotate("split state h_S", (LEADING + 4, SPLIT), (LEADING + 4, SPLIT - 1.6), color="white")
    for layer in range(SPLIT + 1, LAYERS):
        axes.annotate(
            "", (8 + 2.5 * (layer - SPLIT), layer + 0.5), (12, SPLIT + 0.05),
            arrowprops={"arrowstyle": "->", "color": "#7a5c00", "connectionstyle": "arc3,rad=-0.15"},
        )  # fmt: skip
    axes.text(27, SPLIT + 2.6, "one affine map\nper late layer", ha="center", color="#7a5c00")
    axes.set(xlim=(0, ROWS), ylim=(0, LAYERS), xlabel="prompt tokens (rows)", ylabel="layers")
    axes.set_xticks([])
    axes.set_yticks([0, SPLIT, LAYERS], ["0", "S", "L"])
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("rows.svg"))
