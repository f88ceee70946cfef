"""Two dumps of the same tokens, layer by layer.

Knows files of `deepinfer dump`; must not know how they were made.
"""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from deepinfer.testing.compare import distances, largest_difference


@dataclass(frozen=True)
class LayerDistance:
    """How far two states are apart.

    Attributes:
        state: streams entering a layer, or logits; maker: what made it.
        distance: largest 1 - cosine of all rows; difference: largest of all values.
        token: number of the token where the distance is largest.
    """

    state: str
    maker: str
    distance: float
    difference: float
    token: int


def layer_distances(one: Path, other: Path) -> list[LayerDistance]:
    """From the first layer to the logits."""
    mine, theirs = load_file(one), load_file(other)
    assert mine.keys() == theirs.keys(), "dumps of different models"
    streams = sorted((name for name in mine if name != "logits"), key=lambda n: int(n[8:]))
    found = []
    for name in (*streams, "logits"):
        rows = distances(mine[name], theirs[name]).flatten(1) if name != "logits" else distances(
            mine[name], theirs[name]
        ).unsqueeze(-1)  # fmt: skip
        worst = rows.amax(-1)
        state, maker = "logits", f"layer {len(streams) - 1} or the head"
        if name != "logits":
            number = int(name[8:])
            state = f"streams into layer {number}"
            maker = f"layer {number - 1}" if number else "the embedding"
        token = int(worst.argmax())
        found.append(
            LayerDistance(state, maker, float(worst[token]),
                          largest_difference(mine[name], theirs[name]), token)
        )  # fmt: skip
    return found


def first_over(found: list[LayerDistance], tolerance: float) -> LayerDistance | None:
    """The first state that is farther apart than `tolerance`, or is not a number."""
    return next((entry for entry in found if not entry.distance <= tolerance), None)
